"""Rows are read from JSON and JSONL; defects are reported with their place, and too many are an error."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from each import of_each
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks.lora import hub
from pytest_gpucluster.benchmarks.lora.dataset import (
    BETWEEN,
    END,
    LABELS,
    WITH_FUNCTIONS,
    Row,
    load_rows,
    read_rows,
    row_of,
    turns_of,
)
from pytest_gpucluster.benchmarks.lora.function_calls import FunctionCall, parse
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.errors import EnvironmentBroken

GOOD = [{"system": row.system, "chat": row.chat} for row in synthetic_rows(200, seed=1)]


def array(values, **options):
    return json.dumps(values, **options).encode()


def jsonl(values):
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


@of_each(
    "data",
    [
        array(GOOD),
        array(GOOD, indent=2),
        jsonl(GOOD),
        b"\xef\xbb\xbf" + array(GOOD),
        jsonl(GOOD)[:-1],
        b"\r\n" + jsonl(GOOD).replace(b"\n", b"\r\n\r\n"),
    ],
)
def test_every_layout_gives_the_same_rows(data):
    rows, malformed = read_rows(data, "rows")
    assert [(row.system, row.chat) for row in rows] == [(row["system"], row["chat"]) for row in GOOD]
    assert malformed == []


CALLED = {"type": "function", "function": {"name": "heat", "arguments": {"city": "O'Hara"}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How hot is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "name": "heat", "content": '{"degrees": 30}'},
    {"role": "assistant", "content": "30 degrees."},
]
TOOL = {"type": "function", "function": {"name": "heat", "parameters": {}}}


def test_messages_and_tools_become_a_row_of_texts():
    found = [
        row_of({"messages": MESSAGES, "tools": [TOOL]}),
        row_of({"messages": MESSAGES, "tools": json.dumps([TOOL["function"]]), "id": 7}),
        row_of({"messages": [*MESSAGES[:2], {**MESSAGES[2], "tool_calls": [CALLED["function"]]}, *MESSAGES[3:]]}),
    ]
    functions = WITH_FUNCTIONS.removeprefix("SYSTEM: ") + json.dumps(TOOL["function"], indent=4)
    assert [row.system for row in found] == [*[f"SYSTEM: Be brief.\n{functions}"] * 2, "SYSTEM: Be brief."]
    for row in found:
        assert [turn.role for turn in row.turns] == ["user", "assistant", "function", "assistant"]
        assert parse(row.turns[1].text) == FunctionCall(name="heat", arguments={"city": "O'Hara"})
        assert row.turns[2].text == '{"degrees": 30}'


def answered(**message):
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **message}]}


BAD = [
    ({"messages": "Hello"}, "messages must be a list of objects"),
    ({"messages": ["Hello"]}, "messages must be a list of objects"),
    (answered(content=["b"]), "a message must have a known role and a text, not 'assistant' and ['b']"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "a known role and a text, not 'robot'"),
    ({**answered(content="b"), "tools": "[1"}, "no JSON"),
    (answered(tool_calls={"name": "f"}), "tools and tool_calls must be lists"),
    (answered(content="b\n USER: c"), "a line of a message begins as a turn does: USER:"),
    (answered(content=""), "there is nothing to train on"),
    (7, "a row must be an object, not 7"),
    (None, "a row must be an object, not None"),
    ({"system": 1, "chat": "USER: a\n\n\nASSISTANT: b"}, "system must be a text, not 1"),
    ({"system": "", "chat": []}, "chat must be a text, not []"),
    ({"system": "", "chat": "Hello"}, "the chat does"),
    ({"system": "", "chat": "USER: a"}, "there is nothing to train on"),
    (
        {"prompt": "a", "completion": "b"},
        "a row has the keys prompt, completion; needed are messages, or system and chat",
    ),
]


@pytest.mark.parametrize("layout", [jsonl, lambda values: array(values, indent=1)], ids=["jsonl", "array"])
@of_each("malformed", BAD)
def test_a_malformed_row_is_left_out_and_named_by_its_number(layout, malformed):
    value, reason = malformed
    data = layout([*GOOD[:3], value, *GOOD[3:]])
    rows, [message] = read_rows(data, "rows")
    assert len(rows) == len(GOOD)
    assert message.startswith("row 4: ")
    assert reason in message


def test_more_than_one_row_in_a_hundred_is_an_error_that_names_the_first():
    bad = {"system": "", "chat": ""}
    assert len(read_rows(jsonl([*GOOD[:198], bad, bad]), "rows")[1]) == 2
    with pytest.raises(EnvironmentBroken, match=r"^rows\.jsonl: 3 of 200 .* 1%.*: row 198: .* row 200: "):
        read_rows(jsonl([*GOOD[:197], bad, bad, bad]), "rows.jsonl")
    with pytest.raises(EnvironmentBroken, match=r"row 5: .* and 15 more; repair"):
        read_rows(jsonl([bad] * 20), "rows")


@of_each(
    "broken",
    [
        (b"", ": the"),
        (b" \n\n", ": the"),
        (b"[]", ": the"),
        (b" [ ]\n", ": the"),
        *(
            (text, rf": cut off, or no JSON array: {why}")
            for text, why in [
                (array(GOOD)[:-1], rf"no JSON: .* line 1 column {len(array(GOOD))} "),
                (array(GOOD, indent=1)[:300], r"no JSON: Unterminated string .* line 3 column \d+ "),
                (b'[\n{"system": "", "chat": ', "no JSON: Expecting value: line 2 "),
                (b"[", "no JSON: "),
                (array(GOOD[:2]) + b"\n[1]", "no JSON: Extra data: line 2 column 1 "),
                (b"[" * 200_000, "nested"),
                (b"[" + b"9" * 5000 + b"]", "no JSON: Exceeds"),
            ]
        ),
        # Of JSONL that is cut off only one row is lost.
        *((jsonl(GOOD)[: -1 - cut], ": cut off in its last line: no JSON: ") for cut in (1, 40, 90)),
        (json.dumps(GOOD[0], indent=1).encode(), r": \d+ of \d+ rows are malformed.*one object"),
        (jsonl(GOOD[:2]) + b'{"system": "caf\xe9", "chat": ""}\n', r":3: not UTF-8: byte \d+ is 0xe9"),
        ((5).to_bytes(8, "little") + b'{"a":1}', ".*safetensors"),
        (
            array([{"prompt": "a", "answer": "b"}] * 9),
            ": 9 of 9 rows .* row 1: .* prompt, answer; needed are",
        ),
    ],
)
def test_a_broken_file_is_an_error_with_its_place(broken):
    data, place = broken
    with pytest.raises(EnvironmentBroken, match=f"^rows{place}"):
        read_rows(data, "rows")


@of_each(
    "malformed",
    [
        (b'{"system": "x", chat}', "no JSON: Expecting property name"),
        (b'{"n": ' + b"9" * 5000 + b"}", "no JSON: Exceeds the limit"),
        (b'{"n": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"system": "", "chat": "USER: a\\nASSISTANT: \\ud800"}', r"chat has half a character, '\ud800', at 19"),
    ],
)
def test_a_line_that_python_or_a_tokenizer_cannot_read_is_malformed(malformed):
    rows, [message] = read_rows(malformed[0] + b"\n" + jsonl(GOOD), "rows")
    assert len(rows) == 200
    assert message.startswith(f"row 1: {malformed[1]}")


def test_a_path_is_read_with_its_sha256(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(array(GOOD))
    digest = hashlib.sha256(array(GOOD)).hexdigest()
    rows = load_rows(path, sha256=digest.upper())
    assert (len(rows.rows), rows.malformed, rows.sha256, rows.revision) == (200, (), digest, None)
    assert rows.source == str(path)
    path.write_bytes(array(GOOD) + b" ")
    with pytest.raises(EnvironmentBroken, match=rf"its sha256 is [0-9a-f]{{64}}, and {digest}"):
        load_rows(str(path), sha256=digest)


@of_each("name", ["missing.json", "a/b.json", "a/b/c.json", "./missing", "/nowhere/at/all", Path("me/calls")])
def test_a_missing_path_and_a_folder_are_an_error(tmp_path, name):
    with pytest.raises(EnvironmentBroken, match=rf"^{re.escape(str(name))}: .*such file"):
        load_rows(name)
    with pytest.raises(EnvironmentBroken, match=r"directory; give"):
        load_rows(tmp_path)


def test_a_row_is_the_same_conversation_whatever_white_space_is_around_it():
    row = Row(system="s", chat="USER: a\n\n\nASSISTANT: b")
    assert Row(system="s\n", chat=row.chat + "\n\n").key() == row.key()
    assert Row(system="t", chat=row.chat).key() != row.key()


# The hub: its cache is laid out here as huggingface_hub lays it out, and no network is there.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cached(cache, repository, revision, files):
    folder = cache / f"datasets--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(revision)
    for name, data in files.items():
        (snapshot / name).write_bytes(data)


def test_a_name_on_the_hub_is_read_from_its_cache(cache):
    cached(cache, "me/calls", "a" * 40, {"train.jsonl": jsonl(GOOD), "README.md": b"rows"})
    for source, revision in [("me/calls", "main"), ("me/calls@" + "a" * 40, "a" * 40)]:
        rows = load_rows(source)
        assert (len(rows.rows), rows.source, rows.revision) == (200, source, revision)
    assert load_rows("me/calls", revision="a" * 40).revision == "a" * 40


def test_offline_what_is_not_in_the_cache_fails_at_once(cache):
    with pytest.raises(EnvironmentBroken, match=r"^me/calls@main: .*HF_HUB_OFFLINE .*hub's cache"):
        load_rows("me/calls")
    with pytest.raises(EnvironmentBroken, match=r"^glaiveai/glaive-function-calling-v2@e7f4b64.*HF_HUB_OFFLINE is set"):
        load_rows("glaiveai/glaive-function-calling-v2")


def test_the_original_is_demanded_with_its_own_revision_and_sha256_and_several_files_are_refused(cache):
    pinned = hub.PINNED
    name = pinned.repository
    cached(cache, name, pinned.revision, {pinned.file: array(GOOD)})
    with pytest.raises(EnvironmentBroken, match=f"{name}@{pinned.revision}: its sha256 is .* {pinned.sha256}"):
        load_rows(name)
    cached(cache, name, "b" * 40, {pinned.file: array(GOOD)})
    assert len(load_rows(f"{name}@{'b' * 40}").rows) == 200
    cached(cache, "me/calls", "a" * 40, {"train.jsonl": jsonl(GOOD), "test.json": b"[]"})
    with pytest.raises(EnvironmentBroken, match=r"JSONL .*\.json, train\.jsonl;"):
        load_rows("me/calls")


@pytest.fixture
def online(cache, monkeypatch):
    """A hub that holds one repository."""
    import huggingface_hub
    from huggingface_hub import constants

    class Hub:
        def __init__(self):
            self.asked, self.downloads, self.answer = [], [], ["rows.jsonl", "README.md"]

        def dataset_info(self, repository, *, revision, timeout):
            self.asked.append(timeout)
            if isinstance(self.answer, Exception):
                raise self.answer
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.answer])

        def download(self, repository, *, local_files_only, revision, allow_patterns=None, **options):
            if local_files_only:
                return original(repository, local_files_only=True, revision=revision, **options)
            [file] = allow_patterns
            self.downloads.append(file)
            (cache / file).write_bytes(jsonl(GOOD))
            return str(cache)

    found, original = Hub(), huggingface_hub.snapshot_download
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.download)
    return found


def test_a_file_is_fetched_from_the_hub_which_is_asked_once_and_where_it_does_not_answer_the_cache_does(online, cache):
    assert len(load_rows("me/calls@v1").rows) == 200
    assert (online.asked, online.downloads) == ([hub.ANSWER_SECONDS], ["rows.jsonl"])
    online.answer = ConnectionError("nothing answers\nat all")
    for name in ("me/calls", "glaiveai/glaive-function-calling-v2"):
        with pytest.raises(EnvironmentBroken, match=rf"^{name}@.*: the hub .*\(nothing answers\).*the hub's"):
            load_rows(name)
    cached(cache, "me/calls", "a" * 40, {"train.jsonl": jsonl(GOOD)})
    assert len(load_rows("me/calls").rows) == 200
    assert (online.asked, online.downloads) == ([hub.ANSWER_SECONDS] * 4, ["rows.jsonl"])


def test_a_download_that_does_not_end_is_given_up(online, monkeypatch):
    import huggingface_hub

    ended = threading.Event()
    monkeypatch.setattr(hub, "DOWNLOAD_SECONDS", 0.05)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: ended.wait(60))
    with pytest.raises(EnvironmentBroken, match=r"\(not over after 0\.05 s\)"):
        load_rows("me/calls")
    ended.set()


@of_each("text", ["calls", "a/b/c", "/a/b", "./a", "a b/c", "a/b@", "", "a/b@c d"])
def test_what_is_no_name_on_the_hub(text):
    assert hub.hub_name(text) is None


CHAT = (
    "USER: How hot is it in Rome?\n\n\n"
    'ASSISTANT: <functioncall> {"name": "heat", "arguments": \'{"city": "Rome"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"degrees": 30}\n\n\n'
    "ASSISTANT: It is 30 degrees. <|endoftext|>\n\n\n"
    "USER: Thanks!\n"
)


def test_roles_and_texts_are_found_in_their_order():
    found = turns_of(CHAT)
    assert [(turn.role, turn.text) for turn in found] == [
        ("user", "How hot is it in Rome?"),
        ("assistant", '<functioncall> {"name": "heat", "arguments": \'{"city": "Rome"}\'}'),
        ("function", '{"degrees": 30}'),
        ("assistant", "It is 30 degrees."),
        ("user", "Thanks!"),
    ]


TEXTS = st.text(min_size=1, max_size=20).map(str.strip).filter(bool).filter(lambda text: END not in text)


@given(st.lists(st.tuples(st.sampled_from(sorted(LABELS)), TEXTS), min_size=1), st.booleans())
def test_what_was_put_together_is_taken_apart_again(turns, with_end):
    turns = [*turns, ("assistant", "so it is")]
    if any(label in text for _, text in turns for label in LABELS.values()):
        return
    pieces = [f"{LABELS[role]} {text}{f' {END}' if with_end and role == 'assistant' else ''}" for role, text in turns]
    chat = BETWEEN.join(pieces)
    assert [(turn.role, turn.text) for turn in turns_of(chat)] == turns


def test_labels_in_a_line_and_paragraphs_are_text_and_ends_may_be_left_out_or_repeated():
    for chat, texts in [
        (
            "USER: What is ASSISTANT: and USER: so?\nASSISTANT: A label.",
            ["What is ASSISTANT: and USER: so?", "A label."],
        ),
        (f"USER: a\n\n\nASSISTANT: b\n\n\nUSER: c\n\n\nASSISTANT: d {END} {END}\n", list("abcd")),
        ("USER: one\n\n\ntwo\n\nASSISTANT: three\nfour", ["one\n\n\ntwo", "three\nfour"]),
    ]:
        assert [turn.text for turn in turns_of(chat)] == texts


@of_each(
    "refused",
    [
        (" \n", "empty"),
        ("Hello! USER: hi", "(USER:, ASSISTANT:, FUNCTION RESPONSE:), but with 'Hello!"),
        ("once\nUSER: hi\nASSISTANT: hello", "but with 'once"),
        ("USER: hi", "there is nothing to train on"),
        ("USER: hi\n\n\nASSISTANT: <|endoftext|>", "there is nothing to train on"),
    ],
)
def test_what_is_no_conversation_is_refused_with_the_reason(refused):
    chat, why = refused
    with pytest.raises(ValueError, match=re.escape(why)):
        turns_of(chat)
