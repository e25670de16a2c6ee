"""The rate at which one device multiplies matrices: shapes, layouts, operands, and the timed products, all verified.

A product is an (m, k) matrix times a (k, n) one. It is compared, element by element, with a true fp32 product of the
same operands.

The matrices are random, never zeros: zeros toggle fewer bits, draw less power, and were seen to run 13 % faster on a
power-limited GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from pytest_gpucluster.benchmarks.blocks import NO_CONTEXT, measure_rate
from pytest_gpucluster.benchmarks.dtypes import Arithmetic, arithmetic, require_fp8, require_switches
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free, sets_beyond_cache
from pytest_gpucluster.benchmarks.verify import Comparison, Difference, bytes_to_compare, difference_seen, element_text
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.interface import Accelerator
from pytest_gpucluster.device.products import numerics
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.sampling import Sampling, Series
from pytest_gpucluster.metrics.time_budget import VERIFYING, counted

KEPT = 64
"""Rows and columns that a simulated device keeps of larger matrices."""

LAYOUTS = ("nn", "nt", "tn", "tt")
"""The order of the left and the right operand: n row by row, t column by column, which is its transpose row by row."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a product and the layout of its operands. The result is stored row by row.

    Attributes:
        m, n: rows and columns of the result.
        k: columns of the left operand, and rows of the right one.
        layout: one of ``LAYOUTS``.

    Raises: ValueError if a number is not positive, or there is no such layout.
    """

    m: int
    n: int
    k: int
    layout: str = "nn"

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 1 or self.layout not in LAYOUTS:
            raise ValueError(f"m, n and k must be at least 1, and layout one of {', '.join(LAYOUTS)}: {self!r}")

    @classmethod
    def square(cls, n: int, *, layout: str = "nn") -> Shape:
        """Return the shape of a product of two n x n matrices."""
        return cls(m=n, n=n, k=n, layout=layout)

    @property
    def flops(self) -> int:
        """Operations of one product.

        Source: 2 m n k: Golub and Van Loan, "Matrix Computations" (4th edition), section 1.1.
        """
        return 2 * self.m * self.n * self.k

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n and k."""
        return self.m, self.n, self.k

    def kept(self, by: Accelerator) -> Shape:
        """Return the shape that a device keeps of this one."""
        m, n, k = (by.kept(size, KEPT) for size in self.sizes)
        return Shape(m=m, n=n, k=k, layout=self.layout)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its measurements: m, n, k and layout."""
        return {"m": str(self.m), "n": str(self.n), "k": str(self.k), "layout": self.layout}

    def __str__(self) -> str:
        """Format it as ``16384x8192x4096 nt``: m, n, k, layout."""
        return f"{self.m}x{self.n}x{self.k} {self.layout}"


_PART_ELEMENTS = 2**24
"""The reference is computed for this number of elements at a time, to need little memory besides the operands."""


def reference_bytes(shape: Shape) -> int:
    """Return the memory for the comparison with the reference, besides operands and result.

    It is fp32: the right operand and the temporaries of its norms, and for one part of the rows the left operand and a
    few matrices of the part's size.
    """
    rows = _rows_of_a_part(shape.m, shape.n)
    return 2 * 4 * shape.k * shape.n + 4 * rows * (5 * shape.n + max(shape.n, shape.k))


def wrong_elements(
    left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, arithmetic: Arithmetic
) -> tuple[Difference, str] | None:
    """Compare ``product`` with ``left @ right``: how many elements are out of bounds, where the first one is, and its
    value; None if each element is within the bound of its arithmetic.

    The bound is ``roundoff`` of the element, and ``accumulation`` of |row of left| |column of right|.

    Args:
        left: (m, k).
        right: (k, n).
        product: (m, n), in the arithmetic's result dtype.
        arithmetic: how it was multiplied.
    """
    count, first, what = 0, 0, ""
    with numerics("highest"):
        wide_right = right.float()
        right_norms = torch.linalg.vector_norm(wide_right, dim=0)
        columns = right.shape[1]
        rows = _rows_of_a_part(len(left), columns)
        for start in range(0, len(left), rows):
            wide_left = left[start : start + rows].float()
            reference = wide_left @ wide_right
            found = product[start : start + rows].float()
            bound = torch.outer(torch.linalg.vector_norm(wide_left, dim=1), right_norms)
            bound.mul_(arithmetic.accumulation).add_(reference.abs(), alpha=arithmetic.roundoff)
            # Written so that a NaN on either side is wrong, and so is a reference that is infinite.
            wrong = ((found - reference).abs_() <= bound).logical_and_(reference.isfinite()).logical_not_()
            here = int(wrong.sum())
            if here and not count:
                offset = int(wrong.flatten().view(torch.uint8).argmax())
                values = [float(each.flatten()[offset]) for each in (found, reference, bound)]
                what = "found {:.9g}, the fp32 reference is {:.9g}, allowed are +-{:.3g}".format(*values)
                first = start * columns + offset
            count += here
    return (Difference(count=count, offset=first), what) if count else None


def _rows_of_a_part(rows: int, columns: int) -> int:
    return min(rows, max(1, _PART_ELEMENTS // columns))


RESULTS_AT_ONCE = 64
RESULTS_BYTES = 4 * 2**30
"""Maximum number and bytes of products that are kept until they are verified. Of bf16 matrices with
n = 16384 it is 8 products: 0.1 s of work between two interventions of the host."""


def usual_layout(kind: Arithmetic) -> str:
    """Return the layout in which square matrices of this kind are multiplied; of scaled ones it is the only one.

    Source: the doc of torch.nn.functional.scaled_mm: the first matrix is row-major, the second column-major.
    """
    return "nt" if kind.is_scaled else "nn"


def layouts_of(kind: Arithmetic) -> tuple[str, ...]:
    """Return the layouts in which matrices of this kind can be multiplied."""
    return (usual_layout(kind),) if kind.is_scaled else LAYOUTS


class Buffers:
    """The number and size of the matrices.

    Attributes:
        shape, kind: of the products, and their arithmetic.
        turns_around: the products of a pair of operands are a b and b a. Otherwise they are a b and c b.
        sets: sets of operands that are used in turn.
        results: products that are kept at a time.
        operand_bytes: of all operands of one set.
        result_bytes: of one result.
    """

    def __init__(self, *, shape: Shape, kind: Arithmetic, cache: int) -> None:
        self.shape, self.kind = shape, kind
        self.turns_around = shape.m == shape.n == shape.k and shape.layout == usual_layout(kind)
        left, right = (elements * kind.operands.itemsize for elements in (shape.m * shape.k, shape.k * shape.n))
        if self.turns_around:
            # Column-major right operands are copies: the same matrix is the left one of the other product.
            self.operand_bytes = (4 if kind.is_scaled else 2) * left
        else:
            self.operand_bytes = 2 * left + right
        self.result_bytes = shape.m * shape.n * kind.result.itemsize
        # Operands and result of one product pass through the cache until the next one.
        self.sets = sets_beyond_cache(left + right + self.result_bytes, cache)
        results = max(1, min(RESULTS_AT_ONCE, RESULTS_BYTES // self.result_bytes))
        # Whole rounds of the sets, so that each result always belongs to the same set.
        self.results = max(1, results // self.sets) * self.sets

    @property
    def name(self) -> str:
        """The shape, for messages: n=64 for square matrices in their usual layout."""
        return f"n={self.shape.n}" if self.turns_around else str(self.shape)

    @property
    def needed_bytes(self) -> int:
        """Memory for operands, results, first products, comparison, and the reference with its fp32 operands."""
        operands = self.sets * self.operand_bytes
        results = (self.results + 2 * self.sets) * self.result_bytes
        return operands + results + bytes_to_compare(self.result_bytes) + reference_bytes(self.shape)


@dataclass(frozen=True, kw_only=True)
class _Operands:
    """The operands of one of the two products of a set, and the expected result."""

    left: torch.Tensor
    right: torch.Tensor
    first: torch.Tensor


class Products:
    """The operands and the results, which are used in turn: the work that ``blocks`` repeats.

    Raises: WrongResult if one of the first products is wrong; names the first wrong element.
    """

    def __init__(self, device: torch.device, buffers: Buffers, *, name: str, seed: int) -> None:
        self._buffers, self._name, by = buffers, name, accelerator(device)
        self._multiply = by.product(scaled=buffers.kind.is_scaled, of=buffers.shape.sizes)
        self._shape = buffers.shape.kept(by)
        random = torch.Generator(device).manual_seed(seed)
        size, dtype = (self._shape.m, self._shape.n), buffers.kind.result
        # An element that is never written must not be right by chance.
        self._results = [torch.full(size, math.nan, dtype=dtype, device=device) for _ in range(buffers.results)]
        self._sets: list[tuple[_Operands, _Operands]] = []
        for _ in range(buffers.sets):
            self._sets.append(self._make_operands(random))
        self._comparison = Comparison(self._results[0])
        self._verified = 0
        self.max_in_flight = buffers.results
        self.flops = buffers.shape.flops

    def _make_operands(self, random: torch.Generator) -> tuple[_Operands, _Operands]:
        """Compute two different products for the first time, and compare them with the reference.

        Raises: WrongResult naming the first wrong element.
        """
        shape, kind = self._shape, self._buffers.kind
        if self._buffers.turns_around:
            a, b = (_operand(kind, shape.n, shape.n, "n", random) for _ in range(2))
            return self._first(a, _column_major(b, kind)), self._first(b, _column_major(a, kind))
        of_left, of_right = shape.layout[0], shape.layout[1]
        left, other = (_operand(kind, shape.m, shape.k, of_left, random) for _ in range(2))
        right = _operand(kind, shape.k, shape.n, of_right, random)
        return self._first(left, right), self._first(other, right)

    def _first(self, left: torch.Tensor, right: torch.Tensor) -> _Operands:
        first = self._results[0].fill_(math.nan)
        self._multiply(left, right, first)
        with counted(VERIFYING):
            wrong = wrong_elements(left, right, first, self._buffers.kind)
        if wrong is not None:
            where, what = wrong
            raise WrongResult(f"{self._name}: the first product is wrong in {self._place(where)}: {what}")
        return _Operands(left=left, right=right, first=first.clone())

    def start(self, index: int) -> None:
        """Start product ``index``."""
        pair, result = self._operands_of(index)
        self._multiply(pair.left, pair.right, result)

    def _operands_of(self, index: int) -> tuple[_Operands, torch.Tensor]:
        # Each result had the other product of its set before.
        rounds, place = divmod(index, self._buffers.results)
        return self._sets[place % self._buffers.sets][rounds % 2], self._results[place]

    def verify(self, done: range) -> None:
        """Compare the last products with the first ones.

        The tensor cores rest during it. derived, not measured, for bf16 and n = 16384 on an H100: the comparison reads
        two matrices and writes and reads an eighth of one, 1.2 GB, which takes 0.40 ms at nine tenths of 3.35 TB/s,
        compared with 12.0 ms for a product at 731 TFLOPS: 3 %.

        Raises: WrongResult naming how many products are wrong, and the first wrong element of the first one.
        """
        operands = [self._operands_of(index) for index in done]
        differ = torch.stack([self._comparison.differ(result, pair.first) for pair, result in operands])
        self._verified += len(done)
        wrong = differ.nonzero().flatten().tolist()  # waits for all of them
        if not wrong:
            return
        pair, result = operands[wrong[0]]
        found = difference_seen(result, pair.first, self._name)
        raise WrongResult(
            f"{self._name}: product {done[wrong[0]]} is wrong in {self._place(found)}:"
            f" found {element_text(result, found.offset)}, expected {element_text(pair.first, found.offset)};"
            f" {len(wrong)} of {self._verified} products are wrong"
        )

    def _place(self, wrong: Difference) -> str:
        row, column = divmod(wrong.offset, self._shape.n)
        return f"{wrong.count} of {self._shape.m * self._shape.n} elements, first at row {row}, column {column}"


def _operand(kind: Arithmetic, rows: int, columns: int, lies: str, random: torch.Generator) -> torch.Tensor:
    """Return a random matrix that lies row by row ("n") or column by column ("t")."""
    size = (rows, columns) if lies == "n" else (columns, rows)
    if kind.is_scaled:
        operand = torch.randn(size, generator=random, device=random.device).to(kind.operands)
    else:
        operand = torch.randn(size, generator=random, device=random.device, dtype=kind.operands)
    if kind.cleared_bits:
        operand.view(torch.int32).bitwise_and_(-(1 << kind.cleared_bits))
    return operand if lies == "n" else operand.t()


def _column_major(right: torch.Tensor, kind: Arithmetic) -> torch.Tensor:
    """Return the same matrix in the layout of a right operand."""
    return right.t().contiguous().t() if kind.is_scaled else right


INSTEAD = "choose smaller sizes, such as --gpucluster-workload matmul.sizes=4096,8192"
"""How to ask for less memory."""

BEST_OF = (4096, 8192, 16384)
"""The sizes n of which the best decides. Source: ``best_square``."""


@dataclass(frozen=True, kw_only=True)
class BestSquare:
    """The size by whose rate a device is judged.

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
    """The result of one device.

    Attributes:
        tflops: in 10**12 floating point operations a second, a sample for each block of products.
        shape, dtype: of the products.
    """

    tflops: Series
    shape: Shape
    dtype: str


