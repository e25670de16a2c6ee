"""``gpucluster run --hosts`` over nodes whose ssh is a small program: every way in which a run can end."""

import json
import re
import signal
import sys
import time

import pytest
from fake_ssh import FakeSsh, journal_lines
from sessions import Process, environment

from pytest_gpucluster.cli import main
from pytest_gpucluster.reports import registry


def leaves(exit=0, **lines):
    return {"journals": [journal_lines(exit=exit, **{"nnodes": 2, **lines})], "exit": exit}


PASSED = leaves()
REJECTED = leaves(1, outcome="failed", message="matmul 1 TFLOPS < 2 TFLOPS", verdict="REJECTED")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    found = FakeSsh(tmp_path / "fake")
    monkeypatch.setenv("PATH", found.path)
    for name in ("GPUCLUSTER_HOSTNAME", "NCCL_DEBUG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def ssh(fake, tmp_path, monkeypatch, capfd):
    """Run the command in a folder of its own: exit code, standard output, standard error, ssh.json."""
    work = tmp_path / "my work"
    (work / "acceptance").mkdir(parents=True)
    monkeypatch.chdir(work)
    (work / "hosts").write_text("localhost\ngpu-2\n")

    def run(*words, hosts="hosts", expect="8xH100"):
        code = main.main(["run", "--hosts", hosts, *([f"--expect={expect}"] if expect else []), *words])
        printed = capfd.readouterr()
        kept = work / "gpucluster-ssh" / "latest" / "ssh.json"
        return code, printed.out, printed.err, json.loads(kept.read_text()) if kept.exists() else None

    return run


# "localhost" is the first node: the others poll its name up.


def test_a_run_that_passes_on_all_nodes_is_0_and_its_reports_are_here(ssh, fake, tmp_path):
    fake.acts({"localhost": {**PASSED, "prints": "rank 0\nhalf"}, "gpu-2": {"prints": "\x1b[2Jother\n"}})
    code, out, err, kept = ssh("--port=20001", "--", "acceptance/", "-k", "it or that")
    assert code == 0
    assert [line for line in out.splitlines() if not line.startswith("[")][1:] == ["rank 0", "half"]
    assert "[gpu-2] \N{REPLACEMENT CHARACTER}[2Jother\n" in out
    assert err.splitlines()[-1] == "ACCEPTED, exit code 0: 1 passed"
    assert "[gpu-2] a warning\N{REPLACEMENT CHARACTER}[31m\n" in out
    folder = tmp_path / "my work" / "gpucluster-ssh" / "latest"
    assert (folder / "localhost" / "20260102-000000" / "journal.jsonl").is_file()
    assert (folder / "report.html").is_file()
    output = "a warning\x1b[31m\n\x1b[2Jother\n"
    assert (folder / "gpu-2.log").read_text() == f"Welcome to gpu-2! gpucluster-node: ready\n{output}"
    assert [(node["name"], node["exit"], node["copy_problem"]) for node in kept["nodes"]] == [
        *(("localhost", 0, ""), ("gpu-2", 0, ""))
    ]
    first, second = fake.started["localhost"], fake.started["gpu-2"]
    assert first["words"][:6] == [
        *("run", "--node-rank=0", "--nnodes=2", "--master-addr=localhost", "--master-port=20001"),
        "--nproc-per-node=8",
    ]
    assert second["words"][1] == "--node-rank=1"
    assert first["words"][7:11] == ["acceptance/", "-k", "it or that", "--gpucluster-expect=2x8xH100"]
    assert first["directory"] == str(tmp_path / "my work")
    assert first["ssh"][-1] == f"exec {sys.executable} -m pytest_gpucluster.runners.node_agent"


@pytest.mark.parametrize(
    ("first", "second", "code", "line"),
    [
        (REJECTED, {"lost": "Timeout"}, 1, "REJECTED, exit code 1: matmul: matmul 1 TFLOPS < 2 TFLOPS"),
        (PASSED, {"lost": "Timeout, server gpu-2."}, 11, "BROKEN, exit code 11: gpu-2: the connection was lost"),
        ({**PASSED, "keeps": "disk gone"}, {"exit": 0}, 11, "BROKEN, exit code 11: ended with exit code 0 and no"),
        (leaves(verdict=None), {"exit": 0}, 11, "BROKEN, exit code 11: its journal has no end"),
        (PASSED, {"exit": None, "error": "killed"}, 11, "BROKEN, exit code 11: gpu-2: killed"),
        (leaves(rehearsal=True, verdict="REHEARSED"), {"exit": 0}, 0, "REHEARSAL, REHEARSED, exit code 0: 1 passed"),
        (
            {**PASSED, "journals": PASSED["journals"] * 2},
            {"exit": 0},
            11,
            "BROKEN, exit code 11: ended with exit code 0",
        ),
    ],
)
def test_the_exit_code_is_never_better_than_what_is_known(first, second, code, line, ssh, fake, monkeypatch):
    monkeypatch.setattr(registry, "FILES", {})  # a second for each of these
    fake.acts({"localhost": first, "gpu-2": second})
    found, _, err, kept = ssh()
    assert (found, kept["exit"]) == (code, code)
    assert err.splitlines()[-1].startswith(line)


def test_reports_of_a_lost_node_are_copied_by_a_second_connection(ssh, fake, tmp_path):
    fake.acts({"localhost": PASSED, "gpu-2": {**leaves(), "lost": "Broken pipe"}})
    code, _, _, kept = ssh()
    assert code == 11
    assert (tmp_path / "my work" / "gpucluster-ssh" / "latest" / "gpu-2" / "20260102-000000").is_dir()
    assert kept["nodes"][1]["problem"].endswith("exit code 0")


def test_what_ranks_write_for_rank_0_on_their_own_disk_is_copied_too(ssh, fake, tmp_path):
    fake.acts({"localhost": {**PASSED, "own disk": True}, "gpu-2": {"writes": ["../localhost/artifacts/rank-8.txt"]}})
    assert ssh()[0] == 0
    folder = tmp_path / "my work" / "gpucluster-ssh" / "latest"
    assert (folder / "gpu-2" / "localhost" / "artifacts" / "rank-8.txt").is_file()


def test_on_a_shared_disk_nothing_is_copied_twice(ssh, fake, tmp_path):
    fake.acts({"localhost": PASSED, "gpu-2": {"lost": "Broken pipe"}})
    ssh()
    folder = tmp_path / "my work" / "gpucluster-ssh" / "latest"
    assert sorted(path.name for path in (folder / "gpu-2").iterdir()) == ["ended.json", "output.log"]


def test_a_second_ctrl_c_waits_for_no_reports(fake, tmp_path):
    fake.acts({"localhost": PASSED, "gpu-2": {"keeps for long": True}})
    (tmp_path / "hosts").write_text("localhost\ngpu-2\n")
    command = [sys.executable, "-m", "pytest_gpucluster", "run", "--hosts=hosts", "--expect=8"]
    with Process(command, tmp_path, environment({"PATH": fake.path})) as process:

        def signal_when(it_is_time):
            until = time.monotonic() + 60
            while not it_is_time():
                assert process.popen.poll() is None, process.output
                assert time.monotonic() < until, process.output
                time.sleep(0.05)
            process.popen.send_signal(signal.SIGINT)

        signal_when((fake.root / "collecting").exists)
        signal_when(lambda: ": stopping " in process.output)
        left = process.wait()
    assert left.exit == 2, left.output
    assert re.search(r"gpu-2: reports not copied: .*SIGINT.* gpu-2:gpucluster-report/", left.stderr)
    assert left.stderr.splitlines()[-1] == "BROKEN, exit code 2: interrupted (SIGINT)"


def test_where_uncopied_reports_are_is_printed(ssh, fake):
    fake.acts({"localhost": PASSED, "gpu-2": {"keeps": "no space left"}})
    code, _, err, kept = ssh()
    assert code == 0  # what matters is here: the journal is rank 0's
    assert re.search(r"gpu-2: reports not copied: no space left; .* gpu-2:gpucluster-report/", err)
    assert kept["nodes"][1]["copy_problem"].startswith("no space left")


def test_a_node_that_does_not_answer_stops_the_run_with_a_code_of_its_own(ssh, fake):
    fake.acts({"localhost": PASSED, "gpu-2": {"refuses": "No route to host"}})
    code, out, err, kept = ssh()
    assert (code, kept, fake.started) == (12, None, {})
    assert re.search(r"^  ssh: .*gpu-2 port 22: No route", out, re.MULTILINE)
    assert re.search(r"1 of 2 nodes .*: gpu-2; --exclude ", err.splitlines()[-1])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ({"facts": {"torch": "2.9.0"}}, "  torch: 2.9.0, but most have "),
        ({"calls itself": "localhost"}, "  reports the host name localhost like another node"),
        ({"facts": {"problems": ["cannot write"]}}, "  cannot write"),
        ({"reached": "10.0.0.1 5 10.0.0.2 22"}, "  resolves "),
        ({"answers": "[]"}, "  ended with exit code 0 and no JSON"),
        ({"answers": "{}"}, "  ended with exit code 0 and no JSON"),
        ({"answers": '{"half'}, "  ended with exit code 0 and no JSON"),
        ({"probe exit": 1}, "  ended with exit code 1 and no JSON"),
        # Facts that came before the connection was lost: the rest is unknown.
        ({"probe exit": 255}, "  the connection was lost: ssh ended with exit code 255"),
    ],
)
def test_a_node_that_is_not_ready_stops_the_run(act, message, ssh, fake):
    fake.acts({"localhost": PASSED, "gpu-2": act})
    for words in ([], ["--check"]):
        code, out, _, _ = ssh(*words)
        assert (code, fake.started) == (12 if "no JSON" in message or "lost" in message else 11, {})
        assert any(line.startswith(message) for line in out.splitlines()), out


