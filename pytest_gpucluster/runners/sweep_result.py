"""The results of a sweep: of each run, its one verdict, its text, and its files; and what a sweep needs of a scheduler.

A run's journal is reduced to a few plain values, short enough for a container's termination message. The verdict comes
from the outcome of every node alone and of the survivors together. The text is a line as each node ends, and the table
at the end. On disk, in the sweep's own folder: ``sweep.json``, ``sweep.txt`` and ``exclude.txt``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.isolation.finding import node_sections
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal, read
from pytest_gpucluster.journal.verdict import (
    ACCEPTED,
    BROKEN,
    INCOMPLETE,
    PASSED_WITH_DEVIATIONS,
    REHEARSED,
    REJECTED,
    SELECTION_PASSED,
    Verdict,
)
from pytest_gpucluster.text import one_line

ANSWER_SCHEMA_VERSION = 1
MOST_BYTES = 4096
"""Of a termination message. Source:
https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/."""
_REASON_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The verdict of one run, and what failed first.

    ``ended`` is False where nobody closed the journal: then ``verdict`` and ``exit`` are what that means.
    """

    verdict: str
    exit: int
    reason: str
    failure: str = ""
    """What failed first: a criterion, or else what went wrong outside of tests, with its one-line message."""
    ended: bool
    rehearsal: bool
    nnodes: int
    world_size: int
    run_id: str = ""
    journal: str = ""
    """Where the journal lies, on the machine that has read it."""

    @classmethod
    def of(cls, journal: Journal, where: str) -> Answer:
        """Return what a journal says."""
        return cls(
            verdict=journal.verdict,
            exit=journal.exit,
            reason=one_line(journal.reason, _REASON_CHARACTERS),
            failure=one_line(_first_failure(journal), _REASON_CHARACTERS),
            ended=journal.end is not None,
            rehearsal=journal.run.rehearsal,
            nnodes=journal.run.nnodes,
            world_size=journal.run.world_size,
            run_id=one_line(journal.run.run_id, _REASON_CHARACTERS),
            journal=where,
        )

    def to_json(self) -> str:
        """Return one line of JSON of at most ``MOST_BYTES`` bytes; texts are cut where it would be more."""
        plain: dict[str, Any] = {"schema_version": ANSWER_SCHEMA_VERSION, **asdict(self)}
        for characters in (
            _REASON_CHARACTERS,
            _REASON_CHARACTERS // 2,
            _REASON_CHARACTERS // 4,
            _REASON_CHARACTERS // 16,
        ):
            # Escapes of JSON are up to twelve bytes for a character.
            text = json.dumps({name: _cut(value, characters) for name, value in plain.items()})
            if len(text) <= MOST_BYTES:
                break
        return text

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """Read what :meth:`to_json` has written.

        Raises:
            JournalError: it is something else, or of a newer version.
        """
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            raise JournalError(f"no answer of `gpucluster verdict`: {one_line(text, 80)!r}") from None
        if not isinstance(read, dict) or read.pop("schema_version", None) != ANSWER_SCHEMA_VERSION:
            raise JournalError(f"no answer of this version's `gpucluster verdict`: {one_line(text, 80)!r}")
        wrong = sorted(name for name, kind in _KINDS.items() if type(read.get(name)) is not kind)
        if wrong:
            raise JournalError(f"an answer of `gpucluster verdict` with no or a wrong {', '.join(wrong)}")
        return cls(**{name: read[name] for name in _KINDS})


_KINDS: Mapping[str, type[Any]] = {
    "verdict": str,
    "exit": int,
    "reason": str,
    "failure": str,
    "ended": bool,
    "rehearsal": bool,
    "nnodes": int,
    "world_size": int,
    "run_id": str,
    "journal": str,
}


def answer_in(folder: Path) -> tuple[Answer | None, str]:
    """Return what the journal of the one run in a report directory answers; or None, and why."""
    journals = sorted(path for path in folder.glob(f"*/{JOURNAL_FILE}") if path.parent.name != "latest")
    if len(journals) != 1:
        runs = f"{len(journals)} runs in {folder}, where one was started" if journals else ""
        return None, runs
    try:
        return Answer.of(read(journals[0], keep_samples=False), str(journals[0])), ""
    except JournalError as error:
        return None, str(error)


def _cut(value: Any, characters: int) -> Any:
    return one_line(value, characters) if isinstance(value, str) else value


