"""The dtypes of matrix products: operands, accuracy, fp8, and whether a device multiplies right.

:func:`check_product` compares small products with exact answers, bit by bit. Operands are integers, so few and so small
that every partial sum is exact in the accumulator and in the result. The answer then does not depend on the order of
summation, and a single wrong bit is seen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.products import numerics
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, VERIFYING, counted
from pytest_gpucluster.metrics.units import require_one_of

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
bits below bit 24 (Hopper and Blackwell: 25) are dropped, then those below bit 23 of the new sum. All of that is
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
Ada) the products and the sum so far are aligned to the largest of them, and the bits below its 13th are cut off,
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
        roundoff: half the relative distance of neighbouring values of the result: the error of its rounding.
        accumulation: further error of an element, as a part of |row of a| |column of b|.
        float32_precision: torch's switch: ``highest`` is true fp32, ``high`` allows TF32.
        cleared_bits: the lowest bits of each operand that are set to 0.
        is_scaled: multiplied by torch's scaled product, whose second operand is column-major.
        multiple_of: rows and columns are multiples of this.
        largest: ``check_product`` multiplies integers up to this: K times its square is exact in the result.
    """

    operands: torch.dtype
    result: torch.dtype
    roundoff: float
    largest: int
    accumulation: float = _TENSOR_CORE_ACCUMULATION
    float32_precision: str = "highest"
    cleared_bits: int = 0
    is_scaled: bool = False
    multiple_of: int = 1


# TF32 keeps 10 of fp32's 23 bits of fraction. Operands without the other 13 lose nothing on the way into a tensor
# core, so that TF32 products can be compared with the reference as closely as the others. Integers are exact up to:
# bf16 2**8, fp16 2**11, fp32 2**24; TF32 keeps 11 bits of an operand and sums in fp32.
ARITHMETICS: Mapping[str, Arithmetic] = MappingProxyType(
    {
        "bf16": Arithmetic(operands=torch.bfloat16, result=torch.bfloat16, roundoff=2.0**-8, largest=1),
        "fp16": Arithmetic(operands=torch.float16, result=torch.float16, roundoff=2.0**-11, largest=2),
        "tf32": Arithmetic(
            operands=torch.float32,
            result=torch.float32,
            roundoff=2.0**-24,
            largest=256,
            float32_precision="high",
            cleared_bits=13,
        ),
        "fp32": Arithmetic(
            operands=torch.float32,
            result=torch.float32,
            roundoff=2.0**-24,
            largest=256,
            accumulation=_FP32_ACCUMULATION,
        ),
        "fp8": Arithmetic(
            operands=torch.float8_e4m3fn,
            result=torch.bfloat16,
            roundoff=2.0**-8,
            largest=1,
            accumulation=_FP8_FAST_ACCUMULATION,
            is_scaled=True,
            multiple_of=16,
        ),
    }
)


def arithmetic(dtype: str) -> Arithmetic:
    """Return the arithmetic of a dtype.

    Raises: ValueError if there is none of that name.
    """
    require_one_of("dtype", dtype, ARITHMETICS)
    return ARITHMETICS[dtype]


def require_switches(device: torch.device, kind: Arithmetic) -> None:
    """Check that torch's switch decides between true fp32 and TF32.

    Raises: EnvironmentBroken if a variable overrides it: then the one may be measured as the other, and a GPU reported
    as slow, or wrong.
    Source: NVIDIA_TF32_OVERRIDE=0 turns TF32 off in all of NVIDIA's libraries:
    https://deeprec.readthedocs.io/en/latest/NVIDIA-TF32.html.
    """
    value = os.environ.get(_OVERRIDE)
    if device.type == "cuda" and kind.operands == torch.float32 and value:
        raise EnvironmentBroken(
            f"{device}: {_OVERRIDE}={value} is set in the environment, so that NVIDIA's libraries do not let torch"
            " choose between fp32 and TF32; unset it"
        )


CAPABILITY = (8, 9)
"""The first with fp8 tensor cores. Source: the message of torch's scaled product on older GPUs."""


def require_fp8(device: torch.device) -> None:
    """Check that a device multiplies fp8 matrices.

    Raises: EnvironmentBroken on a GPU that is too old: that is no fault of the GPU.
    """
    capability = accelerator(device).capability
    if capability is not None and capability < CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (CAPABILITY, capability))
        raise EnvironmentBroken(
            f"{device}: fp8 products need compute capability {needed} or later, and this GPU has {found}; leave fp8 out"
            " (-k 'not fp8'), or name the SKU with --gpucluster-sku"
        )


KEPT = 64
"""Rows and columns of the result that a simulated device keeps."""

K = 256
"""Terms of each sum: few enough for it to be exact in every dtype."""


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes that a device supports: fp8 from ``CAPABILITY`` on, all others anywhere."""
    capability = accelerator(device).capability
    has_fp8 = capability is not None and capability >= CAPABILITY
    return tuple(name for name, kind in ARITHMETICS.items() if has_fp8 or not kind.is_scaled)


def check_product(device: torch.device, dtype: str, *, n: int, where: str = "") -> None:
    """Multiply an n x K and a K x n matrix of random integers on the device, and compare with the CPU's fp64 product.

    Args:
        device: where to multiply.
        dtype: of the operands: one of ``dtypes_of``; the result is of the same, but bf16 for fp8.
        n: rows and columns of the product; for fp8 a multiple of 16.
        where: the device's name in an error; by default its name in torch.

    Raises:
        WrongResult: an element differs; names dtype, device, how many do and the first of them.
        ValueError: there is no such dtype.
    """
    kind, n = arithmetic(dtype), accelerator(device).kept(n, KEPT)
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-kind.largest, kind.largest + 1, shape, generator=generator, dtype=torch.float64)
        for shape in ((n, K), (K, n))
    )
    with counted(VERIFYING):
        expected = a @ b
    with counted(MEASURING), numerics(kind.float32_precision):
        left, right = (integers.to(torch.float32).to(kind.operands).to(device) for integers in (a, b))
        if kind.is_scaled:
            right = right.t().contiguous().t()  # column-major, as it must be
        product = left.new_empty((n, n), dtype=kind.result)
        accelerator(device).product(scaled=kind.is_scaled)(left, right, product)
    what = f"the {dtype} product of {n} x {K} and {K} x {n} matrices on {where or device}"
    with counted(VERIFYING):
        _compare(product.cpu().double(), expected, what)


def _compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    # Not found != expected alone: NaN must count as wrong, and does, for it equals nothing.
    wrong = ~(found == expected)
    count = int(wrong.sum())
    if count:
        row, column = (int(index) for index in wrong.nonzero()[0])
        raise WrongResult(
            f"{what} is wrong in {count} of {wrong.numel()} elements; the first is [{row}, {column}]:"
            f" {float(found[row, column]):g} instead of {float(expected[row, column]):g}"
        )
