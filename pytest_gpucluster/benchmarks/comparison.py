"""Are two tensors the same, bit by bit? Cheap to ask while nothing waits, and exact once the answer is no.

Bits are compared, not numbers: NaN equals itself then, and 0 is not -0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pytest_gpucluster.errors import WrongResult

_INTEGERS = {dtype.itemsize: dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)}

_PART_ELEMENTS = 2**26
"""Differences are counted in so many elements at a time, to need little memory."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor's elements as integers of the same width."""
    return tensor.view(-1).view(_INTEGERS[tensor.itemsize])


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor in the widest integers that divide its size."""
    for width, dtype in _INTEGERS.items():
        if tensor.nbytes % width == 0:
            return tensor.view(-1).view(dtype)
    raise AssertionError("one byte divides every size")


class Comparison:
    """Compares tensors of one size word by word, and leaves the answer on the device.

    Each comparison reads both tensors once. Wide words make what is written and read in between small: an eighth of
    one tensor.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._words = len(words_of(like))
        # In whole int64 words, so that it too can be read by words. What is beyond the last word stays False.
        self._mask = torch.zeros(-(-self._words // 8) * 8, dtype=torch.bool, device=like.device)

    def differ(self, found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Start the comparison; return a bool of no dimension, True if a bit differs."""
        torch.ne(words_of(found), words_of(expected), out=self._mask[: self._words])
        return self._mask.view(torch.int64).any()


def bytes_to_compare(nbytes: int) -> int:
    """Return the bytes of memory that a ``Comparison`` of tensors of ``nbytes`` takes."""
    return nbytes // min(8, max(1, nbytes & -nbytes)) + 8


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How many elements differ, and where the first of them is, counted through the flat tensors."""

    count: int
    offset: int


def difference(found: torch.Tensor, expected: torch.Tensor) -> Difference | None:
    """Compare two contiguous tensors of one shape and dtype element by element; None if all bits are the same.

    It waits for the device.
    """
    count, offset = 0, -1
    ours, theirs = bits_of(found), bits_of(expected)
    for start in range(0, len(ours), _PART_ELEMENTS):
        differs = ours[start : start + _PART_ELEMENTS] != theirs[start : start + _PART_ELEMENTS]
        here = int(differs.sum())
        if here and not count:
            # argmax returns the first of equal maxima.
            offset = start + int(differs.view(torch.uint8).argmax())
        count += here
    return Difference(count=count, offset=offset) if count else None


def difference_seen(found: torch.Tensor, expected: torch.Tensor, where: str) -> Difference:
    """Return the difference of two tensors that a ``Comparison`` has seen to differ.

    Raises: WrongResult if they do not differ any more: then memory or device cannot be trusted.
    """
    seen = difference(found, expected)
    if seen is None:
        raise WrongResult(f"{where}: data were seen to differ from what they must be, and then not any more")
    return seen


def shown(tensor: torch.Tensor, offset: int) -> str:
    """Write one element as number and as bits: ``1.5 (0x3fc0)``."""
    element = tensor.view(-1)[offset : offset + 1]
    width = tensor.itemsize
    return f"{element.item():g} ({int(bits_of(element)) % 256**width:#0{2 * width + 2}x})"
