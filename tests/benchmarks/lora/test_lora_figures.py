"""What a LoRA training has shown, as figures: nothing that a limit asks for is left out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pytest_gpucluster.benchmarks.lora.convergence import Convergence, figures_of
from pytest_gpucluster.benchmarks.lora.evaluation import CallScore
from pytest_gpucluster.benchmarks.lora.throughput import LoraRate
from pytest_gpucluster.benchmarks.training.parity import Parity
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.metrics.loss_curve import Curve
from pytest_gpucluster.metrics.sampling import Series

PARITY = Parity(losses=[1.0] * 10, loss_errors=[1e-7], gradient_errors=[1e-6], weight_errors=[0.0])
RESULT = {"final_loss": 0.3, "all_token_loss": 0.4, "held_out_loss": 0.6, "held_out_ratio": 0.1} | dict.fromkeys(
    ("moved_adapters", "unchanged_base", "replayed_steps"), 1.0
)
RESULT |= {"resume_error": 0.0, "reload_error": 0.0}
FOUND = Convergence(
    finite_steps=1.0,
    parity={"fp32": PARITY},
    curve=Curve(points=()),
    result=RESULT,
    calls=CallScore(
        counts={
            "asked": 4,
            "called": 3,
            "well_formed": 3,
            "right_function": 2,
            "right_arguments": 1,
            "not_due": 0,
            "unneeded": 0,
        },
        skipped={},
    ),
    rate=LoraRate(
        tokens_per_second=Series(samples=(1e4,) * 6, median=1e4, low=1e4, high=1e4),
        flops_per_token=31_716_278_272,
        peak_bytes=70 * 10**9,
        recomputes=False,
        notes=(),
    ),
    labels={"model": "lora_tiny", "recipe": "packed", "precision": "bf16", "groups": "1", "group_ranks": "8"},
)
UNKNOWN = replace(FOUND.rate, tokens_per_second=None)


def values(found, peak=989.0):
    return {metric: value for metric, value, _, _ in figures_of(found, peak_tflops=peak)}


def test_the_figures_are_what_was_found_each_a_known_metric_in_its_unit():
    for metric, value, unit, labels in figures_of(FOUND, peak_tflops=989.0):
        measurement.measurement(metric, value, unit=unit, labels=dict(labels))
    found = values(FOUND)
    assert found["lora.held_out_ratio"] == pytest.approx(0.1)
    assert found["lora.mfu"].median == pytest.approx(1e4 * 31.716e9 / 989e12, rel=1e-4)
    ratios = {"well_formed": 0.75, "right_function": 0.5, "right_arguments": 0.25}
    assert {name: found[f"lora.calls.{name}"] for name in ratios} == ratios
    assert "lora.group_error" not in found
    assert "lora.mfu" not in values(FOUND, peak=None)
    assert values(replace(FOUND, result=RESULT | {"group_error": 0.01}))["lora.group_error"] == 0.01


def test_a_rate_that_no_rank_knows_is_nan_and_never_left_out():
    found = values(replace(FOUND, rate=UNKNOWN))
    assert math.isnan(found["lora.tokens_per_second"])
    assert math.isnan(found["lora.mfu"])


def test_a_training_that_ended_early_says_only_what_it_knows_and_leaves_no_gap_in_it():
    early = replace(FOUND, result={}, finite_steps=0.0, rate=UNKNOWN)
    errors = {"lora.loss_error": 1e-7, "lora.gradient_error": 1e-6, "lora.weight_error": 0.0}
    assert values(early) == {"lora.finite_steps": 0.0, **errors}
    still = values(replace(early, result={"moved_adapters": 0.0}))
    assert still == {"lora.finite_steps": 0.0, **errors, "lora.moved_adapters": 0.0}
