"""How fast one device multiplies matrices, with every product verified.

The matrices are square and random, never zeros: zeros toggle fewer bits, draw less power, and were seen to
run 13 % faster on a power-limited GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pytest_gpucluster import stats
from pytest_gpucluster.benchmarks.clock import Clock, clock_for
from pytest_gpucluster.benchmarks.footprint import memory_returned
from pytest_gpucluster.errors import InconclusiveMeasurement, WrongResult
from pytest_gpucluster.units import did_you_mean

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Write the product of the first two matrices to the third."""

BLOCK_SECONDS = 0.25
"""A sample is the mean over about this long: single products are autocorrelated."""

MIN_BLOCKS = 8
"""At least this many samples, however short the window is."""

ACCUMULATION_BOUND = 32 * 2.0**-24
"""How far an element may be off beside its own rounding, as a part of |row of a| |column of b|.

Products of the operands are exact in fp32 (true fp32 rounds each once), so what remains is the accumulation
of n terms. With rounding errors that are independent, n additions of random terms are off by 0.7 u |row|
|column|, u = 2**-24, and six standard deviations of that, for reference and product together, are 6 u.
Partial sums that are truncated instead of rounded can add about 5 u at n = 16384. The rest is margin: at that
n the bound is 0.0002 of an element's standard deviation, and the worst element of a TF32 product that claims
to be fp32 is off by about 0.002.
Source: the model is Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis" (2019).
"""

_REFERENCE_ELEMENTS = 2**24
"""The reference is made for so many elements at a time, to need little memory beside the operands."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What a dtype's name stands for. ``roundoff`` is half the relative distance of neighbouring values."""

    dtype: torch.dtype
    bits: torch.dtype
    roundoff: float
    float32_precision: str = "highest"
    cleared_bits: int = 0


# TF32 keeps 10 of fp32's 23 bits of fraction. Operands without the other 13 lose nothing on the way into a
# tensor core, so that TF32 products can be held against the reference as closely as the others.
KINDS = {
    "bf16": _Kind(dtype=torch.bfloat16, bits=torch.int16, roundoff=2.0**-8),
    "fp16": _Kind(dtype=torch.float16, bits=torch.int16, roundoff=2.0**-11),
    "tf32": _Kind(dtype=torch.float32, bits=torch.int32, roundoff=2.0**-24, float32_precision="high", cleared_bits=13),
    "fp32": _Kind(dtype=torch.float32, bits=torch.int32, roundoff=2.0**-24),
}


@dataclass(frozen=True, kw_only=True)
class MatmulResult:
    """What was measured on one device.

    Attributes:
        tflops: median of the samples, in 10**12 floating point operations a second.
        samples_tflops: one for each block of products.
        n, dtype, seed: what was multiplied.
        flops_per_iter: operations of one product.
        iters: timed products.
        verified_products: products compared element by element: the timed ones and the two before them.
    """

    tflops: float
    samples_tflops: tuple[float, ...]
    n: int
    dtype: str
    seed: int
    flops_per_iter: int
    iters: int
    verified_products: int


