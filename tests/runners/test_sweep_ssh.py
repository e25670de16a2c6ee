"""A sweep over ssh: every node alone, the survivors together, and what is known of those that do not answer."""

import json
import signal
import sys

import pytest
from fake_ssh import FakeSsh, found, journal_lines
from recordings import wait_until
from sessions import Process, environment

from pytest_gpucluster.cli import main
from pytest_gpucluster.runners import ssh_job

PASSED = {"journals": [journal_lines()], "together": [journal_lines(nnodes=2)], "exit": 0}
REJECTED = {"journals": [journal_lines(outcome="failed", message="slow", verdict="REJECTED", exit=1)], "exit": 1}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    found = FakeSsh(tmp_path / "fake")
    monkeypatch.setenv("PATH", found.path)
    return found


@pytest.fixture
def sweep(fake, tmp_path, monkeypatch, capfd):
    """Run the command: exit code, sweep.json, standard error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("localhost\ngpu-2\ngpu-3\n")

    def run(*words):
        code = main.main(["sweep", "ssh", "hosts", "--expect=8xH100", *words])
        kept = tmp_path / "gpucluster-sweep" / "latest" / "sweep.json"
        return code, json.loads(kept.read_text()) if kept.exists() else {}, capfd.readouterr().err

    return run


def test_every_node_runs_alone_and_then_those_that_passed_together(fake, sweep, tmp_path):
    fake.acts({"localhost": PASSED, "gpu-2": PASSED, "gpu-3": REJECTED})
    code, kept, _ = sweep("--port=20001", "--", "acceptance/", "-k", "hbm")
    assert code == 1
    assert found(kept) == {
        "localhost": ("ACCEPTED", 0, ""),
        "gpu-2": ("ACCEPTED", 0, ""),
        "gpu-3": ("REJECTED", 1, "matmul: slow"),
    }
    assert (kept["together"]["verdict"], kept["scheduler"]) == ("ACCEPTED", "ssh")
    folder = tmp_path / "gpucluster-sweep" / "latest"
    assert "[slurm]\ngpu-3\n" in (folder / "exclude.txt").read_text()
    assert (folder / "nodes" / "gpu-3" / "20260102-000000" / "journal.jsonl").is_file()
    alone = next(note["words"] for note in fake.notes if note["name"] == "gpu-3")
    assert alone[:5] == ["run", "--standalone", "--nproc-per-node=8", "--", "acceptance/"]
    assert "--gpucluster-expect=1x8xH100" in alone
    joint = fake.started["gpu-2"]["words"]
    assert joint[1:5] == ["--node-rank=1", "--nnodes=2", "--master-addr=localhost", "--master-port=20001"]
    assert "--gpucluster-expect=2x8xH100" in joint


@pytest.mark.parametrize(
    ("act", "failure"),
    [
        ({"refuses": "No route to host"}, "gpu-3 port 22: No route"),
        ({**PASSED, "lost": "Broken pipe"}, "the connection was lost: Broken pipe"),
        ({**PASSED, "keeps": "disk gone"}, "exit code 0 and no journal: disk gone"),
        ({"exit": 11}, "exit code 11 and no journal"),
        ({"hangs": True, "exit": 2}, " 3 s"),
    ],
)
def test_a_node_without_an_answer_is_never_a_pass(act, failure, fake, sweep):
    fake.acts({"localhost": PASSED, "gpu-2": PASSED, "gpu-3": act})
    code, kept, _ = sweep(*(["--alone-within=3 s"] if "hangs" in act else []))
    assert code == 11
    verdict, exit_code, message = found(kept)["gpu-3"]
    assert (verdict, exit_code) == ("NO ANSWER", 11)
    assert failure in message
    assert kept["together"]["verdict"] == "ACCEPTED"


def test_a_joint_run_is_as_good_as_its_worst_node(fake, sweep):
    fake.acts({"localhost": PASSED, "gpu-2": {**PASSED, "together exit": 11}, "gpu-3": REJECTED})
    code, kept, _ = sweep()
    assert code == 1
    assert kept["together"]["verdict"] == "BROKEN"
    assert "exit code 11" in kept["together"]["failure"]


def test_a_node_that_had_to_be_ended_in_the_joint_run_is_no_pass(fake, sweep, monkeypatch):
    monkeypatch.setattr(ssh_job, "OTHERS_SECONDS", 1.0)
    fake.acts({"localhost": PASSED, "gpu-2": {**PASSED, "together hangs": True}, "gpu-3": REJECTED})
    _, kept, _ = sweep()
    assert (kept["together"]["verdict"], kept["together"]["exit"]) == ("NO ANSWER", 11)
    assert " 1 s " in kept["together"]["failure"]


def test_ctrl_c_ends_what_runs_and_keeps_what_is_known(fake, tmp_path):
    fake.acts({"localhost": PASSED, "gpu-2": {"hangs": True, "exit": 2}})
    (tmp_path / "hosts").write_text("localhost\ngpu-2\n")
    command = [sys.executable, "-m", "pytest_gpucluster", "sweep", "ssh", "hosts", "--expect=8"]
    kept = tmp_path / "gpucluster-sweep" / "latest" / "sweep.json"
    with Process(command, tmp_path, environment({"PATH": fake.path})) as process:
        wait_until(lambda: len(fake.notes) == 2 and json.loads(kept.read_text())["alone"])
        process.popen.send_signal(signal.SIGINT)
        left = process.wait()
    assert left.exit == 2
    assert "BROKEN, exit code 2: interrupted by Ctrl-C: 1 of 2 nodes ended" in left.stdout
    assert found(json.loads(kept.read_text())) == {"localhost": ("ACCEPTED", 0, "")}
    assert (tmp_path / "gpucluster-sweep" / "latest" / "nodes" / "gpu-2" / "ended.json").is_file()
