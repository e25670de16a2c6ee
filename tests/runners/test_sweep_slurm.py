"""A sweep under Slurm: each node's own srun, the survivors' one, and what is left when it is interrupted."""

import json
import os
import signal
import subprocess
import sys

import pytest
from fake_slurm import REJECTED, FakeSlurm, leaves
from fake_ssh import found
from recordings import wait_until
from sessions import Process, environment

from pytest_gpucluster.cli import main
from pytest_gpucluster.runners import sweep_slurm

PASSED = leaves()
TOGETHER = leaves(nnodes=2)


@pytest.fixture
def fake(tmp_path):
    return FakeSlurm(tmp_path / "slurm")


@pytest.fixture
def sweep(fake, tmp_path, monkeypatch, capsys):
    """Run the command in an allocation: exit code, sweep.json, standard output and error."""

    def run(nodelist, *words, expect="8xH100", options=()):
        for name, value in fake.environment(nodelist).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GPUCLUSTER_HOSTNAME", "login")
        arguments = ["sweep", "slurm", "--expect", expect, "--report-dir", str(tmp_path / "out"), *options, *words]
        code = main.main(arguments)
        printed = capsys.readouterr()
        kept = tmp_path / "out" / "latest" / "sweep.json"
        return code, json.loads(kept.read_text()) if kept.exists() else {}, printed

    return run


