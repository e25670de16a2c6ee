"""The live line in real sessions: seen on a terminal, nowhere else, and nothing of it is left."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter
from sessions import CPU, PLUGINS, Project, environment
from tmux import Terminal, terminal

from pytest_gpucluster.session.status_line import WorkersLiveHooks, why_not

SUITE = """
import os, sys, time

def test_first(progress):
    progress(1, 4, loss=1.0)
    time.sleep(0.5)
    progress(4, 4, loss=1.0)

def test_second(capsys):
    with capsys.disabled():
        print("direct words")
        time.sleep(0.5)
        print("more direct words")
    print("captured words")
    sys.stderr.write("captured, too")

def test_third():
    while not os.path.exists("go"):
        time.sleep(0.05)
    print("captured words", flush=True)
    assert False, "x" * 200

def test_fourth(): pass
"""
CHANGING = (r"\d+\.\d+s\b", r"\d{8}-\d{6}(?:-\d+)?", r"(gpucluster settings: device=cpu \(command line\)).*")
"""What differs between two runs anyway: times, the run's folder, and the setting itself."""


def run_on(window: Terminal, project: Project, *options: str) -> None:
    """Start a session on the terminal."""
    command = [sys.executable, "-m", "pytest", *PLUGINS, CPU, *options]
    environ = {name: value for name, value in environment().items() if name != "COLUMNS"}
    window.run(command, {**environ, "TERM": "screen", "CI": "", "TMPDIR": str(project.path)})


def left_on(window: Terminal) -> list[str]:
    """Return what a session has left on the terminal, at its end."""
    window.wait_for("ended with")
    text = window.everything().partition("ended with")[0]
    for changing in CHANGING:
        text = re.sub(changing, lambda match: match[1] or "" if match.lastindex else "", text)
    return [line.rstrip() for line in text.strip().splitlines()]


def test_it_is_seen_while_tests_run_and_leaves_the_terminal_as_it_is_without_it(project: Project) -> None:
    project.suite(SUITE)
    # Low windows: what is shown at their end makes them scroll.
    with terminal(90, 12, project.path) as window, terminal(90, 12, project.path) as other:
        run_on(window, project, "--gpucluster-live=auto")
        run_on(other, project, "--gpucluster-live=never")
        window.wait_for("so far)")
        screen = window.wait_for("test_third: ")
        assert re.search(r"^test_third: \d+:\d\d so far, at most \d+:\d\d left$", screen, re.MULTILINE), screen
        assert "captured words" not in screen
        window.resize(60, 12)
        window.resize(90, 12)
        (project.path / "go").touch()
        left, without = left_on(window), left_on(other)
    assert left == without
    assert "test_first: step 4 of 4, loss 1" in left, "the last step stays"
    at = left.index("more direct words")
    assert left[at - 1].endswith("direct words")
    assert any("REJECTED" in line for line in left)


def test_ctrl_c_leaves_nothing_of_it(project: Project) -> None:
    project.suite("import time\n\ndef test_it():\n    time.sleep(60)\n")
    with terminal(90, 30, project.path) as window:
        run_on(window, project)
        window.wait_for("so far")
        window.keys("C-c")
        window.wait_for("ended with 2")
        assert "so far" not in window.everything()


def config_of(**changes: Any) -> Any:
    """A session before a terminal on which the line could be shown, but for these changes."""
    found = {"isatty": True, "verbosity": 0, "capture": "fd", "usepdb": False, "trace": False, **changes}
    reporter: Any = TerminalReporter.__new__(TerminalReporter)
    reporter.isatty, reporter.config = found["isatty"], SimpleNamespace(option=SimpleNamespace(**found))
    reporter.config.option.verbose = found["verbosity"]
    return SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugin=lambda name: found.get("reporter", reporter)),
        getoption=lambda name, default=None: default if found.get(name) is None else found[name],
    )


@pytest.mark.parametrize(
    ("changes", "environ", "asked", "why"),
    [
        ({}, {}, "auto", ""),
        ({}, {"CI": ""}, "auto", ""),
        ({}, {"CI": "false"}, "auto", ""),
        ({"verbosity": 2}, {}, "auto", ""),
        ({}, {}, "never", "switched off"),
        ({"reporter": None}, {}, "auto", "another plugin"),
        ({"reporter": SimpleNamespace(isatty=True, verbosity=0)}, {}, "auto", "another plugin"),
        ({"isatty": False}, {}, "auto", "no terminal"),
        ({}, {"TERM": "dumb"}, "auto", "cannot move"),
        ({}, {"TERM": ""}, "auto", "cannot move"),
        ({}, {"CI": "true"}, "auto", "CI"),
        ({"verbosity": -1}, {}, "auto", "quiet"),
        ({"capture": "no"}, {}, "auto", "not captured"),
        ({"capture": None}, {}, "auto", "not captured"),
        ({"capture": "sys"}, {}, "auto", "not captured"),
        ({"capture": "tee-sys"}, {}, "auto", "not captured"),
        ({"usepdb": True}, {}, "auto", "debugger"),
        ({"trace": True}, {}, "auto", "debugger"),
    ],
)
def test_it_is_shown_only_where_it_disturbs_nothing(
    changes: dict[str, Any], environ: dict[str, str], asked: str, why: str
) -> None:
    told = why_not(config_of(**changes), {"TERM": "xterm", **environ}, asked=asked)
    assert why in told
    assert bool(told) == bool(why)


class Recorded:
    """Keeps the names of the methods that were called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.called.append(" ".join([name, *map(str, arguments)]))


def test_of_several_workers_the_latest_test_is_shown_until_all_have_ended_theirs() -> None:
    live = Recorded()
    hooks = WorkersLiveHooks(live)  # type: ignore[arg-type]  # what is needed of it
    hooks.pytest_runtest_logstart("t.py::test_a[1]")
    hooks.pytest_runtest_logstart("t.py::test_a[1]")
    hooks.pytest_runtest_logfinish()
    assert live.called == ["begin test_a[1]"]
    hooks.pytest_runtest_logstart("t.py::test_b")
    hooks.pytest_runtest_logfinish()
    assert live.called == ["begin test_a[1]", "begin test_b"]
    hooks.pytest_runtest_logfinish()
    hooks.pytest_runtest_logfinish()
    assert live.called[2:] == ["end", "end"]
    hooks.pytest_sessionfinish()
    hooks.pytest_unconfigure()
    assert live.called[4:] == ["close", "close"]


def test_a_line_that_has_ended_early_is_told_at_the_end() -> None:
    live: Any = SimpleNamespace(problem="")
    reporter: Any = Recorded()
    hooks = WorkersLiveHooks(live)
    hooks.pytest_terminal_summary(reporter)
    live.problem = "ValueError: no such colour"
    hooks.pytest_terminal_summary(reporter)
    assert re.match("write_line gpucluster: .*: ValueError: no such colour$", *reporter.called)
