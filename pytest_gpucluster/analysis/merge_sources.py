"""The journals to merge: their lines and digests, one mapping of ranks for all, and whether they may be merged.

A launcher may number the same GPUs differently in each run. Runs may become one verdict if they had the same cluster,
were judged by the same limits, and measured alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.journal import Journal, read
from pytest_gpucluster.journal.records import MergedFrom
from pytest_gpucluster.text import some_of

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A journal, as its lines, which are kept verbatim, and as read from them."""

    path: Path
    sha256: str
    written: tuple[tuple[str, str, bytes], ...]
    """Each line: its type, its test, and its bytes. Parsed lines of a thousand ranks would be large."""
    journal: Journal
    """Without samples."""

    @property
    def nodeids(self) -> Iterator[str]:
        """Yield the tests of the run, collected or not."""
        yield from (test.nodeid for test in self.journal.collected or ())
        yield from (result.nodeid for result in self.journal.results)
        if self.journal.running is not None:
            yield self.journal.running.nodeid

    @property
    def broke(self) -> bool:
        """Return whether the run broke."""
        return self.journal.verdict == "BROKEN"

    @property
    def is_whole(self) -> bool:
        """Return whether this run is of the whole suite, and collected all of it."""
        run, problems = self.journal.run, {problem.name for problem in self.journal.problems}
        return not run.selection and self.journal.collected is not None and not problems & {"collection", "usage"}

    @property
    def origin(self) -> MergedFrom:
        """Return what the merged journal states of this run."""
        run = self.journal.run
        return MergedFrom(
            journal=str(self.path),
            sha256=self.sha256,
            run_id=run.run_id,
            started_at=run.started_at,
            verdict=self.journal.verdict,
            exit=self.journal.exit,
            series=run.series,
            number=run.number,
        )

    def of_type(self, kind: str) -> Line | None:
        """Return the last line of a type."""
        return next((json.loads(raw) for type_, _, raw in reversed(self.written) if type_ == kind), None)

    def all_of_type(self, kind: str) -> Iterator[Line]:
        """Yield the lines of a type."""
        yield from (json.loads(raw) for type_, _, raw in self.written if type_ == kind)

    def results(self, nodeid: str) -> list[Line]:
        """Return the lines that make up a test's result."""
        return [json.loads(raw) for type_, about, raw in self.written if (type_, about) == ("test", nodeid)]


def load_source(path: Path) -> Source:
    """Read a journal to be merged.

    Raises:
        JournalError: as ``journal.read``; or its run is going on, or its start time is missing, or it was merged.
    """
    journal = read(path, keep_samples=False, live=True)
    if journal.is_live:
        raise JournalError(f"{path}: its run is going on ({journal.progress}); merge it when it has ended")
    if journal.run.merged_from:
        origins = ", ".join(each.journal for each in journal.run.merged_from)
        raise JournalError(f"{path}: it was merged from {origins}; merge those with the others instead")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror or error}") from None
    written = []
    for raw in content.split(b"\n"):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):  # `read` accepted the file, so this is its end: cut off or empty
            break
        written.append((str(line.get("type", "")), str(line.get("nodeid", "")), raw))
    if time_of(journal.run.started_at) is None:
        raise JournalError(
            f"{path}: the start time in its first line is {journal.run.started_at!r:.40}, which is no time with a "
            "zone: without it the newest results are unknown"
        )
    return Source(path=path, sha256=hashlib.sha256(content).hexdigest(), written=tuple(written), journal=journal)


def time_of(text: str) -> datetime | None:
    """Return a time; None where the text is none, or has no zone."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


_BY_RANK = ("values", "intervals", "samples", "telemetry")


@dataclass(frozen=True, kw_only=True)
class RankMapping:
    """The ranks of all runs, each once, and the mapping of each run's numbers to theirs."""

    ranks: tuple[Line, ...]
    """As in a journal's line of the cluster, with the new numbers."""
    of_run: Mapping[str, Mapping[int, int]]
    """SHA-256 of a run's journal -> its rank -> the new number."""

    def renumbers(self, source: Source) -> bool:
        """Return whether a run's ranks get other numbers."""
        return any(old != new for old, new in self.of_run[source.sha256].items())


def slot(rank: Line) -> tuple[str, ...]:
    """Return the identity of a rank across runs: its GPU, or on cpu its host and local rank."""
    gpu = rank.get("gpu") or {}
    if gpu.get("uuid"):
        return ("gpu", str(gpu["uuid"]))
    return ("slot", str(rank.get("host", "")), str(rank.get("local_rank", 0)))


def ranks_of(source: Source) -> Sequence[Line]:
    """Return the ranks that a run has recorded."""
    cluster = source.of_type("cluster")
    return [] if cluster is None else list(cluster.get("ranks") or [])


def rank_mapping(sources: Sequence[Source]) -> RankMapping:
    """Map the ranks of all runs to one numbering: that of the last run, then ranks of earlier runs only."""
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
    return RankMapping(
        ranks=tuple(ranks),
        of_run={
            source.sha256: {int(rank["rank"]): numbers[slot(rank)] for rank in ranks_of(source)} for source in sources
        },
    )


