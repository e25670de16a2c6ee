"""One run over many nodes by ssh: started on all of them, followed, ended, its reports fetched, and one exit code.

The result is one exit code and one line for the whole run.
"""

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
from pytest_gpucluster.journal.verdict import BROKEN, INCOMPLETE, REJECTED
from pytest_gpucluster.runners import ssh
from pytest_gpucluster.runners.hosts import Host, Plan
from pytest_gpucluster.runners.node_agent import GRACE_SECONDS, unpack
from pytest_gpucluster.runners.ssh import Access, Channel, Frame, explained, ssh_command
from pytest_gpucluster.text import one_line, printable

HANG_UP_SECONDS = GRACE_SECONDS + 15.0
"""From the request to end until the connection is closed: the node kills what is left before that."""
_CLOSE_SECONDS = 15.0
COLLECT_SECONDS = 600.0
_LOST_SECONDS = ssh.SILENT_SECONDS + GRACE_SECONDS
"""How long a node that was lost may need to notice that, and to end what runs there."""


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What came of it.

    Attributes:
        exit: of the run on the node; None where nobody knows.
        seconds: how long it took, without bringing the reports.
        stopped: why it was ended from here; empty where it was not.
        why: why there is no exit code; empty where there is one.
        folder: where its reports are now; None where they could not be brought.
        missing: why not.
    """

    exit: int | None
    seconds: float
    stopped: str = ""
    why: str = ""
    folder: Path | None = None
    missing: str = ""


class Errand:
    """A run on a node. Nothing waits in here: look at it again and again."""

    def __init__(
        self,
        host: Host,
        access: Access,
        *,
        words: Sequence[str],
        directory: str,
        environ: dict[str, str],
        remote_folder: str,
        first_folder: str,
        folder: Path,
        log: Path,
        within_seconds: float,
        answer_seconds: float,
        on_line: Callable[[str, str], None] = lambda kind, line: None,
    ) -> None:
        """Start it.

        Args:
            host: the node.
            access: how it is reached.
            words: of ``gpucluster``, to run there.
            directory: to run in.
            environ: variables beside those of the node.
            remote_folder: of this run on the node.
            first_folder: that of rank 0's node, by the same path: what ranks here have written there is brought too.
            folder: where its content comes to, here. It must not be there yet.
            log: where its output goes, here.
            within_seconds: after so long it is ended.
            answer_seconds: the longest that the node may take until it says its first word.
            on_line: called with OUT or ERR and each line that it prints.

        Raises:
            EnvironmentBroken: ssh cannot be started.
            OSError: the log cannot be written.
        """
        self.host = host
        self._access, self._directory, self._remote_folder, self._folder = access, directory, remote_folder, folder
        self._first_folder = first_folder
        self._within, self._answer_within, self._on_line = within_seconds, answer_seconds, on_line
        self._started = time.monotonic()
        self._seconds = 0.0
        self._told_to_end: float | None = None
        self._told: set[str] = set()
        self._hung_up: float | None = None
        self._stopped = self._why = ""
        self._exit: int | None = None
        self._half = {ssh.OUT: "", ssh.ERR: ""}
        self._brought: Brought | None = None
        self._collect: Channel | None = None
        self._collect_until = 0.0
        self._archive: IO[bytes] | None = None
        self._log = log.open("wb", buffering=0)
        request = ssh.request("run", words=list(words), directory=directory, env=environ, folder=remote_folder)
        try:
            self._channel = Channel(ssh_command(host, access), request)
        except EnvironmentBroken:
            self._log.close()
            raise

    @property
    def running(self) -> bool:
        """Whether the run itself is not over yet."""
        return self._collect is None and self._brought is None

    @property
    def exit(self) -> int | None:
        """What the run has ended with, as soon as that is known."""
        return self._exit

    def look(self) -> Brought | None:
        """Go on; return what came of it when all is here."""
        if self._brought is not None:
            return self._brought
        if self._collect is None:
            self._follow()
        else:
            self._take_parts(self._collect)
        return self._brought

    def tell_to_end(self, why: str, word: str = ssh.TERMINATE) -> None:
        """Let the node end the run; its reports are written, and brought."""
        if not self.running or word in self._told:
            return
        self._told.add(word)
        self._stopped = self._stopped or why
        self._told_to_end = self._told_to_end or time.monotonic()
        self._channel.tell(word)

    def leave_reports(self, why: str) -> None:
        """Do not wait any longer for the reports of a run that is over: they stay on the node."""
        if self._collect is not None and self._brought is None:
            self._collect.kill()
            self._bring(None, why)

    def abandon(self) -> str:
        """Give it up at once. Return what may still run; an empty text where that is nothing."""
        was_running = self.running
        self._channel.kill()
        if self._collect is not None:
            self._collect.kill()
        self._close()
        if not was_running or self._channel.ended:
            return ""
        return f"{self.host.name}: its run was given up; the node ends it by itself within {_LOST_SECONDS:.0f} s"

    # ---- the run

    def _follow(self) -> None:
        over = self._channel.closed
        for frame in self._channel.drain():
            self._take(frame)
        now = time.monotonic()
        if over or self._channel.ended:
            self._seconds = round(now - self._started, 3)
            self._over()
        elif not self._channel.greeted and now - self._started > self._answer_within:
            self._stopped = self._stopped or f"no answer within {self._answer_within:g} s"
            self._channel.kill()
        elif self._told_to_end is None:
            if now - self._started > self._within:
                self.tell_to_end(f"no end of it within {self._within:g} s")
        elif self._hung_up is None:
            if now - self._told_to_end > HANG_UP_SECONDS:
                self._hung_up = now
                self._channel.hang_up()
        elif now - self._hung_up > _CLOSE_SECONDS:
            self._channel.kill()

    def _take(self, frame: Frame) -> None:
        if frame.kind in self._half:
            self._print(frame.kind, frame.value)
        elif frame.kind == ssh.END:
            code = frame.value.get("exit")
            self._exit = code if isinstance(code, int) else None
            self._why = "" if self._exit is not None else str(frame.value.get("error") or "it has said no exit code")

    def _print(self, kind: str, text: str) -> None:
        self._keep(text)
        *lines, self._half[kind] = (self._half[kind] + text).split("\n")
        for line in lines:
            self._on_line(kind, line.rstrip("\r"))

    def _keep(self, text: str) -> None:
        self._log.write(text.encode("utf-8", "backslashreplace"))

    def _over(self) -> None:
        for kind, half in self._half.items():
            if half:
                self._on_line(kind, half)
        if not self._channel.ended:
            self._why = explained(self._channel)
            self._keep(f"{self._why}\n")
        greeted = self._channel.greeted
        lost = not self._channel.ended
        self._channel.kill()
        if not greeted:
            self._bring(None, "")
            return
        wait = _LOST_SECONDS if lost else 0.0
        request = ssh.request(
            "collect",
            directory=self._directory,
            folder=self._remote_folder,
            beside=self._first_folder,
            wait_seconds=wait,
        )
        self._archive = tempfile.TemporaryFile(prefix="gpucluster-")  # noqa: SIM115  # closed when it is unpacked
        self._collect_until = time.monotonic() + COLLECT_SECONDS
        self._collect = Channel(ssh_command(self.host, self._access), request)

    # ---- its reports

    def _take_parts(self, channel: Channel) -> None:
        assert self._archive is not None
        over = channel.closed
        problem, done = "", False
        for frame in channel.drain():
            if frame.kind == ssh.PART:
                self._archive.write(frame.value)
            elif frame.kind == ssh.END:
                done, problem = True, str(frame.value.get("error") or "")
                code = frame.value.get("exit")
                # A run whose connection was lost has left word of its end, which is better than none.
                if self._exit is None and isinstance(code, int):
                    self._why = f"{self._why}; on the node it has ended with exit code {code}"
        if not done and not over:
            if time.monotonic() < self._collect_until:
                return
            problem = f"not here within {COLLECT_SECONDS:g} s"
        elif not done:
            problem = explained(channel)
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
        self._bring(None if problem else self._folder, problem)

    def _bring(self, folder: Path | None, problem: str) -> None:
        where = f"{self.host.name}:{self._remote_folder}"
        self._brought = Brought(
            exit=self._exit,
            seconds=self._seconds,
            stopped=self._stopped,
            why=self._why,
            folder=folder,
            missing=f"{problem}; its reports are in {where}" if problem else "",
        )
        self._close()

    def _close(self) -> None:
        self._log.close()
        if self._archive is not None:
            with contextlib.suppress(OSError):  # a temporary file that nobody needs any more
                self._archive.close()


_POLL_SECONDS = 0.05
OTHERS_SECONDS = 360.0
"""How long other nodes may go on when one has ended. Longer than torchrun's own wait for agents that have not ended,
300 s. Source: torch, distributed/elastic/agent/server/api.py (``exit_barrier_timeout``)."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Heard:
    """The signals that have come. The first one ends the run in order; another one says so once more, as SIGTERM, and
    waits no longer for the reports of runs that are over."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.numbers.append(number)

    @property
    def name(self) -> str:
        """The first one."""
        return signal.Signals(self.numbers[0]).name if self.numbers else ""


@contextmanager
def listening() -> Iterator[Heard]:
    """Hear signals instead of ending by them, except for SIGHUP under nohup."""
    heard = Heard()
    # Under nohup the run outlives its terminal.
    mine = [number for number in _ENDING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, heard.take) for number in mine}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def carry_out(
    plan: Plan,
    access: Access,
    directory: Path,
    *,
    within_seconds: float,
    answer_seconds: float,
    others_seconds: float,
    heard: Heard,
    say: Callable[[str, bool], None],
) -> Mapping[str, Brought]:
    """Run a plan on its nodes and return name -> what came of each. Nothing that was started is left alone.

    Args:
        plan: what to run.
        access: how nodes are reached.
        directory: for what the nodes leave: ``NAME.log`` and the folder ``NAME``.
        within_seconds: the longest that a node may take.
        answer_seconds: the longest that one may take until it says its first word.
        others_seconds: how long the others may go on when the first node has ended.
        heard: the signals so far.
        say: shows a line to the operator; True for what came from standard error, or is ours.

    Raises:
        EnvironmentBroken: ssh cannot be started.
        OSError: what the nodes say cannot be kept.
    """
    errands: list[Errand] = []
    try:
        for node_rank, host in enumerate(plan.hosts):
            errands.append(
                Errand(
                    host,
                    access,
                    words=plan.words(node_rank),
                    directory=plan.directory,
                    environ=dict(plan.environ),
                    remote_folder=plan.folder(host),
                    first_folder=plan.folder(plan.hosts[0]),
                    folder=directory / host.name,
                    log=directory / f"{host.name}.log",
                    within_seconds=within_seconds,
                    answer_seconds=answer_seconds,
                    on_line=_teller(host.name if node_rank else "", say),
                )
            )
        return _follow(errands, heard, others_seconds, say)
    except BaseException:  # whatever it is, nothing goes on alone
        for errand in errands:
            left = errand.abandon()
            if left:
                say(left, True)
        raise


def _follow(
    errands: Sequence[Errand], heard: Heard, others_seconds: float, say: Callable[[str, bool], None]
) -> Mapping[str, Brought]:
    brought: dict[str, Brought] = {}
    ended_at: float | None = None
    answered = 0
    while len(brought) < len(errands):
        for errand in errands:
            if errand.host.name not in brought:
                done = errand.look()
                if done is not None:
                    brought[errand.host.name] = done
        if ended_at is None and any(not errand.running for errand in errands):
            ended_at = time.monotonic()
        running = [errand for errand in errands if errand.running]
        if len(heard.numbers) > answered:
            answered += 1
            _interrupt(errands, heard, answered, say)
        elif ended_at is not None and time.monotonic() - ended_at > others_seconds:
            for errand in running:
                errand.tell_to_end(f"no end of it {others_seconds:g} s after that of another node")
        time.sleep(_POLL_SECONDS)
    return brought


def _interrupt(errands: Sequence[Errand], heard: Heard, times: int, say: Callable[[str, bool], None]) -> None:
    number = heard.numbers[times - 1]
    running = [errand for errand in errands if errand.running]
    if times == 1:
        say(f"{heard.name}: {len(running)} nodes are told to end; reports are written and brought", True)
    else:
        for errand in errands:
            errand.leave_reports(f"interrupted by {heard.name} again")
    # Ctrl-C first, as on a terminal; whoever presses it again means it.
    word = ssh.INTERRUPT if number == signal.SIGINT and times == 1 else ssh.TERMINATE
    for errand in running:
        errand.tell_to_end(f"interrupted by {heard.name}", word)


def _teller(name: str, say: Callable[[str, bool], None]) -> Callable[[str, str], None]:
    """Return what shows a node's lines: with its name in front, and plainly for that of rank 0."""
    front = f"[{name}] " if name else ""

    def tell(kind: str, line: str) -> None:
        say(f"{front}{printable(line)}", kind == ssh.ERR)

    return tell


