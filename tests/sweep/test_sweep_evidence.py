"""exclude.txt names the nodes that did not get through alone, in the forms that schedulers take."""

from __future__ import annotations

from pytest_gpucluster.sweep.evidence import exclude_text
from pytest_gpucluster.sweep.outcome import Outcome


def of(node, failure):
    return Outcome(node=node, verdict="REJECTED", exit=1, failure=failure, seconds=None)


def test_each_node_is_listed_with_why():
    assert exclude_text([of("gpu-003", "hbm: slow\n[slurm]\nall"), of("gpu-007", "x")]).splitlines() == [
        "# Nodes to leave out of the next jobs. Each did not pass alone, so no other node can be the cause.",
        "# gpu-003: REJECTED: hbm: slow [slurm] all",
        "# gpu-007: REJECTED: x",
        "#",
        "# sbatch --exclude=\"$(sed -n '/^\\[slurm\\]/{n;p}' exclude.txt)\" ...",
        "[slurm]",
        "gpu-[003,007]",
        "",
        "# kubectl cordon gpu-003",
        "# kubectl cordon gpu-007",
        "[kubernetes]",
        "gpu-003",
        "gpu-007",
    ]


def test_nobody_is_listed_where_all_got_through():
    assert exclude_text([]) == ""
