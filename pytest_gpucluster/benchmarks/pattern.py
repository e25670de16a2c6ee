"""Known data that look random: word j is j times an odd constant, plus a start, modulo 2**64.

About half of the bits change from word to word, no two words of a buffer are equal, and the sum of any range is known
without adding it up. Sums of integers modulo 2**64 do not depend on the order of additions, and no single wrong bit
leaves one as it is.

    >>> pattern = Pattern(start=5)
    >>> [pattern.word(0), pattern.word(1) - pattern.word(0) == FACTOR]
    [5, True]

Source: the constant is 2**64 over the golden ratio: Knuth, "The Art of Computer Programming", volume 3 (2nd edition),
section 6.4.
"""

from __future__ import annotations

import torch

from pytest_gpucluster.benchmarks.comparison import Comparison, Difference, difference_seen

FACTOR = 0x9E3779B97F4A7C15 - 2**64

PART_WORDS = 2**24
"""Buffers are filled and compared in so many words at a time, to need little memory beside them."""


def signed(number: int) -> int:
    """Return the int64 that a number is modulo 2**64.

    >>> signed(2**63), signed(-1), signed(2**64 + 3)
    (-9223372036854775808, -1, 3)
    """
    return (number + 2**63) % 2**64 - 2**63


class Pattern:
    """An endless sequence of int64 words; ``start`` tells one from another."""

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
        """Return what a writer for buffers of so many words, with its comparison, takes in memory."""
        return 18 * min(PART_WORDS, longest_words) + 16

    def fill(self, words: torch.Tensor, pattern: Pattern) -> None:
        """Write the pattern from its word 0 on."""
        for start in range(0, len(words), len(self._multiples)):
            self._part(words[start : start + len(self._multiples)], start, pattern)

    def compare(self, words: torch.Tensor, pattern: Pattern) -> Difference | None:
        """Compare with the pattern from its word 0 on, bit by bit; None if all is right. It waits for the device.

        Raises: WrongResult if what was seen to differ does not any more.
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
