"""One run over many nodes by ssh: started on all of them, followed, stopped, its reports copied, and one exit code."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.journal.verdict import BROKEN, REJECTED
from pytest_gpucluster.runners import ssh
from pytest_gpucluster.runners.hosts import Host
from pytest_gpucluster.runners.node_agent import GRACE_SECONDS, exit_of, unpack
from pytest_gpucluster.runners.plan import SshPlan
from pytest_gpucluster.runners.run_result import Conclusion, RunResult, conclusion, listed, read_result
from pytest_gpucluster.runners.ssh import Access, Channel, ssh_command
from pytest_gpucluster.text import printable

STOP_SECONDS = GRACE_SECONDS + 15.0
"""From the request to stop until the connection is closed: the node kills what is left before that."""
_CLOSE_SECONDS = 15.0
_COPY_SECONDS = 600.0
_LOST_SECONDS = ssh.HEARTBEAT_TIMEOUT_SECONDS + GRACE_SECONDS
"""A node whose connection was lost may take this long to notice it and to end what runs there."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class NodeResult:
    """The result of a run on one node.

    Attributes:
        name: the node.
        exit: exit code of the run on it; None if unknown.
        seconds: its duration, without copying the reports.
        stop_reason: why it was stopped from here; empty if it was not.
        problem: why there is no exit code; empty if there is one.
        folder: where its reports are now; None if they could not be copied.
        copy_problem: why not.
    """

    name: str
    exit: int | None
    seconds: float = 0.0
    stop_reason: str = ""
    problem: str = ""
    folder: Path | None = None
    copy_problem: str = ""

    def journal(self) -> tuple[RunResult | None, str]:
        """Return the result in the journal among its reports; or None, and why."""
        return read_result(self.folder) if self.folder is not None else (None, self.copy_problem or self.problem)


