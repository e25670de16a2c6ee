"""Merge journals into one: all attempts at each test, the one that is its result, and the verdict."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any

from pytest_gpucluster.analysis.merge_sources import Line, Source, changes, differences, renumber, slot
from pytest_gpucluster.analysis.output import fields_of
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.journal.journal import SCHEMA_VERSION, JournalBuilder
from pytest_gpucluster.journal.records import OUTCOMES, TestResult, failed_before
from pytest_gpucluster.journal.verdict import Verdict
from pytest_gpucluster.text import first_line, one_line

BY = "gpucluster runs merge"
_ATTEMPT = re.compile(r"attempt \d+")
_DIFFERENCE = 400


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One run's attempt at a test: its result, and the journal's lines of it."""

    source: Source
    result: TestResult
    lines: Sequence[Line]

    @property
    def failed_tries(self) -> int:
        """Return the number of tries of that run that did not pass."""
        result = self.result
        return 0 if result.outcome == "skipped" else result.attempts - (result.outcome == "passed")


def attempts_at(nodeid: str, sources: Sequence[Source]) -> list[Attempt]:
    """Return every attempt at a test, in the order of the runs. A test in which a run ended counts as an error."""
    found = []
    for source in sources:
        journal = source.journal
        result = next((result for result in journal.results if result.nodeid == nodeid), None)
        if journal.running is not None and journal.running.nodeid == nodeid:
            message = first_line(f"the run ended here: {journal.reason}")
            result = TestResult(nodeid=nodeid, outcome="error", phase="call", message=message)
            collected = next((asdict(test) for test in journal.collected or () if test.nodeid == nodeid), {})
            about = {"outcome": "error", "phase": "call", "message": message, "text": message}
            about |= {"started_at": journal.running.at}
            line = {"type": "test", "nodeid": nodeid, **collected, **about}
            found.append(Attempt(source=source, result=result, lines=[line]))
        elif result is not None:
            found.append(Attempt(source=source, result=result, lines=source.of_type("test", nodeid)))
    return found


def decisive_attempt(attempts: Sequence[Attempt]) -> Attempt:
    """Return the attempt that is the result: the newest one that is conclusive.

    A skip does not replace an earlier result. An error does not replace a failure: only a pass or another failure does.
    """
    decides = attempts[0]
    for attempt in attempts[1:]:
        was, is_now = decides.result.outcome, attempt.result.outcome
        if (is_now == "skipped" and was != "skipped") or (is_now == "error" and was == "failed"):
            continue
        decides = attempt
    return decides


