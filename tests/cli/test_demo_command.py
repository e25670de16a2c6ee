"""``gpucluster demo``: forked hosts and ranks, the verdict last, exit codes, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import sessions
import torchrun

from pytest_gpucluster.cli import demo, main
from pytest_gpucluster.journal.journal import read
from pytest_gpucluster.launch.forks import ForkServer
from pytest_gpucluster.simulation import cluster

SUITE = {
    "test_first.py": '''
        """Is anything there?"""
        import os, signal, time
        import pytest
        from stamps import stamp

        @pytest.mark.criterion("inventory")
        def test_first(cluster, measure):
            stamp("first")
            measure("inventory.ranks", cluster.world_size, unit="ranks", record_only=True)
            if os.environ.get("WAIT"):
                time.sleep(60)
        ''',
    "test_second.py": '''
        """Is any GPU slow?"""
        import os, signal, time
        import pytest

        @pytest.mark.criterion("gpu.compute")
        def test_second(cluster, measure):
            measure("gpu.usable_dtypes", 5, unit="dtypes")
            assert os.environ.get("VICTIM") != str(cluster.rank), "too slow"
            if os.environ.get("DIES") == str(cluster.rank):
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
        ''',
}
WORDS = ["--", ".", *sessions.PLUGINS, "-p", "no:cacheprovider", "--gpucluster-timeouts=stuck=2,dead=4"]


@pytest.fixture(scope="module")
def server():
    found = ForkServer()
    yield found
    found.close()


@pytest.fixture
def run(server, tmp_path, monkeypatch, capfd):
    """Run the command over the suite in this process; return its exit code and what was printed."""
    sessions.clean_environment(monkeypatch)
    monkeypatch.setattr(demo, "ForkServer", lambda: SimpleNamespace(start=server.start, close=lambda: None))
    torchrun.write_suite(tmp_path, SUITE)
    (tmp_path / "stamps").mkdir()
    monkeypatch.setenv("STAMPS", str(tmp_path / "stamps"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path / "suite")

    def call(*words, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = main.main(["demo", "2x2xH100", "--report-dir=../reports", *words, *WORDS])
        printed = capfd.readouterr()
        assert list(demo.holders(f"gpucluster-demo-{os.getpid()}")) == [], "processes are left"
        return code, printed.out, printed.err.splitlines()

    return call


def test_each_host_has_an_agent_and_the_verdict_comes_last(run, tmp_path):
    code, output, errors = run("--fault", "slow-gpu:gpu-01/1=20%", "--seed=7")
    assert code == 0, output
    assert "PASSED  second" in output
    assert "Warning" not in output
    assert errors[0].startswith("gpucluster: 4 ranks on 2 simulated hosts, with slow-gpu:gpu-01/1=20%;")
    assert [line for line in errors if not line.startswith("gpucluster: ")] == []
    folder = (tmp_path / "reports" / "latest").resolve()
    assert f"report: {folder}/report.html\n" in output
    assert errors[-1].startswith("gpucluster: SIMULATED, exit code 0: 2 passed; 2 nodes")
    assert [place.host for place in read(folder / "journal.jsonl").ranks] == ["gpu-00"] * 2 + ["gpu-01"] * 2
    described = cluster.load(str(tmp_path / "reports" / "simulation.yaml"))
    assert (described.name, described.seed, described.hosts) == ("2x2xH100", 7, ("gpu-00", "gpu-01"))
    assert [str(fault) for fault in described.faults.all] == ["slow-gpu:gpu-01/1=20%"]


@pytest.mark.parametrize(
    ("free", "words", "told"),
    [
        (1.44e9, ["--all"], ""),
        (1.43e9, ["--all"], "1.4 GB of memory"),
        (0.47e9, [], "0.48 GB of memory"),
        (0.49e9, [], ""),
        (1.43e9, ["--", "-k", "lora"], "1.4 GB of memory"),
        (None, ["--fault=throttle:gpu-00/1=50s"], ""),
        (None, ["--fault=throttle:gpu-00/1"], "--profile soak"),
        (None, ["--fault=hang:gpu-00/1", "--", "-k", "hbm"], "hang:gpu-00/1 acts after 20 s"),
    ],
)
def test_too_little_memory_or_load_is_said_before_anything_is_started(tmp_path, monkeypatch, capfd, free, words, told):
    monkeypatch.setattr(demo.Tree, "meminfo", lambda self, name: free)
    monkeypatch.setattr(demo, "_run_nodes", lambda *given: (SimpleNamespace(exit=0, line="the end"), ""))
    assert main.main(["demo", "2x2xH100", f"--report-dir={tmp_path}", *words]) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert told in said
    assert ("of memory" in said or "may not come" in said) == bool(told)


@pytest.mark.parametrize(
    ("words", "is_short"),
    [
        ([], True),
        (["--", "-p", "no:logging"], True),
        (["--all"], False),
        (["--", "-k", "lora"], False),
        (["--", "-mtraining"], False),
        (["--", "acceptance"], False),
    ],
)
def test_what_trains_for_minutes_is_left_out_unless_it_is_asked_for(tmp_path, monkeypatch, words, is_short):
    taken = []

    def run_nodes(*given):
        taken.extend(given[-1])
        return SimpleNamespace(exit=0, line="the end"), ""

    monkeypatch.setattr(demo, "_run_nodes", run_nodes)
    (tmp_path / "acceptance").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main.main(["demo", "2x2xH100", f"--report-dir={tmp_path}", *words]) == 0
    assert (demo.SHORT in taken) == is_short


def test_narration_says_what_happens_and_where_the_culprit_stands(run, tmp_path):
    code, output, errors = run("--narrate", "--fault=slow-gpu:gpu-01/1", VICTIM="3")
    assert code == 1, output
    said = "\n".join(line for line in output.splitlines() if line.startswith(">> "))
    assert said.splitlines()[0] == ">> Is anything there?"
    assert "1 test of gpu.compute on every rank; look at gpu.usable_dtypes" in said
    assert re.search(r"1 failed\. test_second names gpu-01 GPU 1 \(rank 3\)", said)
    told = "\n".join(errors)
    page = (tmp_path / "reports" / "latest").resolve() / "report.html"
    assert "planted: slow-gpu:gpu-01/1: all rates of the GPU are lower by this much" in told
    assert re.search(r"JUnit: \S+/reports/report.xml, testcase test_second, <failure>: rank 3 \(gpu-01", told)
    anchor = re.search(rf"page: {page}#(c\d+)", told)
    assert f'id="{anchor[1]}"' in page.read_text()
    assert errors[-1].startswith("gpucluster: SIMULATED, REJECTED, exit code 1: ")


def test_a_host_whose_launcher_is_killed_breaks_the_run(run):
    code, output, errors = run(DIES="3")
    assert code == 11, output
    assert "BROKEN, exit code 11: " in errors[-1]


def test_ctrl_c_ends_all_processes_and_leaves_the_reports(tmp_path):
    torchrun.write_suite(tmp_path, SUITE)
    (tmp_path / "stamps").mkdir()
    more = {"WAIT": "yes", "STAMPS": str(tmp_path / "stamps"), "GPUCLUSTER_TEST_TOKEN": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "pytest_gpucluster",
        "demo",
        "2x2xH100",
        "--report-dir=../reports",
        *WORDS,
    ]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=tmp_path / "suite",
            env=sessions.environment(more),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + sessions.DEADLINE_SECONDS
        while len(list((tmp_path / "stamps").iterdir())) < 4:
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < until, (tmp_path / "output").read_text()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(sessions.DEADLINE_SECONDS) == 2
    finally:
        process.kill()
        process.wait()
    assert torchrun.processes(str(tmp_path)) == []
    assert demo.holders(f"gpucluster-demo-{process.pid}") == set()
    printed = (tmp_path / "output").read_text().splitlines()
    assert "exit code 2: " in printed[-1]
    assert read(tmp_path / "reports" / "latest" / "journal.jsonl").exit == 2
    assert (tmp_path / "reports" / "latest" / "report.html").exists()
    assert (tmp_path / "reports" / "report.xml").exists()


def test_ctrl_c_while_torch_is_loaded_starts_nothing(run, monkeypatch, server):
    def load():
        os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(demo, "ForkServer", load)
    code, _, errors = run()
    assert code == 2
    assert "interrupted (SIGINT) before there was a verdict" in errors[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["2x8xH100", "--fault=slow-gp:gpu-01/3"], "known are slow-gpu, .*; did you mean 'slow-gpu'"),
        (["2x8xH100", "--fault=slow-gpu:gpu-01"], "is written as slow-gpu:gpu-01/3"),
        (["2x8xH100", "--fault=slow-gpu:gpu-07/3"], "has no host 'gpu-07'; it has gpu-00, gpu-01"),
        (["2x8xH100", "--fault=slow-gpu:gpu-01/8"], "has no GPU '8'; it has 0, 1, 2, 3, 4, 5, 6, 7"),
        (["2x8xH100", "--fault=dead-rail:gpu-01/mlx5_9"], "has no port 'mlx5_9'; .*did you mean 'mlx5_"),
        (["2x8xH100", "--fault=hang:gpu-01/3=10%"], "takes no amount"),
        (["2x8xH10"], "no simulated cluster has H10 GPUs; known are .*did you mean 'h100'"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_is_allowed(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "ForkServer", None)
    assert main.main(["demo", *words]) == 4
    assert re.search(message, capsys.readouterr().err)
    assert list(Path().iterdir()) == []


def test_help_lists_the_shapes_and_the_faults(capsys):
    with pytest.raises(SystemExit):
        main.main(["demo", "--help"])
    text = "".join(capsys.readouterr().out.split())
    assert {name for name in [*cluster.shipped(), *demo.KINDS] if name not in text} == set()