def test_a_check_runs_nothing(ssh, fake):
    fake.acts({})
    code, out, _, kept = ssh("--check")
    assert (code, kept, fake.started) == (0, None, {})
    assert out.splitlines()[-1] == "gpucluster: 2 of 2 nodes are ready"
    fake.acts({"gpu-2": {"refuses": "Connection refused"}})
    assert ssh("--check")[0] == 12


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        ([], {"hosts": "gone"}, "gone: No such file or directory"),
        ([], {"expect": "2x8xH100"}, "--expect 2x8xH100: does not describe one node"),
        (["--nodes=gpu-9"], {}, "--nodes: gpu-9 not in the hosts file"),
        (["--", "-n8"], {}, "-n8: not allowed after --"),
        (["--", "--gpucluster-expect=2x8"], {}, "state before the -- what each node has"),
        (["--ssh", "ProxyJump=x"], {}, "not an option of ssh"),
        (["--env", "GONE"], {}, "--env GONE: not set here"),
    ],
)
def test_wrong_usage_is_2_and_queries_no_node(words, settings, message, ssh, fake):
    fake.acts({})
    code, _, err, _ = ssh(*words, **settings)
    assert (code, fake.started) == (2, {})
    assert message in err


def test_settings_are_forwarded_and_what_is_not_is_named(ssh, fake, monkeypatch):
    monkeypatch.setenv("GPUCLUSTER_THRESHOLDS", "limits.yaml")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    fake.acts({"localhost": PASSED})
    code, _, err, _ = ssh("--env", "SITE=a b")
    assert code == 0
    assert fake.started["gpu-2"]["env"] == {"GPUCLUSTER_THRESHOLDS": "limits.yaml", "SITE": "a b"}
    assert re.search(r"\(--env NAME .*\): NCCL_DEBUG", err)


def test_without_ssh_nothing_runs(ssh, fake, monkeypatch):
    monkeypatch.setenv("PATH", str(fake.root))
    code, _, err, _ = ssh()
    assert code == 11
    assert "PATH" in err


def test_a_report_directory_that_cannot_be_written_is_reported(ssh, fake, tmp_path):
    fake.acts({"localhost": PASSED})
    (tmp_path / "my work" / "file").write_text("")
    code, _, err, _ = ssh("--report-dir=file/out")
    assert (code, fake.started) == (2, {})
    assert "file" in err
