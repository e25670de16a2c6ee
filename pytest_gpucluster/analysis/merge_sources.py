"""The journals to merge: their lines and digests, their ranks by one numbering, and whether they may be merged.

A launcher may number the same GPUs differently in each run. Runs may become one verdict if they had the same cluster,
were judged by the same limits, and measured alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.journal import Journal, read
from pytest_gpucluster.journal.records import KIND_NAMES
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
    began: datetime

    @property
    def nodeids(self) -> Iterator[str]:
        """Yield the tests of the run, collected or not."""
        yield from (test.nodeid for test in self.journal.collected or ())
        yield from (result.nodeid for result in self.journal.results)
        if self.journal.running is not None:
            yield self.journal.running.nodeid

    @property
    def is_whole(self) -> bool:
        """Return whether this run is of the whole suite, and collected all of it."""
        run, problems = self.journal.run, {problem.name for problem in self.journal.problems}
        return not run.selection and self.journal.collected is not None and not problems & {"collection", "usage"}

    def of_type(self, kind: str, nodeid: str | None = None) -> list[Line]:
        """Return the lines of a type, or those that make up a test's result."""
        return [json.loads(raw) for type_, about, raw in self.written if type_ == kind and nodeid in (None, about)]

    @cached_property
    def ranks(self) -> Sequence[Line]:
        """The ranks that the run has recorded, as its line of the cluster has them."""
        return [rank for cluster in self.of_type("cluster")[-1:] for rank in cluster.get("ranks") or []]


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
    began = time_of(journal.run.started_at)
    if began is None:
        raise JournalError(
            f"{path}: the start time in its first line is {journal.run.started_at!r:.40}, which is no time with a "
            "zone: without it the newest results are unknown"
        )
    digest = hashlib.sha256(content).hexdigest()
    return Source(path=path, sha256=digest, written=tuple(written), journal=journal, began=began)


def time_of(text: str) -> datetime | None:
    """Return a time; None where the text is none, or has no zone."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def slot(rank: Line) -> tuple[str, ...]:
    """Return the identity of a rank across runs: its GPU, or on cpu its host and local rank."""
    gpu = rank.get("gpu") or {}
    if gpu.get("uuid"):
        return ("gpu", str(gpu["uuid"]))
    return ("slot", str(rank.get("host", "")), str(rank.get("local_rank", 0)))


_BY_RANK = ("values", "intervals", "samples", "telemetry")


def renumber(line: Line, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Return a test's line with other numbers for its ranks. Texts are unchanged: they name host and GPU as well."""

    def with_rank(entry: Mapping[str, Any], key: str = "rank") -> dict[str, Any]:
        return {**entry, key: numbers.get(entry.get(key, -1), entry.get(key))}

    def by_rank(values: Mapping[str, Any]) -> dict[str, Any]:
        return {str(numbers.get(int(rank), rank)): value for rank, value in values.items()}

    changed = dict(line)
    for name in ("culprits", "released"):
        if changed.get(name):
            changed[name] = sorted(numbers.get(rank, rank) for rank in changed[name])
    if changed.get("ranks"):
        changed["ranks"] = list(map(with_rank, changed["ranks"]))
    if changed.get("telemetry"):
        changed["telemetry"] = by_rank(changed["telemetry"])
    if changed.get("spent"):
        spent = {part: times for part, times in changed["spent"].items() if isinstance(times, Mapping)}  # not null
        changed["spent"] = {part: with_rank(times, "most_rank") for part, times in spent.items()}
    changed["measurements"] = [
        {
            **with_rank(judged, "worst_rank"),
            **{name: by_rank(judged[name]) for name in _BY_RANK if judged.get(name)},
            **({"baseline": with_rank(judged["baseline"])} if judged.get("baseline") else {}),
        }
        for judged in changed.get("measurements") or []
    ]
    return changed


_DEADLINES = ("deadline", "budget")
_OF_A_JOB = ("SLURM_", "TORCHELASTIC_", "GPUCLUSTER_", "NCCL_DEBUG_FILE")


_COMPARED: tuple[tuple[str, Callable[[Source], Hashable]], ...] = (
    ("kinds of run", lambda s: f"a {KIND_NAMES[s.journal.run.kind]}"),
    ("SKUs", lambda s: s.journal.sku),
    ("limits (SHA-256)", lambda s: s.journal.limits and tuple(file.sha256 for file in s.journal.limits.files)),
    ("workloads", lambda s: _workload(s)),
    ("expectations (--gpucluster-expect)", lambda s: s.journal.run.option("expect") or "nothing"),
    ("hosts", lambda s: tuple(sorted({str(rank.get("host")) for rank in s.ranks})) or None),
    ("GPUs", lambda s: tuple(sorted(" ".join(slot(rank)[1:]) for rank in s.ranks)) or None),
)
"""What is compared, and its value; None where that is not recorded."""


def differences(sources: Sequence[Source]) -> Iterator[str]:
    """Yield the differences that keep these runs from one verdict."""
    for what, value_of in _COMPARED:
        known = [(source, value) for source in sources if (value := value_of(source)) is not None]
        for source, value in known[1:]:
            first, expected = known[0]
            if value != expected:
                yield f"other {what}: {_difference(expected, value)} ({first.path} and {source.path})"
                break
    for source in sources:
        if source.journal.results and not source.ranks:
            yield f"{source.path} has results, but no description of their cluster"


def changes(sources: Sequence[Source]) -> list[str]:
    """Return the differences to report that allow merging: versions, and environment variables."""
    lines = []
    for what, of in (("versions", _versions), ("environments", _environment)):
        known = [(source, found) for source in sources if (found := of(source)) is not None]
        for source, found in known[:-1]:
            newest, last = known[-1]
            texts = [
                f"{name}: {found.get(name, 'not set')}, then {last.get(name, 'not set')}"
                for name in sorted({*found, *last})
                if found.get(name) != last.get(name)
            ]
            if texts:
                title, then = source.journal.run.title, newest.journal.run.title
                lines.append(f"other {what} in {title} than in {then}: {'; '.join(texts)}")
    return lines


def _versions(source: Source) -> Mapping[str, str] | None:
    if source.journal.cluster is None:
        return None
    found: dict[str, set[str]] = {}
    for rank in source.journal.ranks:
        for name, version in rank.versions.items():
            found.setdefault(name, set()).add(version)
    if source.journal.run.plugin_version:
        found["pytest-gpucluster"] = {source.journal.run.plugin_version}
    return {name: ", ".join(sorted(versions)) for name, versions in found.items()}


def _environment(source: Source) -> Mapping[str, str] | None:
    environment = source.journal.environment
    if environment is None:
        return None
    return {name: value for name, value in environment.variables.items() if not name.startswith(_OF_A_JOB)}


def _workload(source: Source) -> Hashable:
    workload = source.journal.workload
    if workload is None:
        return None if source.journal.results == () else ("none recorded",)
    return tuple(sorted((k, v) for k, v in workload.values.items() if k.rpartition(".")[2] not in _DEADLINES))


def _difference(one: Hashable, other: Hashable) -> str:
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return f"{one} and {other}"
    parts = []
    for values, others in ((one, other), (other, one)):
        rest = [value for value in values if value not in others]
        texts = ["=".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in rest]
        parts.append(some_of(texts) or "nothing else")
    return " and ".join(parts)