def _first_failure(journal: Journal) -> str:
    """Return what failed first: a failure before an error, for it is what rejects the hardware."""
    for outcome in ("failed", "error"):
        for result in journal.results:
            if result.outcome == outcome:
                return f"{result.criterion or result.nodeid}: {result.message}"
        for problem in journal.problems:
            if problem.outcome == outcome:
                return f"{problem.name}: {problem.message}"
    return "" if journal.exit == 0 or journal.is_live else journal.reason


NO_ANSWER = "NO ANSWER"
"""Nobody knows: the run left no journal, or did not end in time. Never a pass."""
PASSES = (ACCEPTED, SELECTION_PASSED, REHEARSED)
_NOTHING_FAILED = ((INCOMPLETE, 10), (PASSED_WITH_DEVIATIONS, 12))
BROKE = 11
_FAILURE_CHARACTERS = 300


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
        failure=one_line(failure, _FAILURE_CHARACTERS),
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


TOGETHER = "together"
"""What the joint run is called where a node's name would stand."""


class Scheduler(Protocol):
    """Starts the runs of a sweep, and ends them. Every wait in it has a deadline."""

    def alone(self, nodes: Sequence[str]) -> Iterator[Outcome]:
        """Run every node for itself, and yield what became of each as it ends.

        Where a scheduler puts a second run on a node, that node comes again: the worse outcome counts.
        """

    def together(self, nodes: Sequence[str]) -> Outcome:
        """Run these nodes as one cluster. The outcome's node is ``TOGETHER``."""

    def stop(self) -> Sequence[str]:
        """End whatever was started and still runs. Return what could not be ended, a line each; never raise."""


_NAMED = 8


def conclude(
    nodes: Sequence[str],
    alone: Sequence[Outcome],
    together: Outcome | None,
    *,
    why_not_together: str = "",
    interrupted: str = "",
    broke: str = "",
) -> Verdict:
    """Return the verdict of a sweep.

    Accepted (0) takes that every node has passed alone and that all survivors have passed together. A node or a joint
    run that is rejected makes the whole rejected (1). Else what broke or gave no answer makes it broken (11), and
    what is incomplete, or did not run together, incomplete (10).

    Args:
        nodes: all nodes of the sweep. One without an outcome has given no answer.
        alone: what became of them, each once.
        together: what became of the survivors; None where they did not run.
        why_not_together: why they did not.
        interrupted: by what the sweep was interrupted, if it was.
        broke: what went wrong with the sweep itself, if something did.
    """
    if interrupted:
        return Verdict(
            word=BROKEN, exit=2, reason=f"interrupted by {interrupted}: {len(alone)} of {len(nodes)} nodes ended"
        )
    told = {outcome.node: outcome for outcome in alone}
    everything = [*(told[node] for node in nodes if node in told), *([together] if together else [])]
    missing = [node for node in nodes if node not in told]
    rejected = [outcome for outcome in everything if outcome.verdict == REJECTED or outcome.exit == 1]
    if rejected:
        return Verdict(word=REJECTED, exit=1, reason=_reason("rejected", rejected))
    broken = [outcome for outcome in everything if not outcome.survived]
    if broke or broken or missing:
        reasons = [broke] if broke else []
        reasons += [_reason("without a verdict", broken)] if broken else []
        reasons += [f"{NO_ANSWER}: {_named(missing)}"] if missing else []
        return Verdict(word=BROKEN, exit=BROKE, reason="; ".join(reasons))
    deviating = [outcome for outcome in everything if outcome.exit == 12]
    incomplete = [outcome for outcome in everything if not outcome.passed and outcome.exit != 12]
    if incomplete or together is None:
        reasons = [_reason("incomplete", incomplete)] if incomplete else []
        reasons += [] if together else [f"not run together: {why_not_together or 'nobody said why'}"]
        return Verdict(word=INCOMPLETE, exit=10, reason="; ".join(reasons))
    if deviating:
        return Verdict(word=PASSED_WITH_DEVIATIONS, exit=12, reason=_reason("with deviations", deviating))
    words = {outcome.verdict for outcome in everything}
    # The weakest pass is the sweep's: a rehearsal accepts nothing.
    word = next(word for word in (REHEARSED, SELECTION_PASSED, ACCEPTED) if word in words and word in PASSES)
    return Verdict(word=word, exit=0, reason=f"{len(nodes)} nodes passed alone, and together")


