"""All attempts at each test, in the order of their runs, and which of them is its result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.journal_lines import TestResult
from pytest_gpucluster.merging.source import Line, Source
from pytest_gpucluster.text import first_line

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
