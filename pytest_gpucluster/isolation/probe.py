"""What one group of nodes or GPUs did when it was probed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One group of units that was probed at once with other, disjoint groups.

    ``members`` are the units (nodes, or the GPUs of one node), ascending, each once. ``busbw`` is the GB/s of the
    group's slowest rank; None where it did not finish, or where there is none to measure because the group is a
    single GPU. ``wrong`` tells who saw wrong data, and where. ``failure`` tells why it did not finish: a timeout, an
    exception, a rank that was lost.

    Raises:
        ValueError: the members are none, not ascending or one of them twice.
    """

    members: tuple[int, ...]
    busbw: float | None
    wrong: str = ""
    failure: str = ""

    def __post_init__(self) -> None:
        if not self.members or list(self.members) != sorted(set(self.members)):
            raise ValueError(f"a group has units in ascending order, each once, not {self.members!r}")

    @property
    def broken(self) -> bool:
        """Whether it failed whatever its speed: wrong data, not finished, or no value that can be judged."""
        if self.wrong or self.failure:
            return True
        if self.busbw is None:
            return len(self.members) > 1  # nobody says why there is no value: never a pass
        return not math.isfinite(self.busbw) or self.busbw < 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; a value that is no number becomes text."""
        busbw = self.busbw
        return {
            "members": list(self.members),
            "busbw": busbw if busbw is None or math.isfinite(busbw) else str(busbw),
            "wrong": self.wrong,
            "failure": self.failure,
        }