@releases_memory()
def measure_matmul(
    device: torch.device,
    shape: Shape,
    *,
    dtype: str,
    sampling: Sampling,
    instead: str = INSTEAD,
    during: AbstractContextManager[object] = NO_CONTEXT,
) -> MatmulResult:
    """Measure products of two random matrices of a shape and layout, in TFLOPS.

    Only the time of the products counts. ``fp32`` is true fp32: TF32 is off. ``fp8`` has e4m3 operands, a bf16
    result and fast accumulation. Only operands larger than the device's cache measure the whole device; smaller ones
    are used in turn with others.

    Two products of each pair, a b and b a, take turns, so that a part of the result that a product failed to write
    still has the other one's value and is seen; where these are not both of the shape and layout, they are a b and c b.
    Both are first compared with a true fp32 reference, element by element.
    Each later product is compared with the first of its kind bit by bit, between the timed regions.

    Args:
        device: where to multiply.
        shape: of the products, such as ``square_shape`` returns; for fp8 of multiples of 16.
        dtype: "bf16", "fp16", "tf32", "fp32" or "fp8".
        sampling: how long to warm up and to measure, and the required confidence.
        instead: how to ask for less memory, for the message.
        during: entered while samples are taken.

    Returns: the result; its series may be inconclusive, and states it.

    Raises:
        WrongResult: a product is wrong, NaN and infinities included; names the count and the first element.
        InconclusiveMeasurement: the clock did not advance.
        EnvironmentBroken: too little memory is free, the device has no fp8, or the environment overrides the choice
            between fp32 and TF32.
        ValueError: an argument is out of its range.

    Source: of the operations of a product, ``Shape.flops``.
    """
    buffers = prepare_shape(device, shape, dtype=dtype, instead=instead)
    name = f"{device}: matmul {dtype} {buffers.name}"
    with numerics(buffers.kind.float32_precision):
        products = Products(device, buffers, name=name, seed=0)
        rate = measure_rate(products, accelerator(device).clock(), sampling=sampling, during=during)
    return MatmulResult(tflops=rate.per_second.scaled(shape.flops / 1e12), shape=shape, dtype=dtype)