REJECTS, INTERRUPTED, BROKE, NODES_SILENT = 1, 2, 11, 12
"""``NODES_SILENT`` is this command's own: a node of the file did not answer."""
_CHARACTERS = 1000


@dataclass(frozen=True, kw_only=True)
class NodeEnd:
    """What came of one node: its exit code, or why there is none."""

    name: str
    exit: int | None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the journal says that was brought from the node of rank 0."""

    word: str
    exit: int
    reason: str
    rehearsal: bool
    nnodes: int


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The exit code, and what the operator reads."""

    exit: int
    line: str


def conclude(
    ends: Sequence[NodeEnd],
    record: Record | None,
    *,
    no_record: str = "",
    silent: Mapping[str, str] | None = None,
    interrupted: str = "",
) -> Conclusion:
    """Return what a run came to.

    A pass takes that every node ended with 0, that the journal is here and says so too, of as many nodes as were
    started, and that no node of the file was left out. A rejection counts more than all else.

    Args:
        ends: of all nodes that were started, rank 0's first.
        record: what its journal says; None where it could not be had.
        no_record: why not.
        silent: nodes that were left out since they did not answer -> why.
        interrupted: by what, if it was.
    """
    codes = [end.exit for end in ends]
    if REJECTS in codes or (record is not None and (record.exit == REJECTS or record.word == REJECTED)):
        reason = record.reason if record is not None else _who(ends, {REJECTS})
        return _said(REJECTED, REJECTS, reason, record)
    if interrupted:
        return _said(BROKEN, INTERRUPTED, f"interrupted ({interrupted})", record)
    lost = [end for end in ends if end.exit is None]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        told = f"; its journal says: {record.reason}" if record is not None and record.exit else ""
        return _said(BROKEN, BROKE, f"{lost[0].name}: {lost[0].why or 'nobody knows how it ended'}{more}{told}", record)
    first = codes[0] if codes else BROKE
    bad = {code for code in codes if code is not None and code not in (0, 10, 12)}
    if first in (0, 10, 12) and bad:
        return _said(BROKEN, BROKE, f"{_who(ends, bad)}, where rank 0's node ended with {first}", record)
    if bad:
        reason = record.reason if record is not None else _who(ends, bad)
        return _said(BROKEN, int(first or BROKE), reason, record)
    if record is None:
        return _said(BROKEN, BROKE, f"no record of the run is here: {no_record or 'nobody said why'}", record)
    if record.nnodes != len(ends):
        reason = f"its journal is of {record.nnodes} nodes, but {len(ends)} were started"
        return _said(BROKEN, BROKE, reason, record)
    worst = max(int(code or 0) for code in codes)
    if record.exit != worst:
        reason = f"the nodes ended with {worst}, but the journal says {record.word}, exit code {record.exit}"
        return _said(BROKEN, BROKE, reason, record)
    if silent:
        names = ", ".join(list(silent)[:8]) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
        of = len(ends) + len(silent)
        reason = f"{len(ends)} of {of} nodes: {record.word} ({record.reason}); no answer: {names}"
        return _said(INCOMPLETE, NODES_SILENT, reason, record)
    return _said(record.word, record.exit, record.reason, record)


def _said(word: str, code: int, reason: str, record: Record | None) -> Conclusion:
    rehearsal = "REHEARSAL, " if record is not None and record.rehearsal else ""
    return Conclusion(exit=code, line=one_line(f"{rehearsal}{word}, exit code {code}: {reason}", _CHARACTERS))


def _who(ends: Sequence[NodeEnd], codes: set[int]) -> str:
    told = [f"{end.name} ended with {end.exit}" for end in ends if end.exit in codes]
    return ", ".join(told[:8]) + (f" and {len(told) - 8} more" if len(told) > 8 else "")
