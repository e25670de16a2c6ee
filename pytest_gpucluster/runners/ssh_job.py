"""One run over many nodes by ssh: started on all of them, followed, stopped, its reports copied, and one exit code.

A sweep over ssh is such a run on every node on its own, then one over the survivors."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.journal.verdict import BROKEN, REJECTED
from pytest_gpucluster.runners import ssh
from pytest_gpucluster.runners.hosts import Host
from pytest_gpucluster.runners.node_agent import GRACE_SECONDS, exit_of, unpack
from pytest_gpucluster.runners.plan import SshPlan, SweepPlan, random_port
from pytest_gpucluster.runners.run_result import Conclusion, RunResult, conclusion
from pytest_gpucluster.runners.ssh import Access, Channel
from pytest_gpucluster.runners.sweep import JobScheduler
from pytest_gpucluster.runners.sweep_outcome import BROKEN_EXIT, JOINT, NO_ANSWER, LauncherExit, judge_run
from pytest_gpucluster.text import printable, some_of

STOP_SECONDS = GRACE_SECONDS + 15.0
"""From the request to stop until the connection is closed: the node kills what is left before that."""
_CLOSE_SECONDS = 15.0
_COPY_SECONDS = 600.0
_LOST_SECONDS = ssh.HEARTBEAT_TIMEOUT_SECONDS + GRACE_SECONDS
"""A node whose connection was lost may take this long to notice it and to end what runs there."""
OTHERS_SECONDS = 360.0
"""How long other nodes may go on when one has ended. Longer than torchrun's own wait for agents that have not ended,
300 s. Source: torch, distributed/elastic/agent/server/api.py (``exit_barrier_timeout``)."""
_POLL_SECONDS = 0.05
Show = Callable[[str, bool], None]
"""Prints a line; True for those of this command, which go to standard error."""


@dataclass(frozen=True, kw_only=True)
class NodeResult:
    """The result of a run on one node.

    Attributes:
        name: the node.
        exit: exit code of the run on it; None if unknown.
        seconds: its duration, without copying the reports.
        stop_reason: why it was stopped from here; empty if it was not.
        problem: why there is no exit code; empty if there is one.
        copy_problem: why its reports could not be copied; empty if they are here.
    """

    name: str
    exit: int | None
    seconds: float = 0.0
    stop_reason: str = ""
    problem: str = ""
    copy_problem: str = ""


class RemoteJob:
    """A run on a node. No method waits: call :meth:`poll` repeatedly."""

    def __init__(
        self, plan: SshPlan, host: Host, directory: Path, prefix: str, *, within_seconds: float, show: Show
    ) -> None:
        """Start it.

        Args:
            plan: the run.
            host: the node, one of the plan's.
            directory: here, for the output ``NAME.log`` and the reports ``NAME``, which must not exist yet.
            prefix: of each line that it prints.
            within_seconds: deadline, after which it is stopped.
            show: prints a line.

        Raises:
            EnvironmentBroken: ssh cannot be started.
            OSError: the log cannot be written.
        """
        self.name, self.running = host.name, True
        self._plan, self._host, self._folder = plan, host, directory / host.name
        self._prefix, self._within, self._show = prefix, within_seconds, show
        self._started = time.monotonic()
        self._stop_sent_at: float | None = None
        self._sent: set[str] = set()
        self._stop_reason = self._skip_reason = ""
        self._result: NodeResult | None = None
        self._steps = self._run()
        request = ssh.request(
            "run",
            words=plan.node_command(plan.hosts.index(host)),
            directory=plan.access.directory,
            env=dict(plan.access.environ),
            folder=plan.folder(host),
        )
        self._log = directory / f"{host.name}.log"
        self._channel = Channel(host, plan.access, request, self._log.open("w+b", buffering=0))

    def poll(self) -> NodeResult | None:
        """Make progress; return the result when its reports are here too."""
        if self._result is None:
            try:
                next(self._steps)
            except StopIteration as end:
                self._result = end.value
        return self._result

    def stop(self, reason: str, command: str = ssh.TERMINATE) -> None:
        """Ask the node to end the run; its reports are written and copied."""
        if not self.running or command in self._sent:
            return
        self._sent.add(command)
        self._stop_reason = self._stop_reason or reason
        self._stop_sent_at = self._stop_sent_at or time.monotonic()
        self._channel.send(command)

    def skip_reports(self, reason: str) -> None:
        """Stop waiting for the reports of a run that has ended: they stay on the node."""
        self._skip_reason = "" if self.running else reason

    def abandon(self) -> str:
        """Give it up at once. Return what may still run; empty if nothing."""
        may_run = self.running and not self._channel.closed
        self._channel.close()
        if not may_run:
            return ""
        return f"{self.name}: its run was given up; the node ends it by itself within {_LOST_SECONDS:.0f} s"

    def _run(self) -> Generator[None, None, NodeResult]:
        yield from self._follow()
        seconds = round(time.monotonic() - self._started, 3)
        self.running = False
        code, answered = self._channel.exit, self._channel.answered
        problem = self._channel.problem if code is None else ""
        self._channel.close()
        copy_problem = ""
        if problem:
            with self._log.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"{problem}\n")
        if answered:
            copy_problem = yield from self._copy(0.0 if code is not None else _LOST_SECONDS)
            # After a lost connection the node's own file of the exit code is better than nothing.
            if problem and not copy_problem and (remote_code := exit_of(self._folder)) is not None:
                problem += f"; on the node it ended with exit code {remote_code}"
        if copy_problem:
            copy_problem += f"; its reports are in {self.name}:{self._plan.folder(self._host)}"
        return NodeResult(
            name=self.name,
            exit=code,
            seconds=seconds,
            stop_reason=self._stop_reason,
            problem=problem,
            copy_problem=copy_problem,
        )

    def _follow(self) -> Iterator[None]:
        partial, answer_seconds = b"", self._plan.access.answer_seconds
        while True:
            closed = self._channel.closed  # before the output is read, which is complete then
            *lines, partial = (partial + self._channel.drain()).split(b"\n")
            lines += [partial] if closed and partial else []
            for line in lines:
                text = line.removesuffix(b"\r").decode("utf-8", "backslashreplace")
                self._show(f"{self._prefix}{printable(text)}", False)
            if closed:
                return
            now = time.monotonic()
            if not self._channel.answered and now - self._started > answer_seconds:
                self._stop_reason = self._stop_reason or f"no answer within {answer_seconds:g} s"
                self._channel.kill()
            elif self._stop_sent_at is None:
                if now - self._started > self._within:
                    self.stop(f"did not end within {self._within:g} s")
            elif now - self._stop_sent_at > STOP_SECONDS + _CLOSE_SECONDS:
                self._channel.kill()
            elif now - self._stop_sent_at > STOP_SECONDS:
                self._channel.hang_up()
            yield

    def _copy(self, wait_seconds: float) -> Generator[None, None, str]:
        """Copy the reports; return why that failed. ``wait_seconds``: for the end of the run on the node."""
        request = ssh.request(
            "collect",
            directory=self._plan.access.directory,
            folder=self._plan.folder(self._host),
            first_folder=self._plan.folder(self._plan.hosts[0]),
            wait_seconds=wait_seconds,
        )
        self._channel = Channel(self._host, self._plan.access, request)
        until = time.monotonic() + _COPY_SECONDS
        try:
            while not self._channel.closed:
                if self._skip_reason or time.monotonic() > until:
                    return self._skip_reason or f"not here within {_COPY_SECONDS:g} s"
                yield
            if self._channel.exit is None:
                return self._channel.problem
            self._folder.mkdir(parents=True)
            unpack(self._channel.answer(), self._folder)
        except EnvironmentBroken as error:
            return str(error)
        except OSError as error:
            return f"{error.filename or self._folder}: {error.strerror or error}"
        finally:
            self._channel.close()
        return ""


class RemoteRun:
    """A run on all nodes of a plan. When it has ended on one, the others get :data:`OTHERS_SECONDS`."""

    def __init__(
        self, plan: SshPlan, directory: Path, *, within_seconds: float, show: Show = lambda line, is_error: None
    ) -> None:
        """Start it.

        Args:
            plan: what to run.
            directory: for the output ``NAME.log`` and the reports ``NAME`` of each node.
            within_seconds: deadline for each node.
            show: prints a line.

        Raises:
            EnvironmentBroken: ssh cannot be started.
            OSError: output or reports cannot be written.
        """
        self.reports = directory / plan.hosts[0].name
        """Those of rank 0."""
        self._show, self._first_end = show, 0.0
        self._jobs: list[RemoteJob] = []
        try:
            for host in plan.hosts:
                prefix = f"[{host.name}] " if self._jobs else ""
                job = RemoteJob(plan, host, directory, prefix, within_seconds=within_seconds, show=show)
                self._jobs.append(job)
        except BaseException:  # nothing may go on unattended
            self.abandon()
            raise

    def poll(self) -> LauncherExit | None:
        """Make progress; return how it ended, as its worst node did; None while it runs."""
        results = self.results()
        return None if results is None else launcher_exit(results, f"{self.reports}.log")

    def results(self) -> Sequence[NodeResult] | None:
        """Make progress; return the results in the order of the plan when all are here."""
        results = [job.poll() for job in self._jobs]
        if not self._first_end and any(not job.running for job in self._jobs):
            self._first_end = time.monotonic()
        elif self._first_end and time.monotonic() - self._first_end > OTHERS_SECONDS:
            self.stop(f"did not end within {OTHERS_SECONDS:g} s after another node")
        found = [result for result in results if result is not None]
        return found if len(found) == len(results) else None

    def wait(self, signals: Signals) -> Sequence[NodeResult]:
        """Wait for the end, or for a signal that ends it.

        The first one ends the run in order. After a second one reports of runs that have ended are not waited for.
        """
        handled = 0
        try:
            while (results := self.results()) is None:
                if len(signals.numbers) > handled:
                    number, handled = signals.numbers[handled], handled + 1
                    running = sum(job.running for job in self._jobs)
                    if handled == 1:
                        self._show(
                            f"{signals.name}: stopping {running} nodes; their reports are written and copied", True
                        )
                    else:
                        for job in self._jobs:
                            job.skip_reports(f"interrupted by {signals.name} again")
                    # Ctrl-C first, as on a terminal; a second one is urgent.
                    is_ctrl_c = number == signal.SIGINT and handled == 1
                    self.stop(f"interrupted by {signals.name}", ssh.INTERRUPT if is_ctrl_c else ssh.TERMINATE)
                time.sleep(_POLL_SECONDS)
        except BaseException:  # nothing may go on unattended
            self.abandon()
            raise
        return results

    def stop(self, reason: str, command: str = ssh.TERMINATE) -> None:
        """Ask all nodes to end the run; the reports are written and copied."""
        for job in self._jobs:
            job.stop(reason, command)

    def abandon(self) -> str:
        """Give it up at once. Return what may still run; empty if nothing."""
        problems = [problem for job in self._jobs if (problem := job.abandon())]
        for problem in problems:
            self._show(problem, True)
        return "; ".join(problems)


class Ssh(JobScheduler):
    """The runs of a sweep on nodes that ssh reaches. They end with this process, and when a connection is lost."""

    grace_seconds = STOP_SECONDS + 30.0

    def __init__(self, hosts: Sequence[Host], access: Access, run_id: str) -> None:
        """Start nothing yet. ``run_id`` is unique on these nodes."""
        super().__init__()
        self._hosts = {host.name: host for host in hosts}
        self._access, self._run_id = access, run_id
        self.nodes, self.python, self.port = tuple(self._hosts), access.python, random_port()

    def start(self, plan: SweepPlan, nodes: Sequence[str], folder: Path) -> RemoteRun:
        """Start the run on these nodes; the reports of each go to a folder with its name."""
        hosts = tuple(self._hosts[name] for name in nodes)
        is_joint = folder.name == JOINT
        ssh_plan = SshPlan(
            hosts=hosts,
            access=self._access,
            per_node=plan.per_node,
            arguments=plan.pytest_arguments,
            run_id=f"{self._run_id}-{JOINT if is_joint else 'alone'}",
            master=hosts[0].address,
            port=plan.port,
        )
        directory = folder if is_joint else folder.parent
        directory.mkdir(exist_ok=True)
        return RemoteRun(ssh_plan, directory, within_seconds=plan.seconds(len(nodes)))


class Signals:
    """The signals that have come."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.numbers.append(number)

    @property
    def name(self) -> str:
        """Name of the first one."""
        return signal.Signals(self.numbers[0]).name if self.numbers else ""


