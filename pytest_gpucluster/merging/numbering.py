"""One numbering of ranks for several runs: a launcher may number the same GPUs otherwise each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.merging.source import Line, Source

_BY_RANK = ("values", "intervals", "samples", "telemetry")


@dataclass(frozen=True, kw_only=True)
class Numbering:
    """The ranks of all runs, each once, and what each run's own numbers become."""

    ranks: tuple[Line, ...]
    """As in a journal's line of the cluster, with the new numbers."""
    of_run: tuple[Mapping[int, int], ...]
    """For each run: its rank -> the new number."""

    def renumbers(self, run: int) -> bool:
        """Tell whether a run's ranks have other numbers now."""
        return any(old != new for old, new in self.of_run[run].items())


def slot(rank: Line) -> tuple[str, ...]:
    """Return what makes a rank the same in two runs: its GPU, or on cpu its host and local rank."""
    gpu = rank.get("gpu") or {}
    if gpu.get("uuid"):
        return ("gpu", str(gpu["uuid"]))
    return ("slot", str(rank.get("host", "")), str(rank.get("local_rank", 0)))


def ranks_of(source: Source) -> Sequence[Line]:
    """Return the ranks that a run has on record."""
    cluster = source.of_type("cluster")
    return [] if cluster is None else list(cluster.get("ranks") or [])


def numbering(sources: Sequence[Source]) -> Numbering:
    """Number the ranks of all runs: as the last run does, then those that only earlier runs had."""
    numbers: dict[tuple[str, ...], int] = {}
    ranks: list[Line] = []
    latest = next((source for source in reversed(sources) if ranks_of(source)), None)
    for rank in ranks_of(latest) if latest is not None else ():
        numbers[slot(rank)] = int(rank["rank"])
        ranks.append(rank)
    for source in reversed(sources):
        for rank in ranks_of(source):
            if slot(rank) not in numbers:
                numbers[slot(rank)] = max(numbers.values(), default=-1) + 1
                ranks.append({**rank, "rank": numbers[slot(rank)]})
    return Numbering(
        ranks=tuple(ranks),
        of_run=tuple({int(rank["rank"]): numbers[slot(rank)] for rank in ranks_of(source)} for source in sources),
    )


def renumbered(line: Line, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Return a test's line with other numbers for its ranks. Texts stay: they name host and GPU as well."""
    changed = dict(line)

    def number(rank: Any) -> Any:
        return numbers.get(rank, rank)

    def by_rank(told: Any) -> Any:
        return {str(number(int(rank))): value for rank, value in told.items()} if told else told

    for name in ("culprits", "released"):
        if changed.get(name):
            changed[name] = sorted(number(rank) for rank in changed[name])
    if changed.get("ranks"):
        changed["ranks"] = [{**row, "rank": number(row.get("rank"))} for row in changed["ranks"]]
    if changed.get("telemetry"):
        changed["telemetry"] = by_rank(changed["telemetry"])
    if changed.get("spent"):
        changed["spent"] = {
            part: {**told, "most_rank": number(told.get("most_rank"))}
            for part, told in changed["spent"].items()
            if isinstance(told, Mapping)  # null, or a part that this version does not know and has not looked at
        }
    changed["measurements"] = [
        {
            **judged,
            **{name: by_rank(judged[name]) for name in _BY_RANK if name in judged},
            **{
                name: {**told, "rank": number(told.get("rank"))} for name in ("baseline",) if (told := judged.get(name))
            },
            "worst_rank": number(judged.get("worst_rank")),
        }
        for judged in changed.get("measurements") or []
    ]
    return changed
