"""Does a device multiply right in each dtype? Small products with exact answers, compared bit by bit.

Operands are integers, so few and so small that every partial sum is exact in the accumulator and in the result. The
answer then does not depend on the order of summation, and a single wrong bit is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from pytest_gpucluster.benchmarks.arithmetic import numerics
from pytest_gpucluster.benchmarks.scaled_product import CAPABILITY, scaled_product
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, VERIFYING, counted
from pytest_gpucluster.metrics.units import did_you_mean

K = 256
"""Terms of each sum: few enough for it to be exact in every dtype."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Return the product of two matrices."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """``largest``: integers up to this are multiplied, such that K times its square is exact in the result."""

    dtype: torch.dtype
    largest: int
    tf32: bool = False
    fp8: bool = False


# Exact up to: bf16 2**8, fp16 2**11, fp32 2**24. TF32 keeps 11 bits of an operand and sums in fp32.
_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "bf16": _Kind(dtype=torch.bfloat16, largest=1),
        "fp16": _Kind(dtype=torch.float16, largest=2),
        "tf32": _Kind(dtype=torch.float32, largest=256, tf32=True),
        "fp32": _Kind(dtype=torch.float32, largest=256),
        "fp8": _Kind(dtype=torch.float8_e4m3fn, largest=1, fp8=True),
    }
)


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """Name the dtypes that a device multiplies in: fp8 from ``scaled_product.CAPABILITY`` on, all others anywhere."""
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
    return tuple(name for name, kind in _KINDS.items() if has_fp8 or not kind.fp8)


def check_product(
    device: torch.device,
    dtype: str,
    *,
    n: int,
    where: str = "",
    seed: int = 0,
    multiply: Multiply | None = None,
) -> None:
    """Multiply an n x K and a K x n matrix of random integers on the device, and compare with the CPU's fp64 product.

    Args:
        device: where to multiply.
        dtype: of the operands: one of ``dtypes_of``; the result is of the same, but bf16 for fp8.
        n: rows and columns of the product; for fp8 a multiple of 16.
        where: how to call the device in an error; by default its name in torch.
        seed: of the operands.
        multiply: by default ``torch.mm``, for fp8 torch's scaled product.

    Raises:
        WrongResult: an element differs; names dtype, device, how many do and the first of them.
        ValueError: there is no such dtype, or n is less than 1.
    """
    if dtype not in _KINDS:
        raise ValueError(f"dtype is one of {', '.join(_KINDS)}, not {dtype!r}{did_you_mean(dtype, _KINDS)}")
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    kind = _KINDS[dtype]
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randint(-kind.largest, kind.largest + 1, shape, generator=generator, dtype=torch.float64)
        for shape in ((n, K), (K, n))
    )
    with counted(VERIFYING):
        expected = a @ b
    with counted(MEASURING), numerics("high" if kind.tf32 else "highest"):
        product = (multiply or (_scaled_mm if kind.fp8 else torch.mm))(_to(a, device, kind), _to(b, device, kind))
    what = f"the {dtype} product of {n} x {K} and {K} x {n} matrices on {where or device}"
    with counted(VERIFYING):
        _compare(product.cpu().double(), expected, what)


def _to(integers: torch.Tensor, device: torch.device, kind: _Kind) -> torch.Tensor:
    return integers.to(torch.float32).to(kind.dtype).to(device)


def _scaled_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)
    # The second operand must be column-major: the transpose of a row-major matrix is.
    scaled_product(a.device)(a, b.t().contiguous().t(), product)
    return product


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