def test_every_node_runs_alone_and_then_all_together(fake, sweep, tmp_path):
    fake.acts({"*": PASSED, "together": TOGETHER}, ["gpu-1", "gpu-2"])
    code, kept, printed = sweep("gpu-[1-2]", "--", "acceptance/", "-k", "matmul", options=["--srun=--gpus-per-node=8"])
    assert code == 0
    assert (kept["verdict"], kept["exit"], kept["finished"]) == ("ACCEPTED", 0, True)
    assert found(kept) == {"gpu-1": ("ACCEPTED", 0, ""), "gpu-2": ("ACCEPTED", 0, "")}
    assert kept["together"]["verdict"] == "ACCEPTED"
    folder = (tmp_path / "out" / "latest").resolve()
    started = {note["name"]: note["argv"] for note in fake.noted("start")}
    assert sorted(started) == ["gpu-1", "gpu-2", "together"]
    alike = ["--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--export=ALL", "--mpi=none"]
    alike += ["--gpus-per-node=8"]
    pytest_words = ["-m", "pytest", "acceptance/", "-k", "matmul"]
    assert started["gpu-2"] == [
        *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--nodelist=gpu-2", "--job-name=gpucluster-sweep"),
        *("--time=123", *alike, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8"),
        *(*pytest_words, "--gpucluster-expect=1x8xH100", f"--gpucluster-report-dir={folder}/nodes/gpu-2"),
        f"--junitxml={folder}/nodes/gpu-2.xml",
    ]
    joint = started["together"]
    assert joint[:6] == [
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=gpu-[1-2]", "--job-name=gpucluster-sweep"),
        "--time=243",
    ]
    assert joint[6 : 6 + len(alike)] == alike
    script = joint[joint.index("sh") + 2]
    [port] = [word for word in joint if word.startswith("--master-port=")]
    assert 20000 <= int(port.partition("=")[2]) < 30000
    assert joint[joint.index("sh") :] == [
        *("sh", "-c", script, sys.executable, "--nnodes=2", "--master-addr=gpu-1", port, "--nproc-per-node=8"),
        *(*pytest_words, "--gpucluster-expect=2x8xH100"),
        *(f"--gpucluster-report-dir={folder}/together", f"--junitxml={folder}/together.xml"),
    ]
    # A host's name that was set for this process would be that of every node.
    assert {note["hostname"] for note in fake.noted("start")} == {None}
    assert not (folder / "exclude.txt").exists()
    assert "[2/2] gpu-" in printed.out
    assert printed.out.splitlines()[-1].startswith("ACCEPTED, exit code 0: 2 nodes ")


def test_a_node_that_hangs_is_ended_and_has_given_no_answer(fake, sweep, monkeypatch):
    monkeypatch.setattr(sweep_slurm.Slurm, "grace_seconds", 0.3)
    fake.acts({"n1": {"do": "hang"}, "n2": {"do": "be deaf"}})
    code, kept, _ = sweep("n[1-2]", options=["--alone-within", "3 s"])
    assert code == 11
    assert {name: each[:2] for name, each in found(kept).items()} == dict.fromkeys(("n1", "n2"), ("NO ANSWER", 11))
    assert " 3 s: " in found(kept)["n1"][2]
    assert [note["name"] for note in fake.noted("terminated")] == ["n1"]
    # srun of n2 was killed, so its tasks may still be there; other people's steps are none of ours.
    started = {note["name"]: note["pid"] for note in fake.noted("start")}
    [cancelled] = [note["argv"] for note in fake.noted("scancel")]
    assert cancelled == ["--signal=KILL", *(f"77.{pid}" for pid in started.values())]


def test_nodes_that_fail_alone_are_listed_and_left_out(fake, sweep, tmp_path):
    fake.acts(
        {
            "n1": PASSED,
            "n2": REJECTED,
            "n4": {"do": "say", "says": "ERROR: no such option: --oops\n======", "exit": 1},
            "n5": leaves(verdict="INCOMPLETE", exit=10, message="did not run: hbm"),
            "n7": {**PASSED, "exit": 1},
            "n8": leaves(verdict=None),
            "n9": {**PASSED, "journals": PASSED["journals"] * 2},
            "together": TOGETHER,
        },
        ["n1", "n5"],
    )
    code, kept, printed = sweep("n[1-2,4-5,7-9]")
    assert code == 1
    expected = {
        "n1": ("ACCEPTED", 0, ""),
        "n2": ("REJECTED", 1, "matmul: matmul 1 TFLOPS < 2 TFLOPS"),
        "n4": ("NO ANSWER", 11, "exit code 1 and no journal: ERROR: no such option: --oops"),
        "n5": ("INCOMPLETE", 10, "did not run: hbm"),
        "n7": ("BROKEN", 11, "exit code 1"),
        "n8": ("NO ANSWER", 11, "t.py::test_next"),
        "n9": ("NO ANSWER", 11, "2 runs in"),
    }
    assert {name: each[:2] for name, each in found(kept).items()} == {name: each[:2] for name, each in expected.items()}
    assert [name for name, each in expected.items() if each[2] not in found(kept)[name][2]] == []
    [joint] = [note["argv"] for note in fake.noted("start") if note["name"] == "together"]
    assert "--nodelist=n1,n5" in joint or "--nodelist=n[1,5]" in joint
    assert fake.noted("scancel") == []
    excluded = (tmp_path / "out" / "latest" / "exclude.txt").read_text()
    assert "\n[slurm]\nn[2,4,7-9]\n" in excluded
    assert "# n2: REJECTED: matmul: matmul 1 TFLOPS < 2 TFLOPS\n" in excluded
    table = (tmp_path / "out" / "latest" / "sweep.txt").read_text()
    assert table in printed.out + "\n"
    assert printed.out.splitlines()[-1].startswith("REJECTED, exit code 1: rejected: n2; n2: matmul: matmul 1 TFLOPS")


def test_no_more_nodes_than_asked_for_run_at_a_time(fake, sweep):
    fake.acts({"*": {**REJECTED, "seconds": 0.2}})
    assert sweep("n[1-5]", options=["--at-once", "2"])[0] == 1
    events = [(note["at"], 1 if note["what"] == "start" else -1) for note in fake.notes]
    running, most = 0, 0
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    assert most == 2


def test_nodes_can_be_chosen_from_the_allocation(fake, sweep):
    fake.acts({"*": PASSED, "together": TOGETHER}, ["n1", "n3"])
    code, kept, _ = sweep("n[1-9]", options=["--nodes", "n[1,3]"], expect="8")
    assert (code, kept["nodes"]) == (0, ["n1", "n3"])
    assert {note["name"] for note in fake.noted("start") if "--gpucluster-expect=1x8" in note["argv"]} == {"n1", "n3"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_sweep_ends_what_it_started_and_keeps_what_it_knows(fake, tmp_path, number):
    fake.acts({"n1": REJECTED, "n2": {"do": "hang"}, "n3": {"do": "hang"}})
    command = [sys.executable, "-m", "pytest_gpucluster", "sweep", "slurm", "--expect=8", "--report-dir=out"]
    kept = tmp_path / "out" / "latest" / "sweep.json"
    with Process(command, tmp_path, environment(fake.environment("n[1-3]"))) as process:
        wait_until(lambda: json.loads(kept.read_text())["alone"])
        # By now it says what is true if nothing follows.
        early = json.loads(kept.read_text())
        assert (early["verdict"], early["exit"], early["finished"]) == ("BROKEN", 2, False)
        wait_until(lambda: len(fake.noted("start")) == 3)
        process.popen.send_signal(number)
        left = process.wait()
    assert left.exit == 2
    assert sorted(note["name"] for note in fake.noted("terminated")) == ["n2", "n3"]
    last = json.loads(kept.read_text())
    assert [each["node"] for each in last["alone"]] == ["n1"]
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[number]
    assert (last["exit"], last["reason"]) == (2, f"interrupted by {name}: 1 of 3 nodes ended")
    assert f"BROKEN, exit code 2: interrupted by {name}" in left.stdout


def test_what_cannot_be_asked_for_is_refused_before_anything_starts(fake, sweep, capsys):
    for nodelist, words, message in (
        ("n[1-2]", ["--expect", "eight"], "--expect eight: "),
        ("n[1-2]", ["--nodes", "n[2-3]"], "--nodes: n3 "),
        ("n[1-2]", ["--nodes", "n[2-"], "'n[2-'"),
        ("n[1-2]", ["--nodes", "n1,n1"], "n1 "),
        ("n[1-2]", ["--", "--junitxml=x.xml"], "--junitxml=x.xml: "),
        ("", [], "allocation"),
        ("a/b", [], "'a/b'"),
    ):
        code, kept, printed = sweep(nodelist, *words)
        assert (code, kept, fake.notes) == (2, {}, [])
        assert message in printed.err
    for words, message in (
        (["--min-nodes", "1"], "2"),
        (["--at-once", "0"], "1"),
        (["--alone-within", "5"], "'5 s'"),
        (["--alone-within", "0.5 s"], "is not from 1 to"),
        (["--port", "80"], "1024 to 65535"),
    ):
        with pytest.raises(SystemExit) as error:
            sweep("n[1-2]", *words)
        assert error.value.code == 2
        printed = capsys.readouterr().err
        assert words[0] in printed
        assert message in printed


def test_a_missing_program_of_slurm_is_named(fake, sweep, monkeypatch):
    (fake.bin / "srun").unlink()
    monkeypatch.setenv("PATH", str(fake.root))  # a real Slurm may be installed here
    code, _, printed = sweep("n[1-2]")
    assert code == 2
    assert "srun " in printed.err


def test_a_task_on_a_strange_node_does_not_take_part():
    script = sweep_slurm._NODE_RANK_SCRIPT.format(nodes="a b")
    for node, code, output in (("b", 0, "-m torch.distributed.run --node-rank=1 --nnodes=2\n"), ("c", 64, "")):
        environ = {**os.environ, "SLURMD_NODENAME": node}
        words = ["sh", "-c", script, "echo", "--nnodes=2"]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=30)
        assert (done.returncode, done.stdout) == (code, output)
