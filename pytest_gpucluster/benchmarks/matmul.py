"""How fast one device multiplies matrices, with every product verified.

The matrices are random, never zeros: zeros toggle fewer bits, draw less power, and were seen to run 13 % faster on a
power-limited GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from pytest_gpucluster.benchmarks.arithmetic import Arithmetic, arithmetic, numerics, require_switches
from pytest_gpucluster.benchmarks.blocks import NOTHING, Rate, measure_rate
from pytest_gpucluster.benchmarks.clock import Clock, clock_for
from pytest_gpucluster.benchmarks.footprint import cache_bytes, memory_returned, require_free
from pytest_gpucluster.benchmarks.matmul_products import Buffers, Multiply, Products, layouts_of, usual_layout
from pytest_gpucluster.benchmarks.matmul_shape import Shape
from pytest_gpucluster.benchmarks.scaled_product import require_fp8, scaled_product
from pytest_gpucluster.metrics.sampling import Sampling, Series

BEST_OF = (4096, 8192, 16384)
"""The sizes n of which the best decides. Source: ``best_square``."""


@dataclass(frozen=True, kw_only=True)
class BestSquare:
    """The size that speaks for a device.

    Attributes:
        n: rows and columns of that product.
        sizes: those that it was chosen from, ascending; the same on every rank that measured the same sizes.
    """

    n: int
    sizes: tuple[int, ...]

    @property
    def label(self) -> str:
        """The sizes as a limit's condition names them, such as "4096, 8192, 16384"."""
        return ", ".join(map(str, self.sizes))


@dataclass(frozen=True, kw_only=True)
class MatmulResult:
    """What was measured on one device.

    Attributes:
        tflops: in 10**12 floating point operations a second, a sample for each block of products.
        shape, dtype, seed: what was multiplied.
        flops_per_iter: operations of one product.
        iters: timed products, without those of the warm-up.
        verified_products: products compared element by element: the timed ones, those of the warm-up and the first
            ones, which the others are compared with.
        operand_sets: sets of operands that were used in turn, so that they do not stay in the device's cache.
    """

    tflops: Series
    shape: Shape
    dtype: str
    seed: int
    flops_per_iter: int
    iters: int
    verified_products: int
    operand_sets: int


def measure_matmul(
    device: torch.device,
    *,
    n: int,
    dtype: str,
    sampling: Sampling,
    seed: int = 0,
    during: AbstractContextManager[object] = NOTHING,
    clock: Clock | None = None,
    multiply: Multiply | None = None,
    cache: int | None = None,
) -> MatmulResult:
    """Measure products of two random n x n matrices, in TFLOPS.

    Counted is the time of the products alone. ``fp32`` is true fp32: TF32 is off. ``fp8`` has e4m3 operands, a bf16
    result and fast accumulation. Only operands larger than the device's cache say something about the whole device;
    smaller ones are used in turn with others.

    Two products of each pair, a b and b a, take turns, so that a part of the result which a product failed to write
    still holds the other one and is seen. Both are first held against a true fp32 reference, element by element. Each
    later product is compared with the first of its kind bit by bit, between the timed regions.

    Args:
        device: where to multiply.
        n: rows and columns of the matrices; for fp8 a multiple of 16.
        dtype: "bf16", "fp16", "tf32", "fp32" or "fp8".
        sampling: how long to multiply before and while samples are taken, and how sure to be.
        seed: of the operands.
        during: held open while samples are taken.
        clock: takes the time; by default the device's own.
        multiply: ``multiply(a, b, out)``, by default ``torch.mm``, and torch's scaled product for fp8.
        cache: bytes of the device's last cache; by default as the device says.

    Returns: the result; its series may be inconclusive, and says so.

    Raises:
        WrongResult: a product is wrong, NaN and infinities included; names the count and the first element.
        InconclusiveMeasurement: the clock did not advance.
        EnvironmentBroken: too little memory is free, the device has no fp8, or the environment forbids to choose
            between fp32 and TF32.
        ValueError: an argument is out of its range.

    Source: of the operations of a product, ``Shape.flops``.
    """
    instead = "choose smaller sizes, such as --gpucluster-workload matmul.sizes=4096,8192"
    buffers = prepare(device, n=n, dtype=dtype, cache=cache, instead=instead)
    name = f"{device}: matmul {dtype} n={n}"
    return _measured(device, buffers, dtype, name, seed, multiply, clock, sampling, during)


def measure_shape(
    device: torch.device,
    shape: Shape,
    *,
    dtype: str,
    sampling: Sampling,
    instead: str,
    seed: int = 0,
    during: AbstractContextManager[object] = NOTHING,
    clock: Clock | None = None,
    multiply: Multiply | None = None,
    cache: int | None = None,
) -> MatmulResult:
    """Measure products of any shape and layout, in TFLOPS: as ``measure_matmul`` does it, by the same rules.

    Where a b and b a are not both of this shape and layout, the two products that take turns are a b and c b.

    Args:
        shape: what is multiplied.
        instead: how to ask for less memory, for the message.
        others: as for ``measure_matmul``.

    Raises: as ``measure_matmul``.
    """
    buffers = prepare_shape(device, shape, dtype=dtype, cache=cache, instead=instead)
    name = f"{device}: matmul {dtype} {shape}"
    return _measured(device, buffers, dtype, name, seed, multiply, clock, sampling, during)


