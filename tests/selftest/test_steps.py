"""What a step makes of what it finds: rates, logs, NVML's answers, errors; and the data of real nodes."""

import json
import re
from pathlib import Path

import pytest
import torch
from each import of_each
from fake_nvml import FakeNvml

from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.judge import loader
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.metrics.datasheets import promise_of
from pytest_gpucluster.metrics.sampling import Series
from pytest_gpucluster.node import kernel_log
from pytest_gpucluster.node.fabric import nccl_log
from pytest_gpucluster.node.nvml_queries import QUERIES
from pytest_gpucluster.selftest import steps
from pytest_gpucluster.selftest.report import Report

FIXTURES = sorted((Path(__file__).parents[1] / "data" / "selftest").iterdir())
H100 = "NVIDIA H100 80GB HBM3"


def context(folder, device="cuda:0"):
    return steps.Context(device=device, folder=str(folder), log=str(folder / "it.log"), seconds=30)


@pytest.mark.parametrize(
    ("gpu", "family", "kind", "value", "state"),
    [
        (H100, "matmul", "bf16", 720.0, "OK"),
        (H100, "matmul", "bf16", 500.0, "UNPROVEN"),
        (H100, "matmul", "bf16", 1100.0, "WRONG"),
        (H100, "hbm", "copy", 2.9e12, "OK"),
        (H100, "hbm", "copy", 9e12, "WRONG"),
        (H100, "host_link", "h2d", 55e9, "OK"),
        ("A GPU of tomorrow", "matmul", "bf16", 720.0, "UNPROVEN"),
    ],
)
def test_a_rate_stands_next_to_published_ones(gpu, family, kind, value, state):
    constant = Series(samples=(value,), median=value, low=value, high=value)
    found = steps._rate(gpu, family, kind, lambda family, kind: constant)
    assert (found.state, bool(found.todo)) == (state, state != "OK")


_TORCH = (
    "[PG ID 0] ProcessGroupNCCL environments: NCCL version: 2.28.9, TORCH_NCCL_ASYNC_ERROR_HANDLING: {}, "
    "TORCH_NCCL_BLOCKING_WAIT: 0, TORCH_NCCL_TRACE_BUFFER_SIZE: 2000, TORCH_NCCL_NAN_CHECK: 0\n"
    "HeartbeatMonitor environments: TORCH_NCCL_ENABLE_MONITORING (Whether to kill program): false, X: 1\n"
)


@pytest.mark.parametrize(("handling", "recorded", "state"), [(0, 1, "OK"), (3, 1, "WRONG"), (0, 0, "UNPROVEN")])
def test_the_environment_is_compared_with_the_logs(tmp_path, monkeypatch, handling, recorded, state):
    for name, variable in steps.environment.VARIABLES.items():
        monkeypatch.setenv(name, variable.value)
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "NCCL.%p.log"))
    monkeypatch.setattr(steps.process_group, "flight_records", lambda: [{}] * recorded)
    log = nccl_log.NcclLog.of(steps.os.environ, pid=steps.os.getpid()).path
    log.write_text("h:1:1 [0] NCCL INFO Pattern 4\nh:1:1 [0] NCCL INFO NCCL_NO_CACHE set by environment to X\n")
    (tmp_path / "it.log").write_text(_TORCH.format(handling))
    monkeypatch.setenv("NCCL_NO_CACHE", "X")
    found = steps._environment(context(tmp_path))
    assert found.state == state
    taken = found.values["taken"]
    assert (taken["TORCH_NCCL_ENABLE_MONITORING"], taken["TORCH_FR_BUFFER_SIZE"], taken["NCCL_NO_CACHE"]) == (
        "0",
        "2000",
        "X",
    )
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in taken


def test_a_needed_query_without_an_answer_is_wrong_and_another_one_is_listed(tmp_path, monkeypatch):
    promise = promise_of("H100 SXM")
    assert promise is not None
    every = dict.fromkeys(QUERIES, 1)
    del every["pages.pending"]
    monkeypatch.setattr(steps, "PyNvml", lambda: FakeNvml({"GPU-1": every}))
    assert steps._nvml(context(tmp_path)).state == "OK"
    document = json.loads((tmp_path / "nvml.json").read_text())
    assert document["gpus"]["0"]["missing"]["pages.pending"]["kind"] == "not supported"
    assert "serial" not in document["gpus"]["0"]["values"]
    del every[promise.required_queries[0]]
    assert steps._nvml(context(tmp_path)).state == "WRONG"
    monkeypatch.setattr(steps, "PyNvml", lambda: FakeNvml({}))
    assert steps._nvml(context(tmp_path)).state == "WRONG"


