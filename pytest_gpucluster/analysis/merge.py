"""Merge journals into one: all attempts at each test, the one that is its result, and the verdict."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations, product
from typing import Any

from pytest_gpucluster.analysis.merge_sources import (
    Line,
    RankMapping,
    Source,
    changes,
    differences,
    rank_mapping,
    renumber,
    run_title,
    time_of,
)
from pytest_gpucluster.config.workload import WorkloadRecord
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.journal import SCHEMA_VERSION, JournalBuilder
from pytest_gpucluster.journal.records import MergedFrom, TestResult, failed_before
from pytest_gpucluster.text import first_line, one_line

_COUNTS = ", which counts"
_ATTEMPT = re.compile(r"attempt \d+")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One run's attempt at a test."""

    run: int
    """Index of the run."""
    nodeid: str
    outcome: str
    message: str
    failed_tries: int
    """Number of tries of that run that did not pass."""
    earlier: tuple[str, ...] = ()
    """The results of the tries before the last one, as texts; of a merged journal those of all tries."""
    line: Line | None = None
    """Replaces the journal's lines where the run ended in this test."""


def attempts_at(nodeid: str, sources: Sequence[Source]) -> list[Attempt]:
    """Return every attempt at a test, in the order of the runs. A test in which a run ended counts as an error."""
    found = []
    for number, source in enumerate(sources):
        journal = source.journal
        result = next((result for result in journal.results if result.nodeid == nodeid), None)
        running = journal.running
        if running is not None and running.nodeid == nodeid:
            message = first_line(f"the run ended here: {journal.reason}")
            found.append(
                Attempt(
                    run=number,
                    nodeid=nodeid,
                    outcome="error",
                    message=message,
                    failed_tries=1,
                    line=_error_line(nodeid, running.at, message, source),
                )
            )
        elif result is not None:
            found.append(
                Attempt(
                    run=number,
                    nodeid=nodeid,
                    outcome=result.outcome,
                    message=result.message,
                    failed_tries=_failed_tries(result),
                    earlier=_earlier(result),
                )
            )
    return found


def decisive_attempt(attempts: Sequence[Attempt]) -> Attempt:
    """Return the attempt that is the result: the newest one that is conclusive.

    A skip does not replace an earlier result. An error does not replace a failure: only a pass or another failure does.
    """
    decides = attempts[0]
    for attempt in attempts[1:]:
        if attempt.outcome == "skipped" and decides.outcome != "skipped":
            continue
        if attempt.outcome == "error" and decides.outcome == "failed":
            continue
        decides = attempt
    return decides