def best_square(tflops: Mapping[int, Series]) -> BestSquare:
    """Choose the square product by which a device is judged: the best of n = 4096, 8192 and 16384.

    Which of them is the fastest differs from GPU to GPU and from library to library, and no single one is a floor for
    all: two H100 SXM reached 726 and 729 TFLOPS in bf16 at n = 4096, and 669.24 and 670.05 at n = 16384
    (drmysore/nebius-h100-8gpu-benchmark); the acceptance of 2 nodes x 8 H100 SXM 80GB required more than 700 and
    observed 730.97 at n = 8192.

    The best has the highest lower end of its interval among the conclusive ones. Where none is, it is the highest
    median, which is then inconclusive. Of equals it is the smallest.

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


def square_shape(n: int, dtype: str) -> Shape:
    """Return the shape of the product of two n x n matrices of a dtype.

    Raises: ValueError if n or the dtype is out of its range.
    """
    kind = arithmetic(dtype)
    if n < 1 or n % kind.multiple_of:
        raise ValueError(f"n must be at least 1, and for {dtype} a multiple of {kind.multiple_of}, not {n}")
    return Shape.square(n, layout=usual_layout(kind))


def prepare_shape(device: torch.device, shape: Shape, *, dtype: str, instead: str = INSTEAD) -> Buffers:
    """Check that a device can multiply matrices of this shape, and return the buffers that it needs.

    Args:
        device: where to multiply.
        shape: of the products.
        dtype: as in ``measure_matmul``.
        instead: how to ask for less memory, for the message.

    Raises:
        EnvironmentBroken: too little memory is free, the device has no fp8, or the environment overrides the choice
            between fp32 and TF32.
        ValueError: an argument is out of its range, or the dtype does not support the layout.
    """
    kind = arithmetic(dtype)
    if any(size % kind.multiple_of for size in (shape.m, shape.n, shape.k)):
        raise ValueError(f"m, n and k must be multiples of {kind.multiple_of} for {dtype}, not {shape}")
    if shape.layout not in layouts_of(kind):
        raise ValueError(f"{dtype} is multiplied in the layout {' or '.join(layouts_of(kind))} only, not {shape}")
    if kind.is_scaled:
        require_fp8(device)
    require_switches(device, kind)
    buffers = Buffers(shape=shape, kind=kind, cache=accelerator(device).cache_bytes())
    require_free(device, buffers.needed_bytes, f"matmul {dtype} {buffers.name}", instead=instead)
    return buffers
