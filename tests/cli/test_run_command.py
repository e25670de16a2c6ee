"""``gpucluster run`` over a real torchrun: pytest's own exit code, and one line instead of a traceback."""

import os
import signal
from types import SimpleNamespace

import pytest
import torchrun

from pytest_gpucluster.cli import main
from pytest_gpucluster.cli import run as run_command

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


def last_lines(run):
    """The last line that each node has printed, where no traceback is and no process stays."""
    assert "Traceback" not in run.output
    assert "ChildFailedError" not in run.output
    assert run.left_over == []
    paths = sorted(run.directory.glob("output*.txt"))
    return [path.read_text(errors="backslashreplace").splitlines()[-1] for path in paths]


def test_every_node_ends_with_the_exit_code_of_the_run_and_names_the_reports(tmp_path):
    run = start(tmp_path, PLAIN, fault="fail", hosts=("node-a", "node-b"), ranks=1).wait()
    assert run.exits == [1, 1], run.output
    reports = (run.directory / "reports" / "latest").resolve()
    first, second = last_lines(run)
    assert first.startswith("gpucluster: REHEARSAL, REJECTED, exit code 1: node-b (rank 1): test_it.py::test_it failed")
    assert first.endswith(f"(reports: {reports})")
    assert second == first.replace("(reports: ", "(reports: node-a:")


def test_what_pytest_refuses_before_the_plugin_is_there_is_4(tmp_path):
    run = start(tmp_path, PLAIN, "--no-such-option", ranks=1, forked=False).wait()  # a real one
    assert run.exits == [4], run.output
    assert "--no-such-option" in run.output
    assert last_lines(run)[0].startswith("gpucluster: BROKEN, exit code 4: ")


# Which code and line of what was left is decided in test_torchrun_conclusion.py, without a run.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("files", "fault", "code", "line"),
    [
        (PLAIN, "", 0, "REHEARSAL, REHEARSED, exit code 0: 1 passed; 1 node, 2 ranks"),
        (SKIPPED, "", 10, "REHEARSAL, INCOMPLETE, exit code 10: did not run: it ("),
        (torchrun.suite("one_fault"), "kill", 11, "REHEARSAL, BROKEN, exit code 11: rank 0 (node-a, pid "),
    ],
    ids=["passed", "a criterion did not run", "rank 0 is killed"],
)
def test_the_exit_code_is_that_of_the_run_where_torchrun_ends_with_1(files, fault, code, line, tmp_path):
    run = start(tmp_path, files, fault=fault).wait()
    assert run.exits == [code], run.output
    # A line of its own, and not the end of the one that rank 0 was writing.
    assert last_lines(run)[0].startswith(f"gpucluster: {line}")
    assert (run.end[2] == "recorder") == (fault == "kill")


@pytest.mark.extended
def test_ctrl_c_reaches_the_ranks_once_and_the_reports_are_written(tmp_path):
    run = start(tmp_path, torchrun.suite("one_fault"), fault="wait")
    run.wait_for_stamp("fault", 0)
    run.wait_for_stamp("fault", 1)
    for _ in range(2):  # impatience changes nothing
        os.kill(run.agents[0].pid, signal.SIGINT)
    run.wait()
    assert (run.exits, run.end[:2]) == ([2], ("BROKEN", 2)), run.output
    assert "exit code 2: " in last_lines(run)[0]


def test_a_terminal_that_is_gone_ends_the_ranks_in_order():
    got = []
    forwarder = run_command.SignalForwarder()
    forwarder.handle(signal.SIGHUP, None)  # before torchrun was started
    forwarder.add(SimpleNamespace(send_signal=got.append))
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGINT):
        forwarder.handle(number, None)
    assert got == [signal.SIGTERM, signal.SIGINT]
    assert forwarder.signals[0] == signal.SIGHUP


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "acceptance/"], "two dashes"),
        (["run", "--no-python", "--", "acceptance/"], "--no-python"),
    ],
)
def test_wrong_usage_is_2_and_starts_nothing(words, message, capsys, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    assert main.main(words) == 2
    assert message in capsys.readouterr().err


def test_options_of_torchrun_are_not_looked_into():
    options = main.parse(["run", "--nnodes", "2", "--rdzv-conf=a=1", "-t", "3", "--", "-k", "a", "--", "b"])
    assert options.for_torchrun == ["--nnodes", "2", "--rdzv-conf=a=1", "-t", "3"]
    assert options.forwarded == ["-k", "a", "--", "b"]


def test_a_place_to_meet_that_does_not_resolve_is_wrong_usage_before_torchrun_starts(capsys, monkeypatch):
    monkeypatch.setattr(run_command.SignalForwarder, "add", lambda *_: pytest.fail("torchrun was started"))
    assert main.main(["run", "--nnodes=2", "--master-addr=no-such-host.invalid", "--", "acceptance/"]) == 2
    assert "--master-addr: no-such-host.invalid " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "kind", "does"),
    [
        (0, "REHEARSAL", "gpucluster node selftest"),
        (0, "SIMULATED", "gpucluster node selftest"),
        (0, "", "gpucluster certificate create"),
        (1, "REHEARSAL", "again with `-k`"),
        (10, "REHEARSAL", "gpucluster doctor"),
        (12, "", "without the deviations"),
    ],
)
def test_what_to_do_next_stands_before_the_verdict_where_the_page_is(code, kind, does, tmp_path, capsys):
    run_command.print_next(str(tmp_path), code, kind)
    run_command.print_next("", code, kind)
    assert capsys.readouterr().err == ""  # there is no page on this node
    (tmp_path / "report.html").touch()
    run_command.print_next(str(tmp_path), code, kind)
    [following] = capsys.readouterr().err.splitlines()
    assert following.startswith("gpucluster: next: ")
    assert does in following
