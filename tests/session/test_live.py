"""The live line: what reaches the terminal byte by byte, and on a real one that nothing of it is left."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter
from sessions import CPU, PLUGINS, Project, environment
from tmux import Terminal, terminal

from pytest_gpucluster.session import progress as module
from pytest_gpucluster.session.progress import ERASE_BELOW, INDEX, LIVE, RESTORE, SAVE, StatusLine, begin_live

SHOWN = f"{INDEX}\x1b[1A{SAVE}\x1b[?7l{INDEX}\r\x1b[2K\x1b[2mtest_it: 0:00 so far\x1b[m\x1b[?7h{RESTORE}"


class Screen:
    """A terminal that keeps every byte, before a clock that stands still until it is moved."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.reads, self._writes = os.pipe()
        self.columns, self.rows, self.time = columns, rows, 100.0
        self.writer = SimpleNamespace(_file=io.TextIOWrapper(io.FileIO(self._writes, "w")), width_of_current_line=0)
        self.live = StatusLine(self.writer, size=self.size, now=lambda: self.time)

    def size(self, descriptor: int) -> os.terminal_size:
        assert os.path.sameopenfile(descriptor, self._writes)
        return os.terminal_size((self.columns, self.rows))

    def received(self) -> str:
        os.set_blocking(self.reads, False)
        try:
            return os.read(self.reads, 65536).decode()
        except BlockingIOError:
            return ""


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    made.live.close()
    made.writer._file.close()
    os.close(made.reads)


def test_the_line_is_shown_below_and_erased_before_anything_is_written(screen: Screen) -> None:
    screen.live.pytest_runtest_logstart("t.py::test_it")
    screen.writer._file.write("tests ..")
    assert screen.received() == "tests .."
    screen.live.show()
    assert screen.received() == SHOWN
    screen.live.show()
    assert screen.received() == ERASE_BELOW + SHOWN, "the line is drawn anew, not one below the other"
    assert screen.writer._file.write(".") == 1
    assert screen.received() == f"{ERASE_BELOW}."
    screen.writer._file.write(".")
    assert screen.received() == ".", "there is nothing to erase any more"
    screen.live.show()
    screen.received()
    screen.live.pytest_runtest_logfinish()
    assert screen.received() == ERASE_BELOW
    screen.live.show()
    assert screen.received() == "", "between tests nothing is shown"


def test_the_step_is_that_of_the_test_that_runs(screen: Screen) -> None:
    live = screen.live
    assert live.text() == ""
    live.pytest_runtest_logstart("t.py::test_it[\x1b[2J\n\u202e]")
    assert live.text().isprintable(), "a name moves no cursor"
    live.step = "step 3 of 9"
    screen.time += 75
    assert live.text().endswith(": step 3 of 9 (1:15 so far)")
    live.pytest_runtest_logstart("t.py::test_next")
    assert live.text() == "test_next: 0:00 so far"


@pytest.mark.parametrize(
    ("columns", "rows", "written", "is_shown"),
    [(19, 24, 0, False), (80, 4, 0, False), (80, 5, 0, True), (0, 0, 3, False), (80, 24, 80, False)],
    ids=["narrow", "low", "fits", "of unknown size", "after a full line"],
)
def test_only_where_there_is_room_for_it(screen: Screen, columns: int, rows: int, written: int, is_shown: bool) -> None:
    screen.columns, screen.rows, screen.writer.width_of_current_line = columns, rows, written
    screen.live.pytest_runtest_logstart("t.py::test_it")
    screen.live.show()
    assert ("so far" in screen.received()) == is_shown


