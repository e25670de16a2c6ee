"""Is a product right? Held against a true fp32 product of the same operands, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pytest_gpucluster.benchmarks.arithmetic import Arithmetic, numerics
from pytest_gpucluster.benchmarks.matmul_shape import Shape

_PART_ELEMENTS = 2**24
"""The reference is made for so many elements at a time, to need little memory beside the operands."""


def reference_bytes(shape: Shape) -> int:
    """Return the memory that the comparison with the reference needs beside operands and result.

    It is fp32: the right operand and what its norms need, and for one part of the rows the left operand and a few
    matrices of the part's size.
    """
    rows = _rows_of_a_part(shape.m, shape.n)
    return 2 * 4 * shape.k * shape.n + 4 * rows * (5 * shape.n + max(shape.n, shape.k))


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """How many elements are out of bounds, where the first one is, and what it is."""

    count: int
    row: int
    column: int
    what: str


def wrong_elements(
    left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, arithmetic: Arithmetic
) -> Wrong | None:
    """Compare ``product`` with ``left @ right``; None if each element is within the bound of its arithmetic.

    The bound is ``roundoff`` of the element, and ``accumulation`` of |row of left| |column of right|.

    Args:
        left: (m, k).
        right: (k, n).
        product: (m, n), in the arithmetic's result dtype.
        arithmetic: how it was multiplied.
    """
    count, first = 0, (0, 0, "")
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
                row, column = divmod(offset, columns)
                first = start + row, column, what
            count += here
    row, column, what = first
    return Wrong(count=count, row=row, column=column, what=what) if count else None


def _rows_of_a_part(rows: int, columns: int) -> int:
    return min(rows, max(1, _PART_ELEMENTS // columns))
