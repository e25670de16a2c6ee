"""What became of one run of a sweep: a node alone, or the survivors together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.journal.verdict import (
    ACCEPTED,
    BROKEN,
    INCOMPLETE,
    PASSED_WITH_DEVIATIONS,
    REHEARSED,
    REJECTED,
    SELECTION_PASSED,
)
from pytest_gpucluster.sweep.answer import Answer
from pytest_gpucluster.text import one_line

NO_ANSWER = "NO ANSWER"
"""Nobody knows: the run left no journal, or did not end in time. Never a pass."""
PASSES = (ACCEPTED, SELECTION_PASSED, REHEARSED)
_NOTHING_FAILED = ((INCOMPLETE, 10), (PASSED_WITH_DEVIATIONS, 12))
BROKE = 11
_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run's launcher ended, as its scheduler tells. ``seconds`` are None where it never started."""

    exit: int | None
    """None where it did not end by itself."""
    seconds: float | None
    stopped: str = ""
    """Why it was ended from outside: its deadline, or that the scheduler took its place; empty where it was not."""
    log: str = ""
    """Where its output lies."""
    hint: str = ""
    """What else is known where there is no answer, such as the last words of its output."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict of one run: of a node, or of all survivors together."""

    node: str
    verdict: str
    exit: int
    failure: str
    """The first failing criterion with its message, or why there is no pass, in one line; empty for a pass."""
    seconds: float | None
    journal: str = ""
    log: str = ""

    @property
    def passed(self) -> bool:
        """Whether everything passed."""
        return self.exit == 0 and self.verdict in PASSES

    @property
    def survived(self) -> bool:
        """Whether nothing failed: it goes on to the next stage. INCOMPLETE survives, and is no pass in the end."""
        return self.passed or (self.verdict, self.exit) in _NOTHING_FAILED

    def to_json(self) -> Mapping[str, Any]:
        """Return plain JSON types."""
        return {
            "node": self.node,
            "verdict": self.verdict,
            "exit": self.exit,
            "failure": self.failure,
            "seconds": self.seconds,
            "journal": self.journal,
            "log": self.log,
        }


def worse(one: Outcome, other: Outcome) -> Outcome:
    """Return the worse of two outcomes of one node: a rejection, then no verdict, then an incomplete one."""
    return max(one, other, key=lambda outcome: (outcome.verdict == REJECTED, not outcome.survived, not outcome.passed))


def outcome_of(node: str, answer: Answer | None, ended: Ended, *, nnodes: int, world_size: int) -> Outcome:
    """Return what became of a run, from what its journal answers and how its launcher ended.

    A failure counts however the launcher ended. A pass counts only if the launcher says so too, and if the run was of
    as many nodes and ranks as were launched.
    """
    verdict, code, failure = _judged(answer, ended, nnodes=nnodes, world_size=world_size)
    return Outcome(
        node=node,
        verdict=verdict,
        exit=code,
        failure=one_line(failure, _CHARACTERS),
        seconds=ended.seconds,
        journal=answer.journal if answer is not None else "",
        log=ended.log,
    )


def _judged(answer: Answer | None, ended: Ended, *, nnodes: int, world_size: int) -> tuple[str, int, str]:
    if answer is None:
        why = ended.stopped or (
            "its launcher did not end" if ended.exit is None else f"ended with exit code {ended.exit} and no journal"
        )
        return NO_ANSWER, BROKE, f"{why}: {ended.hint}" if ended.hint else why
    if answer.verdict == REJECTED or answer.exit == 1:
        return REJECTED, 1, answer.failure or answer.reason
    if ended.stopped:
        seen = "" if answer.ended else f"; {answer.reason}"
        return NO_ANSWER, BROKE, f"{ended.stopped}{seen}"
    if not answer.ended:
        return NO_ANSWER, BROKE, f"its journal has no end: {answer.failure or answer.reason}"
    if (answer.nnodes, answer.world_size) != (nnodes, world_size):
        found = f"{answer.world_size} ranks on {answer.nnodes} nodes"
        return BROKEN, BROKE, f"its journal is of {found}, but {world_size} on {nnodes} were launched"
    if answer.verdict in PASSES and answer.exit == 0:
        if ended.exit == 0:
            return answer.verdict, 0, ""
        how = "did not end" if ended.exit is None else f"ended with exit code {ended.exit}"
        return BROKEN, BROKE, f"its journal says {answer.verdict}, but its launcher {how}"
    if (answer.verdict, answer.exit) in _NOTHING_FAILED:
        return answer.verdict, answer.exit, answer.failure or answer.reason
    return BROKEN, answer.exit if answer.exit in (2, 3, 4, 5) else BROKE, answer.failure or answer.reason
