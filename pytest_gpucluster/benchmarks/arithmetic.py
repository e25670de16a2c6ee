"""In which arithmetic matrices are multiplied: operands, result, how exact it is, and torch's switches for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.units import did_you_mean

_OVERRIDE = "NVIDIA_TF32_OVERRIDE"

_FP32_ACCUMULATION = 32 * 2.0**-24
"""Of true fp32, and so of the reference. Each product and each sum is rounded to nearest, so what remains is the
accumulation of n terms. With rounding errors that are independent, n additions of random terms are off by 0.7 u |row|
|column|, u = 2**-24, and six standard deviations of that, for reference and product together, are 6 u. The rest is
margin: at n = 16384 the bound is 0.0002 of an element's standard deviation, and the worst element of a TF32 product
that claims to be fp32 is off by about 0.002.
Source: the model is Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis" (2019).
"""

_TENSOR_CORE_ACCUMULATION = 256 * 2.0**-24
"""Tensor cores multiply bf16, fp16 and TF32 exactly and sum in fp32, but cut off instead of rounding: at each step (of
4 TF32 products on Ampere and Ada, of 8 on Hopper, of more for 16 bits) products and sum are aligned to the largest and
what lies below bit 24 (Hopper and Blackwell: 25) goes, then what lies below bit 23 of the new sum. All of that is
toward zero, so the errors of a sum that keeps its sign add up.

derived: emulated for TF32 at n = 16384, in units of 2**-24 |row| |column|, the root mean square is 7 on Ampere and 5 on
Hopper. It grows with the sum: six standard deviations out, where one of 2**28 elements lies, the worst was off by 59 on
Ampere and 44 on Hopper; 137 there if it rounded down, not toward zero. For smaller n it is less. At n = 16384
this bound is 0.002 of an element's standard deviation.
Source: for the arithmetic Xie et al., MMA-Sim (arXiv:2511.10909), and its code, which was compared with the hardware
bit by bit: https://github.com/microsoft/MMA-Sim.
"""

_FP8_FAST_ACCUMULATION = 10 * 2.0**-13
"""On Ada and Hopper the tensor cores sum fp8 products with 13 bits of fraction: at each step of 32 products (16 on
Ada) the products and the sum so far are aligned to the largest of them, and what lies below its 13th bit is cut off,
toward zero. Fast accumulation does all n terms that way. Blackwell keeps 25 bits.

derived: emulated for random operands with steps of 16 and of 32, the error in units of 2**-13 |row| |column| is 0.20
(root mean square) at n = 16384, and less for smaller n. It grows with the sum: of elements that come to lie six
standard deviations out, where one of 2**28 does, the worst of hundreds was off by 6.8. At n = 16384 this bound is
0.16, at 4096 0.08 of an element's standard deviation. Later products are compared with the first one bit by bit.
Source: DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.5.2; SageAttention2 (arXiv:2411.10958), which finds
1 + 8 + 13 bits; Xie et al., MMA-Sim (arXiv:2511.10909), and Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor
Cores" (arXiv:2512.07004), which compare models with the hardware bit by bit. That they find it cut off toward zero
matters: rounded down, the same elements would be off by 62, and six standard deviations out by 135.
"""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How matrices of one kind are multiplied.

    Attributes:
        operands, result: the dtypes.
        roundoff: half the relative distance of neighbouring values of the result: what rounding it may cost.
        accumulation: how far an element may be off beside that, as a part of |row of a| |column of b|.
        float32_precision: torch's switch: ``highest`` is true fp32, ``high`` allows TF32.
        cleared_bits: the lowest bits of each operand that are set to 0.
        is_scaled: multiplied by ``scaled_product``, whose second operand is column-major.
        multiple_of: rows and columns are multiples of this.
    """

    operands: torch.dtype
    result: torch.dtype
    roundoff: float
    accumulation: float = _TENSOR_CORE_ACCUMULATION
    float32_precision: str = "highest"
    cleared_bits: int = 0
    is_scaled: bool = False
    multiple_of: int = 1


# TF32 keeps 10 of fp32's 23 bits of fraction. Operands without the other 13 lose nothing on the way into a tensor
# core, so that TF32 products can be held against the reference as closely as the others.
ARITHMETICS: Mapping[str, Arithmetic] = MappingProxyType(
    {
        "bf16": Arithmetic(operands=torch.bfloat16, result=torch.bfloat16, roundoff=2.0**-8),
        "fp16": Arithmetic(operands=torch.float16, result=torch.float16, roundoff=2.0**-11),
        "tf32": Arithmetic(
            operands=torch.float32,
            result=torch.float32,
            roundoff=2.0**-24,
            float32_precision="high",
            cleared_bits=13,
        ),
        "fp32": Arithmetic(
            operands=torch.float32, result=torch.float32, roundoff=2.0**-24, accumulation=_FP32_ACCUMULATION
        ),
        "fp8": Arithmetic(
            operands=torch.float8_e4m3fn,
            result=torch.bfloat16,
            roundoff=2.0**-8,
            accumulation=_FP8_FAST_ACCUMULATION,
            is_scaled=True,
            multiple_of=16,
        ),
    }
)


def arithmetic(dtype: str) -> Arithmetic:
    """Look one up.

    Raises: ValueError if there is none of that name.
    """
    if dtype not in ARITHMETICS:
        raise ValueError(f"dtype is one of {', '.join(ARITHMETICS)}, not {dtype!r}{did_you_mean(dtype, ARITHMETICS)}")
    return ARITHMETICS[dtype]


def require_switches(device: torch.device, kind: Arithmetic) -> None:
    """Make sure that torch's switch decides between true fp32 and TF32.

    Raises: EnvironmentBroken if a variable overrides it: then the one may be measured as the other, and a GPU blamed
    for being slow, or wrong.
    Source: NVIDIA_TF32_OVERRIDE=0 turns TF32 off in all of NVIDIA's libraries:
    https://deeprec.readthedocs.io/en/latest/NVIDIA-TF32.html.
    """
    value = os.environ.get(_OVERRIDE)
    if device.type == "cuda" and kind.operands == torch.float32 and value:
        raise EnvironmentBroken(
            f"{device}: {_OVERRIDE}={value} is set in the environment, so that NVIDIA's libraries do not let torch"
            " choose between fp32 and TF32; unset it"
        )


@contextmanager
def numerics(float32_precision: str) -> Iterator[None]:
    """Set torch's switches for the arithmetic of products, and put them back.

    ``highest`` is true fp32, ``high`` allows TF32. Partial sums are kept in fp32: with less, the element by
    element bound would not hold, and a result would depend on how a library divides the work.
    """
    cuda = torch.backends.cuda.matmul
    cpu: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch makes it at run time
    try:
        old_precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        # Only the newer switches below were set, and torch refuses to name both in the words of the older.
        old_precision = "highest"
    precisions = cuda.fp32_precision, cpu.fp32_precision
    reductions = [
        (name, (getattr(cuda, name), getattr(cuda, f"{name}_split_k")))
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    ]
    fp16_accumulation = cuda.allow_fp16_accumulation
    try:
        torch.set_float32_matmul_precision(float32_precision)
        for name, (_, split_k) in reductions:
            setattr(cuda, name, (False, split_k))
        cuda.allow_fp16_accumulation = False
        yield
    finally:
        torch.set_float32_matmul_precision(old_precision)
        cuda.fp32_precision, cpu.fp32_precision = precisions
        for name, value in reductions:
            setattr(cuda, name, value)
        cuda.allow_fp16_accumulation = fp16_accumulation
