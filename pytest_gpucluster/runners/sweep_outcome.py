"""The outcome of each run of a sweep, its verdict, the table, and ``sweep.json``, ``sweep.txt`` and ``exclude.txt``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.files import atomic_write
from pytest_gpucluster.isolation.finding import EXCLUDE_FILE, exclude_text
from pytest_gpucluster.journal.records import SIMULATED
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
from pytest_gpucluster.runners.run_result import RunResult
from pytest_gpucluster.text import fitted_table, heads, one_line, some_of

NO_ANSWER = "NO ANSWER"
"""The run left no journal, or did not end in time. Never a pass."""
PASSES = (ACCEPTED, SELECTION_PASSED, REHEARSED, SIMULATED)
_NOTHING_FAILED = ((INCOMPLETE, 10), (PASSED_WITH_DEVIATIONS, 12))
BROKEN_EXIT = 11
JOINT = "together"
"""Name of the joint run where a node's name would be."""
_FAILURE_CHARACTERS, _ROW_CHARACTERS, _WIDTH = 300, 160, 1000
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LauncherExit:
    """How a run's launcher ended, as its scheduler reports. ``seconds`` is None if it never started."""

    exit: int | None
    """None if it did not end by itself."""
    seconds: float | None
    stop_reason: str = ""
    """Why it was ended from outside, such as its deadline or a preemption; empty if it was not."""
    log: str = ""
    """Path of its output."""
    hint: str = ""
    """More about a run without a journal, such as the last line of its output."""


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
        """Whether nothing failed, so that it takes part in the joint run. INCOMPLETE does, but is no pass."""
        return self.passed or (self.verdict, self.exit) in _NOTHING_FAILED


def worse(one: Outcome, other: Outcome) -> Outcome:
    """Return the worse of two outcomes of one node: a rejection, then no verdict, then an incomplete one."""
    return max(one, other, key=lambda outcome: (outcome.verdict == REJECTED, not outcome.survived, not outcome.passed))


def judge_run(
    node: str,
    result: RunResult | None,
    launcher: LauncherExit,
    problem: str = "",
    *,
    nnodes: int,
    world_size: int | None = None,
) -> Outcome:
    """Return the outcome of a run from its journal, or why there is none, and from how its launcher ended.

    A failure counts however the launcher ended. A pass counts only if the launcher ended with 0, and if the run was of
    as many nodes and ranks as were launched; ``world_size`` is None where that is unknown.
    """

    def ended(verdict: str, code: int, failure: str) -> Outcome:
        return Outcome(
            node=node,
            verdict=verdict,
            exit=code,
            failure=one_line(failure, _FAILURE_CHARACTERS),
            seconds=launcher.seconds,
            journal=result.journal if result is not None else "",
            log=launcher.log,
        )

    how = "did not end" if launcher.exit is None else f"ended with exit code {launcher.exit}"
    if result is None:
        why = launcher.stop_reason or (f"its launcher {how}" if launcher.exit is None else f"{how} and no journal")
        hint = problem or launcher.hint
        return ended(NO_ANSWER, BROKEN_EXIT, f"{why}: {hint}" if hint else why)
    failure = result.failure or result.reason
    if result.verdict == REJECTED or result.exit == 1:
        return ended(REJECTED, 1, failure)
    if launcher.stop_reason:
        return ended(NO_ANSWER, BROKEN_EXIT, f"{launcher.stop_reason}{'' if result.ended else f'; {result.reason}'}")
    if not result.ended:
        return ended(NO_ANSWER, BROKEN_EXIT, f"its journal has no end: {failure}")
    if result.nnodes != nnodes or world_size not in (None, result.world_size):
        found, launched = f"{result.world_size} ranks on {result.nnodes} nodes", f"{world_size or 'ranks'} on {nnodes}"
        return ended(BROKEN, BROKEN_EXIT, f"its journal is of {found}, but {launched} were launched")
    if result.verdict in PASSES and result.exit == 0:
        if launcher.exit == 0:
            return ended(result.verdict, 0, "")
        hint = f": {launcher.hint}" if launcher.hint else ""
        return ended(BROKEN, BROKEN_EXIT, f"its journal states {result.verdict}, but its launcher {how}{hint}")
    if (result.verdict, result.exit) in _NOTHING_FAILED:
        return ended(result.verdict, result.exit, failure)
    return ended(BROKEN, result.exit if result.exit in (2, 3, 4, 5) else BROKEN_EXIT, failure)


