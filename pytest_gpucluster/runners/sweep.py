"""A sweep: every node on its own, all at the same time, then the survivors as one cluster; and its one verdict.

A node without a verdict never counts as good.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pytest_gpucluster.errors import EnvironmentBroken, OptionError
from pytest_gpucluster.journal.records import SIMULATED
from pytest_gpucluster.journal.verdict import (
    BROKEN,
    INCOMPLETE,
    PASSED_WITH_DEVIATIONS,
    REHEARSED,
    REJECTED,
    SELECTION_PASSED,
    Verdict,
)
from pytest_gpucluster.runners.hosts import NODE_NAME, NODE_NAME_RULE
from pytest_gpucluster.runners.plan import SweepPlan
from pytest_gpucluster.runners.run_result import read_result
from pytest_gpucluster.runners.sweep_outcome import (
    BROKEN_EXIT,
    JOINT,
    NO_ANSWER,
    PASSES,
    LauncherExit,
    Outcome,
    SweepFiles,
    judge_run,
    progress_line,
    sweep_table,
    verdict_line,
    worse,
)
from pytest_gpucluster.text import one_line, some_of

_POLL_SECONDS = 0.05


class Scheduler(Protocol):
    """Starts the runs of a sweep, and ends them. Every wait in it has a deadline."""

    nodes: tuple[str, ...]
    """Of the sweep."""
    python: str
    """Default interpreter on them."""
    port: int
    """Default rendezvous port of the joint run."""

    def run_nodes(self, plan: SweepPlan, directory: Path) -> Iterator[Outcome]:
        """Run every node on its own, and yield each outcome as it ends.

        A scheduler may run a node twice; the worse outcome counts.
        """

    def run_joint(self, plan: SweepPlan, nodes: Sequence[str], directory: Path) -> Outcome:
        """Run these nodes as one cluster. The outcome's node is ``JOINT``."""

    def stop(self) -> Sequence[str]:
        """End everything that still runs. Return what could not be ended, one line each; never raise."""


class Stopped(BaseException):
    """A signal ends the sweep. Not an Exception: no handler of a run's errors may catch it."""


def sweep(plan: SweepPlan, scheduler: Scheduler, files: SweepFiles, show: Callable[[str], None]) -> Verdict:
    """Carry out a sweep and return its verdict.

    However it ends, what was started is ended, and all outcomes so far are printed and written.

    Args:
        plan: what to run.
        scheduler: starts the runs.
        files: written again after each outcome; their folder is also that of the runs.
        show: prints a line.

    Raises:
        OSError: the files cannot be written. A verdict that cannot be read again is none.
    """
    outcomes: dict[str, Outcome] = {}
    joint: Outcome | None = None
    skipped = interrupted = broken = ""

    def write_so_far() -> None:
        found = list(outcomes.values())
        files.write(conclude(plan.nodes, found, None, interrupted="an unrecorded end"), found, None)

    try:
        write_so_far()
        try:
            for outcome in scheduler.run_nodes(plan, files.directory):
                previous = outcomes.get(outcome.node, outcome)
                outcomes[outcome.node] = worse(previous, outcome)
                show(progress_line(len(outcomes), len(plan.nodes), outcome))
                write_so_far()
            survivors = [node for node in plan.nodes if node in outcomes and outcomes[node].survived]
            if len(survivors) < plan.min_nodes:
                skipped = f"{len(survivors)} of {len(plan.nodes)} nodes are left, and --min-nodes is {plan.min_nodes}"
                show(f"no joint run: {skipped}")
            else:
                show(f"joint run of {len(survivors)} of {len(plan.nodes)} nodes")
                joint = scheduler.run_joint(plan, survivors, files.directory)
                show(progress_line(1, 1, joint))
        except (KeyboardInterrupt, Stopped) as error:
            interrupted = str(error) or "Ctrl-C"
        except EnvironmentBroken as error:
            broken = str(error)
    finally:
        for problem in scheduler.stop():
            show(f"not ended: {problem}")
    skipped = skipped or interrupted or broken
    found = list(outcomes.values())
    verdict = conclude(plan.nodes, found, joint, skipped=skipped, interrupted=interrupted, broken=broken)
    files.write(verdict, found, joint, skipped=skipped, finished=not interrupted)
    show(f"\n{sweep_table(plan.nodes, found, joint, skipped)}\n")
    show(verdict_line(verdict))
    return verdict


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


