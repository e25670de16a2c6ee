"""Ctrl-C and SIGTERM, to the launcher or to one rank: reports are written, and say what was interrupted."""

import os
import signal

import pytest
from cases import params, runs_of
from times import SIGNAL
from torchrun import start, suite


def is_told(run, times, name, message, since):
    assert run.verdicts["test_first"] == "passed"
    assert message in run.verdicts["test_fault"], run.output
    assert run.verdicts["test_fault"].startswith("error: ")
    assert run.verdicts["test_next"].startswith("skipped: not run: ")
    assert run.end[:2] == ("BROKEN", 2)
    assert run.exits[0] != 0
    assert run.left_over == []
    assert run.files_left == []
    times.ended(f"signal: {name}", run, since=since, goal=SIGNAL)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGINT, "interrupted (Ctrl-C) on rank "),
        (signal.SIGTERM, "ended by SIGTERM on node-a during call of test_one"),
    ],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_to_the_launcher_ends_the_run_with_reports(tmp_path, times, number, message):
    run = start(tmp_path, suite("one_fault"), deadline=60.0, environment={"FAULT": "wait", "VICTIM": "1"})
    since = run.wait_for_stamp("fault", 1).at
    since = max(since, run.wait_for_stamp("fault", 0).at)
    os.kill(run.agents[0].pid, number)
    is_told(run.wait(), times, f"{number.name} to the launcher", message, since)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    return runs_of(request, tmp_path_factory, deadline=60.0)


@pytest.mark.parametrize("case", params(("interrupt", 0), ("interrupt", 1), ("terminate", 0), ("terminate", 1)))
def test_a_signal_to_one_rank_ends_all(runs, times, case):
    run, (fault, victim) = runs[case], case
    told = {"interrupt": f"interrupted (Ctrl-C) on rank {victim} (node-a)", "terminate": "ended by SIGTERM on node-a"}
    message = f"{told[fault]} during call of test_one_fault.py::test_fault"
    is_told(run, times, f"{fault}, rank {victim}", message, run.stamp("fault", victim).at)
    assert run.exits == [1]


@pytest.mark.parametrize("case", params(("end_the_session", 1)))
def test_pytest_exit_on_one_rank_ends_all_with_its_code(runs, case):
    run = runs[case]
    message = "interrupted (pytest.exit) on rank 1 (node-a) during call of test_one_fault.py::test_fault: enough of it"
    assert message in run.verdicts["test_fault"]
    assert run.end[:2] == ("BROKEN", 7)
    assert run.exits == [1]
    assert run.left_over == []
    assert run.files_left == []
