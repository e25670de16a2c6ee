"""Journals merged into one: all attempts at each test, which of them is its result, and the verdict on all."""

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
    Numbering,
    Source,
    changes,
    differences,
    numbering,
    renumbered,
    time_of,
    told,
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
    """Which of the runs."""
    nodeid: str
    outcome: str
    message: str
    lost: int
    """How many tries of that run did not pass."""
    earlier: tuple[str, ...] = ()
    """What came of the tries before the last one, in words; of a merged journal's, of all of them."""
    line: Line | None = None
    """In place of the journal's lines, where the run ended in this test."""


def attempts_at(nodeid: str, sources: Sequence[Source]) -> list[Attempt]:
    """Return every attempt at a test, in the order of the runs. A test in which a run ended was tried, and broke."""
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
                    lost=1,
                    line=_broken(nodeid, running.at, message, source),
                )
            )
        elif result is not None:
            found.append(
                Attempt(
                    run=number,
                    nodeid=nodeid,
                    outcome=result.outcome,
                    message=result.message,
                    lost=_lost(result),
                    earlier=_earlier(result),
                )
            )
    return found


def deciding(attempts: Sequence[Attempt]) -> Attempt:
    """Return the attempt that is the result: the newest one that is an answer.

    A skip answers nothing, so an earlier result stays. A broken attempt says nothing about hardware that has failed:
    only a pass, or another failure, takes the place of a failure.
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
    """Return the lines of a test for the merged journal: those of the deciding attempt, and in their properties what
    came of all attempts."""
    decides = deciding(attempts)
    lost = sum(attempt.lost for attempt in attempts if attempt is not decides)
    told = _told(attempts, decides, sources)
    lines = sources[decides.run].results(decides.nodeid) if decides.line is None else [decides.line]
    return [
        {
            **line,
            "attempts": int(line.get("attempts") or 1) + lost,
            "properties": [
                *([f"attempt {number}", text] for number, text in enumerate(told, start=1)),
                *(pair for pair in line.get("properties") or [] if not _ATTEMPT.fullmatch(str(pair[0]))),
            ],
        }
        for line in lines
    ]


def _told(attempts: Sequence[Attempt], decides: Attempt, sources: Sequence[Source]) -> list[str]:
    """Return what came of each try, in words; nothing where there was but one."""
    said: list[str] = []
    for attempt in attempts:
        source = sources[attempt.run]
        if source.is_merged and attempt.earlier:  # that journal has told it already, and names the runs
            said += [text if attempt is decides else text.replace(_COUNTS, "", 1) for text in attempt.earlier]
            continue
        said += [f"{source.told}: {text}" for text in attempt.earlier]
        message = f": {attempt.message}" if attempt.message else ""
        counts = _COUNTS if attempt is decides else ""
        said.append(f"{source.told}{counts}: {attempt.outcome}{message}")
    return [first_line(text, 400) for text in said] if len(said) > 1 else []


def _earlier(result: TestResult) -> tuple[str, ...]:
    return tuple(text for name, text in result.properties if _ATTEMPT.fullmatch(name))


def _lost(result: TestResult) -> int:
    if result.outcome == "skipped":
        return 0
    return result.attempts - (result.outcome == "passed")


def _broken(nodeid: str, started_at: str, message: str, source: Source) -> dict[str, Any]:
    told: Mapping[str, Any] = next((vars(test) for test in source.journal.collected or () if test.nodeid == nodeid), {})
    names = {key: told[key] for key in ("classname", "name", "file", "line", "criterion") if key in told}
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
"""The first word of the properties that say what was merged."""
_DIFFERENCE = 400


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What came of it."""

    lines: Callable[[], Iterator[Mapping[str, Any]]]
    """Yields those of the journal, from the first to the closing one. Of a thousand ranks all at once are large."""
    verdict: verdict.Verdict
    despite: tuple[str, ...]
    """In what the clusters differ, if that was allowed."""


