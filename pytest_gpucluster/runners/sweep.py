"""A sweep: its plan, the command of each of its runs, and its order: every node alone, then the survivors together.

All nodes run alone at the same time. Schedulers' command-line tools are called with :func:`run_tool`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_gpucluster.agreement.preflight import Expectation
from pytest_gpucluster.errors import EnvironmentBroken, OptionError
from pytest_gpucluster.journal.verdict import Verdict
from pytest_gpucluster.runners.sweep_result import (
    Evidence,
    Outcome,
    Scheduler,
    conclude,
    progress_line,
    sweep_table,
    verdict_line,
    worse,
)
from pytest_gpucluster.text import one_line

LAUNCHER = "torch.distributed.run"
"""torchrun as a module: the python in front of it says which installation is meant."""
_OURS = {
    "--junitxml": "each run has its own file",
    "--junit-xml": "each run has its own file",
    "--gpucluster-report-dir": "each run has its own folder; name the sweep's with --report-dir",
    "--gpucluster-expect": "say before the -- what each node has: --expect 8xH100",
    "-n": "torchrun starts the ranks",
    "--numprocesses": "torchrun starts the ranks",
}
_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run on which nodes. Deadlines are in seconds, counted from the start of a node's run."""

    nodes: tuple[str, ...]
    each: Expectation
    """What one node has: ``nodes`` is 1."""
    pytest_arguments: tuple[str, ...]
    alone_within: float
    together_within: float
    at_once: int
    min_nodes: int
    """With fewer survivors they do not run together."""
    python: str
    port: int
    """Where the ranks of all survivors meet, on the first of them."""

    def world_size(self, nnodes: int) -> int:
        """Return the ranks on so many nodes."""
        return nnodes * self.each.gpus_per_node

    def command_alone(self) -> list[str]:
        """Return what runs on one node for itself. It ends with pytest's arguments, so that more may follow."""
        start = [self.python, "-m", LAUNCHER, "--standalone"]
        return [*start, f"--nproc-per-node={self.each.gpus_per_node}", *self._pytest(1)]

    def command_together(self, nnodes: int, master: str) -> list[str]:
        """Return what runs on each of so many nodes, but for ``--node-rank``, which comes first after ``LAUNCHER``.

        Node rank 0 must be on the master: the static rendezvous keeps the first rank, and so the reports, there.

        Source: https://docs.pytorch.org/docs/stable/elastic/run.html.
        """
        start = [self.python, "-m", LAUNCHER, f"--nnodes={nnodes}"]
        start += [f"--nproc-per-node={self.each.gpus_per_node}", f"--master-addr={master}"]
        return [*start, f"--master-port={self.port}", *self._pytest(nnodes)]

    def _pytest(self, nnodes: int) -> list[str]:
        sku = f"x{self.each.sku}" if self.each.sku else ""
        expect = f"--gpucluster-expect={nnodes}x{self.each.gpus_per_node}{sku}"
        return ["-m", "pytest", *self.pytest_arguments, expect]


def reporting(report_dir: str, junit: str) -> list[str]:
    """Return pytest's arguments that say where a run leaves its reports."""
    return [f"--gpucluster-report-dir={report_dir}", f"--junitxml={junit}"]


def each_node(text: str) -> Expectation:
    """Read what one node has: ``8xH100`` or ``8``.

    Raises:
        OptionError: anything else.
    """
    try:
        each = Expectation.parse(f"1x{text}")
    except OptionError:
        each = None
    if each is None or re.match(r"\d+[xX]", each.sku or ""):
        raise OptionError(
            f"--expect {text}: not what one node has; write its GPUs and their model, such as 8xH100, or 8"
        )
    return each


def require_free(arguments: Sequence[str]) -> None:
    """Make sure that pytest's arguments leave alone what the sweep itself sets.

    Raises:
        OptionError: they do not.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        name = "-n" if re.fullmatch(r"-n\d+|-nauto", name) else name
        if name in _OURS:
            raise OptionError(f"{argument}: not after --: {_OURS[name]}")


def require_nodes(nodes: Sequence[str]) -> None:
    """Make sure that there are nodes, each once and with a name that a file can have.

    Raises:
        OptionError: there are not.
    """
    if not nodes:
        raise OptionError("there are no nodes to sweep")
    odd = [node for node in nodes if not _NODE.fullmatch(node)]
    twice = sorted({node for node in nodes if nodes.count(node) > 1})
    if odd:
        raise OptionError(f"{odd[0]!r} is no name of a node: letters, digits, dots, dashes and underscores only")
    if twice:
        raise OptionError(f"{twice[0]} is named twice; a node counts once")


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
    say(f"\n{sweep_table(plan.nodes, alone, together, why_not)}\n")
    say(verdict_line(verdict))
    return verdict


def _why_not_together(plan: Plan, survivors: list[str]) -> str:
    """Return why the survivors cannot run together; an empty text where they can."""
    if len(survivors) < plan.min_nodes:
        return f"{len(survivors)} of {len(plan.nodes)} nodes are left, and --min-nodes is {plan.min_nodes}"
    return ""


def require_tool(*names: str) -> None:
    """Make sure that these programs are on the PATH.

    Raises:
        OptionError: one is not.
    """
    for name in names:
        if shutil.which(name) is None:
            raise OptionError(f"{name} is not on the PATH: run the sweep where {name} works, or add its folder to PATH")


def run_tool(command: Sequence[str], *, given: str = "", within_seconds: float) -> str:
    """Run a program to its end and return its standard output.

    Raises:
        EnvironmentBroken: it cannot be run, does not end in time, or ends with another code than 0.
    """
    shown = one_line(" ".join(command), 200)
    try:
        done = subprocess.run(
            list(command),
            input=given,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=within_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentBroken(f"`{shown}` has not ended within {within_seconds:g} s") from None
    except OSError as error:
        raise EnvironmentBroken(f"`{shown}` cannot be run: {error.strerror or error}") from None
    if done.returncode != 0:
        said = one_line(done.stderr or done.stdout, 400) or "nothing"
        raise EnvironmentBroken(f"`{shown}` ended with exit code {done.returncode} and said: {said}")
    return done.stdout
