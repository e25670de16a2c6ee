"""The times that docs/whole-cluster.md predicts are those that the suite predicts, of the tests that it has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpucluster.predicted import predict
from pytest_gpucluster.workload_file import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "whole-cluster.md").read_text(encoding="utf-8")
LISTING = """\
import json, os
def pytest_collection_finish(session):
    told = []
    for item in session.items:
        criterion = item.get_closest_marker("criterion")
        marks = sorted({mark.name for mark in item.iter_markers()})
        told.append([item.nodeid, item.name, criterion.args[0] if criterion else None, marks])
    open(os.environ["LISTED"], "w").write(json.dumps(told))
"""
_OF_FABRIC = ("inventory", "connectivity", "infiniband", "nccl_environment", "links", "nccl", "collectives")
FABRIC = {f"test_{name}.py" for name in _OF_FABRIC}
CHOSEN = {
    "`-m single_gpu`": lambda file, marks: "single_gpu" in marks,
    '`-m "single_gpu or nccl"`': lambda file, marks: marks & {"single_gpu", "nccl"} and "needs_nodes" not in marks,
    "the survivors together": lambda file, marks: marks & {"single_gpu", "nccl"},
    "the seven files": lambda file, marks: file in FABRIC,
    "`-m training`": lambda file, marks: "training" in marks,
    "a node alone, everything": lambda file, marks: "needs_nodes" not in marks,
    "sign-off: everything": lambda file, marks: True,
}
ROWS = re.findall(
    r"^\| (.+?) \| (quick|full) \| (\d+) \| (\d+) \| ([\d.]+) min \| ([\d.]+) min \| (\d+) \|$", PAGE, re.M
)


@pytest.fixture(scope="module")
def tests(tmp_path_factory):
    """Every test of the suite: its file, its name, its criterion, its marks."""
    folder = tmp_path_factory.mktemp("listing")
    (folder / "listing.py").write_text(LISTING)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GPUCLUSTER_"))}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "acceptance/",
            "--collect-only",
            "-q",
            "-p",
            "listing",
            "-p",
            "no:cacheprovider",
        ],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(folder), "LISTED": str(folder / "told.json"), "GPUCLUSTER_DEVICE": "cpu"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    told = json.loads((folder / "told.json").read_text())
    assert len(told) > 80
    return [(nodeid.partition("::")[0].rpartition("/")[2], name, of, set(marks)) for nodeid, name, of, marks in told]


def test_what_an_acceptance_needs_is_said_before_the_first_command():
    """Without weights and data `qwen2_lora` is skipped, and no sequence could end in ACCEPTED."""
    before, _, _ = PAGE.partition("\n## Bare metal\n")
    for name in ("MODEL", "DATA", "SCRATCH"):
        assert f"\nexport GPUCLUSTER_{name}=/" in before or f"\nexport GPUCLUSTER_{name}=function_calls=/" in before


def test_every_selection_has_a_row():
    assert len(ROWS) == len(CHOSEN)
    assert all(any(key in row[0] for row in ROWS) for key in CHOSEN)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_is_what_the_suite_predicts(row, tests):
    what, profile, *told = row
    chosen = next(rule for key, rule in reversed(CHOSEN.items()) if key in what)
    workload = load(ROOT / "acceptance" / "workloads.yaml", profile=profile).workload
    these = [(name, criterion) for file, name, criterion, marks in tests if chosen(file, marks)]
    found = predict(these, workload)
    minutes = [f"{seconds / 60:.1f}" for seconds in (found.span.least_seconds, found.span.most_seconds)]
    assert told == [str(len(these)), str(found.tests), *minutes, str(found.other_tests)]


def test_the_files_of_the_fabric_are_those_of_the_command():
    [command] = re.findall(r"--report-dir fabric -- ([^$]+?)\ngpucluster", PAGE)
    assert {word.rpartition("/")[2] for word in command.split() if word.endswith(".py")} == FABRIC
