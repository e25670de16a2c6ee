"""How fast one device multiplies matrices, with every product verified.

The matrices are square and random, never zeros: zeros toggle fewer bits, draw less power, and were seen to
run 13 % faster on a power-limited GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from pytest_gpucluster.benchmarks.arithmetic import Arithmetic, arithmetic, numerics, require_switches
from pytest_gpucluster.benchmarks.blocks import NOTHING, Rate, measure_rate
from pytest_gpucluster.benchmarks.clock import Clock, clock_for
from pytest_gpucluster.benchmarks.comparison import Comparison, bytes_to_compare, difference_seen, shown
from pytest_gpucluster.benchmarks.footprint import cache_bytes, memory_returned, require_free, sets_beyond_cache
from pytest_gpucluster.benchmarks.matmul_reference import PART_BYTES, wrong_elements
from pytest_gpucluster.benchmarks.scaled_product import require_fp8, scaled_product
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.sampling import Sampling, Series

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Write the product of the first two matrices to the third."""

RESULTS_AT_ONCE = 64
RESULTS_BYTES = 4 * 2**30
"""So many products, and of no more than so many bytes, are kept until they are verified. Of bf16 matrices with
n = 16384 it is 8 products: 0.1 s of work between two looks of the host."""


@dataclass(frozen=True, kw_only=True)
class MatmulResult:
    """What was measured on one device.

    Attributes:
        tflops: in 10**12 floating point operations a second, a sample for each block of products.
        n, dtype, seed: what was multiplied.
        flops_per_iter: operations of one product.
        iters: timed products, without those of the warm-up.
        verified_products: products compared element by element: the timed ones, those of the warm-up and the first
            ones, which the others are compared with.
        operand_sets: pairs of operands that were used in turn, so that they do not stay in the device's cache.
    """

    tflops: Series
    n: int
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

    Source: of the operations of a product, ``flops_of``.
    """
    instead = "choose smaller sizes, such as --gpucluster-workload matmul.sizes=4096,8192"
    layout = prepare(device, n=n, dtype=dtype, cache=cache, instead=instead)
    flops = flops_of(n)
    name = f"{device}: matmul {dtype} n={n}"
    with memory_returned(), numerics(layout.kind.float32_precision):
        by = multiply or multiplier(device, layout.kind)
        rate = _measure(device, layout, name, seed, by, clock or clock_for(device), sampling, during)
    return MatmulResult(
        tflops=rate.per_second.scaled(flops / 1e12),
        n=n,
        dtype=dtype,
        seed=seed,
        flops_per_iter=flops,
        iters=rate.timed,
        verified_products=rate.verified + 2 * layout.sets,
        operand_sets=layout.sets,
    )


def prepare(device: torch.device, *, n: int, dtype: str, instead: str, cache: int | None = None) -> Layout:
    """Make sure that a device can multiply n x n matrices, and say how they lie in its memory.

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
    if kind.is_scaled:
        require_fp8(device)
    require_switches(device, kind)
    layout = Layout(n=n, kind=kind, cache=cache_bytes(device) if cache is None else cache)
    require_free(device, layout.needed_bytes, f"matmul {dtype} n={n}", instead=instead)
    return layout


def multiplier(device: torch.device, kind: Arithmetic) -> Multiply:
    """Return what multiplies matrices of this kind: ``torch.mm``, and torch's scaled product for fp8."""
    return scaled_product(device) if kind.is_scaled else _mm


def flops_of(n: int) -> int:
    """Return the operations of one product of n x n matrices.

    Source: 2 n**3: Golub and Van Loan, "Matrix Computations" (4th edition), section 1.1.
    """
    return 2 * n**3


def _measure(
    device: torch.device,
    layout: Layout,
    name: str,
    seed: int,
    multiply: Multiply,
    clock: Clock,
    sampling: Sampling,
    during: AbstractContextManager[object],
) -> Rate:
    # A function of its own, for its frame holds all tensors: see memory_returned.
    products = Products(device, layout, name=name, seed=seed, multiply=multiply)
    return measure_rate(products, clock, sampling=sampling, during=during)


