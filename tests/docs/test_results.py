"""docs/results.md: what was measured on GPUs and nothing else, each figure with the journal it comes from."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from each import of_each

from pytest_gpucluster.journal import journal

DOCS = Path(__file__).parents[2] / "docs"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpucluster_results", DOCS / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()

RUN = {
    "type": "run",
    "schema_version": 1,
    "run_id": "20260102-r1",
    "started_at": "2026-01-02T03:04:05+00:00",
    "device": "cuda",
    "rehearsal": False,
    "selection": True,
    "world_size": 2,
    "nnodes": 1,
    "plugin_version": "0.2.0",
}
VERSIONS = {"torch": "2.11.0", "cuda": "13.0", "nccl": "2.28.3", "driver": "580.65.06"}
WORKLOAD = {
    "type": "workload",
    "profile": "full",
    "file": "acceptance/workloads.yaml",
    "values": {"matmul.sizes": "16384"},
    "origins": {"matmul.sizes": "--gpucluster-workload"},
}
END = {"type": "end", "verdict": "SELECTION PASSED", "exit": 0, "reason": "1 passed"}
BF16 = {
    "metric": "matmul.bf16.tflops",
    "unit": "TFLOPS",
    "labels": {"n": "16384"},
    "status": "passed",
    "value": 791.25,
    "worst_rank": 1,
    "interval": [790.5, 792.0],
    "intervals": {"1": [790.5, 792.0]},
    "limit": {"min": 700.0, "max": None, "source": "user", "origin": "thresholds.yaml:14:7"},
    "margin": 0.13,
    "peak_ratio": 0.8,
    "values": {"0": 795.0, "1": 791.25},
    "telemetry": {"1": {"sm_clock_mhz": [1740, 1755, 1980], "throttle": ["sw_power_cap"]}},
}
BEST = {
    **BF16,
    "metric": "matmul.bf16.best_tflops",
    "labels": {"m": "16384", "n": "8192", "k": "4096", "layout": "nt"},
    "status": "recorded",
    "limit": None,
}


def cluster(name: str = "NVIDIA H200") -> dict[str, Any]:
    gpu = {"index": 0, "uuid": "GPU-secret", "name": name}
    ranks = [{"rank": rank, "host": "secret-host", "gpu": gpu, "versions": VERSIONS} for rank in range(2)]
    return {"type": "cluster", "ranks": ranks}


def result(*measurements: dict[str, Any], outcome: str = "passed") -> dict[str, Any]:
    return {"type": "test", "nodeid": "t.py::test_bf16", "outcome": outcome, "measurements": list(measurements)}


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_bytes(b"".join(journal.encode(line) for line in lines))
    return path


def page_of(tmp_path: Path, *lines: dict[str, Any]) -> str:
    path = written(tmp_path / "journal.jsonl", RUN, *(lines or (cluster(), WORKLOAD, result(BF16), END)))
    return GENERATOR.page([GENERATOR.evidence(path)])


def rows(page: str, title: str) -> list[list[str]]:
    """The cells of all rows under a heading, headers and rules left out."""
    body = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    kept = [line for i, line in enumerate(lines) if "---" not in line and "---" not in "".join(lines[i + 1 : i + 2])]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in kept]


def test_a_figure_stands_with_all_that_it_takes_to_trace_it(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert "secret" not in page, "hosts and serial numbers"
    section = rows(page, "NVIDIA H200, 2026-01-02")
    facts = {row[0]: row[1] for row in section if len(row) == 2}
    sha256 = hashlib.sha256((tmp_path / "journal.jsonl").read_bytes()).hexdigest()
    assert "selection" in facts.pop("selection")
    assert facts["SHA-256 of the journal"] == sha256
    assert (facts["verdict"], facts["GPUs"]) == ("SELECTION PASSED: 1 passed", "2 ranks on 1 node, NVIDIA H200")
    assert (facts["driver"], facts["NCCL"], facts["profile"]) == (
        "580.65.06",
        "2.28.3",
        "full (acceptance/workloads.yaml)",
    )
    [row] = [row for row in section if len(row) == 8]
    assert row[:4] == ["`matmul.bf16.tflops`", "n=16384", "passed", "791.2 TFLOPS (worst of 2 ranks)"]
    assert row[4:7] == ["790.5 to 792", "80 %", ">= 700 TFLOPS (thresholds.yaml:14:7)"]
    assert "rank 1: sm clock 1755 MHz" in row[7]
    assert "`matmul.bf16.tflops`" not in [row[0] for row in rows(page, "Not measured")]


@of_each(
    "case",
    [
        (result(BEST), "NVIDIA H100 80GB HBM3"),
        (result({**BEST, "status": "failed"}), "NVIDIA H200"),
        (result(BEST, outcome="failed"), "NVIDIA H200"),
        (result({**BEST, "inconclusive": "12 % wide"}), "NVIDIA H200"),
        (result({**BEST, "status": "error", "value": None}), "NVIDIA H200"),
    ],
)
def test_a_goal_takes_no_value_that_does_not_count(tmp_path: Path, case: tuple[dict[str, Any], str]) -> None:
    line, gpu = case
    assert rows(page_of(tmp_path, cluster(gpu), line, END), "Goals")[0][-1] == "not measured"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        pytest.param([{**RUN, "rehearsal": True, "device": "cpu"}], "a rehearsal on cpu", id="rehearsal"),
        pytest.param([{**RUN, "device": ""}], "a rehearsal on an unknown device", id="unknown device"),
        pytest.param([RUN, result(BF16), END], "no rank of this run names its GPU", id="no GPU named"),
        pytest.param([END], "not a journal of this project", id="no journal"),
    ],
)
def test_what_says_nothing_about_hardware_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[dict[str, Any]], message: str
) -> None:
    path, out = written(tmp_path / "journal.jsonl", *lines), tmp_path / "results.md"
    assert GENERATOR.main([str(path), "--out", str(out)]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"results.py: {path}")
    assert message in stderr
    assert not out.exists()
