"""The declarations of criteria: complete, and of one name each."""

import fnmatch
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import shipped_suite
from each import of_each

from pytest_gpucluster.config import workload_loader
from pytest_gpucluster.config.workload import CRITERIA, PROFILES, SECTIONS
from pytest_gpucluster.journal.verdict import REHEARSED_ALWAYS
from pytest_gpucluster.metrics.catalogue import declared, read_metrics
from pytest_gpucluster.metrics.measurement import METRICS

ROOT = Path(__file__).parents[2]
GROUPS = ("verification", "computing", "communication", "training", "storage")
SHIPPED = ROOT / "acceptance" / "workloads.yaml"
WORKLOADS = {profile: workload_loader.load(SHIPPED, profile=profile).workload for profile in PROFILES}


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


@pytest.mark.parametrize("words", ["GB, more", "GB, higher, rack", "GB, higher, bf16_tflops"])
def test_a_declaration_with_another_word_is_refused(words):
    with pytest.raises(ValueError, match=r"hbm\.new"):
        read_metrics(f"hbm.new: {words}\n    What it is.")
