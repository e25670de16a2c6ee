"""pytest's side of the live line: whether there is one, which test runs, and when it writes to the terminal itself."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import pytest
from _pytest.terminal import TerminalReporter  # pytest 8.2 does not have it under its own name

from pytest_gpucluster.footer import Footer
from pytest_gpucluster.live import Live
from pytest_gpucluster.markers import deadline_of
from pytest_gpucluster.step_file import StepFile

if TYPE_CHECKING:
    from pytest_gpucluster.run import Run

LIVE = pytest.StashKey[Live]()
NEVER = "never"
"""The option's value that switches it off."""


def why_not(config: pytest.Config, environ: Mapping[str, str], *, asked: str) -> str:
    """Return why no live line is to be shown on this process's terminal; "" if it is.

    Uncaptured output of tests would be written where nobody knows of, as would a debugger's.
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


def begin(config: pytest.Config, run: Run) -> None:
    """Show the live line, if this process is rank 0 and its terminal is fit for it."""
    live = _on_terminal(config, run)
    if live is None or run.settings is None:
        return
    plugins = config.pluginmanager
    plugins.register(LiveHooks(live, float(run.settings.deadline)), "gpucluster-live")
    capture = plugins.get_plugin("capturemanager")
    if capture is not None:
        plugins.register(Bodies(live.footer, capture), "gpucluster-live-bodies")
    _start(live, run)


def begin_for_workers(config: pytest.Config, run: Run) -> str | None:
    """Show the live line in the controller of local workers, if its terminal is fit for it.

    Returns:
        The file in which the first worker is to say how far it is; None if nobody shows it.
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
    footer = Footer(descriptor, styled=bool(reporter._tw.hasmarkup))
    reporter._tw._file = footer.above(written)
    run.clear_terminal = footer.give_up
    config.stash[LIVE] = live = Live(footer)
    return live


def _start(live: Live, run: Run) -> None:
    who = run.joined.who.values() if run.joined is not None else ()
    here = [str(rank["gpu"]["uuid"]) for rank in who if rank.get("gpu") and rank["host"] == run.facts.hostname]
    # A slice is no GPU that NVML counts, and a worker has not said yet which it has.
    is_known = bool(here) and all(uuid.startswith("GPU-") for uuid in here)
    live.start(gpus=here if is_known else None, reads_gpus=run.device == "cuda")


class _Ending:
    """How it ends, wherever the tests run."""

    def __init__(self, live: Live) -> None:
        self._live = live

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Nothing is shown while the verdict is found and told."""
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

    def __init__(self, footer: Footer, capture: Any) -> None:
        self._footer, self._capture = footer, capture
        self._is_in_body = self._is_holding = False
        self._suspend, self._resume = capture.suspend_global_capture, capture.resume_global_capture
        capture.suspend_global_capture, capture.resume_global_capture = self._suspended, self._resumed

    def _suspended(self, in_: bool = False) -> None:
        if self._is_in_body and not self._is_holding:
            self._is_holding = True
            self._footer.hold()
        self._suspend(in_=in_)

    def _resumed(self) -> None:
        self._resume()
        self._release()

    def _release(self) -> None:
        if self._is_holding:
            self._is_holding = False
            self._footer.release()

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