def test_the_thread_draws_until_it_is_closed(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SOON_SECONDS", 0.01)
    screen.live.pytest_runtest_logstart("t.py::test_it")
    screen.live.start()
    os.set_blocking(screen.reads, True)
    assert os.read(screen.reads, 65536).decode().startswith(SHOWN)
    screen.live.close()
    screen.live._thread.join(60)
    assert not screen.live._thread.is_alive()
    assert screen.received().endswith(ERASE_BELOW)
    assert isinstance(screen.writer._file, io.TextIOWrapper), "pytest writes without it again"


SUITE = """
import os, time

def test_first(progress):
    progress(1, 4, loss=1.0)
    time.sleep(0.5)
    progress(4, 4, loss=1.0)

def test_second():
    while not os.path.exists("go"):
        time.sleep(0.05)
    print("captured words", flush=True)
    assert False, "x" * 200

def test_third(): pass
"""
CHANGING = r"\d+\.\d+s\b|\d{8}-\d{6}(?:-\d+)?"
"""What differs between two runs anyway: times, and the run's folder."""


def run_on(window: Terminal, project: Project, *options: str) -> None:
    """Start a session on the terminal."""
    command = [sys.executable, "-m", "pytest", *PLUGINS, CPU, *options]
    environ = {name: value for name, value in environment().items() if name != "COLUMNS"}
    window.run(command, {**environ, "TERM": "screen", "CI": "", "TMPDIR": str(project.path)})


def left_on(window: Terminal) -> list[str]:
    """Return what a session has left on the terminal, at its end."""
    window.wait_for("ended with")
    text = re.sub(CHANGING, "", window.everything().partition("ended with")[0])
    return [line.rstrip() for line in text.strip().splitlines()]


def test_it_is_seen_while_tests_run_and_leaves_the_terminal_as_it_is_without_it(project: Project) -> None:
    project.suite(SUITE)
    # Low windows: what is shown at their end makes them scroll.
    with terminal(90, 12, project.path) as window, terminal(90, 12, project.path) as other:
        run_on(window, project)
        run_on(other, project, "--capture=sys")
        screen = window.wait_for("test_second: ")
        assert re.search(r"^test_second: \d+:\d\d so far$", screen, re.MULTILINE), screen
        assert "captured words" not in screen
        window.resize(60, 12)
        window.resize(90, 12)
        (project.path / "go").touch()
        left, without = left_on(window), left_on(other)
    assert left == without
    assert "test_first: step 4 of 4, loss 1" in left, "the last step stays"
    assert any("REJECTED" in line for line in left)


def test_ctrl_c_leaves_nothing_of_it(project: Project) -> None:
    project.suite("import time\n\ndef test_it():\n    time.sleep(60)\n")
    with terminal(90, 30, project.path) as window:
        run_on(window, project)
        window.wait_for("so far")
        window.keys("C-c")
        window.wait_for("ended with 2")
        assert "so far" not in window.everything()


@pytest.mark.parametrize(
    ("changes", "environ", "is_shown"),
    [
        ({}, {}, True),
        ({}, {"CI": ""}, True),
        ({}, {"CI": "false"}, True),
        ({"verbose": 2}, {}, True),
        ({"rank": 1}, {}, False),
        ({"has_joined": False}, {}, False),
        ({"reporter": None}, {}, False),
        ({"reporter": SimpleNamespace(isatty=True, verbosity=0)}, {}, False),
        ({"isatty": False}, {}, False),
        ({}, {"TERM": "dumb"}, False),
        ({}, {"TERM": ""}, False),
        ({}, {"CI": "true"}, False),
        ({"verbose": -1}, {}, False),
        ({"capture": "no"}, {}, False),
        ({"capture": "tee-sys"}, {}, False),
        ({"usepdb": True}, {}, False),
        ({"trace": True}, {}, False),
    ],
)
def test_it_is_shown_only_where_it_disturbs_nothing(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], environ: dict[str, str], is_shown: bool
) -> None:
    found = {"verbose": 0, "capture": "fd", "usepdb": False, "trace": False, "isatty": True, **changes}
    reporter: Any = TerminalReporter.__new__(TerminalReporter)
    option = SimpleNamespace(**found)
    reporter.isatty, reporter.config, reporter._tw = found["isatty"], SimpleNamespace(option=option), object()
    shown: list[Any] = []
    monkeypatch.setattr(
        module, "StatusLine", lambda writer: shown.append(writer) or SimpleNamespace(close=print, start=print)
    )
    plugins = SimpleNamespace(get_plugin=lambda name: found.get("reporter", reporter), register=lambda *_: None)
    config: Any = SimpleNamespace(option=option, pluginmanager=plugins, stash={})
    run: Any = SimpleNamespace(
        rank=found.get("rank", 0), has_joined=found.get("has_joined", True), environ={"TERM": "xterm", **environ}
    )
    begin_live(config, run)
    assert (bool(shown), LIVE in config.stash) == (is_shown, is_shown)
