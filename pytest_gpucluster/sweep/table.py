"""A sweep in text: a line as each node ends, and the table at the end. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpucluster.journal.verdict import Verdict
from pytest_gpucluster.sweep.outcome import Outcome
from pytest_gpucluster.sweep.scheduler import TOGETHER
from pytest_gpucluster.text import one_line

_CHARACTERS = 160


def progress_line(ended: int, of: int, outcome: Outcome) -> str:
    """Return what is shown as a node ends.

    >>> progress_line(3, 64, Outcome(node="gpu-7", verdict="REJECTED", exit=1, failure="hbm: slow", seconds=61.2))
    '[ 3/64] gpu-7: REJECTED after 61 s: hbm: slow'
    """
    failure = f": {outcome.failure}" if outcome.failure else ""
    after = f" after {outcome.seconds:.0f} s" if outcome.seconds is not None else ""
    text = f"{outcome.node}: {outcome.verdict}{after}{failure}"
    return one_line(f"[{ended:{len(str(of))}d}/{of}] {text}", 2 * _CHARACTERS)


def table(nodes: Sequence[str], alone: Sequence[Outcome], together: Outcome | None, why_not: str = "") -> str:
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
    return one_line(f"{verdict.word}, exit code {verdict.exit}: {verdict.reason}", 4 * _CHARACTERS)


def _row(node: str, outcome: Outcome | None, why_not: str) -> tuple[str, str, str, str]:
    if outcome is None:
        return node, "not run", "-", one_line(why_not, _CHARACTERS)
    seconds = "-" if outcome.seconds is None else f"{outcome.seconds:.0f}"
    return node, outcome.verdict, seconds, one_line(outcome.failure, _CHARACTERS)
