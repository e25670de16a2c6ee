from __future__ import annotations

import pytest
import torch

from pytest_gpucluster.benchmarks import matmul
from pytest_gpucluster.benchmarks.dtypes import ARITHMETICS, arithmetic, require_switches
from pytest_gpucluster.errors import EnvironmentBroken, kind_of
from pytest_gpucluster.metrics.sampling import Sampling

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 2)


def test_an_unknown_dtype_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"dtype is.* bf16, fp16, tf32, fp32, fp8, not 'fp-8'; did you mean 'fp8'"):
        arithmetic("fp-8")


@pytest.mark.parametrize("value", ["0", "1"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_a_variable_that_overrides_torchs_switch_is_an_error_and_no_failure(monkeypatch, dtype, value):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    with pytest.raises(EnvironmentBroken, match=f"cuda:2: NVIDIA_TF32_OVERRIDE={value} is set .*; unset it"):
        require_switches(CUDA, arithmetic(dtype))
    assert kind_of(EnvironmentBroken(), "call") == "error"


def test_where_there_is_nothing_to_override_the_variable_does_not_matter(monkeypatch):
    for dtype in ARITHMETICS:
        require_switches(CUDA, arithmetic(dtype))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    for dtype in ("bf16", "fp16", "fp8"):
        require_switches(CUDA, arithmetic(dtype))
    require_switches(CPU, arithmetic("fp32"))


def test_products_are_not_measured_where_a_variable_overrides_the_switch(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setattr(matmul, "accelerator", lambda device: pytest.fail("it went on"))
    with pytest.raises(EnvironmentBroken, match="NVIDIA_TF32_OVERRIDE"):
        matmul.measure_matmul(
            CUDA,
            matmul.Shape.square(64),
            dtype="fp32",
            sampling=Sampling(warmup_seconds=0, window_seconds=1, longest_seconds=1, tolerance_ratio=1),
        )
