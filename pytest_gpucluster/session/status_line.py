"""The live status line on rank 0's terminal: the test that runs, its progress and time, and this node's GPUs.

It is never in a file, a pipe or the log of a CI system, and nothing of it is left on the terminal: pytest's own lines
are the same with and without it. A thread of rank 0 draws it once a second; NVML is asked by a process of its own
(:mod:`pytest_gpucluster.node.health.node_reader`), every other second and for a few figures only. A local
worker writes its progress to a file, which the controller shows.

The cursor stays where the output has left it. To show the lines, room is made below it (IND, which scrolls only where
it must), the place is kept (DECSC), the lines are written, and the place is restored (DECRC). To take them away it is
enough to erase from the cursor on (ED): so nothing must be known of where the cursor is, and neither lines that scroll
nor a window that changes its size can leave remains, or take anything that was written. Source: DEC STD 070 and
XTerm Control Sequences, https://invisible-island.net/xterm/ctlseqs/ctlseqs.html; all of them are of the VT100.

A terminal may accept no output for a while: Ctrl-S has stopped it, or the connection behind it is stuck. Nothing here
waits for it; only what pytest itself writes does, as it does without these lines.
"""

from __future__ import annotations

import os
import re
import select
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest
from _pytest.terminal import TerminalReporter  # pytest 8.2 does not have it under its own name
from rich.cells import cell_len, set_cell_size

from pytest_gpucluster.node.health.node_reader import NodeReader
from pytest_gpucluster.node.health.node_state import Node, NodeState, Part
from pytest_gpucluster.session.selection import deadline_of
from pytest_gpucluster.text import MESSAGE_CHARACTERS, duration, one_line, printable

if TYPE_CHECKING:
    from pytest_gpucluster.session.run import Run


class StepFile:
    """What the first worker writes and the controller reads. As a screen of ``progress`` it takes lines to be written
    over."""

    live = True

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def new(cls) -> StepFile | None:
        """Return one in a folder of its own on this node; None where none can be made.

        The run's folder may be on a network file system, which a rank would wait for while it measures.
        """
        try:
            return cls(Path(tempfile.mkdtemp(prefix="gpucluster-live-")) / "step")
        except OSError:
            return None

    def rewrite(self, text: str, *, ends: bool) -> None:
        """Write how far it is; after the last step there is nothing to write."""
        part = self.path.with_suffix(".new")
        with suppress(OSError):  # the controller has ended, and the folder with it
            part.write_text("" if ends else text, encoding="utf-8")
            part.replace(self.path)

    def line(self, text: str) -> None:
        """Never called: everything here is live."""

    def read(self) -> str:
        """Return what was written last."""
        try:
            return self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def remove(self) -> None:
        """Leave nothing of it, nor its folder."""
        for path in (self.path, self.path.with_suffix(".new")):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # there is something else in it
            self.path.parent.rmdir()


# Here, so that it is not loaded during a measurement.

IND, SAVE, RESTORE, ERASE_BELOW = "\x1bD", "\x1b7", "\x1b8", "\x1b[J"
_NO_WRAP, _WRAP, _DIM, _PLAIN, _ERASE_LINE = "\x1b[?7l", "\x1b[?7h", "\x1b[2m", "\x1b[m", "\x1b[2K"
LEAST_COLUMNS, SPARE_ROWS = 20, 4
"""In a smaller window nothing is shown: what pytest writes needs the room."""

