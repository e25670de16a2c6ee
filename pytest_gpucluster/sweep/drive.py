"""The order of a sweep: every node alone, all at once; then the survivors together."""

from __future__ import annotations

from collections.abc import Callable

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.journal.verdict import Verdict
from pytest_gpucluster.sweep.conclusion import conclude
from pytest_gpucluster.sweep.evidence import Evidence
from pytest_gpucluster.sweep.outcome import Outcome, worse
from pytest_gpucluster.sweep.plan import Plan
from pytest_gpucluster.sweep.scheduler import Scheduler
from pytest_gpucluster.sweep.table import progress_line, table, verdict_line

_UNTOLD = "an end that nobody could record"


class Stopped(BaseException):
    """The sweep was told to end. It is no Exception: nothing on the way may take it for an error of a run."""


def sweep(plan: Plan, scheduler: Scheduler, evidence: Evidence, say: Callable[[str], None]) -> Verdict:
    """Carry out a sweep, and return its verdict.

    Whatever ends it, what was started is ended, and what is known by then is told and kept.

    Args:
        plan: what to do.
        scheduler: starts the runs.
        evidence: keeps what became of them, after each of them.
        say: shows a line to the operator.

    Raises:
        OSError: the evidence cannot be written. A verdict that nobody can read again is none.
    """
    known: dict[str, Outcome] = {}
    alone: list[Outcome] = []
    together: Outcome | None = None
    why_not = interrupted = broke = ""
    try:
        evidence.keep(conclude(plan.nodes, alone, None, interrupted=_UNTOLD), alone, None)
        try:
            for outcome in scheduler.alone(plan.nodes):
                node = outcome.node
                known[node] = worse(known[node], outcome) if node in known else outcome
                alone = list(known.values())
                say(progress_line(len(alone), len(plan.nodes), outcome))
                evidence.keep(conclude(plan.nodes, alone, None, interrupted=_UNTOLD), alone, None)
            survived = {outcome.node for outcome in alone if outcome.survived}
            survivors = [node for node in plan.nodes if node in survived]
            why_not = _why_not_together(plan, survivors)
            if why_not:
                say(f"the survivors do not run together: {why_not}")
            else:
                say(f"{len(survivors)} of {len(plan.nodes)} nodes run together now")
                together = scheduler.together(survivors)
                say(progress_line(1, 1, together))
        except (KeyboardInterrupt, Stopped) as error:
            interrupted = str(error) or "Ctrl-C"
        except EnvironmentBroken as error:
            broke = str(error)
    finally:
        for left in scheduler.stop():
            say(f"not ended: {left}")
    why_not = why_not or interrupted or broke
    verdict = conclude(plan.nodes, alone, together, why_not_together=why_not, interrupted=interrupted, broke=broke)
    evidence.keep(verdict, alone, together, why_not_together=why_not, finished=not interrupted)
    say(f"\n{table(plan.nodes, alone, together, why_not)}\n")
    say(verdict_line(verdict))
    return verdict


def _why_not_together(plan: Plan, survivors: list[str]) -> str:
    """Return why the survivors cannot run together; an empty text where they can."""
    if len(survivors) < plan.min_nodes:
        return f"{len(survivors)} of {len(plan.nodes)} nodes are left, and --min-nodes is {plan.min_nodes}"
    return ""
