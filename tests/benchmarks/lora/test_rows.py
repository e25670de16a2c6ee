"""Rows are read from JSON and JSONL; what is wrong in a file is told with its place, and too much is refused."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpucluster.benchmarks.lora import hub
from pytest_gpucluster.benchmarks.lora.rows import Row, load_rows, read, row_of
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.errors import EnvironmentBroken

GOOD = [{"system": row.system, "chat": row.chat} for row in synthetic_rows(200, seed=1)]


def array(values, **options):
    return json.dumps(values, **options).encode()


def jsonl(values):
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


@pytest.mark.parametrize(
    "data",
    [
        array(GOOD),
        array(GOOD, indent=2),
        jsonl(GOOD),
        b"\xef\xbb\xbf" + array(GOOD),
        b"\r\n" + jsonl(GOOD).replace(b"\n", b"\r\n\r\n"),
    ],
    ids=["array", "indented", "jsonl", "byte order mark", "empty lines"],
)
def test_every_layout_gives_the_same_rows(data):
    rows, malformed = read(data, "rows")
    assert [(row.system, row.chat) for row in rows] == [(row["system"], row["chat"]) for row in GOOD]
    assert malformed == []


def test_each_row_knows_its_line():
    assert [row.line for row in read(jsonl(GOOD), "rows")[0]][:3] == [1, 2, 3]
    indented = array(GOOD, indent=2)
    lines = indented.decode().splitlines()
    assert all(lines[row.line - 1].strip() == "{" for row in read(indented, "rows")[0])


BAD = {
    "no object": (7, "a row must be an object, not a number"),
    "null": (None, "a row must be an object, not null"),
    "no text": ({"system": 1, "chat": "USER: a\n\n\nASSISTANT: b"}, "system must be a text, not a number"),
    "list": ({"system": "", "chat": []}, "chat must be a text, not an array"),
    "no turn": ({"system": "", "chat": "Hello"}, "the chat does not begin with a turn"),
    "no answer": ({"system": "", "chat": "USER: a"}, "the assistant says nothing"),
    "other keys": (
        {"prompt": "a", "completion": "b"},
        "a row has the keys prompt, completion; allowed are {system, chat}",
    ),
    "empty output": ({"instruction": "a", "output": " "}, "the assistant says nothing"),
}


@pytest.mark.parametrize("layout", [jsonl, lambda values: array(values, indent=1)], ids=["jsonl", "array"])
@pytest.mark.parametrize(("value", "reason"), BAD.values(), ids=BAD)
def test_a_malformed_row_is_left_out_and_named_by_its_line(layout, value, reason):
    data = layout([*GOOD[:3], value, *GOOD[3:]])
    rows, [malformed] = read(data, "rows")
    assert len(rows) == len(GOOD)
    assert malformed.row == 3
    assert reason in malformed.reason
    # In the text, the place of the row is where what it is begins.
    line = data.decode().splitlines()[malformed.line - 1].strip(" ,")
    assert line in ("{", json.dumps(value))


def test_a_line_that_is_no_json_is_malformed():
    rows, [malformed] = read(jsonl(GOOD[:150]) + b'{"system": "x", chat}\n' + jsonl(GOOD[150:]), "rows")
    assert len(rows) == 200
    assert str(malformed) == (
        "line 151 (row 150): no JSON: Expecting property name enclosed in double quotes at column 17"
    )


def test_more_than_one_row_in_a_hundred_is_an_error_that_names_the_first():
    bad = {"system": "", "chat": ""}
    assert len(read(jsonl([*GOOD[:198], bad, bad]), "rows")[1]) == 2
    with pytest.raises(EnvironmentBroken) as error:
        read(jsonl([*GOOD[:197], bad, bad, bad]), "rows.jsonl")
    assert str(error.value) == (
        "rows.jsonl: 3 of 200 rows are malformed, and at most 1% may be: line 198 (row 197): the chat is empty;"
        " line 199 (row 198): the chat is empty; line 200 (row 199): the chat is empty; mend them or take them out, or"
        " name another file: one JSON array, or one object a line"
    )


def test_only_a_few_of_many_malformed_rows_are_shown():
    with pytest.raises(EnvironmentBroken, match=r"line 5 .*; and 15 more; mend them"):
        read(jsonl([{"system": "", "chat": ""}] * 20), "rows")


@pytest.mark.parametrize("data", [b"", b" \n\n", b"[]", b" [ ]\n"], ids=["nothing", "blank", "[]", "[ ]"])
def test_an_empty_file_is_an_error(data):
    with pytest.raises(EnvironmentBroken, match=r"^rows: the file is empty"):
        read(data, "rows")


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (array(GOOD)[:-1], rf"rows:1:{len(array(GOOD))}: the file is cut off in row 200: the array does not end"),
        (array(GOOD, indent=1)[:300], r"rows:3:\d+: the file is cut off in row 0: Unterminated string"),
        (b'[\n{"system": "", "chat": ', r"rows:2:\d+: the file is cut off in row 0: Expecting value"),
        (b"[", "rows:1:2: the file is cut off in row 0: the array does not end"),
        (array(GOOD[:2]) + b"\n[1]", r"rows:2:1: no JSON in row 2: nothing may follow the array"),
        (
            b'[{"system": "", "chat": "USER: a\\nASSISTANT: b"} {}]',
            r"rows:1:\d+: no JSON in row 1: ',' or '\]' expected",
        ),
        (b"[" * 200_000, "rows:1:2: no JSON in row 0: nested too deeply"),
        (b"[" + b"9" * 5000 + b"]", "rows:1:2: no JSON in row 0: Exceeds the limit"),
    ],
    ids=["last bracket", "in a text", "before a value", "a bracket", "more after it", "no comma", "nested", "number"],
)
def test_a_broken_array_is_an_error_with_its_place(data, place):
    with pytest.raises(EnvironmentBroken, match=f"^{place}"):
        read(data, "rows")


@pytest.mark.parametrize("cut", [1, 40, 90])
def test_jsonl_that_is_cut_off_is_an_error_though_only_one_row_is_lost(cut):
    data = jsonl(GOOD)[: -1 - cut]
    with pytest.raises(EnvironmentBroken, match=r"^rows:200:\d+: the file is cut off in its last line: "):
        read(data, "rows")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"n": ' + b"9" * 5000 + b"}", "no JSON: Exceeds the limit"),
        (b'{"n": ' + b"[" * 100_000, "no JSON: nested too deeply"),
        (b'{"system": "", "chat": "USER: a\\nASSISTANT: \\ud800"}', r"chat has half a character, '\ud800', at 19"),
    ],
    ids=["number", "nested", "half a character"],
)
def test_a_line_that_python_or_a_tokenizer_cannot_read_is_malformed(line, reason):
    rows, [malformed] = read(line + b"\n" + jsonl(GOOD), "rows")
    assert (len(rows), malformed.line) == (200, 1)
    assert malformed.reason.startswith(reason)


def test_a_file_without_a_readable_line_is_no_file_that_was_cut_off():
    with pytest.raises(EnvironmentBroken, match=r"^rows: \d+ of \d+ rows are malformed.*one object a line$"):
        read(json.dumps(GOOD[0], indent=1).encode(), "rows")


def test_jsonl_without_a_line_break_at_its_end_is_whole():
    assert len(read(jsonl(GOOD)[:-1], "rows")[0]) == 200


def test_what_is_not_utf_8_is_an_error_with_its_line():
    data = jsonl(GOOD[:2]) + b'{"system": "caf\xe9", "chat": ""}\n'
    place = data.index(b"\xe9")
    with pytest.raises(EnvironmentBroken, match=f"^rows:3: not UTF-8: byte {place} is 0xe9; store the file as UTF-8$"):
        read(data, "rows")


def test_packed_blocks_are_no_rows():
    data = (5).to_bytes(8, "little") + b'{"a":1}'
    with pytest.raises(EnvironmentBroken, match=r"^rows: a safetensors file, and no rows"):
        read(data, "rows")


def test_an_unknown_shape_from_the_start_is_an_error_that_names_what_was_found_and_what_is_allowed():
    with pytest.raises(EnvironmentBroken) as error:
        read(array([{"prompt": "a", "answer": "b"}] * 9), "rows.json")
    assert str(error.value) == (
        "rows.json:1: a row has the keys prompt, answer; allowed are {system, chat} as in glaive-function-calling-v2,"
        " or {instruction, input, output}"
    )


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, "Add.\n1 and 2"),
        ({"instruction": "Add 1 and 2.", "input": "", "output": "3"}, "Add 1 and 2."),
        ({"instruction": "Add 1 and 2.", "input": None, "output": "3"}, "Add 1 and 2."),
        ({"instruction": "Add 1 and 2.", "output": "3", "id": 7}, "Add 1 and 2."),
    ],
    ids=["with input", "empty input", "null input", "without input"],
)
def test_rows_of_instruction_input_output_become_a_question_and_an_answer(value, asked):
    row = row_of(value)
    assert row.system == ""
    assert [(turn.role, turn.text) for turn in row.turns] == [("user", asked), ("assistant", "3")]


def test_a_path_is_read_with_its_sha256(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(array(GOOD))
    digest = hashlib.sha256(array(GOOD)).hexdigest()
    rows = load_rows(path, sha256=digest.upper())
    assert (len(rows.rows), rows.malformed, rows.sha256, rows.source, rows.revision) == (
        200,
        (),
        digest,
        str(path),
        None,
    )
    path.write_bytes(array(GOOD) + b" ")
    with pytest.raises(EnvironmentBroken, match=rf"its sha256 is [0-9a-f]{{64}}, and {digest} is expected"):
        load_rows(str(path), sha256=digest)


@pytest.mark.parametrize("name", ["missing.json", "a/b.json", "a/b/c.json", "./missing", "/nowhere/at/all"])
def test_a_missing_path_is_an_error(name):
    with pytest.raises(EnvironmentBroken, match=f"^{re.escape(name)}: no such file, and no name on the hub"):
        load_rows(name)


def test_a_missing_path_is_not_looked_for_on_the_hub():
    with pytest.raises(EnvironmentBroken, match=r"^me/calls: no such file"):
        load_rows(Path("me/calls"))


def test_a_folder_is_an_error(tmp_path):
    with pytest.raises(EnvironmentBroken, match="Is a directory; name a file of rows"):
        load_rows(tmp_path)


def test_a_row_is_the_same_conversation_whatever_white_space_is_around_it():
    row = Row(system="s", chat="USER: a\n\n\nASSISTANT: b")
    assert Row(system="s\n", chat=row.chat + "\n\n", line=3).key() == row.key()
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
    (folder / "refs").mkdir()
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
    with pytest.raises(
        EnvironmentBroken, match=r"^me/calls@main: HF_HUB_OFFLINE is set, and it is not in the hub's cache"
    ):
        load_rows("me/calls")
    with pytest.raises(EnvironmentBroken, match=r"^glaiveai/glaive-function-calling-v2@e7f4b64.*HF_HUB_OFFLINE is set"):
        load_rows("glaiveai/glaive-function-calling-v2")


def test_a_repository_of_several_files_is_refused_with_their_names(cache):
    cached(cache, "me/calls", "a" * 40, {"train.jsonl": jsonl(GOOD), "test.json": b"[]"})
    with pytest.raises(EnvironmentBroken, match=r"JSONL file is expected in it, found: test.json, train.jsonl;"):
        load_rows("me/calls")


def test_the_original_is_demanded_with_its_own_revision_and_sha256(cache):
    name = "glaiveai/glaive-function-calling-v2"
    pinned = hub.PINNED[name]
    cached(cache, name, pinned.revision, {pinned.file: array(GOOD)})
    with pytest.raises(
        EnvironmentBroken, match=f"{name}@{pinned.revision}: its sha256 is .* {pinned.sha256} is expected"
    ):
        load_rows(name)


def test_of_another_revision_of_the_original_no_sha256_is_known(cache):
    name = "glaiveai/glaive-function-calling-v2"
    cached(cache, name, "b" * 40, {hub.PINNED[name].file: array(GOOD)})
    assert len(load_rows(f"{name}@{'b' * 40}").rows) == 200


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

        def download(self, repository, file, *, local_files_only, revision, **options):
            if local_files_only:
                return original(repository, file, local_files_only=True, revision=revision, **options)
            self.downloads.append(file)
            path = cache / file
            path.write_bytes(jsonl(GOOD))
            return str(path)

    found, original = Hub(), huggingface_hub.hf_hub_download
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", found.download)
    return found


def test_a_file_is_fetched_from_the_hub(online):
    assert len(load_rows("me/calls@v1").rows) == 200
    assert (online.asked, online.downloads) == ([hub.ANSWER_SECONDS], ["rows.jsonl"])


def test_a_hub_that_does_not_answer_is_asked_once_and_nothing_is_downloaded(online):
    online.answer = ConnectionError("nothing answers\nat all")
    for name in ("me/calls", "glaiveai/glaive-function-calling-v2"):
        with pytest.raises(
            EnvironmentBroken, match=rf"^{name}@.*: the hub does not give it, and it is not in the hub's"
        ):
            load_rows(name)
    with pytest.raises(EnvironmentBroken, match=r"\(ConnectionError: nothing answers\)$"):
        load_rows("me/calls")
    assert (online.asked, online.downloads) == ([hub.ANSWER_SECONDS] * 3, [])


def test_where_the_hub_does_not_answer_the_cache_does(online, cache):
    cached(cache, "me/calls", "a" * 40, {"train.jsonl": jsonl(GOOD)})
    online.answer = TimeoutError("timed out")
    assert len(load_rows("me/calls").rows) == 200
    assert online.downloads == []


def test_a_download_that_does_not_end_is_given_up(online, monkeypatch):
    import huggingface_hub

    ended = threading.Event()
    monkeypatch.setattr(hub, "DOWNLOAD_SECONDS", 0.05)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: ended.wait(60))
    with pytest.raises(EnvironmentBroken, match=r"\(TimeoutError: not over after 0\.05 s\)"):
        load_rows("me/calls")
    ended.set()


@pytest.mark.parametrize("text", ["calls", "a/b/c", "/a/b", "./a", "a b/c", "a/b@", "", "a/b@c d"])
def test_what_is_no_name_on_the_hub(text):
    assert hub.hub_name(text) is None


def test_without_huggingface_hub_the_line_to_install_it_is_told(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EnvironmentBroken, match=r"huggingface_hub is not installed; install it with python -m pip"):
        load_rows("me/calls")
