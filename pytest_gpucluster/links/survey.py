"""What a survey of links has found: the matrix, what was measured once more, and who is to blame."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pytest_gpucluster.links.culprits import Culprit, Scope, culprits, explained_by_others
from pytest_gpucluster.links.matrix import Matrix, Reading
from pytest_gpucluster.links.places import Places
from pytest_gpucluster.links.plan import Pair

What = Literal["wrong", "slow"]
"""What can be bad about a link: data that do not arrive as sent, or a rate far under the median."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Equal on all ranks.

    Attributes:
        scope: "node" for the links within nodes, "world" for those across them.
        places: where the ranks are.
        matrix: of the tournament.
        alone: of the suspects, measured once more without what could have shared their way.
        below: the ratio to the median below which a link is a suspect; None where no limit says so.
        rounds: of the tournament.
        planned_seconds, seconds: what the tournament was to take and what it took, where it took longest.
        left_out: pairs that were not measured, because the time was up.
    """

    scope: Scope
    places: Places
    matrix: Matrix
    alone: Matrix
    below: float | None
    rounds: int
    planned_seconds: float
    seconds: float
    left_out: tuple[Pair, ...] = ()

    @cached_property
    def slow(self) -> tuple[Pair, ...]:
        """The pairs that are suspects, the slowest first."""
        return () if self.below is None else tuple(self.matrix.slow(self.below))

    def culprits(self, what: What) -> tuple[Culprit, ...]:
        """Return what explains the pairs that delivered wrong data, then or once more, or that are slow."""
        return self._wrong if what == "wrong" else self._slow

    @cached_property
    def _slow(self) -> tuple[Culprit, ...]:
        return culprits(self.slow, self.matrix.pairs, self.places, self.scope)

    @cached_property
    def _wrong(self) -> tuple[Culprit, ...]:
        wrong = {*self.matrix.wrong(), *self.alone.wrong()}
        return culprits(wrong, self.matrix.pairs, self.places, self.scope)

    def of_rank(self, rank: int) -> Reading:
        """Return the reading that stands for a rank: its slowest, but for those that others are to blame for.

        Raises:
            KeyError: the rank has no reading.
        """
        theirs = explained_by_others(self._slow, rank)
        return self.matrix.of_rank(rank, without=theirs)

    def ratio_of_rank(self, rank: int) -> float | None:
        """Return the ratio of this reading to its yardstick; None where there is no other pair."""
        return self.matrix.ratio(self.of_rank(rank))


def matrix_of(readings: Iterable[Reading], scope: Scope, places: Places) -> Matrix:
    """Return the matrix of a scope: what may be slow as a whole is a GPU within nodes, and a node across them."""
    where = places.where()
    return Matrix(readings, (lambda rank: where[rank][0]) if scope == "world" else (lambda rank: rank))


def readings_of(pairs: Iterable[Pair], matrix: Matrix) -> list[Reading]:
    """Return the readings of some pairs, the slowest first."""
    found = [reading for link in pairs for reading in matrix.pairs.get(link, ())]
    return sorted(found, key=lambda reading: reading.bytes_per_second)
