from __future__ import annotations

import pytest
import torch

from pytest_gpucluster.benchmarks.arithmetic import ARITHMETICS, arithmetic


@pytest.mark.parametrize("dtype", list(ARITHMETICS))
def test_the_roundoff_is_that_of_the_result(dtype):
    kind = arithmetic(dtype)
    assert kind.roundoff == torch.finfo(kind.result).eps / 2


@pytest.mark.parametrize("dtype", list(ARITHMETICS))
def test_cleared_bits_leave_what_a_tensor_core_takes(dtype):
    kind = arithmetic(dtype)
    fraction = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10, torch.float8_e4m3fn: 3}[kind.operands]
    assert fraction - kind.cleared_bits == {"tf32": 10}.get(dtype, fraction)


def test_an_unknown_dtype_is_refused_with_a_hint():
    with pytest.raises(ValueError, match="dtype is one of bf16, fp16, tf32, fp32, fp8, not 'fp-8'; did you mean 'fp8'"):
        arithmetic("fp-8")
