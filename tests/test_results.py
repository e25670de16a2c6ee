"""docs/results.md: what was measured on GPUs and nothing else, each figure with the journal it comes from."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_gpucluster import journal, metrics

DOCS = Path(__file__).parent.parent / "docs"


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


def result(*measurements: dict[str, Any], outcome: str = "passed", name: str = "test_bf16") -> dict[str, Any]:
    return {"type": "test", "nodeid": f"t.py::{name}", "outcome": outcome, "measurements": list(measurements)}


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_bytes(b"".join(journal.encode(line) for line in lines))
    return path


def page_of(tmp_path: Path, *lines: dict[str, Any], run: dict[str, Any] = RUN) -> str:
    path = written(tmp_path / "journal.jsonl", run, *(lines or (cluster(), WORKLOAD, result(BF16), END)))
    return GENERATOR.page([GENERATOR.evidence(path)])


def rows(page: str, title: str) -> list[list[str]]:
    """The cells of all rows under a heading, headers and rules left out."""
    body = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    kept = [line for i, line in enumerate(lines) if "---" not in line and "---" not in "".join(lines[i + 1 : i + 2])]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in kept]


def test_the_shipped_page_says_that_nothing_was_measured() -> None:
    assert (DOCS / "results.md").read_text(encoding="utf-8") == GENERATOR.page(), (
        "docs/results.md is stale; make it again: .venv/bin/python docs/results.py [JOURNAL ...]"
    )


def test_without_a_journal_no_metric_is_measured_and_every_one_is_named() -> None:
    page = GENERATOR.page()
    assert "Nothing has been measured on a GPU yet" in page
    missing = rows(page, "Not measured")
    assert [row[0].strip("`") for row in missing] == list(metrics.METRICS)
    assert {row[-1] for row in missing} == {"not measured"}
    assert {row[-1] for row in rows(page, "Goals")} == {"not measured"}


def test_goals_are_targets_with_their_source() -> None:
    goals = rows(GENERATOR.page(), "Goals")
    assert [row[:3] for row in goals] == [
        ["H200", "`matmul.bf16.best_tflops`", ">= 790 TFLOPS or the best of `torch.matmul` in the same run"],
        ["H200", "`hbm.copy.bandwidth`", ">= 4.3 TB/s"],
    ]
    assert all("this project's goal" in row[3] for row in goals)


def test_a_figure_stands_with_all_that_it_takes_to_trace_it(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    section = rows(page, "NVIDIA H200, 2026-01-02")
    facts = {row[0]: row[1] for row in section if len(row) == 2}
    sha256 = hashlib.sha256((tmp_path / "journal.jsonl").read_bytes()).hexdigest()
    assert facts == {
        "run id": "20260102-r1",
        "SHA-256 of the journal": sha256,
        "verdict": "SELECTION PASSED: 1 passed",
        "started": "2026-01-02T03:04:05+00:00",
        "GPUs": "2 ranks on 1 node, NVIDIA H200",
        "driver": "580.65.06",
        "torch": "2.11.0",
        "CUDA": "13.0",
        "NCCL": "2.28.3",
        "pytest-gpucluster": "0.2.0",
        "selection": "only a selection of the suite ran",
        "profile": "full (acceptance/workloads.yaml)",
        "matmul.sizes": "16384 (--gpucluster-workload)",
    }
    assert [row for row in section if len(row) == 8] == [
        [
            "`matmul.bf16.tflops`",
            "n=16384",
            "passed",
            "791.2 TFLOPS (worst of 2 ranks)",
            "790.5 to 792",
            "80 %",
            ">= 700 TFLOPS (thresholds.yaml:14:7)",
            "rank 1: sm clock 1755 MHz (1740 to 1980), throttle: sw_power_cap",
        ]
    ]
    assert "`matmul.bf16.tflops`" not in [row[0] for row in rows(page, "Not measured")]
    assert "`hbm.copy.bandwidth`" in [row[0] for row in rows(page, "Not measured")]
    assert "Nothing has been measured" not in page


def test_the_page_tells_no_hosts_and_no_serials(tmp_path: Path) -> None:
    assert "secret" not in page_of(tmp_path)


def test_a_goal_shows_the_best_value_and_its_run(tmp_path: Path) -> None:
    lower = {**BEST, "labels": {**BEST["labels"], "n": "4096"}, "value": 700.0}
    page = page_of(tmp_path, cluster(), result(lower, BEST), END)
    assert rows(page, "Goals")[0][-1] == "791.2 TFLOPS (m=16384, n=8192, k=4096, layout=nt, run 20260102-r1)"
    assert rows(page, "Goals")[1][-1] == "not measured"


@pytest.mark.parametrize(
    ("lines", "gpu"),
    [
        pytest.param([result(BEST)], "NVIDIA H100 80GB HBM3", id="on another GPU"),
        pytest.param([result({**BEST, "status": "failed"})], "NVIDIA H200", id="a limit missed"),
        pytest.param([result(BEST, outcome="failed")], "NVIDIA H200", id="in a test that failed"),
        pytest.param([result({**BEST, "inconclusive": "12 % wide"})], "NVIDIA H200", id="inconclusive"),
        pytest.param([result({**BEST, "status": "error", "value": None})], "NVIDIA H200", id="no value"),
    ],
)
def test_a_goal_takes_no_value_that_does_not_count(tmp_path: Path, lines: list[dict[str, Any]], gpu: str) -> None:
    page = page_of(tmp_path, cluster(gpu), *lines, END)
    assert rows(page, "Goals")[0][-1] == "not measured"


def test_what_did_not_go_well_is_said_beside_the_figure(tmp_path: Path) -> None:
    page = page_of(tmp_path, cluster(), result({**BF16, "inconclusive": "12 % wide"}, outcome="failed"))
    [row] = [row for row in rows(page, "NVIDIA H200, 2026-01-02") if len(row) == 8]
    assert row[2] == "passed; its test: failed; inconclusive: 12 % wide"
    assert "| verdict | REJECTED: " in page


def test_runs_stand_in_the_order_of_gpu_and_date(tmp_path: Path) -> None:
    paths = []
    for i, (gpu, day) in enumerate([("NVIDIA H200", "05"), ("NVIDIA H100 80GB HBM3", "07"), ("NVIDIA H200", "04")]):
        run = {**RUN, "started_at": f"2026-01-{day}T00:00:00+00:00"}
        paths.append(written(tmp_path / f"{i}.jsonl", run, cluster(gpu), result(BF16), END))
    page = GENERATOR.page([GENERATOR.evidence(path) for path in paths])
    assert re.findall(r"^## (NVIDIA.*)$", page, re.MULTILINE) == [
        "NVIDIA H100 80GB HBM3, 2026-01-07",
        "NVIDIA H200, 2026-01-04",
        "NVIDIA H200, 2026-01-05",
    ]


@pytest.mark.parametrize("text", ["a|b", "a\\|b", "`code`", "<b>", "one\ntwo", "\x1b[31m"], ids=ascii)
def test_no_text_from_a_journal_breaks_the_table(tmp_path: Path, text: str) -> None:
    hostile = {
        **BF16,
        "metric": text,
        "labels": {text: text},
        "inconclusive": text,
        "limit": {"min": 1.0, "origin": text, "source": text},
        "telemetry": {"1": {"throttle": [text], "not_available": {text: text}}},
    }
    workload = {**WORKLOAD, "profile": text, "values": {text: text}}
    page = page_of(tmp_path, cluster(), workload, result(hostile), {**END, "reason": text}, run={**RUN, "run_id": text})
    section = rows(page, "NVIDIA H200, 2026-01-02")
    assert {len(row) for row in section} == {2, 8}
    assert len([row for row in section if len(row) == 8]) == 1
    assert "\x1b" not in page
    assert "<b>" not in page.replace("\\<", "")


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
    told = capsys.readouterr().err
    assert told.startswith(f"results.py: {path}")
    assert message in told
    assert not out.exists()


def test_one_bad_journal_leaves_the_page_as_it_was(tmp_path: Path) -> None:
    good = written(tmp_path / "good.jsonl", RUN, cluster(), result(BF16), END)
    bad = written(tmp_path / "bad.jsonl", {**RUN, "rehearsal": True})
    out = tmp_path / "results.md"
    out.write_text("before", encoding="utf-8")
    assert GENERATOR.main([str(good), str(bad), "--out", str(out)]) == 2
    assert out.read_text(encoding="utf-8") == "before"
    assert GENERATOR.main([str(good), "--out", str(out)]) == 0
    assert "791.2 TFLOPS" in out.read_text(encoding="utf-8")


def test_the_page_is_made_without_torch_and_pytest(tmp_path: Path) -> None:
    path = written(tmp_path / "journal.jsonl", RUN, cluster(), WORKLOAD, result(BF16), END)
    code = (
        "import runpy, sys\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as done:\n    assert done.code == 0\n"
        "print(sorted({'torch', 'pytest', '_pytest', 'yaml', 'pynvml'} & set(sys.modules)))"
    )
    code = f"import sys; sys.argv = [{str(DOCS / 'results.py')!r}, *sys.argv[1:]]\n{code}"
    command = [sys.executable, "-c", code, str(path), "--out", str(tmp_path / "out.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert "791.2 TFLOPS" in (tmp_path / "out.md").read_text(encoding="utf-8")
