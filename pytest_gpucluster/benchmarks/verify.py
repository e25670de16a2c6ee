"""Verification: tensors compared bit by bit, and patterns of known numbers.

Comparing is cheap while nothing waits for the result, and exact once tensors differ. Bits are compared, not numbers:
NaN equals itself then, and 0 is not -0.

A pattern looks random: word j is j times an odd constant, plus a start, modulo 2**64. About half of the bits change
from word to word, no two words of a buffer are equal, and the sum of any range is known without adding it up. Sums of
integers modulo 2**64 do not depend on the order of additions, and no single wrong bit leaves one as it is.

    >>> pattern = Pattern(start=5)
    >>> [pattern.word(0), pattern.word(1) - pattern.word(0) == FACTOR]
    [5, True]

Source: the constant is 2**64 over (1 + sqrt(5)) / 2: Knuth, "The Art of Computer Programming", volume 3 (2nd edition),
section 6.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pytest_gpucluster.errors import WrongResult

_INTEGERS = {dtype.itemsize: dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)}

_PART_ELEMENTS = 2**26
"""Differences are counted in this number of elements at a time, to need little memory."""


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
    """Compares tensors of one size word by word, and leaves the result on the device.

    Each comparison reads both tensors once. Wide words keep the temporary mask small: an eighth of one tensor.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._words = len(words_of(like))
        # In whole int64 words, so that it too can be read by words. The rest beyond the last word stays False.
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
    """Return the difference of two tensors of which a ``Comparison`` has found that they differ.

    Raises: WrongResult if they do not differ any more: then memory or device cannot be trusted.
    """
    found_difference = difference(found, expected)
    if found_difference is None:
        raise WrongResult(f"{where}: data differed from the expected ones, and then not any more")
    return found_difference


def element_text(tensor: torch.Tensor, offset: int) -> str:
    """Format one element as number and as bits: ``1.5 (0x3fc0)``."""
    element = tensor.view(-1)[offset : offset + 1]
    width = tensor.itemsize
    return f"{element.item():g} ({int(bits_of(element)) % 256**width:#0{2 * width + 2}x})"


def wrong_words_text(wrong: Difference, found: int, expected: int, words: int) -> str:
    """Describe wrong 8-byte words among ``words``, of which the first one is ``found``, and ``expected`` is its due."""
    found, expected = found % 2**64, expected % 2**64
    return (
        f"{wrong.count} of {words} 8-byte words are wrong, first at byte {8 * wrong.offset}: found {found:#018x},"
        f" expected {expected:#018x} (bits that differ: {(found ^ expected).bit_count()})"
    )


FACTOR = 0x9E3779B97F4A7C15 - 2**64

PART_WORDS = 2**24
"""Buffers are filled and compared in this number of words at a time, to need little memory besides them."""


def signed(number: int) -> int:
    """Return the int64 that a number is modulo 2**64.

    >>> signed(2**63), signed(-1), signed(2**64 + 3)
    (-9223372036854775808, -1, 3)
    """
    return (number + 2**63) % 2**64 - 2**63


class Pattern:
    """An endless sequence of int64 words; ``start`` selects one."""

    def __init__(self, *, start: int) -> None:
        self._start = start

    def word(self, index: int) -> int:
        """Return one word."""
        return signed(index * FACTOR + self._start)

    def total(self, first: int, count: int) -> int:
        """Return the sum of ``count`` words from ``first`` on, modulo 2**64."""
        return signed(FACTOR * (first * count + count * (count - 1) // 2) + self._start * count)


class PatternWriter:
    """Fills buffers of one device with a pattern, and compares them with it.

    It keeps two parts in memory: ``needed_bytes`` for buffers of that size.
    """

    def __init__(self, device: torch.device, longest_words: int) -> None:
        self._multiples = torch.arange(min(PART_WORDS, longest_words), device=device).mul_(FACTOR)
        self._expected = torch.empty_like(self._multiples)

    @staticmethod
    def needed_bytes(longest_words: int) -> int:
        """Return the memory of a writer for buffers of this number of words, with its comparison."""
        return 18 * min(PART_WORDS, longest_words) + 16

    def fill(self, words: torch.Tensor, pattern: Pattern) -> None:
        """Write the pattern from its word 0 on."""
        for start in range(0, len(words), len(self._multiples)):
            self._part(words[start : start + len(self._multiples)], start, pattern)

    def compare(self, words: torch.Tensor, pattern: Pattern) -> Difference | None:
        """Compare with the pattern from its word 0 on, bit by bit; None if all is right. It waits for the device.

        Raises: WrongResult if a difference is not found again.
        """
        starts = range(0, len(words), len(self._multiples))
        answers = []
        for start in starts:
            part, expected = self._expect(words, start, pattern)
            answers.append(Comparison(part).differ(part, expected))
        count, offset = 0, -1
        for at in torch.stack(answers).nonzero().flatten().tolist():
            found = difference_seen(*self._expect(words, starts[at], pattern), str(words.device))
            offset = offset if count else starts[at] + found.offset
            count += found.count
        return Difference(count=count, offset=offset) if count else None

    def _expect(self, words: torch.Tensor, start: int, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
        part = words[start : start + len(self._multiples)]
        expected = self._expected[: len(part)]
        self._part(expected, start, pattern)
        return part, expected

    def _part(self, out: torch.Tensor, start: int, pattern: Pattern) -> None:
        torch.add(self._multiples[: len(out)], pattern.word(start), out=out)
