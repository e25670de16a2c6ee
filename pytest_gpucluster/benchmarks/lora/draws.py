"""Random draws that follow from a seed on every machine, in every process and with every version of Python."""

from __future__ import annotations

import hashlib
import random
from collections.abc import MutableSequence, Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Draws:
    """Draws from a seed. Keys beside the seed make draws that do not depend on each other.

    Only ``random.Random(int)`` and its ``random()`` are used: they alone are promised to stay what they are. Source:
    Python's documentation of ``random``, "Notes on Reproducibility". What is built on them is spelled out here.
    """

    def __init__(self, seed: int, *keys: object) -> None:
        text = "/".join(map(str, (seed, *keys)))
        self._random = random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))

    def below(self, end: int) -> int:
        """Return a whole number from 0 to ``end - 1``."""
        return min(int(self._random.random() * end), end - 1)

    def between(self, least: int, most: int) -> int:
        """Return a whole number from ``least`` to ``most``, both included."""
        return least + self.below(most - least + 1)

    def one(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return items[self.below(len(items))]

    def chance(self, ratio: float) -> bool:
        """Return True in so many of all cases."""
        return self._random.random() < ratio

    def shuffle(self, items: MutableSequence[Item]) -> None:
        """Put the items into another order, in place: Fisher and Yates, from the end."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
