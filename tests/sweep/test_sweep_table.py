"""The table has every node, also those that have not run."""

from __future__ import annotations

from pytest_gpucluster.sweep.outcome import Outcome
from pytest_gpucluster.sweep.table import progress_line, table


def test_every_node_and_the_joint_run_have_a_row():
    bad = Outcome(node="gpu-2", verdict="REJECTED", exit=1, failure="hbm: slow\x1b[0m\n" + "x" * 500, seconds=61.4)
    lines = table(["gpu-1", "gpu-2"], [bad], None, "too few").splitlines()
    assert lines[0] == "node      verdict   seconds  first failure"
    assert lines[1] == "gpu-1     not run         -  the sweep ended before it"
    assert lines[2].startswith("gpu-2     REJECTED       61  hbm: slow#x1B[0m xxx")
    assert lines[3] == "together  not run         -  too few"
    assert len(lines) == 4
    assert len(progress_line(1, 2, bad)) <= 320