def require_nodes(nodes: Sequence[str]) -> None:
    """Require at least one node, each once and with a name that can be a file's.

    Raises:
        OptionError: not so.
    """
    if not nodes:
        raise OptionError("there are no nodes to sweep")
    odd = [node for node in nodes if not NODE_NAME.fullmatch(node)]
    twice = sorted({node for node in nodes if nodes.count(node) > 1})
    if odd:
        raise OptionError(f"{odd[0]!r} is not a node name: {NODE_NAME_RULE}")
    if twice:
        raise OptionError(f"{twice[0]} is named twice; name each node once")


# ---- what schedulers have in common


class Job(Protocol):
    """A run that was started."""

    reports: Path
    """Where its journal will be."""

    def poll(self) -> LauncherExit | None:
        """Return how it ended; None while it runs."""

    def stop(self, reason: str) -> None:
        """Ask it to end."""

    def abandon(self) -> str:
        """Give it up at once. Return what may still run; empty if nothing."""


class JobScheduler(ABC):
    """A scheduler that starts a job for each node, and one for all survivors."""

    grace_seconds: float
    """From the request to stop until a job is given up."""

    def __init__(self) -> None:
        self._running: list[Job] = []
        self.is_uncertain = False
        """Whether something may run that is not among the jobs: the start of one was interrupted, or it was killed."""

    @abstractmethod
    def start(self, plan: SweepPlan, nodes: Sequence[str], folder: Path) -> Job:
        """Start the job of these nodes, whose output and reports are named after ``folder``.

        Raises:
            EnvironmentBroken: it cannot be started.
        """

    def run_nodes(self, plan: SweepPlan, directory: Path) -> Iterator[Outcome]:
        """Run every node on its own, at most ``at_once`` at a time."""
        folder = directory / "nodes"
        folder.mkdir(exist_ok=True)
        return self._run(plan, [([node], folder / node) for node in plan.nodes])

    def run_joint(self, plan: SweepPlan, nodes: Sequence[str], directory: Path) -> Outcome:
        """Run these nodes as one cluster, with rank 0 on the first."""
        [outcome] = self._run(plan, [(nodes, directory / JOINT)])
        return outcome

    def stop(self) -> Sequence[str]:
        """Ask all jobs to end, wait for them, and abandon the rest; return what may still run, a line for each."""
        for job in self._running:
            job.stop("the sweep ended")
        until = time.monotonic() + self.grace_seconds
        # All of them are polled each time: their output is read, so that they can go on.
        while (left := [job for job in self._running if job.poll() is None]) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        self._running = []
        return [problem for job in left if (problem := job.abandon())]

    def _run(self, plan: SweepPlan, runs: Sequence[tuple[Sequence[str], Path]]) -> Iterator[Outcome]:
        waiting, folders = deque(runs), dict[Job, tuple[Path, int]]()
        while waiting or self._running:
            while waiting and len(self._running) < plan.at_once:
                nodes, folder = waiting.popleft()
                was_uncertain, self.is_uncertain = self.is_uncertain, True
                self._running.append(job := self.start(plan, nodes, folder))
                self.is_uncertain = was_uncertain
                folders[job] = folder, len(nodes)
            ended = [(job, launcher) for job in self._running if (launcher := job.poll()) is not None]
            for job, launcher in ended:
                self._running.remove(job)
                folder, nnodes = folders.pop(job)
                result, problem = read_result(job.reports)
                world_size = nnodes * plan.per_node.gpus_per_node
                yield judge_run(folder.name, result, launcher, problem, nnodes=nnodes, world_size=world_size)
            if not ended:
                time.sleep(_POLL_SECONDS)


def require_tool(*names: str) -> None:
    """Require programs on the PATH.

    Raises:
        OptionError: one is missing.
    """
    for name in names:
        if shutil.which(name) is None:
            raise OptionError(f"{name} is not on the PATH: run the sweep where {name} works, or add its folder to PATH")


def run_tool(command: Sequence[str], *, given: str = "", within_seconds: float) -> str:
    """Run a scheduler's program with ``given`` as its standard input, and return its standard output.

    Raises:
        EnvironmentBroken: it cannot be run, does not end in time, or ends with another code than 0.
    """
    text = one_line(" ".join(command), 200)
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
        raise EnvironmentBroken(f"`{text}` did not end within {within_seconds:g} s") from None
    except OSError as error:
        raise EnvironmentBroken(f"`{text}` cannot be run: {error.strerror or error}") from None
    if done.returncode != 0:
        message = one_line(done.stderr or done.stdout, 400) or "no message"
        raise EnvironmentBroken(f"`{text}` ended with exit code {done.returncode}: {message}")
    return done.stdout
