"""The matrices of one kind of product: how much memory they take, and each product verified."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pytest_gpucluster.benchmarks.arithmetic import Arithmetic
from pytest_gpucluster.benchmarks.comparison import Comparison, bytes_to_compare, difference_seen, shown
from pytest_gpucluster.benchmarks.footprint import sets_beyond_cache
from pytest_gpucluster.benchmarks.matmul_reference import reference_bytes, wrong_elements
from pytest_gpucluster.benchmarks.matmul_shape import LAYOUTS, Shape
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.time_budget import VERIFYING, counted

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Write the product of the first two matrices to the third."""

RESULTS_AT_ONCE = 64
RESULTS_BYTES = 4 * 2**30
"""So many products, and of no more than so many bytes, are kept until they are verified. Of bf16 matrices with
n = 16384 it is 8 products: 0.1 s of work between two looks of the host."""


def usual_layout(kind: Arithmetic) -> str:
    """Return the layout in which square matrices of this kind are multiplied; of scaled ones it is the only one.

    Source: the doc of torch.nn.functional.scaled_mm: the first matrix is row-major, the second column-major.
    """
    return "nt" if kind.is_scaled else "nn"


def layouts_of(kind: Arithmetic) -> tuple[str, ...]:
    """Return the layouts in which matrices of this kind can be multiplied."""
    return (usual_layout(kind),) if kind.is_scaled else LAYOUTS


class Buffers:
    """How many matrices there are, and how large.

    Attributes:
        shape, kind: what is multiplied, and in which arithmetic.
        turns_around: both products of a pair of operands are taken, a b and b a. Otherwise it is a b and c b.
        sets: sets of operands that are used in turn.
        results: products that are kept at a time.
        operand_bytes: of all operands of one set.
        result_bytes: of one result.
    """

    def __init__(self, *, shape: Shape, kind: Arithmetic, cache: int) -> None:
        self.shape, self.kind = shape, kind
        self.turns_around = shape.is_square and shape.layout == usual_layout(kind)
        left, right = (elements * kind.operands.itemsize for elements in (shape.m * shape.k, shape.k * shape.n))
        if self.turns_around:
            # Column-major right operands are copies: the same matrix is the left one of the other product.
            self.operand_bytes = (4 if kind.is_scaled else 2) * left
        else:
            self.operand_bytes = 2 * left + right
        self.result_bytes = shape.m * shape.n * kind.result.itemsize
        # Operands and result of one product: so much passes through the cache until the next one.
        self.sets = sets_beyond_cache(left + right + self.result_bytes, cache)
        results = max(1, min(RESULTS_AT_ONCE, RESULTS_BYTES // self.result_bytes))
        # Whole rounds of the sets, so that each result always belongs to the same set.
        self.results = max(1, results // self.sets) * self.sets

    @property
    def needed_bytes(self) -> int:
        """Memory for operands, results, first products, comparison, and the reference with its fp32 operands."""
        operands = self.sets * self.operand_bytes
        results = (self.results + 2 * self.sets) * self.result_bytes
        return operands + results + bytes_to_compare(self.result_bytes) + reference_bytes(self.shape)


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """One of the two products of a set of operands, and what it must be."""

    left: torch.Tensor
    right: torch.Tensor
    first: torch.Tensor


class Products:
    """The operands and the results, which are used in turn: what ``blocks`` repeats.

    Raises: WrongResult if one of the first products is wrong; names the first wrong element.
    """

    def __init__(self, device: torch.device, buffers: Buffers, *, name: str, seed: int, multiply: Multiply) -> None:
        self._buffers, self._shape, self._name, self._multiply = buffers, buffers.shape, name, multiply
        random = torch.Generator(device).manual_seed(seed)
        size, dtype = (self._shape.m, self._shape.n), buffers.kind.result
        # An element that is never written must not look right by chance.
        self._results = [torch.full(size, math.nan, dtype=dtype, device=device) for _ in range(buffers.results)]
        self._sets: list[tuple[_Turn, _Turn]] = []
        for _ in range(buffers.sets):
            self._sets.append(self._turns(random))
        self._comparison = Comparison(self._results[0])
        self._verified = 0
        self.most_at_once = buffers.results

    def _turns(self, random: torch.Generator) -> tuple[_Turn, _Turn]:
        """Make two different products for the first time, and hold them against the reference.

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

    def _first(self, left: torch.Tensor, right: torch.Tensor) -> _Turn:
        first = self._results[0].fill_(math.nan)
        self._multiply(left, right, first)
        with counted(VERIFYING):
            wrong = wrong_elements(left, right, first, self._buffers.kind)
        if wrong is not None:
            place = self._place(wrong.count, wrong.row, wrong.column)
            raise WrongResult(f"{self._name}: the first product is wrong in {place}: {wrong.what}")
        return _Turn(left=left, right=right, first=first.clone())

    def start(self, index: int) -> None:
        """Start product ``index``."""
        turn, result = self._turn(index)
        self._multiply(turn.left, turn.right, result)

    def _turn(self, index: int) -> tuple[_Turn, torch.Tensor]:
        # Each result holds the other product of its set before.
        rounds, place = divmod(index, self._buffers.results)
        return self._sets[place % self._buffers.sets][rounds % 2], self._results[place]

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
            f" {self._place(found.count, *divmod(found.offset, self._shape.n))}:"
            f" found {shown(result, found.offset)}, expected {shown(turn.first, found.offset)};"
            f" {len(wrong)} of {self._verified} products are wrong"
        )

    def _place(self, count: int, row: int, column: int) -> str:
        return f"{count} of {self._shape.m * self._shape.n} elements, first at row {row}, column {column}"


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
    """Return the same matrix as it must lie to stand on the right."""
    return right.t().contiguous().t() if kind.is_scaled else right