def _reason(what: str, outcomes: Sequence[Outcome]) -> str:
    return f"{what}: {_named([outcome.node for outcome in outcomes])}; {outcomes[0].node}: {outcomes[0].failure}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


_ROW_CHARACTERS = 160


def progress_line(ended: int, of: int, outcome: Outcome) -> str:
    """Return what is shown as a node ends.

    >>> progress_line(3, 64, Outcome(node="gpu-7", verdict="REJECTED", exit=1, failure="hbm: slow", seconds=61.2))
    '[ 3/64] gpu-7: REJECTED after 61 s: hbm: slow'
    """
    failure = f": {outcome.failure}" if outcome.failure else ""
    after = f" after {outcome.seconds:.0f} s" if outcome.seconds is not None else ""
    text = f"{outcome.node}: {outcome.verdict}{after}{failure}"
    return one_line(f"[{ended:{len(str(of))}d}/{of}] {text}", 2 * _ROW_CHARACTERS)


def sweep_table(nodes: Sequence[str], alone: Sequence[Outcome], together: Outcome | None, why_not: str = "") -> str:
    """Return the table of all nodes in their order, and of the joint run: verdict, seconds, what failed first."""
    told = {outcome.node: outcome for outcome in alone}
    rows = [("node", "verdict", "seconds", "first failure")]
    rows += [_row(node, told.get(node), "the sweep ended before it") for node in nodes]
    rows.append(_row(TOGETHER, together, why_not or "the sweep ended before it"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows
    )


def verdict_line(verdict: Verdict) -> str:
    """Return the last line."""
    return one_line(f"{verdict.word}, exit code {verdict.exit}: {verdict.reason}", 4 * _ROW_CHARACTERS)


def _row(node: str, outcome: Outcome | None, why_not: str) -> tuple[str, str, str, str]:
    if outcome is None:
        return node, "not run", "-", one_line(why_not, _ROW_CHARACTERS)
    seconds = "-" if outcome.seconds is None else f"{outcome.seconds:.0f}"
    return node, outcome.verdict, seconds, one_line(outcome.failure, _ROW_CHARACTERS)


EVIDENCE_SCHEMA_VERSION = 1


class Evidence:
    """The folder of one sweep. ``sweep.json`` is true at every moment, also if the sweep ends right then."""

    def __init__(self, directory: Path, *, scheduler: str, command: Sequence[str], nodes: Sequence[str]) -> None:
        self.directory = directory
        self._head = {"scheduler": scheduler, "command": list(command), "nodes": list(nodes)}
        self._nodes = tuple(nodes)

    def keep(
        self,
        verdict: Verdict,
        alone: Sequence[Outcome],
        together: Outcome | None,
        *,
        why_not_together: str = "",
        finished: bool = False,
    ) -> None:
        """Replace the files by what is known now.

        Raises:
            OSError: they cannot be written.
        """
        content = {
            "schema_version": EVIDENCE_SCHEMA_VERSION,
            **self._head,
            "finished": finished,
            "verdict": verdict.word,
            "exit": verdict.exit,
            "reason": verdict.reason,
            "alone": [outcome.to_json() for outcome in alone],
            "together": together.to_json() if together else None,
            "why_not_together": why_not_together,
        }
        text = f"{sweep_table(self._nodes, alone, together, why_not_together)}\n\n{verdict_line(verdict)}\n"
        excluded = exclude_text([outcome for outcome in alone if not outcome.survived])
        _replace(self.directory / "sweep.json", json.dumps(content, indent=1) + "\n")
        _replace(self.directory / "sweep.txt", text)
        if excluded:
            _replace(self.directory / "exclude.txt", excluded)


def exclude_text(failed: Sequence[Outcome]) -> str:
    """Return exclude.txt of the nodes that did not get through alone, each with why; an empty text where all did."""
    if not failed:
        return ""
    lines = ["# Nodes to leave out of the next jobs. Each did not pass alone, so no other node can be the cause."]
    lines += [f"# {outcome.node}: {one_line(f'{outcome.verdict}: {outcome.failure}', 200)}" for outcome in failed]
    return "\n".join([*lines, *node_sections([outcome.node for outcome in failed])]) + "\n"


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it is there only if it could not take the other's place
            beside.unlink(missing_ok=True)
