"""torchrun's --max-restarts: a run that has broken stays broken, and its report stays as it was."""

import pytest
from torchrun import start

ONCE = """
import os
import signal
from stamps import RANK, all_reduce, meet, stamp

FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def test_first(cluster):
    meet(cluster, "nothing")

def test_fault(cluster):
    stamp("fault" if FIRST else "run_again")
    if FIRST and RANK == 1:
        {fault}
    all_reduce(cluster)
"""
FAULTS = {
    "a failure": ("raise RuntimeError('only the first time')", ("REJECTED", 1, "rank 0")),
    "a death": ("os.kill(os.getpid(), signal.SIGKILL)", ("BROKEN", 11, "rank 0")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_restart_never_turns_a_broken_run_into_a_pass(tmp_path, fault):
    code, end = FAULTS[fault]
    run = start(tmp_path, {"test_once.py": ONCE.format(fault=code)}, launcher=["--max-restarts=1"])
    run.wait_for("the first report is closed", lambda: "exit code" in run.output)
    before = run.junit_path.read_bytes()
    run.wait()
    assert run.exits == [1]
    assert "restart 1 of" in run.output
    assert run.find_stamp("run_again", 0) is None
    assert run.end == end
    assert run.junit_path.read_bytes() == before
    assert [path.name for path in (tmp_path / "reports").iterdir() if path.name != "latest"] == [
        (tmp_path / "reports" / "latest").resolve().name
    ]
    assert run.left_over == []