def renumber(line: Line, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Return a test's line with other numbers for its ranks. Texts are unchanged: they name host and GPU as well."""
    changed = dict(line)

    def number(rank: Any) -> Any:
        return numbers.get(rank, rank)

    def by_rank(values: Any) -> Any:
        return {str(number(int(rank))): value for rank, value in values.items()} if values else values

    for name in ("culprits", "released"):
        if changed.get(name):
            changed[name] = sorted(number(rank) for rank in changed[name])
    if changed.get("ranks"):
        changed["ranks"] = [{**row, "rank": number(row.get("rank"))} for row in changed["ranks"]]
    if changed.get("telemetry"):
        changed["telemetry"] = by_rank(changed["telemetry"])
    if changed.get("spent"):
        changed["spent"] = {
            part: {**times, "most_rank": number(times.get("most_rank"))}
            for part, times in changed["spent"].items()
            if isinstance(times, Mapping)  # not null
        }
    changed["measurements"] = [
        {
            **judged,
            **{name: by_rank(judged[name]) for name in _BY_RANK if name in judged},
            **{
                name: {**entry, "rank": number(entry.get("rank"))}
                for name in ("baseline",)
                if (entry := judged.get(name))
            },
            "worst_rank": number(judged.get("worst_rank")),
        }
        for judged in changed.get("measurements") or []
    ]
    return changed


_DEADLINES = ("deadline", "budget")
_OF_A_JOB = ("SLURM_", "TORCHELASTIC_", "GPUCLUSTER_", "NCCL_DEBUG_FILE")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference between the runs.

    ``of_clusters``: other hosts, GPUs or shape, which an operator may allow. Any other difference would mix results of
    different limits or workloads in one verdict.
    """

    text: str
    of_clusters: bool


_COMPARED: tuple[tuple[str, bool, Callable[[Source], Hashable]], ...] = (
    ("kinds of run", False, lambda s: "a REHEARSAL on cpu" if s.journal.run.rehearsal else "a run on GPUs"),
    ("SKUs", False, lambda s: s.journal.sku),
    ("limits (SHA-256 of the files)", False, lambda s: s.journal.limits and _digests(s.journal.limits.files)),
    ("workloads", False, lambda s: _workload(s)),
    ("expectations (--gpucluster-expect)", True, lambda s: s.journal.run.option("expect") or "nothing"),
    ("hosts", True, lambda s: tuple(sorted({str(rank.get("host")) for rank in ranks_of(s)})) or None),
    ("GPUs", True, lambda s: tuple(sorted(" ".join(slot(rank)[1:]) for rank in ranks_of(s))) or None),
)
"""What is compared, whether it is about the cluster, and its value; None where that is not recorded."""


def differences(sources: Sequence[Source]) -> Iterator[Difference]:
    """Yield the differences that keep these runs from one verdict."""
    for what, of_clusters, value_of in _COMPARED:
        known = [(source, value) for source in sources if (value := value_of(source)) is not None]
        for source, value in known[1:]:
            first, expected = known[0]
            if value != expected:
                text = f"other {what}: {_difference(expected, value)} ({first.path} and {source.path})"
                yield Difference(text=text, of_clusters=of_clusters)
                break
    for source in sources:
        if source.journal.results and not ranks_of(source):
            yield Difference(text=f"{source.path} has results, but no description of their cluster", of_clusters=False)


def _digests(files: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(digest for _, digest in files)


def changes(sources: Sequence[Source]) -> list[str]:
    """Return the differences to report that allow merging: versions, and environment variables."""
    lines = []
    for what, of in (("versions", _versions), ("environments", _environment)):
        known = [(source, found) for source in sources if (found := of(source)) is not None]
        for source, found in known[:-1]:
            newest, last = known[-1]
            names = sorted({*found, *last} - {name for name in found if found[name] == last.get(name)})
            texts = [f"{name}: {found.get(name, 'not set')}, then {last.get(name, 'not set')}" for name in names]
            if texts:
                lines.append(
                    f"other {what} in {source.journal.run.title} than in {newest.journal.run.title}: {'; '.join(texts)}"
                )
    return lines


def _versions(source: Source) -> Mapping[str, str] | None:
    """Return the versions of a run, each with its ranks' values."""
    if source.journal.cluster is None:
        return None
    found: dict[str, set[str]] = {}
    for rank in source.journal.ranks:
        for name, version in rank.versions.items():
            found.setdefault(name, set()).add(version)
    own = {"pytest-gpucluster": source.journal.run.plugin_version} if source.journal.run.plugin_version else {}
    return {**{name: ", ".join(sorted(versions)) for name, versions in found.items()}, **own}


def _environment(source: Source) -> Mapping[str, str] | None:
    """Return the variables of a run, without those that differ in each job."""
    environment = source.journal.environment
    if environment is None:
        return None
    return {name: value for name, value in environment.variables.items() if not name.startswith(_OF_A_JOB)}


def _workload(source: Source) -> Hashable:
    """Return the workload, without deadlines."""
    workload = source.journal.workload
    if workload is None:
        return None if source.journal.results == () else ("none recorded",)
    return tuple(sorted((k, v) for k, v in workload.values.items() if k.rpartition(".")[2] not in _DEADLINES))


def _difference(one: Hashable, other: Hashable) -> str:
    """Return the difference of two values as a short text."""
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return f"{one} and {other}"
    here = [each for each in one if each not in other]
    there = [each for each in other if each not in one]
    return f"{_few(here)} and {_few(there)}"


def _few(values: Sequence[Hashable]) -> str:
    texts = ["=".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in values]
    return some_of(texts) or "nothing else"
