"""A sweep: every node on its own, all at the same time, then the survivors as one cluster; and its one verdict.

A node without a verdict never counts as good.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pytest_gpucluster.errors import EnvironmentBroken, OptionError
from pytest_gpucluster.journal.verdict import Verdict
from pytest_gpucluster.node.processes import run_program
from pytest_gpucluster.runners import sweep_outcome
from pytest_gpucluster.runners.hosts import NODE_NAME, NODE_NAME_RULE
from pytest_gpucluster.runners.plan import SweepPlan
from pytest_gpucluster.runners.run_result import read_result
from pytest_gpucluster.runners.sweep_outcome import JOINT, LauncherExit, Outcome, SweepFiles, conclude, judge_run
from pytest_gpucluster.text import one_line

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
                outcomes[outcome.node] = sweep_outcome.worse(previous, outcome)
                show(sweep_outcome.progress_line(len(outcomes), len(plan.nodes), outcome))
                write_so_far()
            survivors = [node for node in plan.nodes if node in outcomes and outcomes[node].survived]
            if len(survivors) < plan.min_nodes:
                skipped = f"{len(survivors)} of {len(plan.nodes)} nodes are left, and --min-nodes is {plan.min_nodes}"
                show(f"no joint run: {skipped}")
            else:
                show(f"joint run of {len(survivors)} of {len(plan.nodes)} nodes")
                joint = scheduler.run_joint(plan, survivors, files.directory)
                show(sweep_outcome.progress_line(1, 1, joint))
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
    show(f"\n{sweep_outcome.sweep_table(plan.nodes, found, joint, skipped)}\n")
    show(sweep_outcome.verdict_line(verdict))
    return verdict


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
    done = run_program(command, within_seconds, environ=os.environ, given=given)  # a job inherits it
    if done.why_not:
        message = one_line(done.errors or done.text, 400) or "no message"
        why_not = f"ended with exit code {done.code}: {message}" if done.code else done.why_not
        raise EnvironmentBroken(f"`{one_line(' '.join(command), 200)}`: {why_not}")
    return done.text