@pytest.mark.parametrize(
    ("more", "state"),
    [("", "OK"), ("h:1:1 [0] NCCL INFO Channel 00/0 : 0 to 1 via a new thing\n", "UNPROVEN")],
)
def test_lines_of_nccl_that_should_be_understood_and_are_not(tmp_path, more, state):
    assert steps._logs(context(tmp_path)).state == "UNPROVEN"
    [fixture] = [path for path in FIXTURES if path.name == "cuda-580.159.04-2.11.0-2.28.9"]
    (tmp_path / "NCCL.1.log").write_text((fixture / "NCCL.775.log").read_text() + more)
    found = steps._logs(context(tmp_path))
    assert (found.state, len(found.values["meant"])) == (state, int(bool(more)))
    assert found.text.startswith("2.28.9")


@pytest.mark.parametrize(
    ("error", "state"),
    [(EnvironmentBroken("no"), "UNPROVEN"), (WrongResult("bits"), "WRONG"), (AttributeError("x"), "WRONG")],
)
def test_an_error_is_a_line(error, state):
    assert steps.failure("it", error).state == state

    def fail():
        raise error

    assert steps._guarded("it", fail).state == state


@pytest.mark.parametrize("shared", [False, True])
def test_an_exception_of_a_step_is_its_last_line(tmp_path, monkeypatch, shared):
    def planted(context):
        yield steps.line("first", True, "text")
        raise RuntimeError("Duplicate GPU detected")

    class Ended(Exception):
        pass

    def end(code):
        raise Ended

    monkeypatch.setattr(steps, "STEPS", {"hang": planted})
    monkeypatch.setattr(steps.os, "_exit", end)
    monkeypatch.setattr(steps.faulthandler, "dump_traceback_later", lambda seconds: None)
    given = {
        "device": "cuda:0",
        "folder": str(tmp_path),
        "log": str(tmp_path / "it.log"),
        "seconds": 9,
        "shared": shared,
    }
    with pytest.raises(Ended):
        steps.main("hang", json.dumps(given))
    found = [json.loads(text) for text in (tmp_path / "it.jsonl").read_text().splitlines()]
    assert [one["state"] for one in found] == ["OK", "UNPROVEN" if shared else "WRONG"]
    assert "Duplicate GPU" in found[1]["text"]


def test_clocks_that_disagree_are_wrong(tmp_path, monkeypatch):
    real = steps.accelerator(torch.device("cpu"))
    clock = real.clock()
    monkeypatch.setattr(clock, "read", lambda: [1.0])
    monkeypatch.setattr(type(real), "clock", lambda self: clock)
    monkeypatch.setattr(steps, "_rates", lambda context: iter(()))
    assert next(line.state for line in steps.device(context(tmp_path, "cpu"))) == "WRONG"


@of_each("folder", FIXTURES, name=lambda folder: folder.name)
def test_what_a_real_node_has_left_is_read(folder):
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    for text in texts.values():
        assert not re.search(r"\b(?!00000000-)[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-", text), "a UUID"
    for name, text in texts.items():
        if name.startswith("NCCL."):
            assert nccl_log.choice(text.splitlines()).version
            assert nccl_log.unread(text.splitlines())[1] == []
    if "report.json" in texts:
        assert codec.read(Report, json.loads(texts["report.json"]), folder.name).lines
    kernel_log.parse(texts["dmesg-nvrm.txt"].splitlines())
    for gpu in json.loads(texts["nvml.json"])["gpus"].values() if "nvml.json" in texts else ():
        promise = promise_of(loader.load().sku_for(gpu["name"]))
        assert not set(promise.required_queries) & set(gpu["missing"])
        asked = {*gpu["values"], *gpu["missing"]} - {"nvlink.bytes"}  # of an earlier version
        assert asked <= set(QUERIES)
