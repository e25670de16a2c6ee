"""A LoRA experiment from what was given, and by what it is known again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_gpucluster.benchmarks.lora import prepared
from pytest_gpucluster.benchmarks.lora.context import context_of, require_same_context
from pytest_gpucluster.benchmarks.lora.experiment import SEED, given_data, given_experiment
from pytest_gpucluster.benchmarks.lora.model import Base, tiny_base
from pytest_gpucluster.benchmarks.lora.plan import Recipe
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.benchmarks.lora.tokenizer import tiny_tokenizer
from pytest_gpucluster.errors import EnvironmentBroken

SIZES = SimpleNamespace(
    steps=5, global_batch=4, rows=1000, sequence=64, held_out_ratio=0.1, held_out_blocks=3
)  # Sizes, as far as data depend on them
RECIPE = Recipe(steps=5, warmup_steps=1, global_batch=4, micro_batch=4, learning_rate=1e-3)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with a tokenizer, rows.jsonl, and blocks.safetensors of the same rows."""
    folder = tmp_path_factory.mktemp("given")
    rows = synthetic_rows(120, seed=1)
    tokenizer = tiny_tokenizer(rows)
    tokenizer.save_pretrained(folder)
    lines = [json.dumps({"system": row.system, "chat": row.chat}) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = given_data(folder / "rows.jsonl")
    made = prepared.prepare(data, tokenizer, name="small", sequence=64, held_out=0.1, seed=SEED)
    prepared.write(folder / "blocks.safetensors", made)
    return folder


def base_in(folder: Path) -> Base:
    return replace(tiny_base(512), folder=folder, label="small")


def test_prepared_blocks_are_what_the_rows_would_be(given):
    of_rows, of_blocks = (
        given_experiment(SIZES, base_in(given), given_data(given / name))
        for name in ("rows.jsonl", "blocks.safetensors")
    )
    assert of_blocks.sha256 == of_rows.sha256
    assert torch.equal(of_blocks.held_out.tokens, of_rows.held_out.tokens)
    assert [row.key() for row in of_blocks.held_out_rows] == [row.key() for row in of_rows.held_out_rows]
    assert len(of_blocks.train) <= 20
    assert of_blocks.origin == f"prepared blocks of {of_rows.origin}"


def test_blocks_of_another_length_are_refused(given):
    sizes, data = SimpleNamespace(**{**vars(SIZES), "sequence": 32}), given_data(given / "blocks.safetensors")
    with pytest.raises(EnvironmentBroken, match="the blocks have 64 positions, and 32 are asked for"):
        given_experiment(sizes, base_in(given), data)


def test_blocks_must_have_the_sha256_that_is_demanded(given):
    path = given / "blocks.safetensors"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert isinstance(given_data(path, sha256=digest), prepared.Prepared)
    with pytest.raises(EnvironmentBroken, match=f"its sha256 is {digest}, and 00 is expected"):
        given_data(path, sha256="00")


def test_data_that_are_not_there_are_told(tmp_path):
    with pytest.raises(EnvironmentBroken, match="no such file"):
        given_data(tmp_path / "missing.jsonl")


@pytest.fixture(scope="module")
def lesson(given):
    return given_experiment(SIZES, base_in(given), given_data(given / "blocks.safetensors"))


def test_other_weights_are_another_experiment(given, lesson):
    one, other = (context_of(base_in(given), RECIPE, lesson, ranks=2, weights=weights) for weights in (1, 2**63))
    assert {key for key in one if one[key] != other[key]} == {"weights"}


@pytest.mark.parametrize(("dropout", "differs"), [(True, {"group_ranks"}), (False, set())])
def test_the_number_of_ranks_matters_only_with_dropout(given, lesson, dropout, differs):
    recipe = replace(RECIPE, dropout=dropout)
    one, other = (context_of(base_in(given), recipe, lesson, ranks=ranks, weights=1) for ranks in (2, 4))
    assert {key for key in one | other if one.get(key) != other.get(key)} == differs


def test_a_checkpoint_of_another_experiment_is_refused_and_it_is_said_what_differs(given, lesson):
    context = context_of(base_in(given), RECIPE, lesson, ranks=2, weights=1)
    require_same_context(Path("step-4"), {"context": dict(context)}, context)
    theirs = {**context, "group_ranks": "4", "more": "x"}
    with pytest.raises(
        EnvironmentBroken, match="group_ranks is 4 there and 2 here; more is x there and not given here"
    ):
        require_same_context(Path("step-4"), {"context": theirs}, context)
    with pytest.raises(EnvironmentBroken, match="step-4 is of another experiment: model is not given there"):
        require_same_context(Path("step-4"), {}, context)