def merge_journals(sources: Sequence[Source], *, other_clusters: bool = False) -> Merged:
    """Merge runs into one: the newest answer of each test, and one verdict on them.

    Args:
        sources: two or more, in the order in which they ran; in any order where one report directory numbered them all.
        other_clusters: runs of different hosts or GPUs may be merged. Then nothing is ACCEPTED by that.

    Raises:
        OptionError: one run is given twice, or nobody can tell which came first, or the runs must not become one
            verdict; says in what they differ.
    """
    _require_apart(sources)
    sources = _in_order(sources)
    found = differences(sources)
    refused = [difference for difference in found if not (difference.of_clusters and other_clusters)]
    if refused:
        said = "\n".join(f"  {one_line(difference.text, _DIFFERENCE)}" for difference in refused)
        flag = all(difference.of_clusters for difference in refused)
        what = (
            "give --allow-different-clusters to merge them all the same, which accepts none of them"
            if flag
            else ("runs that were judged or measured otherwise have no common verdict; merge those that are alike")
        )
        raise OptionError(f"these runs are not of one cluster and one set of limits:\n{said}\n{what}")
    numbers = numbering(sources)
    nodeids = list(dict.fromkeys(nodeid for source in sources for nodeid in _tests_of(source)))
    all_attempts = {nodeid: attempts_at(nodeid, sources) for nodeid in nodeids}
    tried = {nodeid: attempts for nodeid, attempts in all_attempts.items() if attempts}
    # What was merged despite of some difference stays so, however often it is merged again.
    despite = [text for source in sources for text in source.journal.run.merged_despite]
    despite = list(dict.fromkeys([*despite, *(one_line(difference.text, _DIFFERENCE) for difference in found)]))
    decided = _decide(sources, tried, nodeids, despite)
    counts = Counter(deciding(attempts).outcome for attempts in tried.values())
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
    lines = partial(_lines, sources, tried, numbers, despite, end)
    return Merged(lines=lines, verdict=decided, despite=tuple(despite))


