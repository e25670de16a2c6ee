"""What a sweep leaves for people and schedulers: the table with every node, and exclude.txt."""

from pytest_gpucluster.journal.verdict import Verdict
from pytest_gpucluster.runners.sweep_outcome import Outcome, SweepFiles, progress_line, sweep_table


def rejected(node, failure):
    return Outcome(node=node, verdict="REJECTED", exit=1, failure=failure, seconds=61.4)


def test_who_did_not_get_through_alone_is_listed_with_why_in_the_forms_that_schedulers_take(tmp_path):
    passed = Outcome(node="gpu-1", verdict="ACCEPTED", exit=0, failure="", seconds=1.0)
    files = SweepFiles(tmp_path, scheduler="ssh", command=[], nodes=["gpu-1", "gpu-003", "gpu-007"])
    verdict = Verdict(word="REJECTED", exit=1, reason="")
    files.write(verdict, [passed], None)
    assert not (tmp_path / "exclude.txt").exists()
    bad = [rejected("gpu-003", "hbm: slow\n[slurm]\nall"), rejected("gpu-007", "x")]
    files.write(verdict, [passed, *bad], None)
    _, *lines = (tmp_path / "exclude.txt").read_text().splitlines()
    assert lines == [
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


def test_every_node_and_the_joint_run_have_a_row_also_those_that_have_not_run():
    bad = rejected("gpu-2", "hbm: slow\x1b[0m\n" + "x" * 500)
    header, *rows = sweep_table(["gpu-1", "gpu-2"], [bad], None, "too few").splitlines()
    assert header == "node      verdict   seconds  first failure"
    expected = ("gpu-1     not run         -  ", "gpu-2     REJECTED       61  hbm: slow#x1B[0m xxx")
    for row, begin in zip(rows, (*expected, "together  not run         -  too few"), strict=True):
        assert row.startswith(begin)
    assert len(progress_line(1, 2, bad)) <= 320
