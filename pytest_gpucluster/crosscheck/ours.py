"""What a run of ours has measured of collectives, ready to stand beside nccl-tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pytest_gpucluster.crosscheck.nccl_output import PROGRAMS, short_name
from pytest_gpucluster.errors import JournalError, UnitError
from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_measurements import JudgedMetric
from pytest_gpucluster.metrics import units

AVERAGE, SLOWEST = "average_busbw", "busbw"
"""Of all ranks' times their mean, as nccl-tests prints it with a process for each GPU; or the slowest rank's, as a
process sees it that waits for all of its GPUs."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One collective in one dtype at one size, by one number of ranks on one number of nodes.

    Attributes:
        size: as the journal writes it, such as ``1 GB``.
        size_bytes: the same in bytes.
        values: ``SLOWEST`` and ``AVERAGE`` -> rank -> busbw in GB/s.
        inconclusive: why the samples are no basis for anything; empty where they are.
    """

    collective: str
    dtype: str
    size: str
    size_bytes: int
    ranks: int
    nnodes: int
    values: Mapping[str, Mapping[int, float]]
    inconclusive: str = ""

    def busbw(self, kind: str, ranks: Iterable[int] | None) -> float | None:
        """Return the worst of these ranks, in GB/s, of all ranks for None; None where one of them has no value."""
        values = self.values.get(kind, {})
        found = [values.get(rank, math.nan) for rank in (values if ranks is None else ranks)]
        return min(found) if found and all(map(math.isfinite, found)) else None


@dataclass(frozen=True, kw_only=True)
class Ours:
    """The collectives of one run.

    Attributes:
        points: all of them.
        ranks_of: short name of a host -> its ranks.
        nccl: version that torch had, or an empty text.
        why_not: why nothing of it can stand beside nccl-tests; empty where it can.
    """

    points: tuple[Point, ...]
    ranks_of: Mapping[str, tuple[int, ...]]
    nccl: str = ""
    why_not: str = ""

    @property
    def per_node(self) -> int | None:
        """Return how many ranks a node has, or None where nothing was measured inside a node."""
        return max((point.ranks for point in self.points if point.nnodes == 1), default=None)

    @property
    def largest(self) -> tuple[int, int] | None:
        """Return the most ranks that worked together, and on how many nodes."""
        return max(((point.ranks, point.nnodes) for point in self.points), default=None)


def ours(journal: Journal) -> Ours:
    """Return what a journal has of collectives.

    Raises:
        JournalError: a measurement in it has labels that this project does not write.
    """
    places = journal.cluster.ranks if journal.cluster is not None else ()
    by_host: dict[str, list[int]] = {}
    for place in places:
        by_host.setdefault(short_name(place.host), []).append(place.rank)
    nccl = {place.versions.get("nccl", "") for place in places} | {journal.run.versions.get("nccl", "")}
    why_not = ""
    if journal.run.rehearsal or journal.run.device != "cuda":
        why_not = f"the journal is of a rehearsal on {journal.run.device or 'an unknown device'}, where gloo stands in"
    return Ours(
        points=tuple(_points(journal)),
        ranks_of={host: tuple(ranks) for host, ranks in by_host.items()},
        nccl=", ".join(sorted(filter(None, nccl))),
        why_not=why_not,
    )


_Key = tuple[str, tuple[tuple[str, str], ...]]


def _points(journal: Journal) -> Iterator[Point]:
    for result in journal.results:
        measured: dict[_Key, JudgedMetric] = {
            (judged.metric, tuple(sorted(judged.labels.items()))): judged for judged in result.measurements
        }
        for (metric, labels), judged in measured.items():
            collective, _, kind = metric.removeprefix("nccl.").partition(".")
            if collective not in PROGRAMS or kind != SLOWEST:
                continue
            average = measured.get((f"nccl.{collective}.{AVERAGE}", labels))
            yield _point(collective, judged, average, result.nodeid)


def _point(collective: str, judged: JudgedMetric, average: JudgedMetric | None, nodeid: str) -> Point:
    labels = judged.labels
    try:
        return Point(
            collective=collective,
            dtype=labels["dtype"],
            size=labels["size"],
            size_bytes=round(units.parse(labels["size"], like="B").to("B")),
            ranks=int(labels["world_size"]),
            nnodes=int(labels["nnodes"]),
            values={SLOWEST: _values(judged), AVERAGE: _values(average) if average is not None else {}},
            inconclusive=judged.inconclusive,
        )
    except (KeyError, ValueError, UnitError) as error:
        raise JournalError(
            f"{nodeid}: the labels of {judged.metric} are not as this project writes them: {error}"
        ) from None


def _values(judged: JudgedMetric) -> dict[int, float]:
    return {rank: units.convert(value, judged.unit, "GB/s") for rank, value in judged.values.items()}