def measure_matmul(
    device: torch.device,
    *,
    n: int,
    dtype: str,
    seconds: float,
    warmup_seconds: float,
    seed: int = 0,
    clock: Clock | None = None,
    multiply: Multiply | None = None,
) -> MatmulResult:
    """Measure products of two random n x n matrices, in TFLOPS.

    Counted is the time of the products alone. ``fp32`` is true fp32: TF32 is off. Only operands larger than
    the device's cache say something about the whole device; n = 16384 is, on every GPU so far.

    Two products, a b and b a, take turns, so that a part of the result which a product failed to write still
    holds the other one and is seen. Both are first held against a true fp32 reference, element by element.
    Each timed product is then compared with the first of its kind bit by bit, between the timed regions and
    without waiting for it.

    Args:
        device: where to multiply.
        n: rows and columns of the matrices.
        dtype: "bf16", "fp16", "tf32" or "fp32", for the operands and the result.
        seconds: about how long to measure. The count of products is fixed after the warm-up.
        warmup_seconds: at least how long to multiply before, for clocks and temperature to settle.
        seed: of the operands.
        clock: takes the time; by default the device's own.
        multiply: ``multiply(a, b, out)``, by default ``torch.mm``.

    Raises:
        WrongResult: a product is wrong, NaN and infinities included; names the count and the first element.
        InconclusiveMeasurement: the clock did not advance.
        ValueError: an argument is out of its range.

    Source: 2 n**3 operations for a product: Golub and Van Loan, "Matrix Computations" (4th edition), section
    1.1.
    """
    if dtype not in KINDS:
        raise ValueError(f"dtype is one of {', '.join(KINDS)}, not {dtype!r}{did_you_mean(dtype, KINDS)}")
    if n < 1 or not (0 < seconds < math.inf and 0 <= warmup_seconds < math.inf):
        raise ValueError(
            "n must be at least 1, seconds positive and warmup_seconds not negative, "
            f"not n={n}, seconds={seconds}, warmup_seconds={warmup_seconds}"
        )
    with memory_returned(), _numerics(KINDS[dtype].float32_precision):
        return _measure(
            _Products(device, n=n, dtype=dtype, seed=seed, multiply=multiply or _mm),
            clock or clock_for(device),
            seconds=seconds,
            warmup_seconds=warmup_seconds,
        )


def _measure(products: _Products, clock: Clock, *, seconds: float, warmup_seconds: float) -> MatmulResult:
    products.check_against_reference()
    product_seconds = _warm_up(products, clock, warmup_seconds)
    blocks = max(MIN_BLOCKS, math.ceil(seconds / BLOCK_SECONDS))
    per_block = max(1, round(seconds / blocks / product_seconds))
    iters = blocks * per_block
    tally = products.tally(iters)
    for index in range(iters):
        with clock.region():
            products.make(index)
        tally.compare(index)
    times = clock.read()
    tally.check()
    flops = 2 * products.n**3
    samples = tuple(
        flops * per_block / _positive(sum(times[start : start + per_block])) / 1e12
        for start in range(0, iters, per_block)
    )
    return MatmulResult(
        tflops=stats.median(samples),
        samples_tflops=samples,
        n=products.n,
        dtype=products.dtype,
        seed=products.seed,
        flops_per_iter=flops,
        iters=iters,
        verified_products=iters + len(products.firsts),
    )


def _warm_up(products: _Products, clock: Clock, seconds: float) -> float:
    """Multiply for at least ``seconds``; return the seconds of one product at the end of that."""
    spent, count = 0.0, 1
    while True:
        with clock.region():
            for index in range(count):
                products.make(index)
        [elapsed] = clock.read()
        spent += _positive(elapsed)
        if spent >= seconds:
            return elapsed / count
        # The first product takes far longer than the others, so the count may only grow step by step.
        count = max(1, min(10 * count, round(BLOCK_SECONDS * count / elapsed)))


class _Products:
    """The operands, and the two products that take turns."""

    def __init__(self, device: torch.device, *, n: int, dtype: str, seed: int, multiply: Multiply) -> None:
        self.device, self.n, self.dtype, self.seed = device, n, dtype, seed
        self.kind = KINDS[dtype]
        self._multiply = multiply
        random = torch.Generator(device).manual_seed(seed)
        a, b = (torch.randn(n, n, generator=random, device=device, dtype=self.kind.dtype) for _ in range(2))
        if self.kind.cleared_bits:
            for operand in (a, b):
                operand.view(self.kind.bits).bitwise_and_(-(1 << self.kind.cleared_bits))
        self._pairs = ((a, b), (b, a))
        self.out = torch.empty_like(a)
        self.firsts: list[torch.Tensor] = []
        for left, right in self._pairs:
            self.out.fill_(math.nan)  # an element that is never written must not look right by chance
            multiply(left, right, self.out)
            self.firsts.append(self.out.clone())

    def make(self, index: int) -> None:
        """Start product ``index``."""
        left, right = self._pairs[index % 2]
        self._multiply(left, right, self.out)

    def check_against_reference(self) -> None:
        """Hold the first two products against a true fp32 reference.

        Raises: WrongResult naming the first wrong element.
        """
        for (left, right), first in zip(self._pairs, self.firsts, strict=True):
            finding = _differences(left, right, first, self.kind.roundoff)
            if finding:
                raise WrongResult(f"{self}: {finding}")

    def tally(self, iters: int) -> _Tally:
        """Prepare for the comparison of ``iters`` products with the first ones."""
        return _Tally(self, iters)

    def __str__(self) -> str:
        return f"{self.device}: matmul {self.dtype} n={self.n}"