def best_square(tflops: Mapping[int, Series]) -> BestSquare:
    """Choose the square product by which a device is judged: the best of n = 4096, 8192 and 16384.

    Which of them is the fastest differs from GPU to GPU and from library to library, and no single one is a floor for
    all: two H100 SXM reached 726 and 729 TFLOPS in bf16 at n = 4096, and 669.24 and 670.05 at n = 16384
    (drmysore/nebius-h100-8gpu-benchmark); the acceptance of 2 nodes x 8 H100 SXM 80GB demanded more than 700 and
    observed 730.97 at n = 8192.

    The best has the highest lower end of its interval among those that are conclusive: a rate that is sure at one size
    is proven. Where none is, it is the highest median, which is then inconclusive. Of equals it is the smallest.

    Args:
        tflops: the rate at each n, in TFLOPS (10**12 operations a second). Where none of the three sizes is among
            them, the best is that of all.

    Raises: ValueError if there is no rate at all.
    """
    if not tflops:
        raise ValueError("no size was measured, so none is the best")
    sizes = tuple(sorted(set(BEST_OF) & set(tflops)) or sorted(tflops))
    sure = [n for n in sizes if not tflops[n].inconclusive]
    best = max(sure, key=lambda n: tflops[n].low) if sure else max(sizes, key=lambda n: tflops[n].median)
    return BestSquare(n=best, sizes=sizes)


def prepare(device: torch.device, *, n: int, dtype: str, instead: str, cache: int | None = None) -> Buffers:
    """Make sure that a device can multiply n x n matrices, and say which it will hold.

    Args:
        device: where to multiply.
        n, dtype: as in ``measure_matmul``.
        instead: how to ask for less memory, for the message.
        cache: bytes of the device's last cache; by default as the device says.

    Raises:
        EnvironmentBroken: too little memory is free, the device has no fp8, or the environment forbids to choose
            between fp32 and TF32.
        ValueError: an argument is out of its range.
    """
    kind = arithmetic(dtype)
    if n < 1 or n % kind.multiple_of:
        raise ValueError(f"n must be at least 1, and for {dtype} a multiple of {kind.multiple_of}, not {n}")
    shape = Shape.square(n, layout=usual_layout(kind))
    return prepare_shape(device, shape, dtype=dtype, instead=instead, cache=cache, what=f"n={n}")


def prepare_shape(
    device: torch.device, shape: Shape, *, dtype: str, instead: str, cache: int | None = None, what: str = ""
) -> Buffers:
    """Make sure that a device can take products of this shape, and say which matrices it will hold.

    Args:
        device: where to multiply.
        shape: what is multiplied.
        what: how the message calls it; by default as it is written.
        others: as for ``prepare``.

    Raises: as ``prepare``. ValueError also for a layout that this dtype cannot be multiplied in.
    """
    kind = arithmetic(dtype)
    if any(size % kind.multiple_of for size in (shape.m, shape.n, shape.k)):
        raise ValueError(f"m, n and k must be multiples of {kind.multiple_of} for {dtype}, not {shape}")
    if shape.layout not in layouts_of(kind):
        raise ValueError(f"{dtype} is multiplied in the layout {' or '.join(layouts_of(kind))} only, not {shape}")
    if kind.is_scaled:
        require_fp8(device)
    require_switches(device, kind)
    buffers = Buffers(shape=shape, kind=kind, cache=cache_bytes(device) if cache is None else cache)
    require_free(device, buffers.needed_bytes, f"matmul {dtype} {what or shape}", instead=instead)
    return buffers


def multiplier(device: torch.device, kind: Arithmetic) -> Multiply:
    """Return what multiplies matrices of this kind: ``torch.mm``, and torch's scaled product for fp8."""
    return scaled_product(device) if kind.is_scaled else _mm


def flops_of(n: int) -> int:
    """Return the operations of one product of n x n matrices: ``Shape.flops``."""
    return Shape.square(n).flops


def _measured(
    device: torch.device,
    buffers: Buffers,
    dtype: str,
    name: str,
    seed: int,
    multiply: Multiply | None,
    clock: Clock | None,
    sampling: Sampling,
    during: AbstractContextManager[object],
) -> MatmulResult:
    with memory_returned(), numerics(buffers.kind.float32_precision):
        by = multiply or multiplier(device, buffers.kind)
        rate = _rate(device, buffers, name, seed, by, clock or clock_for(device), sampling, during)
    flops = buffers.shape.flops
    return MatmulResult(
        tflops=rate.per_second.scaled(flops / 1e12),
        shape=buffers.shape,
        dtype=dtype,
        seed=seed,
        flops_per_iter=flops,
        iters=rate.timed,
        verified_products=rate.verified + 2 * buffers.sets,
        operand_sets=buffers.sets,
    )


def _rate(
    device: torch.device,
    buffers: Buffers,
    name: str,
    seed: int,
    multiply: Multiply,
    clock: Clock,
    sampling: Sampling,
    during: AbstractContextManager[object],
) -> Rate:
    # A function of its own, for its frame holds all tensors: see memory_returned.
    products = Products(device, buffers, name=name, seed=seed, multiply=multiply)
    return measure_rate(products, clock, sampling=sampling, during=during)


def _mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)