_USUAL_SIZE = 80, 24
_LAST_WORDS_SECONDS = 1.0

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class StatusLine:
    """The lines. Every method may be called from any thread.

    Args:
        descriptor: of the terminal.
        size: returns its columns and rows. Raises OSError when the terminal is gone.
        styled: the lines are dim.
    """

    def __init__(
        self, descriptor: int, *, size: Callable[[int], os.terminal_size] = os.get_terminal_size, styled: bool = True
    ) -> None:
        self.lock = threading.RLock()
        self.is_shown = False
        self._descriptor, self._size, self._styled = descriptor, size, styled
        self._holds = 0
        self._line = ""

    def show(self, lines: Sequence[str]) -> None:
        """Show these lines in place of those that are shown, as much of them as there is room for."""
        with self.lock:
            if self._holds:
                return
            drawn = self._drawn(lines)
            if (drawn or self.is_shown) and self._write(ERASE_BELOW * self.is_shown + drawn):
                self.is_shown = bool(drawn)

    def erase(self) -> None:
        """Take the lines away, if the terminal takes anything now."""
        with self.lock:
            if self.is_shown and self._write(ERASE_BELOW):
                self.is_shown = False

    def hold(self) -> None:
        """Take the lines away, and show none until :meth:`release`: somebody else writes to the terminal."""
        with self.lock:
            self.erase()
            self._holds += 1

    def release(self) -> None:
        """Let lines be shown again."""
        with self.lock:
            self._holds = max(0, self._holds - 1)

    def give_up(self) -> None:
        """Take the lines away for last words, from whatever thread."""
        with self._lock_soon() as is_ours:
            if is_ours:
                self.hold()

    def close(self) -> None:
        """Take the lines away for good, and let go of the terminal."""
        with self._lock_soon() as is_ours:
            if is_ours:
                self.hold()
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                    self._descriptor = -1

    def above(self, file: TextIO) -> Above:
        """Return a file to be written to in place of this one, whose output stays above the lines."""
        return Above(file, self)

    def wrote(self, text: str) -> None:
        """Note what has been written to the terminal, with the lock held."""
        self._line = f"{self._line}{text}".rpartition("\n")[2].rpartition("\r")[2][-4096:]

    @contextmanager
    def _lock_soon(self) -> Iterator[bool]:
        """Take the lock, unless a writer does not come to an end; return whether it was taken."""
        is_ours = self.lock.acquire(timeout=_LAST_WORDS_SECONDS)
        try:
            yield is_ours
        finally:
            if is_ours:
                self.lock.release()

    def _drawn(self, lines: Sequence[str]) -> str:
        try:
            columns, rows = self._size(self._descriptor)
        except OSError:
            return ""
        if not columns or not rows:  # a terminal of unknown size
            columns, rows = _USUAL_SIZE
        lines = lines[: max(0, rows - SPARE_ROWS)]
        # At the end of a line that is full the next character is on the next line, which DECSC need not remember.
        written = cell_len(_CONTROL.sub("", self._line))
        if not lines or columns < LEAST_COLUMNS or not self._is_ours() or (written and written % columns == 0):
            return ""
        style, plain = (_DIM, _PLAIN) if self._styled else ("", "")
        body = "".join(f"{IND}\r{_ERASE_LINE}{style}{fit_line(line, columns - 1)}{plain}" for line in lines)
        return f"{IND * len(lines)}\x1b[{len(lines)}A{SAVE}{_NO_WRAP}{body}{_WRAP}{RESTORE}"

    def _is_ours(self) -> bool:
        """Return whether this process may write: not while it runs in the background of the terminal's shell."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # not our controlling terminal, as for a rank that a launcher gave a session of its own
            return True

    def _write(self, text: str) -> bool:
        """Write, if the terminal takes anything now; return whether it did."""
        data = text.encode("utf-8", "replace")
        try:
            if not self._takes():
                return False
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            # The terminal is gone: the next writer gets the error, and there is nothing to remove.
            self._holds += 1
            self.is_shown = False
            return False
        return True

    def _takes(self) -> bool:
        if self._descriptor < 0:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(0))  # also where it is gone, which writing then says


class Above:
    """A file whose output stays above the lines of a status_line."""

    def __init__(self, file: TextIO, status_line: StatusLine) -> None:
        self._file, self._status_line = file, status_line

    def write(self, text: str) -> int:
        """Take the lines away, and write."""
        with self._status_line.lock:
            self._status_line.erase()
            if self._status_line.is_shown:  # it takes nothing now: both wait until it does
                self._file.write(ERASE_BELOW)
                self._status_line.is_shown = False
            written = self._file.write(text)
            # At once: what waits in a buffer would be written somewhere else when the lines have been shown again.
            self._file.flush()
            self._status_line.wrote(text)
            return written

    def flush(self) -> None:
        """Flush the file itself."""
        self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def fit_line(text: str, columns: int) -> str:
    """Return a text cut to this number of columns of a terminal, with an ellipsis.

    >>> fit_line("step 3 of 100", 8)
    'step 3 …'
    """
    return text if cell_len(text) <= columns else f"{set_cell_size(text, columns - 1)}\N{HORIZONTAL ELLIPSIS}"


TICK_SECONDS = 1.0
SOON_SECONDS = 0.2
"""After something was written, so that lines which come at once do not flicker."""
GLANCE_SECONDS = 2.0
_NAME_CHARACTERS = 40
"""A longer name would leave no room for the state of the test."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class _Running:
    """What is known of the test that runs. It is replaced whole: another thread reads it at any moment."""

    name: str
    began: float
    ends_by: float | None = None
    """When the deadline of its phase is over."""
    step: str = ""