class RemoteJob:
    """A run on a node. No method waits: call :meth:`poll` repeatedly."""

    def __init__(
        self,
        plan: SshPlan,
        host: Host,
        access: Access,
        directory: Path,
        *,
        within_seconds: float,
        answer_seconds: float,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start it.

        Args:
            plan: the run.
            host: the node, one of the plan's.
            access: how it is reached.
            directory: here, for the output ``NAME.log`` and the reports ``NAME``, which must not exist yet.
            within_seconds: deadline, after which it is stopped.
            answer_seconds: deadline for the node's first line.
            on_line: called with each line that it prints.

        Raises:
            EnvironmentBroken: ssh cannot be started.
            OSError: the log cannot be written.
        """
        self.name = host.name
        self._plan, self._host, self._access = plan, host, access
        self._folder = directory / host.name
        self._within, self._answer_within, self._on_line = within_seconds, answer_seconds, on_line
        self._started = time.monotonic()
        self._seconds = 0.0
        self._stop_sent_at: float | None = None
        self._sent: set[str] = set()
        self._hung_up_at: float | None = None
        self._stop_reason = self._problem = ""
        self._exit: int | None = None
        self._partial_line = b""
        self._result: NodeResult | None = None
        self._copy: Channel | None = None
        self._copy_until = 0.0
        self._archive: IO[bytes] | None = None
        self._log = (directory / f"{host.name}.log").open("wb", buffering=0)
        request = ssh.request(
            "run",
            words=plan.node_command(plan.hosts.index(host)),
            directory=plan.directory,
            env=dict(plan.environ),
            folder=plan.folder(host),
        )
        try:
            self._channel = Channel(ssh_command(host, access), request)
        except EnvironmentBroken:
            self._log.close()
            raise

    @property
    def running(self) -> bool:
        """Whether the run itself goes on; its reports are copied after that."""
        return self._copy is None and self._result is None

    def poll(self) -> NodeResult | None:
        """Make progress; return the result when its reports are here too."""
        if self._result is None:
            if self._copy is None:
                self._follow()
            else:
                self._receive(self._copy)
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
        if self._copy is not None and self._result is None:
            self._copy.kill()
            self._finish(None, reason)

    def abandon(self) -> str:
        """Give it up at once. Return what may still run; empty if nothing."""
        was_running = self.running
        self._channel.kill()
        if self._copy is not None:
            self._copy.kill()
        self._close()
        if not was_running or self._channel.exit is not None:
            return ""
        return f"{self.name}: its run was given up; the node ends it by itself within {_LOST_SECONDS:.0f} s"

    # ---- the run

    def _follow(self) -> None:
        closed = self._channel.closed
        data = self._channel.drain()
        self._log.write(data)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._on_line(_text(line))
        now = time.monotonic()
        if closed:
            self._seconds = round(now - self._started, 3)
            self._start_copy()
        elif not self._channel.answered and now - self._started > self._answer_within:
            self._stop_reason = self._stop_reason or f"no answer within {self._answer_within:g} s"
            self._channel.kill()
        elif self._stop_sent_at is None:
            if now - self._started > self._within:
                self.stop(f"did not end within {self._within:g} s")
        elif self._hung_up_at is None:
            if now - self._stop_sent_at > STOP_SECONDS:
                self._hung_up_at = now
                self._channel.hang_up()
        elif now - self._hung_up_at > _CLOSE_SECONDS:
            self._channel.kill()

    def _start_copy(self) -> None:
        if self._partial_line:
            self._on_line(_text(self._partial_line))
        self._exit = self._channel.exit
        if self._exit is None:
            self._problem = self._channel.problem
            self._log.write(f"{self._problem}\n".encode("utf-8", "backslashreplace"))
        self._channel.kill()
        if not self._channel.answered:
            self._finish(None, "")
            return
        request = ssh.request(
            "collect",
            directory=self._plan.directory,
            folder=self._plan.folder(self._host),
            first_folder=self._plan.folder(self._plan.hosts[0]),
            wait_seconds=_LOST_SECONDS if self._exit is None else 0.0,
        )
        self._archive = tempfile.TemporaryFile(prefix="gpucluster-")  # noqa: SIM115  # closed when it is unpacked
        self._copy_until = time.monotonic() + _COPY_SECONDS
        self._copy = Channel(ssh_command(self._host, self._access), request)

    # ---- its reports

    def _receive(self, channel: Channel) -> None:
        assert self._archive is not None
        closed = channel.closed
        self._archive.write(channel.drain())
        if not closed and time.monotonic() < self._copy_until:
            return
        problem = "" if closed else f"not here within {_COPY_SECONDS:g} s"
        if closed and channel.exit is None:
            problem = channel.problem
        channel.kill()
        if not problem:
            try:
                self._folder.mkdir(parents=True)
                self._archive.seek(0)
                unpack(self._archive, self._folder)
            except EnvironmentBroken as error:
                problem = str(error)
            except OSError as error:
                problem = f"{error.filename or self._folder}: {error.strerror or error}"
        # After a lost connection the node's own file of the exit code is better than nothing.
        if self._exit is None and not problem and (code := exit_of(self._folder)) is not None:
            self._problem = f"{self._problem}; on the node it ended with exit code {code}"
        self._finish(None if problem else self._folder, problem)

    def _finish(self, folder: Path | None, problem: str) -> None:
        where = f"{self.name}:{self._plan.folder(self._host)}"
        self._result = NodeResult(
            name=self.name,
            exit=self._exit,
            seconds=self._seconds,
            stop_reason=self._stop_reason,
            problem=self._problem,
            folder=folder,
            copy_problem=f"{problem}; its reports are in {where}" if problem else "",
        )
        self._close()

    def _close(self) -> None:
        self._log.close()
        if self._archive is not None:
            with contextlib.suppress(OSError):  # a temporary file that is not needed any more
                self._archive.close()


OTHERS_SECONDS = 360.0
"""How long other nodes may go on when one has ended. Longer than torchrun's own wait for agents that have not ended,
300 s. Source: torch, distributed/elastic/agent/server/api.py (``exit_barrier_timeout``)."""


class Signals:
    """The signals that have come. The first one ends the run in order. A second one is sent on as SIGTERM, and reports
    of runs that have ended are not waited for any longer."""

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


def run_plan(
    plan: SshPlan,
    access: Access,
    directory: Path,
    *,
    within_seconds: float,
    answer_seconds: float,
    others_seconds: float,
    signals: Signals,
    show: Callable[[str, bool], None],
) -> Mapping[str, NodeResult]:
    """Run a plan on its nodes and return name -> result.

    Args:
        plan: what to run.
        access: how nodes are reached.
        directory: for the output ``NAME.log`` and the reports ``NAME`` of each node.
        within_seconds: deadline for each node.
        answer_seconds: deadline for a node's first line.
        others_seconds: how long the others may go on when one node has ended.
        signals: that have come so far.
        show: prints a line; True for those of this command, which go to standard error.

    Raises:
        EnvironmentBroken: ssh cannot be started.
        OSError: output or reports cannot be written.
    """
    jobs: list[RemoteJob] = []
    try:
        for host in plan.hosts:
            job = RemoteJob(
                *(plan, host, access, directory),
                within_seconds=within_seconds,
                answer_seconds=answer_seconds,
                on_line=_printer(host.name if jobs else "", show),
            )
            jobs.append(job)
        return await_jobs(jobs, others_seconds, signals, show)
    except BaseException:  # nothing may go on unattended
        for job in jobs:
            problem = job.abandon()
            if problem:
                show(problem, True)
        raise


def await_jobs(
    jobs: Sequence[RemoteJob],
    others_seconds: float,
    signals: Signals,
    show: Callable[[str, bool], None] = lambda line, is_error: None,
) -> Mapping[str, NodeResult]:
    """Wait for the jobs of one run and return name -> result. When one has ended, the others get ``others_seconds``."""
    results: dict[str, NodeResult] = {}
    first_end: float | None = None
    handled = 0
    while len(results) < len(jobs):
        for job in jobs:
            if job.name not in results and (result := job.poll()) is not None:
                results[job.name] = result
        if first_end is None and any(not job.running for job in jobs):
            first_end = time.monotonic()
        if len(signals.numbers) > handled:
            handled += 1
            _interrupt(jobs, signals, handled, show)
        elif first_end is not None and time.monotonic() - first_end > others_seconds:
            for job in jobs:
                job.stop(f"did not end within {others_seconds:g} s after another node")
        time.sleep(_POLL_SECONDS)
    return results


def _interrupt(jobs: Sequence[RemoteJob], signals: Signals, count: int, show: Callable[[str, bool], None]) -> None:
    running = [job for job in jobs if job.running]
    if count == 1:
        show(f"{signals.name}: stopping {len(running)} nodes; their reports are written and copied", True)
    else:
        for job in jobs:
            job.skip_reports(f"interrupted by {signals.name} again")
    # Ctrl-C first, as on a terminal; a second one is urgent.
    is_ctrl_c = signals.numbers[count - 1] == signal.SIGINT and count == 1
    for job in running:
        job.stop(f"interrupted by {signals.name}", ssh.INTERRUPT if is_ctrl_c else ssh.TERMINATE)


def _printer(name: str, show: Callable[[str, bool], None]) -> Callable[[str], None]:
    """Return what prints a node's lines, with its name in front except for rank 0's node."""
    prefix = f"[{name}] " if name else ""
    return lambda line: show(f"{prefix}{printable(line)}", False)


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "backslashreplace")


REJECTED_EXIT, INTERRUPTED_EXIT, BROKEN_EXIT = 1, 2, 11


def conclude(
    nodes: Sequence[NodeResult],
    journal: RunResult | None,
    *,
    journal_problem: str = "",
    interrupted: str = "",
) -> Conclusion:
    """Return exit code and last line of a run.

    A pass needs exit code 0 from every node, and a journal that agrees and is of all nodes that were started. A
    rejection overrides everything else.

    Args:
        nodes: results of all nodes that were started, rank 0's first.
        journal: rank 0's; None if there is none here.
        journal_problem: why not.
        interrupted: the signal, if one came.
    """

    def end(word: str, code: int, reason: str) -> Conclusion:
        return conclusion(word, code, reason, rehearsal=journal is not None and journal.rehearsal)

    # A node that was stopped from here may still end with 0, but its result is unknown.
    codes = [None if node.exit == 0 and node.stop_reason else node.exit for node in nodes]
    if REJECTED_EXIT in codes or (journal is not None and (journal.exit == 1 or journal.verdict == REJECTED)):
        reason = journal.reason if journal is not None else _exits(nodes, {REJECTED_EXIT})
        return end(REJECTED, REJECTED_EXIT, reason)
    if interrupted:
        return end(BROKEN, INTERRUPTED_EXIT, f"interrupted ({interrupted})")
    lost = [node for node, code in zip(nodes, codes, strict=True) if code is None]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        journal_reason = f"; its journal states: {journal.reason}" if journal is not None and journal.exit else ""
        first_lost = lost[0]
        reason = (first_lost.stop_reason if first_lost.exit == 0 else "") or first_lost.problem
        reason = reason or first_lost.stop_reason or "exit code unknown"
        return end(BROKEN, BROKEN_EXIT, f"{first_lost.name}: {reason}{more}{journal_reason}")
    first = codes[0] if codes else BROKEN_EXIT
    bad = {code for code in codes if code is not None and code not in (0, 10, 12)}
    if first in (0, 10, 12) and bad:
        return end(BROKEN, BROKEN_EXIT, f"{_exits(nodes, bad)}, but rank 0's node ended with {first}")
    if bad:
        return end(BROKEN, int(first or BROKEN_EXIT), journal.reason if journal is not None else _exits(nodes, bad))
    if journal is None:
        return end(BROKEN, BROKEN_EXIT, f"no journal of the run: {journal_problem or 'no node was started'}")
    if journal.nnodes != len(nodes):
        return end(BROKEN, BROKEN_EXIT, f"its journal is of {journal.nnodes} nodes, but {len(nodes)} were started")
    worst = max(int(code or 0) for code in codes)
    if journal.exit != worst:
        reason = f"the nodes ended with {worst}, but the journal states {journal.verdict}, exit code {journal.exit}"
        return end(BROKEN, BROKEN_EXIT, reason)
    return end(journal.verdict, journal.exit, journal.reason)


def _exits(nodes: Sequence[NodeResult], codes: set[int]) -> str:
    return listed([f"{node.name} ended with {node.exit}" for node in nodes if node.exit in codes])
