"""A LoRA experiment from what was given, and by what it is known again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_gpucluster.benchmarks.lora import packed_file
from pytest_gpucluster.benchmarks.lora.experiment import (
    SEED,
    context_of,
    given_data,
    given_experiment,
    recipe_of,
    require_same_context,
    training_deadline,
)
from pytest_gpucluster.benchmarks.lora.model import Base, tiny_base
from pytest_gpucluster.benchmarks.lora.packing import tiny_tokenizer
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.benchmarks.lora.training_plan import Recipe
from pytest_gpucluster.config.workload_loader import Override, load
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
    made = packed_file.prepare(data, tokenizer, name="small", sequence=64, held_out=0.1, seed=SEED)
    packed_file.write(folder / "blocks.safetensors", made)
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


def test_blocks_of_another_length_or_sha256_and_data_that_are_not_there_are_refused(given):
    path = given / "blocks.safetensors"
    sizes = SimpleNamespace(**{**vars(SIZES), "sequence": 32})
    with pytest.raises(EnvironmentBroken, match="the blocks have 64 positions, and"):
        given_experiment(sizes, base_in(given), given_data(path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert isinstance(given_data(path, sha256=digest), packed_file.Prepared)
    with pytest.raises(EnvironmentBroken, match=f"its sha256 is {digest}, and 00"):
        given_data(path, sha256="00")
    with pytest.raises(EnvironmentBroken, match="no such file"):
        given_data(given / "missing.jsonl")


def test_the_contract_trains_on_whole_conversations_by_its_own_recipe(given):
    data = given_experiment(SIZES, base_in(given), given_data(given / "rows.jsonl"), "contract")
    assert (data.train.padded, data.held_out.padded, len(data.train)) == (True, True, 20)
    assert data.notes == (
        f"20 of 20 conversations are cut off; the longest has {data.train.statistics.longest} tokens",
    )
    with pytest.raises(EnvironmentBroken, match=r"recipe=contract .*packed"):
        given_experiment(SIZES, base_in(given), given_data(given / "blocks.safetensors"), "contract")
    sizes = SimpleNamespace(
        steps=5, warmup_steps=1, global_batch=128, micro_batch=4, precision="bf16", recompute="off", compiled="on"
    )
    packed, contract = (recipe_of(sizes, base_in(given), kind) for kind in ("packed", "contract"))
    assert (packed.warmup_steps, packed.weight_decay, packed.micro_batch, packed.compiled) == (1, 0.0, 4, True)
    assert (contract.warmup_steps, contract.weight_decay, contract.micro_batch, contract.compiled) == (
        3,
        0.01,
        2,
        False,
    )
    assert contract.global_batch == packed.global_batch == 128


def test_the_workload_takes_the_contract_the_chat_template_and_no_calls():
    texts = {"lora.recipe": "contract", "lora.rendering": "chat", "lora.qwen2.calls": "0"}
    overrides = [Override(key=key, texts=(text,), origin="here") for key, text in texts.items()]
    path = Path(__file__).parents[3] / "acceptance" / "workloads.yaml"
    found, shipped = (load(path, profile="full", overrides=given).workload for given in (overrides, []))
    assert (found.lora.recipe, found.lora.rendering, found.qwen2_lora.calls) == ("contract", "chat", 0)
    assert (shipped.lora.recipe, shipped.lora.rendering, shipped.qwen2_lora.calls) == ("packed", "glaive", 64)
    assert training_deadline(shipped.qwen2_lora, "packed", [0]) > 1.5 * 7.2 * 3600


def test_a_training_has_the_time_that_it_is_predicted_to_need_and_half_as_much():
    sizes = SimpleNamespace(
        steps=100, stop_after=0, checkpoint_every=10, global_batch=128, sequence=4096, deadline_seconds=3600.0
    )
    tokens = 110 * 128 * 4096
    one, two, three = ([rank // 8 for rank in range(ranks)] for ranks in (1, 16, 24))
    assert (
        training_deadline(sizes, "packed", one) == 3600 + 1.5 * tokens / 2000
    )  # 7.3 h of steps, of a GPU at the floor
    assert training_deadline(sizes, "packed", one) > 1.5 * 7.3 * 3600
    assert training_deadline(sizes, "packed", two) == 3600 + 1.5 * tokens / 16 / 2000
    assert training_deadline(sizes, "packed", three) == 3600 + 1.5 * tokens * 11 / 128 / 2000  # 12 with up to 11 blocks
    assert training_deadline(sizes, "packed", two, 12_000.0) == 3600 + 1.5 * tokens / 16 / 12_000
    assert training_deadline(sizes, "contract", two) == 3600 + 1.5 * tokens / 8 / 16 / 2000


@pytest.fixture(scope="module")
def data(given):
    return given_experiment(SIZES, base_in(given), given_data(given / "blocks.safetensors"))


def test_other_weights_are_another_experiment_and_another_number_of_ranks_with_dropout(given, data):
    def context(dropout=True, **more):
        recipe = replace(RECIPE, dropout=dropout)
        return context_of(base_in(given), recipe, data, **{"ranks": 2, "weights": 1, **more})

    for one, other, differs in [
        (context(), context(weights=2**63), {"weights"}),
        (context(), context(ranks=4), {"group_ranks"}),
        (context(dropout=False), context(dropout=False, ranks=4), set()),
    ]:
        assert {key for key in one | other if one.get(key) != other.get(key)} == differs


def test_a_checkpoint_of_another_experiment_is_refused_and_it_is_reported_what_differs(given, data):
    context = context_of(base_in(given), RECIPE, data, ranks=2, weights=1)
    require_same_context(Path("step-4"), {"context": dict(context)}, context)
    theirs = {**context, "group_ranks": "4", "more": "x"}
    with pytest.raises(EnvironmentBroken, match=r"group_ranks is 4 in the checkpoint and 2 in .*given in"):
        require_same_context(Path("step-4"), {"context": theirs}, context)
    with pytest.raises(EnvironmentBroken, match=r"step-4 .*another experiment"):
        require_same_context(Path("step-4"), {}, context)
