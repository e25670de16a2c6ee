"""Sizes and operations of Qwen2 with LoRA, against the real model and against what torch counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from each import of_each
from torch.utils.flop_counter import FlopCounterMode

from pytest_gpucluster.benchmarks.lora.model import (
    QWEN2_7B,
    QWEN2_7B_PARAMETERS,
    QWEN2_7B_TRAINED,
    TINY,
    Base,
    Geometry,
    MaskedLoss,
    make_adapted,
    random_base,
    tiny,
    tiny_base,
    trained_parameters,
)

CPU = torch.device("cpu")


def test_the_formulas_give_qwen2_7b_to_the_last_parameter():
    assert QWEN2_7B.parameters == QWEN2_7B_PARAMETERS == 7_615_616_512
    assert QWEN2_7B.adapter_parameters(64) == QWEN2_7B_TRAINED == 161_480_704
    found = [QWEN2_7B.flops_per_token(4096, rank=64), QWEN2_7B.flops_per_token(4096, rank=64, recompute=True)]
    found.append(QWEN2_7B.full_flops_per_token(4096))
    assert [flops / 1e9 for flops in found] == pytest.approx([31.72, 45.91, 44.89], abs=0.005)


def test_the_real_model_on_meta_has_exactly_these_parameters():
    model = make_adapted(random_base(), torch.device("meta"), precision="bf16", dropout=True, seed=0)
    base = sum(weight.numel() for name, weight in model.named_parameters() if ".lora_" not in name)
    assert (base, trained_parameters(model)) == (7_615_616_512, 161_480_704)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (64, 128, 0.05)
    assert len(config.target_modules) == 7
    trained = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    assert trained == {torch.float32}


def test_torch_counts_the_same_operations():
    geometry = Geometry(hidden=64, intermediate=160, layers=2, heads=4, kv_heads=2, vocab=96, positions=64)
    base = Base(label="small", geometry=geometry, adapters=TINY)
    model = MaskedLoss(make_adapted(base, CPU, precision="fp32", dropout=False, seed=0))
    # What it counts of fused attention depends on the kernel, and plain products say all.
    model.causal.set_attn_implementation("eager")
    tokens = torch.zeros(1, 33, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.ones(1, 32, dtype=torch.bool))[0].backward()
    expected = 32 * geometry.flops_per_token(32, rank=TINY.rank, head_trained=True)
    masked = 32 * 6 * geometry.layers * geometry.hidden * 32
    assert counter.get_total_flops() == pytest.approx(expected + masked, rel=1e-3)


@of_each("geometry", [tiny(512), tiny(300)])
def test_a_tiny_model_has_as_many_parameters_as_the_formula_says(geometry):
    base = tiny_base(geometry.vocab)
    model = make_adapted(base, CPU, precision="bf16", dropout=True, seed=0)
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    assert frozen == geometry.parameters
    assert trained_parameters(model) == geometry.adapter_parameters(16) + 2 * geometry.vocab * geometry.hidden


def test_another_geometry_is_reported_apart_by_each_size_and_sizes_that_do_not_fit_are_refused():
    other = replace(QWEN2_7B, hidden=1792, vocab=151936, positions=32768)
    assert QWEN2_7B.differences(other) == ["hidden is 1792, expected 3584", "vocab is 151936, expected 152064"]
    assert QWEN2_7B.differences(replace(QWEN2_7B, positions=1)) == []
    for wrong in ({"layers": 0}, {"heads": 27}, {"kv_heads": 3}, {"hidden": 28 * 127}):
        with pytest.raises(ValueError, match=r"must be"):
            replace(QWEN2_7B, **wrong)


def test_every_field_of_the_configuration_is_given():
    from transformers import Qwen2Config

    config = Qwen2Config(**QWEN2_7B.config_fields())
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (3584, 28, 152064)
    assert config.rope_parameters["rope_theta"] == 1e6
    assert set(config.layer_types) == {"full_attention"}
    assert not config.tie_word_embeddings
    assert (config.max_position_embeddings, config.attention_dropout) == (131072, 0.0)


def test_the_sizes_of_the_rehearsal_s_model_are_these():
    assert tiny(64) == Geometry(hidden=128, intermediate=384, layers=2, heads=4, kv_heads=2, vocab=64, positions=4096)
    assert (QWEN2_7B.rms_epsilon, QWEN2_7B.rope_base) == (1e-6, 1e6)  # Source: config.json of Qwen/Qwen2-7B