@contextmanager
def handling(numbers: Sequence[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Install a signal handler, except for SIGHUP under nohup: there the run outlives its terminal."""
    handled = [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def launcher_exit(nodes: Sequence[NodeResult], log: str = "") -> LauncherExit:
    """Return how a run has ended: as the first node did that was lost or stopped, or else that did not end with 0.

    A node that was stopped from here may still end with 0, but its result is unknown.
    """
    worst = min(nodes, key=lambda node: (node.exit is not None and not node.stop_reason, node.exit == 0))
    where = f"{worst.name}: " if len(nodes) > 1 else ""
    stop_reason = worst.stop_reason or (worst.problem or "no answer over ssh" if worst.exit is None else "")
    return LauncherExit(
        exit=worst.exit,
        seconds=worst.seconds,
        stop_reason=f"{where}{stop_reason}" if stop_reason else "",
        log=log,
        hint=nodes[0].copy_problem or where.removesuffix(": "),
    )


def conclude(
    nodes: Sequence[NodeResult], journal: RunResult | None, *, problem: str = "", interrupted: str = ""
) -> Conclusion:
    """Return exit code and last line of a run.

    A pass needs exit code 0 from every node, and a journal that agrees and is of all nodes that were started. A
    rejection overrides everything else.

    Args:
        nodes: results of all nodes that were started, rank 0's first.
        journal: rank 0's; None if there is none here.
        problem: why not.
        interrupted: the signal, if one came.
    """
    outcome = judge_run("", journal, launcher_exit(nodes), problem, nnodes=len(nodes))
    passing = (0, 10, 12)  # nothing failed
    word, code, reason = outcome.verdict, outcome.exit, outcome.failure or (journal.reason if journal else "")
    worst = max(nodes, key=lambda node: (node.exit not in (None, *passing), node.exit == 10, node.exit == 12))
    rejecting = [node.name for node in nodes if node.exit == 1]
    if code == 1 or rejecting:
        word, code, reason = REJECTED, 1, reason if journal else f"{some_of(rejecting)} ended with exit code 1"
    elif interrupted:
        word, code, reason = BROKEN, 2, f"interrupted ({interrupted})"
    elif word == NO_ANSWER:
        word = BROKEN
    elif code in passing and code != (worst.exit or 0):
        reason = f"its journal states {word}, exit code {code}, but {worst.name} ended with {worst.exit or 0}"
        word, code = BROKEN, BROKEN_EXIT
    return conclusion(word, code, reason, kind=journal.kind if journal else "")