class Live:
    """What is shown, from the first test to the last.

    Args:
        status_line: where.
        now: seconds of the monotonic clock.
    """

    def __init__(self, status_line: StatusLine, *, now: Callable[[], float] = time.monotonic) -> None:
        self.status_line = status_line
        self._now = now
        self._file: StepFile | None = None
        self._wake = threading.Condition()
        self._is_closed = False
        self._running: _Running | None = None
        self._gpus: NodeState | None = None
        self._reader: NodeReader | None = None
        self._thread: threading.Thread | None = None
        self.problem = ""
        """Why it has ended before its time."""

    # ---- what is to be shown ---------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """A test begins."""
        self._running = _Running(name=printable(name), began=self._now())

    def phase(self, deadline_seconds: float) -> None:
        """A phase of it begins, with this deadline."""
        if self._running is not None:
            self._running = replace(self._running, ends_by=self._now() + deadline_seconds)

    def end(self) -> None:
        """It has ended."""
        self._running = None
        self.status_line.erase()

    def rewrite(self, text: str, *, ends: bool) -> None:
        """Show how far the test is, until the next step; the last one is printed as a line."""
        if self._running is not None:
            self._running = replace(self._running, step="" if ends else text)

    def follow(self, file: StepFile) -> None:
        """Show what another process says of its steps."""
        self._file = file

    def lines(self) -> list[str]:
        """Return what is to be shown now."""
        running, now = self._running, self._now()
        if running is None:
            return []
        text = running.step if self._file is None else printable(self._file.read())
        begin = f"{running.name}: "
        step = text.removeprefix(begin) if text.startswith(begin) else ""  # else it is of another test
        taken = f"{duration(now - running.began)} so far"
        if step:
            state = f"{step} ({taken})"
        elif running.ends_by is None:
            state = taken
        else:
            state = f"{taken}, at most {duration(max(0.0, running.ends_by - now))} left"
        first = f"{one_line(running.name, _NAME_CHARACTERS)}: {state}"
        gpus = describe_gpus(self._gpus.node()) if self._gpus is not None else ""
        return [first, *([gpus] if gpus else [])]

    # ---- the thread ------------------------------------------------------------------------------------------

    def start(self, *, gpus: Sequence[str] | None, reads_gpus: bool) -> None:
        """Show it from now on.

        Args:
            gpus: UUIDs of those to show; None: all of this node.
            reads_gpus: whether to show GPUs at all.
        """
        if reads_gpus:
            self._gpus = NodeState(GLANCE_SECONDS, uuids=gpus)
            with suppress(OSError):  # no further process can be started: the line shows the test alone
                self._reader = NodeReader(self._gpus.take, GLANCE_SECONDS, few=True)
        thread = threading.Thread(target=self._draw, name="gpucluster-live", daemon=True)
        with suppress(RuntimeError):  # no more threads here: the run goes on without the line
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Take it away for good."""
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(TICK_SECONDS)
        self.status_line.close()
        if self._file is not None:
            self._file.remove()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _draw(self) -> None:
        try:
            while self._goes_on():
                self.status_line.show(self.lines())
        except Exception as error:  # whatever it is: pytest would make a warning of it, and maybe a failure of that
            self.problem = one_line(f"{type(error).__name__}: {error}", MESSAGE_CHARACTERS)
            self.status_line.hold()

    def _goes_on(self) -> bool:
        with self._wake:
            self._wake.wait(TICK_SECONDS if self.status_line.is_shown else SOON_SECONDS)
            return not self._is_closed


def describe_gpus(node: Node) -> str:
    """Put the GPUs of a node in words: for several the least and the most of each figure, with who stands out."""
    if node.silent_seconds is not None or not node.gpus:
        return ""
    if all(gpu.is_stale for gpu in node.gpus):
        ages = [gpu.age_seconds for gpu in node.gpus if gpu.age_seconds is not None]
        return f"GPUs: NVML has not answered{f' for {min(ages):.0f} s' if ages else ''}"
    lost = [str(gpu.values.get("index")) for gpu in node.gpus if gpu.values.get("lost")]
    read = [gpu for gpu in node.gpus if gpu.age_seconds is not None and not gpu.values.get("lost")]
    head = f"GPU {node.gpus[0].values.get('index')}" if len(node.gpus) == 1 else f"{len(node.gpus)} GPUs"
    parts = [
        _span(read, "utilization_percent", "%", outlier=min),
        _span(read, "memory_used_bytes", "GiB", scale=_GIB),
        _span(read, "temperature_celsius", "°C", outlier=max),
        _span(read, "power_watts", "W"),
        "" if not lost else "LOST" if len(node.gpus) == 1 else f"LOST: {', '.join(lost)}",
    ]
    text = ", ".join(filter(None, parts))
    return f"{head}: {text}" if text else ""


def _span(
    gpus: Sequence[Part], key: str, unit: str, *, scale: float = 1, outlier: Callable[..., Part] | None = None
) -> str:
    known = [gpu for gpu in gpus if gpu.values.get(key) is not None]
    if not known:
        return ""
    least, most = (round(which(gpu.values[key] for gpu in known) / scale) for which in (min, max))
    if least == most:
        return f"{most} {unit}"
    who = "" if outlier is None else f" (GPU {outlier(known, key=lambda gpu: gpu.values[key]).values.get('index')})"
    first, second = (who, "") if outlier is min else ("", who)
    return f"{least}{first}-{most} {unit}{second}"


LIVE = pytest.StashKey[Live]()
NEVER = "never"
"""The option's value that switches it off."""


