"""A file of packed blocks is read as it was written, and anything else is refused with what to do."""

from __future__ import annotations

import json

import pytest
import torch

from pytest_gpucluster.benchmarks.lora import prepared
from pytest_gpucluster.benchmarks.lora.held_out import held_out_split
from pytest_gpucluster.benchmarks.lora.packing import pack
from pytest_gpucluster.benchmarks.lora.rows import Malformed, Rows
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.benchmarks.lora.tokenizer import fingerprint, tiny_tokenizer
from pytest_gpucluster.errors import EnvironmentBroken

pytest.importorskip("transformers")
ROWS = Rows(
    rows=tuple(synthetic_rows(200, seed=0)),
    malformed=(Malformed(line=3, row=2, reason="the chat is empty"),),
    sha256="ab" * 32,
    source="rows.json",
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(ROWS.rows)


@pytest.fixture(scope="module")
def made(tokenizer):
    return prepared.prepare(ROWS, tokenizer, name="tiny", sequence=64, held_out=0.1, seed=3)


@pytest.fixture
def path(made, tmp_path):
    prepared.write(tmp_path / "blocks.safetensors", made)
    return tmp_path / "blocks.safetensors"


def test_both_parts_are_packed_and_no_conversation_is_in_both(made, tokenizer):
    train, held_out = held_out_split(ROWS.rows, 0.1, seed=3)
    assert list(made.held_out_rows) == held_out
    for found, rows in [(made.train, train), (made.held_out, held_out)]:
        packed = pack(rows, tokenizer, 64)
        assert torch.equal(found.tokens, packed.tokens)
        assert torch.equal(found.judged, packed.judged)
        assert found.statistics == packed.statistics


def test_the_context_says_where_it_comes_from(made, tokenizer):
    assert made.context == {
        "source": "rows.json",
        "sha256": "ab" * 32,
        "revision": "",
        "malformed": "1",
        "tokenizer": "tiny",
        "tokenizer_sha256": fingerprint(tokenizer),
        "sequence": "64",
        "seed": "3",
        "held_out": "0.1",
    }


def test_what_was_written_is_read(made, path):
    found = prepared.read(path)
    for part in ("train", "held_out"):
        ours, theirs = getattr(made, part), getattr(found, part)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.judged, theirs.judged)
        assert (theirs.tokens.dtype, theirs.judged.dtype) == (torch.int64, torch.bool)
        assert theirs.statistics == ours.statistics
    assert found.context == made.context
    assert [row.key() for row in found.held_out_rows] == [row.key() for row in made.held_out_rows]
    assert list(path.parent.iterdir()) == [path]


def test_a_second_writing_replaces_the_file_and_gives_the_same_bytes(made, path):
    before = path.read_bytes()
    prepared.write(path, made)
    assert path.read_bytes() == before


def test_a_writing_that_fails_leaves_what_was_there(made, path, monkeypatch):
    import safetensors.torch

    def broken(tensors, beside, metadata):
        beside.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(safetensors.torch, "save_file", broken)
    with pytest.raises(OSError, match="No space left"):
        prepared.write(path, made)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_it_is_told_from_files_of_rows(path, tmp_path):
    assert prepared.is_prepared(path)
    for name, data in [("a", b"[]"), ("b", b'{"system": "", "chat": ""}'), ("c", b""), ("d", b'[      {"a": 1}]')]:
        (tmp_path / name).write_bytes(data)
        assert not prepared.is_prepared(tmp_path / name)


@pytest.mark.parametrize("left", [0, 4, 100, -1, -5000])
def test_a_file_that_is_cut_off_is_refused(path, left):
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(EnvironmentBroken, match=f"^{path}: .*make it anew with `gpucluster data prepare`"):
        prepared.read(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(EnvironmentBroken, match=r"cannot be read: .*make it anew"):
        prepared.read(tmp_path / "none")


def rewritten(path, change=None, tensors=None):
    """The file with another entry of metadata, or with other tensors."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()} | (tensors or {})  # noqa: SIM118  no dict
        [[name, entry]] = file.metadata().items()
    told = json.loads(entry)
    metadata = {name: json.dumps(told)} if change is None else change(name, told)
    save_file(kept, path, metadata)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"change": lambda name, told: {"format": "pt"}}, "no packed blocks; make them with"),
        (
            {"change": lambda name, told: {name: json.dumps({**told, "schema_version": 2})}},
            "schema_version 2, and 1 is read here",
        ),
        ({"change": lambda name, told: {name: json.dumps({**told, "statistics": {"train": {"rows": 1}}})}}, "damaged"),
        ({"change": lambda name, told: {name: json.dumps({**told, "context": 1})}}, "damaged"),
        ({"change": lambda name, told: {name: "{"}}, "damaged"),
        ({"change": lambda name, told: {name: "{}"}}, "damaged"),
        (
            {"tensors": {"train.tokens": torch.zeros(3, 65, dtype=torch.int32)}},
            "damaged: train: tokens are torch.int32",
        ),
        ({"tensors": {"held_out.judged": torch.zeros(1, 64)}}, "damaged: held_out: tokens are"),
        (
            {"tensors": {"train.tokens": torch.zeros(1, 65, dtype=torch.int32), "train.judged": torch.ones(1, 64) > 0}},
            "damaged: train: 1 blocks, of which the statistics say otherwise",
        ),
        ({"tensors": {"held_out.rows": torch.tensor([255], dtype=torch.uint8)}}, "damaged"),
        ({"tensors": {"held_out.rows": torch.tensor([123], dtype=torch.uint8)}}, "damaged"),
    ],
    ids=[
        "format",
        "version",
        "statistics",
        "context",
        "metadata",
        "no version",
        "shape",
        "dtype",
        "counts",
        "not utf-8",
        "no json",
    ],
)
def test_a_file_that_contradicts_itself_is_refused(path, change, why):
    rewritten(path, **change)
    with pytest.raises(EnvironmentBroken, match=why):
        prepared.read(path)


def test_too_few_rows_held_out_are_told(tokenizer):
    with pytest.raises(EnvironmentBroken, match=r"^held out: 2 rows are \d+ tokens, .*, or hold more out$"):
        prepared.prepare(ROWS, tokenizer, name="tiny", sequence=4096, held_out=0.01, seed=0)


def test_blocks_fit_the_tokenizer_and_the_length_that_they_were_made_with(made, tokenizer):
    prepared.require_fit(made, tokenizer, 64)
    with pytest.raises(EnvironmentBroken, match="the blocks have 64 positions, and 128 are asked for"):
        prepared.require_fit(made, tokenizer, 128)
    with pytest.raises(EnvironmentBroken, match="made with the tokenizer of tiny, which is another than the model's"):
        prepared.require_fit(made, tiny_tokenizer(ROWS.rows[:150]), 64)
