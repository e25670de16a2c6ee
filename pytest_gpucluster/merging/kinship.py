"""Whether several runs may become one verdict: the same cluster, judged by the same limits, measured alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.merging.numbering import ranks_of, slot
from pytest_gpucluster.merging.source import Source

_DEADLINES = ("deadline", "budget")
_OF_A_JOB = ("SLURM_", "TORCHELASTIC_", "GPUCLUSTER_", "NCCL_DEBUG_FILE")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that is not the same in all runs.

    ``of_clusters``: other hosts, GPUs or shape, which an operator may want to have in one journal nevertheless. All
    else would make a verdict that no single set of limits has given.
    """

    text: str
    of_clusters: bool


def differences(sources: Sequence[Source]) -> list[Difference]:
    """Return all that keeps these runs from one verdict, in plain words."""
    return list(_differences(sources))


def _differences(sources: Sequence[Source]) -> Iterator[Difference]:
    def differ(what: str, of: Callable[[Source], Hashable], *, of_clusters: bool = False) -> Iterator[Difference]:
        first, known = None, None
        for source in sources:
            value = of(source)
            if value is None:
                continue
            if first is None:
                first, known = source, value
            elif value != known:
                yield Difference(
                    text=f"{what}: {_apart(known, value)} ({first.path} and {source.path})", of_clusters=of_clusters
                )
                return

    yield from differ(
        "other kinds of run", lambda s: "a REHEARSAL on cpu" if s.journal.run.rehearsal else "a run on GPUs"
    )
    yield from differ("other SKUs", lambda s: s.journal.limits.sku if s.journal.limits else None)
    yield from differ(
        "other limits (SHA-256 of the files)",
        lambda s: tuple(digest for _, digest in s.journal.limits.files) if s.journal.limits else None,
    )
    yield from differ("other workloads", _workload)
    yield from differ("other expectations (--gpucluster-expect)", lambda s: _option(s, "expect"), of_clusters=True)
    yield from differ(
        "other hosts", lambda s: tuple(sorted({str(r.get("host")) for r in ranks_of(s)})) or None, of_clusters=True
    )
    yield from differ(
        "other GPUs",
        lambda s: tuple(sorted(" ".join(slot(rank)[1:]) for rank in ranks_of(s))) or None,
        of_clusters=True,
    )
    for source in sources:
        if source.journal.results and not ranks_of(source):
            yield Difference(text=f"{source.path} has results, but not of which cluster they are", of_clusters=False)


def changes(sources: Sequence[Source]) -> list[str]:
    """Return what is no obstacle and must be told: other versions, and other variables that change what is measured."""
    told = []
    for what, of in (("versions", _versions), ("environments", _environment)):
        known = [(source, found) for source in sources if (found := of(source)) is not None]
        for source, found in known[:-1]:
            newest, last = known[-1]
            names = sorted({*found, *last} - {name for name in found if found[name] == last.get(name)})
            texts = [f"{name}: {found.get(name, 'not set')}, then {last.get(name, 'not set')}" for name in names]
            if texts:
                told.append(f"other {what} in {source.told} than in {newest.told}: {'; '.join(texts)}")
    return told


def _versions(source: Source) -> Mapping[str, str] | None:
    """Return the versions of a run, each with its ranks' values."""
    if source.journal.cluster is None:
        return None
    found: dict[str, set[str]] = {}
    for rank in source.journal.cluster.ranks:
        for name, version in rank.versions.items():
            found.setdefault(name, set()).add(version)
    own = {"pytest-gpucluster": source.journal.run.plugin_version} if source.journal.run.plugin_version else {}
    return {**{name: ", ".join(sorted(versions)) for name, versions in found.items()}, **own}


def _environment(source: Source) -> Mapping[str, str] | None:
    """Return the variables of a run, but for those that each job has of its own."""
    environment = source.journal.environment
    if environment is None:
        return None
    return {name: value for name, value in environment.variables.items() if not name.startswith(_OF_A_JOB)}


def _option(source: Source, name: str) -> str:
    value, _ = source.journal.run.options.get(name, ("None", ""))
    return "nothing" if value == "None" else value


def _workload(source: Source) -> Hashable:
    """Return with what was measured; but for how long something may take at most."""
    workload = source.journal.workload
    if workload is None:
        return None if source.journal.results == () else ("none on record",)
    return tuple(sorted((k, v) for k, v in workload.values.items() if k.rpartition(".")[2] not in _DEADLINES))


def _apart(one: Hashable, other: Hashable) -> str:
    """Return in what two values differ, shortly."""
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return f"{one} and {other}"
    here = [each for each in one if each not in other]
    there = [each for each in other if each not in one]
    return f"{_few(here)} and {_few(there)}"


def _few(values: Sequence[Hashable]) -> str:
    texts = ["=".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in values]
    return (", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")) or "nothing else"