def why_not(config: pytest.Config, environ: Mapping[str, str], *, asked: str) -> str:
    """Return why no live line is to be shown on this process's terminal; "" if it is.

    Uncaptured output of tests would be written over it, as would a debugger's.
    """
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if asked == NEVER:
        return "it is switched off"
    if type(reporter) is not TerminalReporter:
        return "another plugin has the terminal"
    if not bool(reporter.isatty):
        return "the output is no terminal"
    if environ.get("TERM", "dumb") in ("", "dumb"):
        return "the terminal cannot move its cursor"
    if environ.get("CI", "").lower() not in ("", "0", "false"):
        return "this is a CI system"
    if reporter.verbosity < 0:
        return "pytest is to be quiet"
    if config.getoption("capture", "no") != "fd":  # there is none where that plugin is switched off
        return "the output of tests is not captured whole"
    if config.getoption("usepdb", False) or config.getoption("trace", False):
        return "a debugger was asked for"
    return ""


def begin_live(config: pytest.Config, run: Run) -> None:
    """Show the live line, if this process is rank 0 and its terminal is fit for it."""
    live = _on_terminal(config, run)
    if live is None or run.launched is None:
        return
    plugins = config.pluginmanager
    plugins.register(LiveHooks(live, float(run.settings.deadline)), "gpucluster-live")
    capture = plugins.get_plugin("capturemanager")
    if capture is not None:
        plugins.register(Bodies(live.status_line, capture), "gpucluster-live-bodies")
    _start(live, run)


def begin_for_workers(config: pytest.Config, run: Run) -> str | None:
    """Show the live line in the controller of local workers, if its terminal is fit for it.

    Returns:
        The file in which the first worker is to write how far it is; None if it is not shown.
    """
    live = _on_terminal(config, run)
    if live is None:
        return None
    file = StepFile.new()
    if file is not None:
        live.follow(file)
    config.pluginmanager.register(WorkersLiveHooks(live), "gpucluster-live")
    _start(live, run)
    return None if file is None else str(file.path)


