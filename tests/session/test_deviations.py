"""A pass with looser limits, reruns over a missed limit or a weaker workload is no plain pass: exit code 12."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from pytest_gpucluster.config.workload_loader import Override, load
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.journal.verdict import PASSED_WITH_DEVIATIONS, decide
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.reports.results_json import results_schema

WORKLOADS = Path(__file__).parents[2] / "acceptance" / "workloads.yaml"
JUDGED = (JudgedMetric(metric="m", status="passed"),)
PASSED = TestResult(nodeid="test_a.py::test_a", criterion="a", outcome="passed", measurements=JUDGED)
FAILED = TestResult(nodeid="test_b.py::test_b", criterion="b", outcome="failed", message="too slow")
ERROR = TestResult(nodeid="test_b.py::test_b", criterion="b", outcome="error", message="no memory")
SKIPPED = TestResult(nodeid="test_b.py::test_b", criterion="b", outcome="skipped", message="no disk")
AGAIN = TestResult(
    nodeid="test_c.py::test_c",
    criterion="c",
    outcome="passed",
    measurements=JUDGED,
    attempts=2,
    properties=(("attempt 1", "failed: too slow"),),
)
# From the first test on the run counts as one on GPUs, of the SKU that the option names.
AS_ON_GPUS = """
    import pytest
    from pytest_gpucluster.session.run import Run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(session):
        session.config.stash[PATCH] = patch = pytest.MonkeyPatch()
        patch.setattr(Run, "rehearsal", False)
        patch.setattr(Run, "kind", "")

    def pytest_unconfigure(config):
        if PATCH in config.stash:
            config.stash[PATCH].undo()

    PATCH = pytest.StashKey()
"""
TEST = """
    import pytest

    CALLS = []

    @pytest.mark.criterion("matmul")
    def test_it(measure):
        CALLS.append(1)
        fault = {fault}
        if fault is not None and len(CALLS) == 1:
            raise fault
        measure("matmul.fp32.tflops", 51.0 if fault is None or len(CALLS) > 1 else 5.0, unit="TFLOPS", n=16384)
        measure("matmul.fp16.tflops", 800.0, unit="TFLOPS", n=16384)
"""
SWITCHED_OFF = """
schema_version: 1
skus:
  H100 SXM:
    limits:
      matmul.fp32.tflops: {record_only: the site does not want it}
      matmul.fp16.tflops: {min: 500 TFLOPS, source: "accepted by the site"}
"""


def verdict(*results, **changes):
    settings = {"pytest_exit": 0, "kind": "", "selection": False, "manifest": True, "topology": "1 node"}
    found = decide(results, **{**settings, **changes})
    return found.word, found.exit


@pytest.mark.parametrize(
    ("results", "changes", "code"),
    [
        ([PASSED], {"deviations": ["less"]}, 12),
        ([PASSED], {"deviations": ["less"], "selection": True}, 12),
        ([PASSED], {"deviations": ["less"], "manifest": False}, 12),
        ([PASSED, AGAIN], {}, 12),
        ([PASSED], {}, 0),
        ([AGAIN], {"kind": "REHEARSAL", "deviations": ["less"]}, 0),
        ([PASSED, AGAIN, FAILED], {"deviations": ["less"], "pytest_exit": 1}, 1),
        ([PASSED, ERROR], {"deviations": ["less"], "pytest_exit": 1}, 11),
        ([PASSED, SKIPPED], {"deviations": ["less"]}, 10),
    ],
)
def test_of_several_codes_12_comes_before_0_only(results, changes, code):
    word, found = verdict(*results, **changes)
    assert found == code
    assert (word == PASSED_WITH_DEVIATIONS) == (code == 12)


@pytest.mark.parametrize(
    ("override", "weaker"),
    [
        ("matmul.sizes=1024", True),
        ("matmul.sizes=4096,8192,16384,1024", False),
        ("matmul.window=1 s", True),
        ("matmul.window=20 s", False),
        ("matmul.tolerance=5 %", True),
        ("matmul.tolerance=0.01 %", False),
        ("training.throughput.contract.layers=1", True),
    ],
)
def test_a_workload_is_weaker_unless_it_surely_asks_for_as_much(override, weaker):
    overrides = [Override.parse(override, origin="command line")]
    if "window=20" in override:
        overrides.append(Override.parse("matmul.longest=100 s", origin="command line"))
    found = load(WORKLOADS, profile="full", overrides=overrides).record.weakened
    assert [text.partition("=")[0] for text in found] == ([override.partition("=")[0]] if weaker else [])


def run(project, *options, fault="None"):
    project.suite(TEST.format(fault=fault), conftest=AS_ON_GPUS)
    (project.path / "criteria.txt").write_text("test_it.py::test_it\n")
    return project.run("--gpucluster-sku=H100 SXM", *options)


def test_a_site_that_only_records_what_the_shipped_limits_judge_deviates(project):
    (project.path / "site.yaml").write_text(SWITCHED_OFF)
    left = run(project, "--gpucluster-thresholds=site.yaml")
    # The journal's first line, from before the first test, has a rehearsal: so no report shows another word.
    assert (left.exit, left.journal.end.verdict) == (12, PASSED_WITH_DEVIATIONS), left.output
    results = json.loads((project.path / "gpucluster-report" / "latest" / "results.json").read_text())
    [deviation] = results["run"]["deviations"]
    assert "matmul.fp32.tflops" in deviation
    assert "47.5 TFLOPS" in deviation
    assert deviation in left.properties["deviations"]
    assert deviation in left.stdout
    assert not results["verdict"]["accepted"]
    jsonschema.validate(results, results_schema())
    [lowered] = [one for one in results["tests"][0]["measurements"] if one["metric"] == "matmul.fp16.tflops"]
    assert (lowered["status"], lowered["limit"]["min"]) == ("passed", 500.0)
    shipped = lowered["shipped_limit"]["min"]
    assert shipped > 500.0
    page = (project.path / "gpucluster-report" / "latest" / "report.html").read_text()
    for report, text in (("terminal", left.stdout), ("JUnit", left.document), ("page", page)):
        assert re.search(rf"500\b.*\(shipped[^()]* {shipped:g}\b", text), report


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param("AssertionError('a wrong result')", 12, id="a wrong result"),
        pytest.param("OSError('no such file')", 0, id="the environment"),
    ],
)
def test_a_failure_that_is_run_again_until_it_passes_deviates(project, fault, code):
    pytest.importorskip("pytest_rerunfailures")
    left = run(project, "--reruns=2", fault=fault)
    assert (left.exit, left.end[1]) == (code, code), left.output
    assert ("matmul failed" in left.journal.reason) == (code == 12)