class Layout:
    """How many matrices there are, and how large.

    Attributes:
        n, kind: what is multiplied, and in which arithmetic.
        sets: pairs of operands that are used in turn.
        results: products that are kept at a time.
        operand_bytes, result_bytes: of one matrix.
    """

    def __init__(self, *, n: int, kind: Arithmetic, cache: int) -> None:
        self.n, self.kind = n, kind
        self.operand_bytes = n * n * kind.operands.itemsize
        self.result_bytes = n * n * kind.result.itemsize
        # Operands and result of one product: so much passes through the cache until the next one.
        self.sets = sets_beyond_cache(2 * self.operand_bytes + self.result_bytes, cache)
        results = max(1, min(RESULTS_AT_ONCE, RESULTS_BYTES // self.result_bytes))
        # Whole rounds of the sets, so that each result always belongs to the same set.
        self.results = max(1, results // self.sets) * self.sets

    @property
    def needed_bytes(self) -> int:
        """Memory for operands, results, first products, comparison, and the reference with its fp32 operands."""
        operands = self.sets * (4 if self.kind.is_scaled else 2) * self.operand_bytes
        results = (self.results + 2 * self.sets) * self.result_bytes
        reference = 2 * 4 * self.n**2 + min(PART_BYTES, 6 * 4 * self.n**2)
        return operands + results + bytes_to_compare(self.result_bytes) + reference


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """One of the two products of a pair of operands, and what it must be."""

    left: torch.Tensor
    right: torch.Tensor
    first: torch.Tensor


class Products:
    """The operands and the results, which are used in turn: what ``blocks`` repeats.

    Raises: WrongResult if one of the first products is wrong; names the first wrong element.
    """

    def __init__(self, device: torch.device, layout: Layout, *, name: str, seed: int, multiply: Multiply) -> None:
        self._layout, self._name, self._multiply = layout, name, multiply
        random = torch.Generator(device).manual_seed(seed)
        shape, dtype = (layout.n, layout.n), layout.kind.result
        # An element that is never written must not look right by chance.
        self._results = [torch.full(shape, math.nan, dtype=dtype, device=device) for _ in range(layout.results)]
        self._sets: list[tuple[_Turn, _Turn]] = []
        for _ in range(layout.sets):
            self._sets.append(self._turns(_operand(layout, random), _operand(layout, random)))
        self._comparison = Comparison(self._results[0])
        self._verified = 0
        self.most_at_once = layout.results

    def _turns(self, a: torch.Tensor, b: torch.Tensor) -> tuple[_Turn, _Turn]:
        """Make a b and b a for the first time, and hold them against the reference.

        Raises: WrongResult naming the first wrong element.
        """
        return self._first(a, b), self._first(b, a)

    def _first(self, left: torch.Tensor, right: torch.Tensor) -> _Turn:
        kind = self._layout.kind
        if kind.is_scaled:
            right = right.t().contiguous().t()  # the same matrix, column-major
        first = self._results[0].fill_(math.nan)
        self._multiply(left, right, first)
        wrong = wrong_elements(left, right, first, kind)
        if wrong is not None:
            place = _place(wrong.count, wrong.row, wrong.column, self._layout.n)
            raise WrongResult(f"{self._name}: the first product is wrong in {place}: {wrong.what}")
        return _Turn(left=left, right=right, first=first.clone())

    def start(self, index: int) -> None:
        """Start product ``index``."""
        turn, result = self._turn(index)
        self._multiply(turn.left, turn.right, result)

    def _turn(self, index: int) -> tuple[_Turn, torch.Tensor]:
        # Each result holds the other product of its set before.
        rounds, place = divmod(index, self._layout.results)
        return self._sets[place % self._layout.sets][rounds % 2], self._results[place]

    def verify(self, done: range) -> None:
        """Compare the last products with the first ones.

        The tensor cores rest meanwhile. derived, not measured, for bf16 and n = 16384 on an H100: the comparison reads
        two matrices and writes and reads an eighth of one, 1.2 GB, which takes 0.40 ms at nine tenths of 3.35 TB/s,
        beside 12.0 ms for a product at 731 TFLOPS: 3 %.

        Raises: WrongResult naming how many products are wrong, and the first wrong element of the first one.
        """
        turns = [self._turn(index) for index in done]
        answers = torch.stack([self._comparison.differ(result, turn.first) for turn, result in turns])
        self._verified += len(done)
        wrong = answers.nonzero().flatten().tolist()  # waits for all of them
        if not wrong:
            return
        turn, result = turns[wrong[0]]
        found = difference_seen(result, turn.first, self._name)
        raise WrongResult(
            f"{self._name}: product {done[wrong[0]]} is wrong in"
            f" {_place(found.count, *divmod(found.offset, self._layout.n), self._layout.n)}:"
            f" found {shown(result, found.offset)}, expected {shown(turn.first, found.offset)};"
            f" {len(wrong)} of {self._verified} products are wrong"
        )


def _operand(layout: Layout, random: torch.Generator) -> torch.Tensor:
    kind, shape = layout.kind, (layout.n, layout.n)
    if kind.is_scaled:
        return torch.randn(shape, generator=random, device=random.device).to(kind.operands)
    operand = torch.randn(shape, generator=random, device=random.device, dtype=kind.operands)
    if kind.cleared_bits:
        operand.view(torch.int32).bitwise_and_(-(1 << kind.cleared_bits))
    return operand


def _place(count: int, row: int, column: int, n: int) -> str:
    return f"{count} of {n * n} elements, first at row {row}, column {column}"


def _mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)
