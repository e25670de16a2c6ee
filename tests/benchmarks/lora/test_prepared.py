"""A file of packed blocks is read as it was written, and anything else is refused with what to do."""

from __future__ import annotations

import json

import pytest
import torch
from each import of_each
from programs import needs_modules

from pytest_gpucluster.benchmarks.lora import packed_file
from pytest_gpucluster.benchmarks.lora.dataset import Rows, held_out_split
from pytest_gpucluster.benchmarks.lora.packing import pack, tiny_tokenizer, tokenizer_fingerprint
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.errors import EnvironmentBroken

pytestmark = needs_modules("transformers")
ROWS = Rows(
    rows=tuple(synthetic_rows(200, seed=0)),
    malformed=("row 3: the chat is empty",),
    sha256="ab" * 32,
    source="rows.json",
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(ROWS.rows)


@pytest.fixture(scope="module")
def made(tokenizer):
    return packed_file.prepare(ROWS, tokenizer, name="tiny", sequence=64, held_out=0.1, seed=3)


@pytest.fixture
def path(made, tmp_path):
    packed_file.write(tmp_path / "blocks.safetensors", made)
    return tmp_path / "blocks.safetensors"


def test_both_parts_are_packed_and_no_conversation_is_in_both(made, tokenizer):
    train, held_out = held_out_split(ROWS.rows, 0.1, seed=3)
    assert list(made.held_out_rows) == held_out
    assert same_blocks(made.train, pack(train, tokenizer, 64))
    assert same_blocks(made.held_out, pack(held_out, tokenizer, 64))


def test_the_context_says_where_it_comes_from(made, tokenizer):
    message = {"source": "rows.json", "sha256": "ab" * 32, "revision": "", "malformed": "1", "tokenizer": "tiny"}
    message |= {"tokenizer_sha256": tokenizer_fingerprint(tokenizer), "sequence": "64", "seed": "3", "held_out": "0.1"}
    message["rendering"] = "glaive"
    assert made.context == message


def same_blocks(one, other):
    return (
        torch.equal(one.tokens, other.tokens)
        and torch.equal(one.loss_mask, other.loss_mask)
        and (one.tokens.dtype, one.loss_mask.dtype) == (other.tokens.dtype, other.loss_mask.dtype)
        and one.statistics == other.statistics
    )


def test_what_was_written_is_read_and_is_reported_from_files_of_rows(made, path):
    found = packed_file.read(path)
    assert same_blocks(found.train, made.train)
    assert same_blocks(found.held_out, made.held_out)
    assert found.context == made.context
    assert [row.key() for row in found.held_out_rows] == [row.key() for row in made.held_out_rows]
    assert list(path.parent.iterdir()) == [path]
    assert packed_file.is_prepared(path)
    for data in (b"[]", b'{"system": "", "chat": ""}', b"", b'[      {"a": 1}]'):
        path.write_bytes(data)
        assert not packed_file.is_prepared(path)


def test_the_same_blocks_give_the_same_bytes_and_a_writing_that_fails_leaves_what_was_there(made, path, monkeypatch):
    import safetensors.torch

    def broken(tensors, temporary, metadata):
        temporary.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    packed_file.write(path, made)
    assert path.read_bytes() == before
    monkeypatch.setattr(safetensors.torch, "save_file", broken)
    with pytest.raises(OSError, match="No space left"):
        packed_file.write(path, made)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@of_each("left", [0, 4, 100, -1, -5000])
def test_a_file_that_is_cut_off_or_missing_is_refused(made, tmp_path, left):
    path = tmp_path / "blocks.safetensors"
    packed_file.write(path, made)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(EnvironmentBroken, match=rf"^{path}: .*again with `gpucluster lora prepare`"):
        packed_file.read(path)
    with pytest.raises(EnvironmentBroken, match=r"cannot be read: .*again"):
        packed_file.read(tmp_path / "none")


def rewritten(path, change=None, tensors=None):
    """The file with other entries in what it tells, with other metadata, or with other tensors."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()} | (tensors or {})  # noqa: SIM118  no dict
        [[name, entry]] = file.metadata().items()
    message = change if isinstance(change, str) else json.dumps(json.loads(entry) | (change or {}))
    save_file(kept, path, {name: message} if message else {"format": "pt"})


@of_each(
    "refused",
    [
        ({"change": ""}, "no packed blocks; make them with"),
        ({"change": {"schema_version": 1}}, "schema_version 1, and 4"),
        ({"change": {"statistics": {"train": {"rows": 1, "blocks": 1}}}}, "damaged"),
        ({"change": {"context": 1}}, "damaged"),
        ({"change": "{"}, "damaged"),
        ({"change": "{}"}, "damaged"),
        ({"tensors": {"train.tokens": torch.zeros(3, 65).int()}}, "damaged: train: tokens are torch.int32"),
        ({"tensors": {"held_out.loss_mask": torch.zeros(1, 64)}}, "damaged: held_out: tokens are"),
        ({"tensors": {"held_out.rows": torch.tensor([255], dtype=torch.uint8)}}, "damaged"),
        ({"tensors": {"held_out.rows": torch.tensor([123], dtype=torch.uint8)}}, "damaged"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(made, tmp_path, refused):
    path, (change, why) = tmp_path / "blocks.safetensors", refused
    packed_file.write(path, made)
    rewritten(path, **change)
    with pytest.raises(EnvironmentBroken, match=why):
        packed_file.read(path)


def test_too_few_rows_held_out_are_reported(tokenizer):
    with pytest.raises(EnvironmentBroken, match=r"^held out: 2 rows are \d+ tokens, .*, .*hold more.*$"):
        packed_file.prepare(ROWS, tokenizer, name="tiny", sequence=4096, held_out=0.01, seed=0)


def test_blocks_fit_the_tokenizer_and_the_length_that_they_were_made_with(made, tokenizer):
    packed_file.require_fit(made, tokenizer, 64, "glaive")
    with pytest.raises(EnvironmentBroken, match="the blocks have 64 positions, and the workload has 128"):
        packed_file.require_fit(made, tokenizer, 128, "glaive")
    with pytest.raises(EnvironmentBroken, match=r"the tokenizer"):
        packed_file.require_fit(made, tiny_tokenizer(ROWS.rows[:150]), 64, "glaive")
    with pytest.raises(EnvironmentBroken, match=r"rendering glaive, .* is chat"):
        packed_file.require_fit(made, tokenizer, 64, "chat")
