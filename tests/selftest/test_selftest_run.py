"""The self-test's parent: children that hang, crash or are cut off, and the whole of it on cpu."""

import json
import os
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpucluster.cli import main
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.selftest import run
from pytest_gpucluster.selftest.report import Report

_CHILD = """
import json, os, signal, sys, time
step, context = sys.argv[1], json.loads(sys.argv[2])
rank = context.get("rank", 0)
def say(what, state="OK", **values):
    with open(context["log"].replace(".log", ".jsonl"), "a") as out:
        out.write(json.dumps(dict(state=state, what=what, text=context["device"], values=values)) + "\\n")
def at(name): return step == name and rank == 0
"""


def lines_of(monkeypatch, planted, device="cpu", *, every_gpu=False, seconds=60):
    """The self-test whose steps run this code instead."""
    monkeypatch.setattr(run, "COMMAND", (sys.executable, "-S", "-c", _CHILD + planted))
    monkeypatch.setattr(run, "STEPS", tuple(replace(step, seconds=seconds) for step in run.STEPS))
    monkeypatch.setattr(run, "_PATIENCE_ON_CPU", 1.0)
    return run.SelfTest(device, every_gpu=every_gpu, say=lambda line: None).run()


def found(report, state):
    return {line.what: line.text for line in report.lines if line.state == state}


@pytest.mark.parametrize(
    ("planted", "state", "what", "text"),
    [
        ("if at('hang'): say('groups'); os.kill(os.getpid(), signal.SIGABRT)", "WRONG", "hang ended", "signal 6"),
        ("if at('device'): sys.exit(3)", "WRONG", "device ended", "exit code 3"),
        ("if at('assert'): say('it', at=time.monotonic()); sys.exit(43)", "OK", "its end", "exit code 43"),
        ("if at('assert'): say('it', at=time.monotonic()); sys.exit(1)", "WRONG", "its end", "exit code 1"),
        (
            "if at('assert'): say('it', at=time.monotonic()); os.kill(os.getpid(), signal.SIGABRT)",
            "WRONG",
            "its end",
            "signal 6",
        ),
    ],
)
def test_the_end_of_a_process_is_a_line(monkeypatch, planted, state, what, text):
    report, _ = lines_of(monkeypatch, planted)
    assert text in found(report, state)[what]
    assert report.is_wrong == (state == "WRONG")


@pytest.mark.parametrize(
    ("planted", "state", "what"),
    [
        ("if at('nccl'): say('kept'); time.sleep(600)", "UNPROVEN", "nccl ended"),
        ("if at('hang'): time.sleep(600)", "UNPROVEN", "hang ended"),
        ("if at('hang'): say('groups'); time.sleep(600)", "WRONG", "hang ended"),
    ],
)
def test_a_step_that_hangs_is_killed_and_what_it_has_found_stays(monkeypatch, tmp_path, planted, state, what):
    pids = f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w')\n"
    report, _ = lines_of(monkeypatch, pids + planted, seconds=2.0)
    assert what in found(report, state)
    assert ("kept" in planted) == ("kept" in found(report, "OK"))
    for pid in (int(path.name) for path in tmp_path.iterdir()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_has_no_time_left_is_unproven(monkeypatch):
    monkeypatch.setattr(run, "TOTAL_SECONDS", 0.5)
    begin = time.monotonic()
    report, _ = lines_of(monkeypatch, "time.sleep(600)")
    assert set(found(report, "UNPROVEN")) == {step.name for step in run.STEPS}
    assert time.monotonic() - begin < 60


def test_each_gpu_has_a_process_and_ranks_share_the_only_one(monkeypatch):
    two = """
if step == "software": say("versions", gpus=2)
say(f"{step} {rank} of {context.get('world')} shared {context.get('shared')} {os.environ.get('NCCL_HOSTID')}")
"""
    texts = found(lines_of(monkeypatch, two, "cuda", every_gpu=True)[0], "OK")
    assert texts["1 device 0 of None shared None None"] == "cuda:1"
    assert texts["hang 1 of 2 shared False None"] == "cuda:1"
    texts = found(lines_of(monkeypatch, two.replace("gpus=2", "gpus=1"), "cuda")[0], "OK")
    assert texts["hang 1 of 2 shared True gpucluster-1"] == "cuda:0"
    report = lines_of(monkeypatch, two.replace("gpus=2", "gpus=0"), "cuda")[0]
    assert report.is_wrong
    none = found(report, "OK")
    assert set(none) == {"versions", "software 0 of None shared None None"}, "without a GPU the rest is not tried"


def test_lines_and_files_are_without_the_names_of_the_host(monkeypatch):
    monkeypatch.setattr(run, "_identifying", lambda: {"gpu-07": "HOST"})
    planted = (
        "open(context['folder'] + '/NCCL.gpu-07.log', 'w').write('gpu-07:1')\n"
        "print('GPU-4a5fe89e-65a1-357d-0c12-2b0f09db32ae'); say('gpu-07')"
    )
    report, files = lines_of(monkeypatch, planted)
    assert files["NCCL.HOST.log"] == "HOST:1"
    assert "HOST" in found(report, "OK")
    assert not [text for text in files.values() if "gpu-07" in text or "4a5fe89e" in text]


@pytest.mark.extended  # each of its processes loads torch
@pytest.mark.smoke
def test_on_cpu_all_of_it_runs_and_the_archive_has_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "s3cr3t")
    out = tmp_path / "it.tar.gz"
    assert main.main(["node", "selftest", "--device", "cpu", "--out", str(out)]) == 0
    with tarfile.open(out) as archive:
        texts = {Path(name).name: archive.extractfile(name).read().decode() for name in archive.getnames()}
    report = codec.read(Report, json.loads(texts["report.json"]), "report.json")
    states = {line.what: line.state for line in report.lines}
    assert {"names", "groups", "abort", "device assert", "its end", "memory"} <= {
        what for what, state in states.items() if state == "OK"
    }
    assert {"matmul fp32", "hbm copy", "host_link h2d", "NCCL memory", "environment"} <= {
        what for what, state in states.items() if state == "UNPROVEN"
    }
    assert "s3cr3t" not in "".join(texts.values())
    printed = capsys.readouterr().out
    assert report.summary() in " ".join(printed.split())
    assert str(out) in printed


def test_where_nothing_can_be_written_nothing_is_tried(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run.SelfTest, "run", lambda self: pytest.fail("it was started"))
    assert main.main(["node", "selftest", "--out", str(tmp_path / "none" / "it.tar.gz")]) == 4
    assert "none" in capsys.readouterr().err