def lines_of(attempts: Sequence[Attempt], sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return the lines of a test for the merged journal: those of the decisive attempt, with the results of all
    attempts in their properties."""
    decides = decisive_attempt(attempts)
    failed_tries = sum(attempt.failed_tries for attempt in attempts if attempt is not decides)
    texts = _attempt_texts(attempts, decides, sources)
    lines = sources[decides.run].results(decides.nodeid) if decides.line is None else [decides.line]
    return [
        {
            **line,
            "attempts": int(line.get("attempts") or 1) + failed_tries,
            "properties": [
                *([f"attempt {number}", text] for number, text in enumerate(texts, start=1)),
                *(pair for pair in line.get("properties") or [] if not _ATTEMPT.fullmatch(str(pair[0]))),
            ],
        }
        for line in lines
    ]


def _attempt_texts(attempts: Sequence[Attempt], decides: Attempt, sources: Sequence[Source]) -> list[str]:
    """Return the result of each try as a text; empty where there was only one."""
    texts: list[str] = []
    for attempt in attempts:
        source = sources[attempt.run]
        if source.is_merged and attempt.earlier:  # its texts name the runs already
            texts += [text if attempt is decides else text.replace(_COUNTS, "", 1) for text in attempt.earlier]
            continue
        texts += [f"{source.title}: {text}" for text in attempt.earlier]
        message = f": {attempt.message}" if attempt.message else ""
        counts = _COUNTS if attempt is decides else ""
        texts.append(f"{source.title}{counts}: {attempt.outcome}{message}")
    return [first_line(text, 400) for text in texts] if len(texts) > 1 else []


def _earlier(result: TestResult) -> tuple[str, ...]:
    return tuple(text for name, text in result.properties if _ATTEMPT.fullmatch(name))


def _failed_tries(result: TestResult) -> int:
    if result.outcome == "skipped":
        return 0
    return result.attempts - (result.outcome == "passed")


def _error_line(nodeid: str, started_at: str, message: str, source: Source) -> dict[str, Any]:
    tests = source.journal.collected or ()
    collected: Mapping[str, Any] = next((vars(test) for test in tests if test.nodeid == nodeid), {})
    names = {key: collected[key] for key in ("classname", "name", "file", "line", "criterion") if key in collected}
    return {
        "type": "test",
        "nodeid": nodeid,
        **names,
        "outcome": "error",
        "phase": "call",
        "message": message,
        "text": message,
        "started_at": started_at,
    }


BY = "gpucluster runs merge"
_OF_MERGING = "merged"
"""The first word of the properties of a merge."""
_DIFFERENCE = 400


@dataclass(frozen=True, kw_only=True)
class MergedJournal:
    """A merged journal and its verdict."""

    lines: Callable[[], Iterator[Mapping[str, Any]]]
    """Yields its lines one by one: those of a thousand ranks are large."""
    verdict: verdict.Verdict
    despite: tuple[str, ...]
    """Allowed differences between the clusters."""


def merge_journals(sources: Sequence[Source], *, other_clusters: bool = False) -> MergedJournal:
    """Merge runs into one: the newest conclusive result of each test, and one verdict.

    Args:
        sources: two or more, in the order in which they ran; in any order where one report directory numbered them all.
        other_clusters: also merge runs of different hosts or GPUs. The result is never ACCEPTED.

    Raises:
        OptionError: one run is given twice, their order is unknown, or they must not have one verdict; it lists the
            differences.
    """
    _require_apart(sources)
    sources = _in_order(sources)
    found = differences(sources)
    rejected = [difference for difference in found if not (difference.of_clusters and other_clusters)]
    if rejected:
        listed = "\n".join(f"  {one_line(difference.text, _DIFFERENCE)}" for difference in rejected)
        is_allowed = all(difference.of_clusters for difference in rejected)
        advice = (
            "give --allow-different-clusters to merge them anyway, which accepts none of them"
            if is_allowed
            else "runs with other limits or workloads have no common verdict; merge those that are alike"
        )
        raise OptionError(f"these runs are not of one cluster and one set of limits:\n{listed}\n{advice}")
    mapping = rank_mapping(sources)
    nodeids = list(dict.fromkeys(nodeid for source in sources for nodeid in _tests_of(source)))
    all_attempts = {nodeid: attempts_at(nodeid, sources) for nodeid in nodeids}
    tried = {nodeid: attempts for nodeid, attempts in all_attempts.items() if attempts}
    # Differences of an earlier merge stay when it is merged again.
    despite = [text for source in sources for text in source.journal.run.merged_despite]
    despite = list(dict.fromkeys([*despite, *(one_line(difference.text, _DIFFERENCE) for difference in found)]))
    decided = _decide(sources, tried, nodeids, despite)
    counts = Counter(decisive_attempt(attempts).outcome for attempts in tried.values())
    end = {
        "type": "end",
        "at": max(
            filter(None, (source.journal.end.at if source.journal.end else "" for source in sources)), default=""
        ),
        "verdict": decided.word,
        "exit": decided.exit,
        "reason": decided.reason,
        "counts": {kind: counts[kind] for kind in ("passed", "failed", "error", "skipped")},
        "not_run": [nodeid for nodeid in nodeids if nodeid not in tried],
        "by": BY,
    }
    lines = partial(_lines, sources, tried, mapping, despite, end)
    return MergedJournal(lines=lines, verdict=decided, despite=tuple(despite))


def _lines(
    sources: Sequence[Source],
    tried: Mapping[str, Sequence[Attempt]],
    mapping: RankMapping,
    despite: Sequence[str],
    end: Mapping[str, Any],
) -> Iterator[Mapping[str, Any]]:
    yield from _head(sources, despite, mapping)
    yield from _tests(tried, sources, mapping)
    yield from _problems(sources)
    yield end


def _require_apart(sources: Sequence[Source]) -> None:
    seen: dict[tuple[str, ...], Source] = {}
    for source in sources:
        run = source.journal.run
        keys = {(run.run_id, run.started_at, run.hostname), *((each.sha256,) for each in source.runs)}
        for each in keys & seen.keys():
            both = f"{seen[each].path} and {source.path}"
            same = "have a run in common" if source.is_merged or seen[each].is_merged else "are the same run"
            raise OptionError(f"{both} {same}; give each run once")
        seen |= dict.fromkeys(keys, source)


def _in_order(sources: Sequence[Source]) -> list[Source]:
    """Return the runs, the oldest first: by their numbers, or in the given order where not all have one.

    Raises:
        OptionError: numbers or clocks contradict the given order.
    """
    found = list(sources)
    if _is_numbered(sources):
        found.sort(key=lambda source: source.runs[0].number)
    for earlier, later in combinations(found, 2):
        for one, other in product(earlier.runs, later.runs):
            if not _is_before(one, other):
                began = (
                    f"{run_title(other.run_id, other.started_at)} began before {run_title(one.run_id, one.started_at)}"
                )
                raise OptionError(
                    f"{earlier.path} is named before {later.path}, but {began}: name the runs in the order in which "
                    "they ran. If that is their order, a clock went back between them: then only runs of one "
                    "report directory have a known order. A run between runs that are merged already is merged with "
                    "those runs themselves"
                )
    return found


def _is_numbered(sources: Sequence[Source]) -> bool:
    runs = [run for source in sources for run in source.runs]
    return bool(runs[0].series) and {run.series for run in runs} == {runs[0].series}


def _is_before(one: MergedFrom, other: MergedFrom) -> bool:
    if one.series and one.series == other.series and one.number != other.number:
        return one.number < other.number
    began, next_began = time_of(one.started_at), time_of(other.started_at)
    return began is not None and next_began is not None and began <= next_began


def _tests_of(source: Source) -> Iterator[str]:
    yield from (test.nodeid for test in source.journal.collected or ())
    yield from (result.nodeid for result in source.journal.results)
    if source.journal.running is not None:
        yield source.journal.running.nodeid


def _head(sources: Sequence[Source], despite: Sequence[str], mapping: RankMapping) -> Iterator[Mapping[str, Any]]:
    """Yield the lines before the tests: those of the newest run that has them, and what was merged."""
    newest = sources[-1]
    digest = hashlib.sha256("".join(source.sha256 for source in sources).encode()).hexdigest()
    first = next(newest.all_of_type("run"))
    is_other = bool(despite and mapping.ranks)
    required = _required(sources)
    demanded = {"require": {"value": ", ".join(required), "origin": BY}} if required else {}
    yield {
        **first,
        "schema_version": SCHEMA_VERSION,
        "run_id": f"merged-{digest[:12]}",
        "started_at": _span(sources)[0],
        "series": "",
        # No JUnit file of it has been written.
        "junit": {**(first.get("junit") or {}), "path": None},
        "selection": bool(despite) or not any(source.is_whole for source in sources),
        "world_size": len(mapping.ranks) if is_other else first.get("world_size", 1),
        "nnodes": len({rank.get("host") for rank in mapping.ranks}) if is_other else first.get("nnodes", 1),
        "options": {**(first.get("options") or {}), **demanded},
        "merged_from": [asdict(run) for run in _runs(sources)],
        "merged_despite": list(despite),
    }
    if mapping.ranks:
        problems = [problem for s in sources for problem in (s.journal.cluster.problems if s.journal.cluster else ())]
        yield {"type": "cluster", "ranks": list(mapping.ranks), "problems": list(dict.fromkeys(problems))}
    for kind in ("limits", "environment", "workload"):
        line = next((line for source in reversed(sources) if (line := source.of_type(kind)) is not None), None)
        if line is not None:
            yield line
    collected: dict[str, Mapping[str, Any]] = {}
    for source in sources:
        for test in (source.of_type("collected") or {}).get("tests") or []:
            collected[test["nodeid"]] = test
    yield {"type": "collected", "tests": list(collected.values()), "manifest": _has_manifest(sources)}
    yield from ({"type": "deviation", "text": text} for text in _deviations(sources))
    reasons = {source.sha256: f": {source.journal.reason}" for source in sources}
    for number, run in enumerate(_runs(sources), start=1):
        text = f"{run_title(run.run_id, run.started_at)}: {run.verdict}, exit code {run.exit}"
        text += reasons.get(run.sha256, "")
        yield {"type": "property", "name": f"{_OF_MERGING} run {number}", "value": first_line(text, 400)}
        yield {"type": "property", "name": f"{_OF_MERGING} run {number} sha256", "value": run.sha256}
    for number, text in enumerate(despite, start=1):
        yield {"type": "property", "name": f"{_OF_MERGING} despite {number}", "value": text}
    for number, text in enumerate(changes(sources), start=1):
        yield {"type": "property", "name": f"{_OF_MERGING} with {number}", "value": first_line(text, 1000)}
    for source in sources:
        for line in source.all_of_type("property"):
            if not (source.is_merged and str(line.get("name", "")).startswith(f"{_OF_MERGING} ")):
                yield line


def _runs(sources: Sequence[Source]) -> list[MergedFrom]:
    """Return all runs that are in these journals, the oldest first."""
    return [run for source in sources for run in source.runs]


def _span(sources: Sequence[Source]) -> tuple[str, str]:
    """Return the start times of the first and the last run."""
    runs = _runs(sources)
    return runs[0].started_at, runs[-1].started_at


def _tests(
    tried: Mapping[str, Sequence[Attempt]], sources: Sequence[Source], mapping: RankMapping
) -> Iterator[Mapping[str, Any]]:
    for attempts in tried.values():
        run = decisive_attempt(attempts).run
        for line in lines_of(attempts, sources):
            if not mapping.renumbers(run):
                yield line
                continue
            note = ["ranks", f"renumbered by GPU or slot; texts have the numbers of {sources[run].title}"]
            yield renumber({**line, "properties": [*line["properties"], note]}, mapping.of_run[run])


def _unanswered(sources: Sequence[Source]) -> list[Source]:
    """Return the broken runs after the last run that did not break."""
    last = max((number for number, source in enumerate(sources) if not source.broke), default=-1)
    return list(sources[last + 1 :])


def _problems(sources: Sequence[Source]) -> Iterator[Mapping[str, Any]]:
    """Yield faults outside tests that still count: those that reject hardware, and those of unanswered runs."""
    unanswered = _unanswered(sources)
    for source in sources:
        for line in source.all_of_type("problem"):
            if line.get("outcome") == "failed" or source in unanswered:
                yield line


def _decide(
    sources: Sequence[Source],
    tried: Mapping[str, Sequence[Attempt]],
    nodeids: Sequence[str],
    despite: Sequence[str],
) -> verdict.Verdict:
    results = [_result(lines_of(attempts, sources)) for attempts in tried.values()]
    whole = any(source.is_whole for source in sources)
    first, last = _span(sources)
    topology = f"merged from {len(_runs(sources))} runs, {first} to {last}"
    topology += "" if _is_numbered(sources) else ", in the order given, which their clocks confirm"
    topology = "; ".join([topology, *_remarks(sources), *(first_line(text) for text in changes(sources))])
    if despite:
        topology += f"; OF DIFFERENT CLUSTERS: {'; '.join(despite)}"
    return verdict.decide(
        results,
        pytest_exit=0,
        abort=_abort(sources),
        not_run=[nodeid for nodeid in nodeids if nodeid not in tried],
        required=_required(sources),
        rehearsal=sources[-1].journal.run.rehearsal,
        selection=bool(despite) or not whole,
        manifest=_has_manifest(sources),
        deviations=_deviations(sources),
        topology=topology,
    )


def _deviations(sources: Sequence[Source]) -> list[str]:
    """Return the deviations of all runs, with the tests that failed and passed within one run."""
    found = [text for source in sources for text in source.journal.deviations]
    for source in sources:
        again = [result for result in source.journal.results if failed_before(result.properties)]
        found += [f"{result.criterion or result.nodeid} failed, and passed when run again" for result in again]
    return list(dict.fromkeys(found))


def _has_manifest(sources: Sequence[Source]) -> bool:
    """Return whether a run of the whole suite had a list of the tests that an acceptance needs."""
    return any(source.is_whole and source.journal.has_manifest for source in sources)


def _remarks(sources: Sequence[Source]) -> list[str]:
    """Return how the runs differ from the shipped workload and limits."""
    remarks: list[str] = []
    for source in sources:
        workload = source.journal.workload
        if workload is not None:
            remarks += WorkloadRecord(
                profile=workload.profile, file=workload.file, values=workload.values, origins=workload.origins
            ).remarks
        for option, remark in (("sku", "judged as {} (--gpucluster-sku)"), ("thresholds", "limits overlaid by {}")):
            value = _option(source, option)
            if value:
                remarks.append(remark.format(value))
    baselines = [_option(source, "baseline") for source in sources]
    if any(baselines):
        names = ", ".join(dict.fromkeys(filter(None, baselines)))
        remarks.append(f"{sum(map(bool, baselines))} of {len(sources)} were compared with a baseline ({names})")
    return list(dict.fromkeys(remarks))


def _option(source: Source, name: str) -> str:
    """Return the value of an option; empty where it was not given."""
    value, _ = source.journal.run.options.get(name, ("None", ""))
    return "" if value == "None" else value


def _abort(sources: Sequence[Source]) -> tuple[int, str] | None:
    """Return exit code and reason where the merged run cannot pass: hardware that was rejected outside any test, or a
    broken run without a later conclusive one."""
    for source in sources:
        journal = source.journal
        failed = next((problem for problem in journal.problems if problem.outcome == "failed"), None)
        if failed is not None:
            return 1, first_line(f"{source.title}: {failed.message}")
        if journal.verdict == "REJECTED" and not any(result.outcome == "failed" for result in journal.results):
            return 1, first_line(f"{source.title}: {journal.reason}")
    unanswered = _unanswered(sources)
    if unanswered:
        last = unanswered[-1]
        return 11, first_line(f"{last.title} broke, and no later run was conclusive: {last.journal.reason}")
    return None


def _result(lines: Sequence[Mapping[str, Any]]) -> verdict.TestResult:
    """Return a test's fields for the verdict, as a reader of the merged journal finds them."""
    builder = JournalBuilder(keep_samples=False)
    builder.add({"type": "run", "schema_version": SCHEMA_VERSION})
    for line in lines:
        builder.add(line)
    return builder.journal().results[0].for_verdict


def _required(sources: Sequence[Source]) -> list[str]:
    """Return the criteria that any of the runs required."""
    return list(dict.fromkeys(name for source in sources for name in source.journal.run.required))