def conclude(
    nodes: Sequence[str],
    outcomes: Sequence[Outcome],
    joint: Outcome | None,
    *,
    skipped: str = "",
    interrupted: str = "",
    broken: str = "",
) -> Verdict:
    """Return the verdict of a sweep.

    Accepted (0): every node passed on its own, and all survivors passed together. A rejected node or joint run makes
    it rejected (1). Else anything broken or without an answer makes it broken (11), and anything incomplete, or no
    joint run, incomplete (10).

    Args:
        nodes: all nodes of the sweep. One without an outcome has given no answer.
        outcomes: of the nodes, each once.
        joint: of the joint run; None if there was none.
        skipped: why not.
        interrupted: what interrupted the sweep, if anything.
        broken: what went wrong with the sweep itself, if anything.
    """
    if interrupted:
        reason = f"interrupted by {interrupted}: {len(outcomes)} of {len(nodes)} nodes ended"
        return Verdict(word=BROKEN, exit=2, reason=reason)
    by_node = {outcome.node: outcome for outcome in outcomes}
    everything = [*(by_node[node] for node in nodes if node in by_node), *([joint] if joint else [])]
    missing = [node for node in nodes if node not in by_node]
    rejected = [outcome for outcome in everything if outcome.verdict == REJECTED or outcome.exit == 1]
    if rejected:
        return Verdict(word=REJECTED, exit=1, reason=_reason("rejected", rejected))
    failed = [outcome for outcome in everything if not outcome.survived]
    if broken or failed or missing:
        reasons = [broken] if broken else []
        reasons += [_reason("without a verdict", failed)] if failed else []
        reasons += [f"{NO_ANSWER}: {some_of(missing, 8)}"] if missing else []
        return Verdict(word=BROKEN, exit=BROKEN_EXIT, reason="; ".join(reasons))
    deviating = [outcome for outcome in everything if outcome.exit == 12]
    incomplete = [outcome for outcome in everything if not outcome.passed and outcome.exit != 12]
    if incomplete or joint is None:
        reasons = [_reason("incomplete", incomplete)] if incomplete else []
        reasons += [] if joint else [f"no joint run: {skipped or 'reason unknown'}"]
        return Verdict(word=INCOMPLETE, exit=10, reason="; ".join(reasons))
    if deviating:
        return Verdict(word=PASSED_WITH_DEVIATIONS, exit=12, reason=_reason("with deviations", deviating))
    words = {outcome.verdict for outcome in everything}
    # The weakest pass is the sweep's: neither a simulated cluster nor a rehearsal accepts anything.
    word = next(word for word in (SIMULATED, REHEARSED, SELECTION_PASSED, *PASSES) if word in words)
    return Verdict(word=word, exit=0, reason=f"{len(nodes)} nodes passed alone, and together")


def _reason(what: str, outcomes: Sequence[Outcome]) -> str:
    return f"{what}: {some_of([outcome.node for outcome in outcomes], 8)}; {outcomes[0].node}: {outcomes[0].failure}"


def progress_line(ended: int, total: int, outcome: Outcome) -> str:
    """Return the line that is printed when a node ends.

    >>> progress_line(3, 64, Outcome(node="gpu-7", verdict="REJECTED", exit=1, failure="hbm: slow", seconds=61.2))
    '[ 3/64] gpu-7: REJECTED after 61 s: hbm: slow'
    """
    failure = f": {outcome.failure}" if outcome.failure else ""
    after = f" after {outcome.seconds:.0f} s" if outcome.seconds is not None else ""
    text = f"{outcome.node}: {outcome.verdict}{after}{failure}"
    return one_line(f"[{ended:{len(str(total))}d}/{total}] {text}", 2 * _ROW_CHARACTERS)


def sweep_table(nodes: Sequence[str], outcomes: Sequence[Outcome], joint: Outcome | None, skipped: str = "") -> str:
    """Return the table of all nodes in their order, and of the joint run: verdict, seconds, first failure."""
    by_node = {**{outcome.node: outcome for outcome in outcomes}, JOINT: joint}
    rows = []
    for node in (*nodes, JOINT):
        outcome = by_node.get(node)
        if outcome is None:
            why = skipped if node == JOINT and skipped else "the sweep ended before it"
            rows.append([node, "not run", "-", one_line(why, _ROW_CHARACTERS)])
        else:
            seconds = "-" if outcome.seconds is None else f"{outcome.seconds:.0f}"
            rows.append([node, outcome.verdict, seconds, one_line(outcome.failure, _ROW_CHARACTERS)])
    titles = heads("node, verdict, seconds, first failure", right="seconds")
    head, lines = fitted_table(titles, rows, _WIDTH)
    return "\n".join([head, *(line for [line] in lines)])


def verdict_line(verdict: Verdict) -> str:
    """Return the last line."""
    return one_line(f"{verdict.word}, exit code {verdict.exit}: {verdict.reason}", 4 * _ROW_CHARACTERS)


class SweepFiles:
    """The folder of one sweep. ``sweep.json`` is valid at every moment, also if the sweep ends right then."""

    def __init__(self, directory: Path, *, scheduler: str, command: Sequence[str], nodes: Sequence[str]) -> None:
        self.directory = directory
        self._head = {"scheduler": scheduler, "command": list(command), "nodes": list(nodes)}
        self._nodes = tuple(nodes)

    def write(
        self,
        verdict: Verdict,
        outcomes: Sequence[Outcome],
        joint: Outcome | None,
        *,
        skipped: str = "",
        finished: bool = False,
    ) -> None:
        """Replace the files.

        Raises:
            OSError: they cannot be written.
        """
        content: Mapping[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            **self._head,
            "finished": finished,
            "verdict": verdict.word,
            "exit": verdict.exit,
            "reason": verdict.reason,
            "alone": [asdict(outcome) for outcome in outcomes],
            "together": asdict(joint) if joint else None,
            "why_not_together": skipped,
        }
        text = f"{sweep_table(self._nodes, outcomes, joint, skipped)}\n\n{verdict_line(verdict)}\n"
        failed = {each.node: f"{each.verdict}: {each.failure}" for each in outcomes if not each.survived}
        atomic_write(self.directory / "sweep.json", json.dumps(content, indent=1) + "\n")
        atomic_write(self.directory / "sweep.txt", text)
        if failed:
            atomic_write(self.directory / EXCLUDE_FILE, exclude_text(None, host=str, failed=failed))
