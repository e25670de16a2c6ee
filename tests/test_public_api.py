"""What other projects may import: the list, that each name is there, and that our own examples need no more."""

import re
import subprocess
import sys
from pathlib import Path

import pytest_gpucluster
from pytest_gpucluster import short_fixtures
from pytest_gpucluster.session import fixtures

ROOT = Path(__file__).parent.parent
STABLE = """
Board Cluster EnvironmentBroken Gpu GpuClusterError HardwareFault InconclusiveMeasurement Limits Measure
Metric ReportProgress Series Telemetry TrainingInputs VerdictRecord WrongResult __version__ checkpoint compress_hostlist
counted
"""
"""Names are added in a minor release, and removed in a major one only."""


def test_the_stable_names_are_all_there_and_no_others():
    assert pytest_gpucluster.__all__ == STABLE.split()
    for name in pytest_gpucluster.__all__:
        assert getattr(pytest_gpucluster, name) is not None
    assert not hasattr(pytest_gpucluster, "Thresholds")


def test_nothing_heavy_is_loaded_until_it_is_used():
    code = "import sys, pytest_gpucluster as g; g.Metric; print({'torch', 'yaml', 'pynvml'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_examples_import_from_nowhere_else():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "deploy").rglob("*.py")]
    assert len(pages) > 20
    found = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages
        for line in re.findall(r"(?m)^ *(?:from|import) pytest_gpucluster\..*", page.read_text(encoding="utf-8"))
        if "short_fixtures" not in line
    ]
    assert found == []


def test_each_short_fixture_stands_for_a_long_one():
    long = {name for name in vars(fixtures) if name.startswith("gpucluster_")}
    assert {f"gpucluster_{name}" for name in short_fixtures.__all__} == long
