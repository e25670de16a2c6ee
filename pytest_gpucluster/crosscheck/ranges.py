"""Sizes as the fewest ranges that nccl-tests can be asked for: ``-b FIRST -e LAST -f FACTOR``. Pure.

>>> [str(each) for each in ranges([1_000_000, 10_000_000, 100_000_000, 1_000_000_000])]
['-b 1000000 -e 1000000000 -f 10']
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Range:
    """Sizes of which each is ``factor`` times the one before; a single one has the factor 1.

    Source: nccl-tests, README.md, options ``-b``, ``-e`` and ``-f``; bare numbers are bytes.
    """

    first: int
    last: int
    factor: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes in bytes."""
        found = [self.first]
        while self.factor > 1 and found[-1] * self.factor <= self.last:
            found.append(found[-1] * self.factor)
        return tuple(found)

    @property
    def arguments(self) -> list[str]:
        """Return what nccl-tests is told."""
        factor = ["-f", str(self.factor)] if self.factor > 1 else []
        return ["-b", str(self.first), "-e", str(self.last), *factor]

    def __str__(self) -> str:
        return " ".join(self.arguments)


def ranges(sizes: Iterable[int]) -> list[Range]:
    """Return ranges that hold these sizes and no others: each start of a program costs seconds.

    The longest range that the smallest size that is left begins is taken first.
    """
    left = sorted(set(sizes))
    found = []
    while left:
        first = left[0]
        best = Range(first=first, last=first)
        for second in left[1:]:
            if second % first:
                continue
            factor = second // first
            last = second
            while last * factor in left:
                last *= factor
            tried = Range(first=first, last=last, factor=factor)
            if len(tried.sizes) > len(best.sizes):
                best = tried
        left = [size for size in left if size not in best.sizes]
        found.append(best)
    return found
