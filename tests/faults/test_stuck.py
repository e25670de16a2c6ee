"""Hangs that nothing can end but SIGKILL: the run ends with every report written, and leaves no process behind."""

import pytest
from cases import params, runs_of
from times import stuck
from torchrun import suite

DEADLINE = 3.0
STUCK = 2.0
EXPECTED = {
    ("hang_in_c", 1): "rank 1 (node-a): hangs at test_one_fault.py:{line} in hang_in_c",
    ("hang_in_c", 0): "the run ended here: rank 0 (node-a) cannot be released from call of "
    "test_one_fault.py::test_fault: hangs at test_one_fault.py:{line} in hang_in_c",
    ("hold_the_gil", 1): "rank 1 (node-a): does not answer (process {pid} is S: sleeping, holding the GIL at "
    "test_one_fault.py:{line} in hold_the_gil)",
    ("hold_the_gil", 0): "the run ended here: rank 0 (node-a, pid {pid}) does not answer, process state S: sleeping, "
    "holding the GIL at test_one_fault.py:{line} in hold_the_gil",
    ("stop", 1): "rank 1 (node-a): does not answer (process {pid} is T: stopped by a signal)",
    ("stop", 0): "the run ended here: rank 0 (node-a, pid {pid}) does not answer, process state T: stopped ",
}
LINES = {
    name: next(n for n, line in enumerate(suite("one_fault")["test_one_fault.py"].splitlines(), 1) if text in line)
    for name, text in {"hang_in_c": "no signal ends this", "hold_the_gil": "PyDLL", "stop": "SIGSTOP"}.items()
}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    return runs_of(request, tmp_path_factory, deadline=DEADLINE, at_once=3, timeouts=f"stuck={STUCK}")


@pytest.mark.parametrize("case", params(*EXPECTED))
def test_the_run_ends_and_the_report_names_the_culprit(runs, times, case):
    run, (fault, victim) = runs[case], case
    stamp = run.stamp("fault", victim)
    expected = EXPECTED[case].format(pid=stamp.pid, line=LINES[fault])
    assert run.verdicts["test_fault"].startswith(f"error: {expected}"), run.output
    assert run.verdicts["test_first"] == "passed"
    assert run.verdicts["test_next"].startswith("skipped: not run: ")
    assert run.end[:2] == ("BROKEN", 11)
    assert run.exits == [1]
    assert run.left_over == []
    assert run.files_left == []
    times.ended(f"stuck: {fault}, rank {victim}", run, since=stamp.at + DEADLINE, goal=stuck(STUCK))