def _on_terminal(config: pytest.Config, run: Run) -> Live | None:
    settings = run.settings
    if settings is None or run.rank != 0 or why_not(config, run.environ, asked=settings.live):
        return None
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    written: TextIO = reporter._tw._file
    try:
        descriptor = os.dup(written.fileno())
    except OSError:  # no more descriptors here: the run goes on without the line
        return None
    status_line = StatusLine(descriptor, styled=bool(reporter._tw.hasmarkup))
    reporter._tw._file = status_line.above(written)
    run.clear_terminal = status_line.give_up
    config.stash[LIVE] = live = Live(status_line)
    return live


def _start(live: Live, run: Run) -> None:
    here = [
        str(rank["gpu"]["uuid"])
        for rank in run.roll.who.values()
        if rank.get("gpu") and rank["host"] == run.facts.hostname
    ]
    # A slice is no GPU that NVML counts, and a worker has not reported yet which it has.
    is_known = bool(here) and all(uuid.startswith("GPU-") for uuid in here)
    live.start(gpus=here if is_known else None, reads_gpus=run.device == "cuda")


class _Ending:
    """How it ends, wherever the tests run."""

    def __init__(self, live: Live) -> None:
        self._live = live

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Nothing is shown while the verdict is found and printed."""
        self._live.close()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say why it has ended before its time."""
        if self._live.problem:
            terminalreporter.write_line(f"gpucluster: the live line has ended early: {self._live.problem}")

    def pytest_unconfigure(self) -> None:
        """Also where the session has not come to its end."""
        self._live.close()


class LiveHooks(_Ending):
    """pytest's side of it, where this process runs the tests.

    Args:
        live: what is shown.
        deadline_seconds: of a phase that has none of its own.
    """

    def __init__(self, live: Live, deadline_seconds: float) -> None:
        super().__init__(live)
        self._deadline_seconds = deadline_seconds

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Show the test."""
        self._live.begin(item.name)
        try:
            return (yield)
        finally:
            self._live.end()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Show how long this phase may take."""
        return (yield from self._phase(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Show how long this phase may take."""
        return (yield from self._phase(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Show how long this phase may take."""
        return (yield from self._phase(item))

    def _phase(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._live.phase(deadline_of(item, self._deadline_seconds))
        return (yield)


class WorkersLiveHooks(_Ending):
    """pytest's side of it in the controller of local workers. The latest test that any of them has begun is shown.

    Its deadline is a marker that only the workers know.
    """

    def __init__(self, live: Live) -> None:
        super().__init__(live)
        self._nodeid = ""
        self._running = 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Show a test; that other workers begin it too is no news."""
        self._running += 1
        if nodeid != self._nodeid:
            self._nodeid = nodeid
            self._live.begin(nodeid.rpartition("::")[2])

    def pytest_runtest_logfinish(self) -> None:
        """Show none while no worker is in one."""
        self._running = max(0, self._running - 1)  # a worker that has crashed ends nothing
        if not self._running:
            self._live.end()


class Bodies:
    """What a test itself writes to the terminal, in place of pytest's capture.

    Between phases the capture is suspended too. So it must be known whether a test runs: these hooks are the innermost.
    """

    def __init__(self, status_line: StatusLine, capture: Any) -> None:
        self._status_line, self._capture = status_line, capture
        self._is_in_body = self._is_holding = False
        self._suspend, self._resume = capture.suspend_global_capture, capture.resume_global_capture
        capture.suspend_global_capture, capture.resume_global_capture = self._suspended, self._resumed

    def _suspended(self, in_: bool = False) -> None:
        if self._is_in_body and not self._is_holding:
            self._is_holding = True
            self._status_line.hold()
        self._suspend(in_=in_)

    def _resumed(self) -> None:
        self._resume()
        self._release()

    def _release(self) -> None:
        if self._is_holding:
            self._is_holding = False
            self._status_line.release()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        """A test may write from here on."""
        return (yield from self._body())

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """A test may write from here on."""
        return (yield from self._body())

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        """A test may write from here on."""
        return (yield from self._body())

    def _body(self) -> Generator[None, Any, Any]:
        self._is_in_body = True
        try:
            return (yield)
        finally:
            self._is_in_body = False
            self._release()

    def pytest_unconfigure(self) -> None:
        """Put the capture back as it was."""
        self._capture.suspend_global_capture, self._capture.resume_global_capture = self._suspend, self._resume