def lines_of(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Return the lines of a test for the merged journal: those of the decisive attempt, with the results of all
    attempts in their properties."""
    decides = decisive_attempt(attempts)
    failed_tries = sum(attempt.failed_tries for attempt in attempts if attempt is not decides)
    texts = _attempt_texts(attempts, decides)
    return [
        {
            **line,
            "attempts": int(line.get("attempts") or 1) + failed_tries,
            "properties": [
                *([f"attempt {number}", text] for number, text in enumerate(texts, start=1)),
                *(pair for pair in line.get("properties") or [] if not _ATTEMPT.fullmatch(str(pair[0]))),
            ],
        }
        for line in decides.lines
    ]


def _attempt_texts(attempts: Sequence[Attempt], decides: Attempt) -> list[str]:
    """Return the result of each try as a text; empty where there was only one."""
    texts: list[str] = []
    for attempt in attempts:
        title, result = attempt.source.journal.run.title, attempt.result
        texts += [f"{title}: {text}" for name, text in result.properties if _ATTEMPT.fullmatch(name)]
        counts, message = ", which counts" * (attempt is decides), f": {result.message}" if result.message else ""
        texts.append(f"{title}{counts}: {result.outcome}{message}")
    return [first_line(text, 400) for text in texts] if len(texts) > 1 else []


def merge_journals(sources: Sequence[Source]) -> MergedJournal:
    """Merge runs of one cluster into one: the newest conclusive result of each test, and one verdict.

    Args:
        sources: two or more, in the order in which they ran.

    Raises:
        OptionError: one run is given twice, their clocks contradict their order, or they must not have one verdict;
            it lists the differences.
    """
    for earlier, later in combinations(sources, 2):
        one, other = earlier.journal.run, later.journal.run
        same = (one.run_id, one.started_at, one.hostname) == (other.run_id, other.started_at, other.hostname)
        if same or earlier.sha256 == later.sha256:
            raise OptionError(f"{earlier.path} and {later.path} are the same run; give each run once")
    for earlier, later in pairwise(sources):
        if earlier.began > later.began:
            one, other = earlier.journal.run, later.journal.run
            raise OptionError(
                f"{earlier.path} is named before {later.path}, but {other.title} began before {one.title}: name the "
                "runs in the order in which they ran. If that is their order, a clock went back between them"
            )
    found = [f"  {one_line(difference, _DIFFERENCE)}" for difference in differences(sources)]
    if found:
        raise OptionError(
            "\n".join(["these runs are not of one cluster and one set of limits:", *found])
            + "\nsuch runs have no common verdict; merge those that are alike"
        )
    return MergedJournal(sources=sources)


@dataclass(frozen=True, kw_only=True)
class MergedJournal:
    """Runs that may be merged, in their order: the lines of their merged journal, and its verdict."""

    sources: Sequence[Source]

    @cached_property
    def ranks(self) -> Sequence[Line]:
        """The ranks of the last run that has recorded any. Their numbers are those of the merged journal."""
        return next((source.ranks for source in reversed(self.sources) if source.ranks), ())

    def _numbers(self, source: Source) -> dict[int, int]:
        """Return rank of a run -> its number in the merged journal, where that is another."""
        numbers = {slot(rank): int(rank["rank"]) for rank in self.ranks}
        found = {int(rank["rank"]): numbers[slot(rank)] for rank in source.ranks}
        return {} if all(old == new for old, new in found.items()) else found

    @cached_property
    def attempts(self) -> dict[str, list[Attempt]]:
        """Attempts at each test that a run has started."""
        nodeids = (nodeid for source in self.sources for nodeid in source.nodeids)
        found = {nodeid: attempts_at(nodeid, self.sources) for nodeid in dict.fromkeys(nodeids)}
        return {nodeid: attempts for nodeid, attempts in found.items() if attempts}

    @property
    def unanswered(self) -> Sequence[Source]:
        """The broken runs after the last run that did not break."""
        last = max(
            (number for number, source in enumerate(self.sources) if source.journal.verdict != "BROKEN"), default=-1
        )
        return self.sources[last + 1 :]

    @cached_property
    def _without_end(self) -> JournalBuilder:
        builder = JournalBuilder(keep_samples=False)
        for line in self._lines():
            builder.add(line)
        return builder

    @cached_property
    def verdict(self) -> Verdict:
        first, *_, last = (source.journal.run.started_at for source in self.sources)
        topology = f"merged from {len(self.sources)} runs, {first} to {last}, in the order that their clocks confirm"
        topology = "; ".join([topology, *self._remarks(), *map(first_line, changes(self.sources))])
        return self._without_end.journal().recompute_verdict(topology=topology, abort=self._abort())

    def lines(self) -> Iterator[Line]:
        """Yield the lines of the merged journal."""
        yield from self._lines()
        journal = self._without_end.journal()
        counts = Counter(result.outcome for result in journal.results)
        ends = (source.journal.end.at for source in self.sources if source.journal.end is not None)
        yield {
            "type": "end",
            "at": max(ends, default=""),
            "verdict": self.verdict.word,
            "exit": self.verdict.exit,
            "reason": self.verdict.reason,
            "counts": {kind: counts[kind] for kind in OUTCOMES},
            "not_run": [test.nodeid for test in journal.not_run],
            "by": BY,
        }

    def _lines(self) -> Iterator[Line]:
        yield from self._head()
        yield from ({"type": "property", **each} for each in self._properties())
        for source in self.sources:
            yield from source.of_type("property")
        for attempts in self.attempts.values():
            yield from self._of_test(attempts)
        # Faults outside tests that still count: those that reject hardware, and those of unanswered runs.
        for source in self.sources:
            for line in source.of_type("problem"):
                if line.get("outcome") == "failed" or source in self.unanswered:
                    yield line

    def _head(self) -> Iterator[Line]:
        """Yield the lines before the properties: those of the newest run that has them, and what was merged."""
        first = self.sources[-1].of_type("run")[0]
        digest = hashlib.sha256("".join(source.sha256 for source in self.sources).encode()).hexdigest()
        required = list(dict.fromkeys(name for source in self.sources for name in source.journal.run.required))
        demanded = {"require": {"value": ", ".join(required), "origin": BY}} if required else {}
        yield {
            **first,
            "schema_version": SCHEMA_VERSION,
            "run_id": f"merged-{digest[:12]}",
            "started_at": self.sources[0].journal.run.started_at,
            # No JUnit file of it has been written.
            "junit": {**(first.get("junit") or {}), "path": None},
            "selection": not any(source.is_whole for source in self.sources),
            "options": {**(first.get("options") or {}), **demanded},
            "merged_from": [
                {
                    "journal": str(source.path),
                    "sha256": source.sha256,
                    **fields_of(source.journal.run, "run_id", "started_at"),
                    **fields_of(source.journal, "verdict", "exit"),
                }
                for source in self.sources
            ],
        }
        if self.ranks:
            clusters = [source.journal.cluster for source in self.sources if source.journal.cluster is not None]
            problems = dict.fromkeys(problem for cluster in clusters for problem in cluster.problems)
            yield {"type": "cluster", "ranks": list(self.ranks), "problems": list(problems)}
        for kind in ("limits", "environment", "workload"):
            yield from [line for source in self.sources for line in source.of_type(kind)[-1:]][-1:]
        collected = {
            test["nodeid"]: test
            for source in self.sources
            for line in source.of_type("collected")[-1:]
            for test in line.get("tests") or []
        }
        has_manifest = any(source.is_whole and source.journal.has_manifest for source in self.sources)
        yield {"type": "collected", "tests": list(collected.values()), "manifest": has_manifest}
        yield from ({"type": "deviation", "text": text} for text in self._deviations())

    def _properties(self) -> Iterator[Line]:
        for number, source in enumerate(self.sources, start=1):
            journal = source.journal
            text = f"{journal.run.title}: {journal.verdict}, exit code {journal.exit}: {journal.reason}"
            yield {"name": f"merged run {number}", "value": first_line(text, 400)}
            yield {"name": f"merged run {number} sha256", "value": source.sha256}

    def _of_test(self, attempts: Sequence[Attempt]) -> Iterator[Line]:
        source = decisive_attempt(attempts).source
        numbers = self._numbers(source)
        for line in lines_of(attempts):
            if numbers:
                title = source.journal.run.title
                note = ["ranks", f"renumbered by GPU or slot; texts have the numbers of {title}"]
                line = renumber({**line, "properties": [*line["properties"], note]}, numbers)
            yield line

    def _deviations(self) -> list[str]:
        found = [text for source in self.sources for text in source.journal.deviations]
        for source in self.sources:
            again = [result for result in source.journal.results if failed_before(result.properties)]
            found += [f"{result.criterion or result.nodeid} failed, and passed when run again" for result in again]
        return list(dict.fromkeys(found))

    def _remarks(self) -> list[str]:
        remarks: list[str] = []
        for journal in (source.journal for source in self.sources):
            if journal.workload is not None:
                remarks += journal.workload.remarks
            for option, remark in (("sku", "judged as {} (--gpucluster-sku)"), ("thresholds", "limits overlaid by {}")):
                if value := journal.run.option(option):
                    remarks.append(remark.format(value))
        baselines = [value for source in self.sources if (value := source.journal.run.option("baseline"))]
        if baselines:
            names = ", ".join(dict.fromkeys(baselines))
            remarks.append(f"{len(baselines)} of {len(self.sources)} were compared with a baseline ({names})")
        return list(dict.fromkeys(remarks))

    def _abort(self) -> tuple[int, str] | None:
        """Return exit code and reason where the merged run cannot pass: hardware that was rejected outside any test, or
        a broken run without a later conclusive one."""
        for journal in (source.journal for source in self.sources):
            failed = next((problem for problem in journal.problems if problem.outcome == "failed"), None)
            if failed is not None:
                return 1, first_line(f"{journal.run.title}: {failed.message}")
            if journal.verdict == "REJECTED" and not any(result.outcome == "failed" for result in journal.results):
                return 1, first_line(f"{journal.run.title}: {journal.reason}")
        if self.unanswered:
            last = self.unanswered[-1].journal
            return 11, first_line(f"{last.run.title} broke, and no later run was conclusive: {last.reason}")
        return None
