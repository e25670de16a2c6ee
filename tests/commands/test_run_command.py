"""``gpucluster run`` over a real torchrun: pytest's own exit code, and one line instead of a traceback."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torchrun

from pytest_gpucluster import cli
from pytest_gpucluster.commands import run as run_command

PLAIN = {
    "test_it.py": """
        import os
        from stamps import RANK

        def test_it(cluster):
            assert os.environ["FAULT"] != "fail" or RANK != 1, "too slow"
        """
}
SKIPPED = {
    "test_it.py": """
        import pytest

        @pytest.mark.criterion("it")
        def test_it(cluster):
            pytest.skip("not today")
        """
}


def start(directory, files, *options, fault="", **settings):
    environment = {"FAULT": fault, "VICTIM": "0"}
    return torchrun.start(
        directory, files, *options, by_command=True, environment=environment, deadline=30.0, **settings
    )


CASES = {
    "pass": lambda directory: start(directory, PLAIN),
    "fail": lambda directory: start(directory, PLAIN, fault="fail", hosts=("node-a", "node-b"), ranks=1),
    "skip": lambda directory: start(directory, SKIPPED),
    "usage": lambda directory: start(directory, PLAIN, "--no-such-option"),
    "lost": lambda directory: start(directory, torchrun.suite("one_fault"), fault="kill"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    def run(name):
        return CASES[name](tmp_path_factory.mktemp(name)).wait()

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


def last_lines(run):
    """The last line that each node has printed."""
    paths = sorted(run.directory.glob("output*.txt"))
    return [path.read_text(errors="backslashreplace").splitlines()[-1] for path in paths]


def is_plain(run):
    assert "Traceback" not in run.output
    assert "ChildFailedError" not in run.output
    assert run.left_over == []


def test_a_run_that_passes_ends_with_0(runs):
    run = runs["pass"]
    assert run.exits == [0], run.output
    [line] = last_lines(run)
    assert line.startswith("gpucluster: REHEARSAL, REHEARSED, exit code 0: 1 passed; 1 node, 2 ranks")
    assert line.endswith(f"(reports: {(run.directory / 'reports' / 'latest').resolve()})")
    is_plain(run)


def test_every_node_ends_with_the_exit_code_of_the_run(runs):
    run = runs["fail"]
    assert run.exits == [1, 1], run.output
    line = "gpucluster: REHEARSAL, REJECTED, exit code 1: test_it.py::test_it failed: rank 1 (node-b): AssertionError: "
    reports = (run.directory / "reports" / "latest").resolve()
    first, second = last_lines(run)
    assert first.startswith(line)
    assert first.endswith(f"(reports: {reports})")
    assert second == first.replace("(reports: ", "(reports: node-a:")
    is_plain(run)


def test_a_criterion_that_did_not_run_is_10_where_torchrun_says_1(runs):
    run = runs["skip"]
    assert run.exits == [10], run.output
    assert "INCOMPLETE, exit code 10: did not run: it (" in last_lines(run)[0]
    is_plain(run)


def test_what_pytest_refuses_before_the_plugin_is_there_is_4(runs):
    run = runs["usage"]
    assert run.exits == [4], run.output
    assert "unrecognized arguments: --no-such-option" in run.output
    assert last_lines(run)[0].startswith("gpucluster: BROKEN, exit code 4: a usage error; nothing was measured")
    is_plain(run)


def test_the_journal_says_how_it_ended_when_rank_0_is_killed(runs):
    run = runs["lost"]
    assert run.exits == [11], run.output
    assert run.end[2] == "recorder"
    # A line of its own, and not the end of the one that rank 0 was writing.
    assert last_lines(run)[0].startswith("gpucluster: REHEARSAL, BROKEN, exit code 11: rank 0 (node-a, pid ")
    assert "ended without a word during test_one_fault.py::test_fault" in last_lines(run)[0]
    is_plain(run)


def test_ctrl_c_reaches_the_ranks_once_and_the_reports_are_written(tmp_path):
    run = start(tmp_path, torchrun.suite("one_fault"), fault="wait")
    run.wait_for_stamp("fault", 0)
    run.wait_for_stamp("fault", 1)
    for _ in range(2):  # impatience changes nothing
        os.kill(run.agents[0].pid, signal.SIGINT)
    run.wait()
    assert run.exits == [2], run.output
    assert run.end[:2] == ("BROKEN", 2)
    assert "exit code 2: interrupted (Ctrl-C) on rank " in last_lines(run)[0]
    is_plain(run)


def test_a_terminal_that_is_gone_ends_the_ranks_in_order(monkeypatch):
    got = []
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: SimpleNamespace(send_signal=got.append))
    passing = run_command._Passing()
    passing.take(signal.SIGHUP, None)  # before there is anybody to pass it on to
    passing.start([], {})
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGINT):
        passing.take(number, None)
    assert got == [signal.SIGTERM, signal.SIGINT]
    assert passing.heard[0] == signal.SIGHUP


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "acceptance/"], "nothing says what pytest is to run: write it after two dashes"),
        (["run", "--nproc-per-node=2", "--"], "nothing says what pytest is to run"),
        (["run", "--no-python", "--", "acceptance/"], "--no-python: what is run is pytest"),
    ],
)
def test_wrong_usage_is_2_and_starts_nothing(words, said, capsys, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_options_of_torchrun_are_not_looked_into():
    options = cli.parse(["run", "--nnodes", "2", "--rdzv-conf=a=1", "-t", "3", "--", "-k", "a", "--", "b"])
    assert options.for_others == ["--nnodes", "2", "--rdzv-conf=a=1", "-t", "3"]
    assert options.passed_on == ["-k", "a", "--", "b"]


def test_a_place_to_meet_that_does_not_resolve_is_wrong_usage_before_torchrun_starts(capsys, monkeypatch):
    monkeypatch.setattr(run_command._Passing, "start", lambda *_: pytest.fail("torchrun was started"))
    assert cli.main(["run", "--nnodes=2", "--master-addr=no-such-host.invalid", "--", "acceptance/"]) == 2
    assert "--master-addr: no-such-host.invalid does not resolve" in capsys.readouterr().err