class _Tally:
    """Comparisons bit by bit, counted on the device so that nothing waits for them."""

    def __init__(self, products: _Products, iters: int) -> None:
        self._products = products
        bits = products.kind.bits
        self._found = products.out.view(bits).flatten()
        self._expected = [first.view(bits).flatten() for first in products.firsts]
        self._differs = torch.empty(products.n**2, dtype=torch.bool, device=products.device)
        self._counts, self._offsets = torch.zeros(2, iters, dtype=torch.int64, device=products.device)
        self._found_bits = torch.zeros(iters, dtype=bits, device=products.device)

    def compare(self, index: int) -> None:
        """Start the comparison of product ``index``, which is in the result's buffer."""
        torch.ne(self._found, self._expected[index % 2], out=self._differs)
        self._counts[index] = self._differs.sum()
        # argmax returns the first of equal maxima.
        self._offsets[index] = self._differs.view(torch.uint8).argmax()
        self._found_bits[index : index + 1] = self._found.index_select(0, self._offsets[index : index + 1])

    def check(self) -> None:
        """Look at the counts.

        Raises: WrongResult naming how many products are wrong, and the first wrong element.
        """
        wrong = self._counts.nonzero().flatten().tolist()
        if not wrong:
            return
        index = wrong[0]
        count, offset = int(self._counts[index]), int(self._offsets[index])
        found = self._found_bits[index : index + 1]
        expected = self._expected[index % 2][offset : offset + 1]
        width = self._products.kind.bits.itemsize
        shown = [
            f"{bits.view(self._products.kind.dtype).item():g} ({int(bits) % 256**width:#0{2 * width + 2}x})"
            for bits in (found, expected)
        ]
        raise WrongResult(
            f"{self._products}: {len(wrong)} of {len(self._counts)} timed products are wrong; the first, "
            f"product {index}, in {_place(count, offset, self._products.n)}: "
            f"found {shown[0]}, expected {shown[1]}"
        )


def _differences(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, roundoff: float) -> str | None:
    """Compare a product with its true fp32 reference; describe what is wrong with it, or return None."""
    n = len(left)
    count, first = 0, ""
    with _numerics("highest"):
        wide_right = right.float()
        right_norms = torch.linalg.vector_norm(wide_right, dim=0)
        rows = max(1, _REFERENCE_ELEMENTS // n)
        for start in range(0, n, rows):
            wide_left = left[start : start + rows].float()
            reference = wide_left @ wide_right
            found = product[start : start + rows].float()
            bound = torch.outer(torch.linalg.vector_norm(wide_left, dim=1), right_norms)
            bound.mul_(ACCUMULATION_BOUND).add_(reference.abs(), alpha=roundoff)
            # Written so that a NaN on either side is wrong, and so is a reference that is infinite.
            wrong = ((found - reference).abs_() <= bound).logical_and_(reference.isfinite()).logical_not_()
            here = int(wrong.sum())
            if here and not count:
                offset = int(wrong.flatten().view(torch.uint8).argmax())
                values = [float(each.flatten()[offset]) for each in (found, reference, bound)]
                offset += start * n
                first = "found {:.9g}, the fp32 reference is {:.9g}, allowed are +-{:.3g}".format(*values)
            count += here
    return f"the first product is wrong in {_place(count, offset, n)}: {first}" if count else None


def _place(count: int, offset: int, n: int) -> str:
    row, column = divmod(offset, n)
    return f"{count} of {n * n} elements, first at offset {offset} (row {row}, column {column})"


def _positive(seconds: float) -> float:
    if not seconds > 0:
        raise InconclusiveMeasurement(f"the clock did not advance: a product took {seconds} s")
    return seconds


def _mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


@contextmanager
def _numerics(float32_precision: str) -> Iterator[None]:
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
