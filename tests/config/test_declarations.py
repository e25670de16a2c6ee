"""The declarations of criteria: complete, of one name each, and with values that a workload's file may lack."""

import fnmatch
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import shipped_suite
from each import of_each

from pytest_gpucluster.config import workload_loader
from pytest_gpucluster.config.workload import CRITERIA, PROFILES, SECTIONS
from pytest_gpucluster.journal.verdict import REHEARSED_ALWAYS
from pytest_gpucluster.metrics.catalogue import declared
from pytest_gpucluster.metrics.measurement import METRICS

ROOT = Path(__file__).parents[2]
GROUPS = ("verification", "computing", "communication", "training", "storage")
SHIPPED = ROOT / "acceptance" / "workloads.yaml"
WORKLOADS = {profile: workload_loader.load(SHIPPED, profile=profile).workload for profile in PROFILES}
VALUES = {
    "quick": {"sizes": "8 GiB, 32 GB", "warmup": "2 s", "window": "3 s", "longest": "10 s", "tolerance": "1 %"},
    "soak": {"window": "9 s"},
    "cpu": {"sizes": "1 MB", "warmup": "0 s", "window": "1 s", "longest": "2 s", "tolerance": "100 %"},
}


def test_every_criterion_of_the_suite_is_declared_once_with_metrics_that_are():
    names = [criterion.name for criterion in declared("CRITERIA")]
    assert set(names) == {name for test in shipped_suite.shipped_tests() for name in test.criteria}
    for counted in (names, [metric.name for metric in declared("METRICS")], [section.path for section in SECTIONS]):
        assert [name for name, count in Counter(counted).items() if count > 1] == []
    assert len(METRICS) > 100
    assert set(REHEARSED_ALWAYS) <= set(names)
    patterns = [pattern for one in declared("CRITERIA") for pattern in one.metrics]
    assert [name for name in METRICS if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)] == []


def test_every_section_is_read_by_the_suite_or_the_session():
    readers = [*(ROOT / "acceptance").glob("*.py"), *(ROOT / "pytest_gpucluster" / "session").glob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in readers)
    named = set(re.findall(r"\b(?:workload|active)\.([a-z_0-9]+)", source)) | set(re.findall(r'"([a-z_0-9]+)"', source))
    assert [section.attribute for section in SECTIONS if section.attribute not in named] == []


# What one who adds a criterion writes: a declaration, a benchmark, and a test in acceptance/ that calls it.
@of_each("name", list(CRITERIA))
def test_a_criterion_has_metrics_a_group_a_time_a_benchmark_and_a_test(name):
    criterion = CRITERIA[name]
    for pattern in criterion.metrics:
        assert fnmatch.filter(METRICS, pattern), f"{name} declares {pattern}, which is no metric"
    assert criterion.metrics
    assert criterion.group in GROUPS or criterion.group == name
    tests = [test for test in shipped_suite.shipped_tests() if name in test.criteria]
    assert tests
    for profile in PROFILES:
        if criterion.span is not None:
            span = criterion.span(WORKLOADS[profile], tests[0].name)
            assert 0 < span.least_seconds <= span.most_seconds < math.inf
    source = "".join((ROOT / path).read_text(encoding="utf-8") for path in {test.file for test in tests})
    if name != "inventory":  # compares what the ranks reported before the first test
        assert re.search(r"^from pytest_gpucluster\.(benchmarks|criteria|node)\b", source, re.MULTILINE)
    assert f'criterion("{name}")' in source


def test_what_is_declared_can_be_read():
    for section in SECTIONS:
        for profile in PROFILES:
            for path, text in section.texts(profile).items():
                assert workload_loader._declared(path, text, "a file").value is not None


def without_hbm(tmp_path):
    text = SHIPPED.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    kept, inside = [], False
    for line in lines:
        inside = line == "    hbm:\n" or (inside and line.startswith("      "))
        kept += [] if inside else [line]
    path = tmp_path / "workloads.yaml"
    path.write_text("".join(kept), encoding="utf-8")
    return path


def test_values_that_a_criterion_declares_need_not_be_in_the_file(tmp_path, monkeypatch):
    path = without_hbm(tmp_path)
    with pytest.raises(workload_loader.ThresholdsError, match=r"lacks hbm\.sizes"):
        workload_loader.load(path, profile="full")
    sections = tuple(replace(one, values=VALUES) if one.path == "hbm" else one for one in SECTIONS)
    monkeypatch.setattr(workload_loader, "SECTIONS", sections)
    found = {profile: workload_loader.load(path, profile=profile) for profile in PROFILES}
    windows = {profile: loaded.workload.hbm.sampling.window_seconds for profile, loaded in found.items()}
    assert windows == {"quick": 3.0, "full": 3.0, "soak": 9.0, "cpu": 1.0}
    assert found["full"].workload.hbm.sizes_bytes == (8 * 2**30, 32 * 10**9)
    assert found["full"].record.overridden == []
    path.write_text(path.read_text() + "    hbm: {window: 1500 ms}\n", encoding="utf-8")
    assert workload_loader.load(path, profile="cpu").workload.hbm.sampling.window_seconds == 1.5


def test_a_declared_value_that_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match=r"hbm\.sizes is declared as '8 GB/s'"):
        workload_loader._declared("hbm.sizes", "8 GB/s", "a file")