def _lines(
    sources: Sequence[Source],
    tried: Mapping[str, Sequence[Attempt]],
    numbers: Numbering,
    despite: Sequence[str],
    end: Mapping[str, Any],
) -> Iterator[Mapping[str, Any]]:
    yield from _head(sources, despite, numbers)
    yield from _tests(tried, sources, numbers)
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
    """Return the runs, the oldest first: by their numbers; where not all have one, as they are given, if numbers and
    clocks say the same.

    Raises:
        OptionError: they do not.
    """
    found = list(sources)
    if _is_numbered(sources):
        found.sort(key=lambda source: source.runs[0].number)
    for earlier, later in combinations(found, 2):
        for one, other in product(earlier.runs, later.runs):
            if not _is_before(one, other):
                began = f"{told(other.run_id, other.started_at)} began before {told(one.run_id, one.started_at)}"
                raise OptionError(
                    f"{earlier.path} is named before {later.path}, but {began}: name the runs in the order in which "
                    "they ran. If that is their order, a clock went back between them: only runs of one report "
                    "directory are known to be in order then. What ran between runs that are merged already is merged "
                    "with these runs themselves"
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


def _head(sources: Sequence[Source], despite: Sequence[str], numbers: Numbering) -> Iterator[Mapping[str, Any]]:
    """Yield the lines before the tests: those of the newest run that has them, and what was merged."""
    newest = sources[-1]
    digest = hashlib.sha256("".join(source.sha256 for source in sources).encode()).hexdigest()
    first = next(newest.all_of_type("run"))
    is_other = bool(despite and numbers.ranks)
    required = _required(sources)
    demanded = {"require": {"value": ", ".join(required), "origin": BY}} if required else {}
    yield {
        **first,
        "schema_version": SCHEMA_VERSION,
        "run_id": f"merged-{digest[:12]}",
        "started_at": _span(sources)[0],
        "series": "",
        # Nobody has written a JUnit file of it yet.
        "junit": {**(first.get("junit") or {}), "path": None},
        "selection": bool(despite) or not any(source.is_whole for source in sources),
        "world_size": len(numbers.ranks) if is_other else first.get("world_size", 1),
        "nnodes": len({rank.get("host") for rank in numbers.ranks}) if is_other else first.get("nnodes", 1),
        "options": {**(first.get("options") or {}), **demanded},
        "merged_from": [asdict(run) for run in _runs(sources)],
        "merged_despite": list(despite),
    }
    if numbers.ranks:
        problems = [problem for s in sources for problem in (s.journal.cluster.problems if s.journal.cluster else ())]
        yield {"type": "cluster", "ranks": list(numbers.ranks), "problems": list(dict.fromkeys(problems))}
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
        said = f"{told(run.run_id, run.started_at)}: {run.verdict}, exit code {run.exit}"
        said += reasons.get(run.sha256, "")
        yield {"type": "property", "name": f"{_OF_MERGING} run {number}", "value": first_line(said, 400)}
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
    """Return when the first of the runs began, and when the last one did."""
    runs = _runs(sources)
    return runs[0].started_at, runs[-1].started_at


def _tests(
    tried: Mapping[str, Sequence[Attempt]], sources: Sequence[Source], numbers: Numbering
) -> Iterator[Mapping[str, Any]]:
    for attempts in tried.values():
        run = deciding(attempts).run
        for line in lines_of(attempts, sources):
            if not numbers.renumbers(run):
                yield line
                continue
            note = ["ranks", f"renumbered by GPU or slot; texts have the numbers of {sources[run].told}"]
            yield renumbered({**line, "properties": [*line["properties"], note]}, numbers.of_run[run])


def _unanswered(sources: Sequence[Source]) -> list[Source]:
    """Return the broken runs that no later run has answered: those after the last one that came to its end."""
    last = max((number for number, source in enumerate(sources) if not source.broke), default=-1)
    return list(sources[last + 1 :])


def _problems(sources: Sequence[Source]) -> Iterator[Mapping[str, Any]]:
    """Yield what went wrong outside of tests and still counts: what rejects hardware, and what nobody answered."""
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
    ending = _ending(sources, tried)
    whole = any(source.is_whole for source in sources)
    first, last = _span(sources)
    said = f"merged from {len(_runs(sources))} runs, {first} to {last}"
    said += "" if _is_numbered(sources) else ", in the order in which they were named, which their clocks confirm"
    said = "; ".join([said, *_remarks(sources), *(first_line(text) for text in changes(sources))])
    if despite:
        said += f"; OF DIFFERENT CLUSTERS: {'; '.join(despite)}"
    return verdict.decide(
        results,
        pytest_exit=0,
        ending=ending,
        not_run=[nodeid for nodeid in nodeids if nodeid not in tried],
        required=_required(sources),
        rehearsal=sources[-1].journal.run.rehearsal,
        selection=bool(despite) or not whole,
        manifest=_has_manifest(sources),
        deviations=_deviations(sources),
        topology=said,
    )


def _deviations(sources: Sequence[Source]) -> list[str]:
    """Return the deviations of all runs, with the tests that failed and passed within one run."""
    found = [text for source in sources for text in source.journal.deviations]
    for source in sources:
        again = [result for result in source.journal.results if failed_before(result.properties)]
        found += [f"{result.criterion or result.nodeid} failed, and passed when run again" for result in again]
    return list(dict.fromkeys(found))


def _has_manifest(sources: Sequence[Source]) -> bool:
    """Tell whether a run of the whole suite knew which tests an acceptance needs."""
    return any(source.is_whole and source.journal.has_manifest for source in sources)


def _remarks(sources: Sequence[Source]) -> list[str]:
    """Return in what the runs were less, or other, than the whole suite with the shipped limits."""
    said: list[str] = []
    for source in sources:
        workload = source.journal.workload
        if workload is not None:
            said += WorkloadRecord(
                profile=workload.profile, file=workload.file, values=workload.values, origins=workload.origins
            ).remarks
        for option, remark in (("sku", "judged as {} (--gpucluster-sku)"), ("thresholds", "limits overlaid by {}")):
            value = _option(source, option)
            if value:
                said.append(remark.format(value))
    baselines = [_option(source, "baseline") for source in sources]
    if any(baselines):
        held = ", ".join(dict.fromkeys(filter(None, baselines)))
        said.append(f"{sum(map(bool, baselines))} of {len(sources)} were held against a baseline ({held})")
    return list(dict.fromkeys(said))


def _option(source: Source, name: str) -> str:
    """Return what an option was set to; empty where it was not."""
    value, _ = source.journal.run.options.get(name, ("None", ""))
    return "" if value == "None" else value


def _ending(sources: Sequence[Source], tried: Mapping[str, Sequence[Attempt]]) -> tuple[int, str] | None:
    """Return what ends the merged run before its time: hardware that was rejected outside of any test, or a run that
    broke, and that no later one answers."""
    for source in sources:
        journal = source.journal
        failed = next((problem for problem in journal.problems if problem.outcome == "failed"), None)
        if failed is not None:
            return 1, first_line(f"{source.told}: {failed.message}")
        if journal.verdict == "REJECTED" and not any(result.outcome == "failed" for result in journal.results):
            return 1, first_line(f"{source.told}: {journal.reason}")
    unanswered = _unanswered(sources)
    if unanswered:
        last = unanswered[-1]
        return 11, first_line(f"{last.told} broke, and no later run has come to its end: {last.journal.reason}")
    return None


def _result(lines: Sequence[Mapping[str, Any]]) -> verdict.TestResult:
    """Return a test as the verdict sees it, read as every reader of the merged journal will read it."""
    builder = JournalBuilder(keep_samples=False)
    builder.add({"type": "run", "schema_version": SCHEMA_VERSION})
    for line in lines:
        builder.add(line)
    return builder.journal().results[0].for_verdict


def _required(sources: Sequence[Source]) -> list[str]:
    """Return the criteria that any of the runs demanded."""
    return list(dict.fromkeys(name for source in sources for name in source.journal.run.required))
