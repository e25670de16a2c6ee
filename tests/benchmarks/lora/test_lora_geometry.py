"""Sizes and operations of Qwen2 with LoRA, against the real model and against what torch counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pytest_gpucluster.benchmarks.lora.adapters import QWEN2, TINY, trained_parameters, with_adapters
from pytest_gpucluster.benchmarks.lora.geometry import QWEN2_7B, QWEN2_7B_PARAMETERS, QWEN2_7B_TRAINED, Geometry, tiny
from pytest_gpucluster.benchmarks.lora.judged_loss import JudgedLoss
from pytest_gpucluster.benchmarks.lora.model import Base, make_adapted, random_base, tiny_base

CPU = torch.device("cpu")


def test_the_formulas_give_qwen2_7b_to_the_last_parameter():
    assert QWEN2_7B.parameters == QWEN2_7B_PARAMETERS == 7_615_616_512
    assert QWEN2_7B.adapter_parameters(64) == QWEN2_7B_TRAINED == 161_480_704
    assert pytest.approx(0.02076, abs=5e-6) == 161_480_704 / (7_615_616_512 + 161_480_704)


def test_the_real_model_on_meta_has_exactly_these_parameters():
    model = make_adapted(random_base(), torch.device("meta"), precision="bf16", dropout=True, seed=0)
    base = sum(weight.numel() for name, weight in model.named_parameters() if ".lora_" not in name)
    assert (base, trained_parameters(model)) == (7_615_616_512, 161_480_704)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (64, 128, 0.05)
    assert len(config.target_modules) == 7
    trained = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    assert trained == {torch.float32}


@pytest.mark.parametrize(
    ("flops", "gflops"),
    [
        (QWEN2_7B.flops_per_token(4096, rank=64), 31.72),
        (QWEN2_7B.flops_per_token(4096, rank=64, recompute=True), 45.91),
        (QWEN2_7B.full_flops_per_token(4096), 44.89),
    ],
    ids=["lora", "recomputed", "full"],
)
def test_operations_of_a_token_at_4096_positions(flops, gflops):
    assert flops / 1e9 == pytest.approx(gflops, abs=0.005)


def test_torch_counts_the_same_operations():
    geometry = Geometry(hidden=64, intermediate=160, layers=2, heads=4, kv_heads=2, vocab=96, positions=64)
    base = Base(label="small", geometry=geometry, adapters=TINY)
    model = JudgedLoss(make_adapted(base, CPU, precision="fp32", dropout=False, seed=0))
    # What it counts of fused attention depends on the kernel, and plain products say all.
    model.causal.set_attn_implementation("eager")
    tokens = torch.zeros(1, 33, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.ones(1, 32, dtype=torch.bool))[0].backward()
    expected = 32 * geometry.flops_per_token(32, rank=TINY.rank, head_trained=True)
    masked = 32 * 6 * geometry.layers * geometry.hidden * 32
    assert counter.get_total_flops() == pytest.approx(expected + masked, rel=1e-3)


@pytest.mark.parametrize("geometry", [tiny(512), tiny(300)], ids=str)
def test_a_tiny_model_has_as_many_parameters_as_the_formula_says(geometry):
    base = tiny_base(geometry.vocab)
    model = make_adapted(base, CPU, precision="bf16", dropout=True, seed=0)
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    assert frozen == geometry.parameters
    assert trained_parameters(model) == geometry.adapter_parameters(16) + 2 * geometry.vocab * geometry.hidden


def test_another_geometry_is_told_apart_by_each_size():
    other = replace(QWEN2_7B, hidden=1792, vocab=151936, positions=32768)
    assert QWEN2_7B.differences(other) == ["hidden is 1792, expected 3584", "vocab is 151936, expected 152064"]
    assert QWEN2_7B.differences(replace(QWEN2_7B, positions=1)) == []


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"heads": 27}, {"kv_heads": 3}], ids=str)
def test_sizes_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be"):
        replace(QWEN2_7B, **wrong)


def test_every_field_of_the_configuration_is_given():
    from transformers import Qwen2Config

    config = Qwen2Config(**QWEN2_7B.config_fields())
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (3584, 28, 152064)
    assert config.rope_parameters["rope_theta"] == 1e6
    assert set(config.layer_types) == {"full_attention"}
    assert not config.tie_word_embeddings


def test_dropout_can_be_left_out():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        model = with_adapters(Qwen2ForCausalLM(Qwen2Config(**tiny(64).config_fields())), QWEN2, dropout=False)
    assert model.peft_config["default"].lora_dropout == 0.0
