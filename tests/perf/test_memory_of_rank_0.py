"""What rank 0 holds does not grow with the samples of all ranks: the journal has them, and they are let go."""

import json
from dataclasses import replace

import pytest
import torchrun

SUITE = """
import pytest

SAMPLES = [1.0 + i / 1000 for i in range(100)]


@pytest.mark.parametrize("number", range(3))
def test_measures(measure, number):
    measure("matmul.bf16.tflops", 1.0, unit="TFLOPS", samples=SAMPLES, record_only=True)
    assert number != 1, "it is wrong"
"""

# What is still held at the end: by the reports, which pytest keeps, and by the tests of this rank.
HELD = """
import json
import os
import pytest
from pytest_gpucluster.session.phases import MEASUREMENTS

REPORTS, ITEMS = [], []


def pytest_runtest_logreport(report):
    REPORTS.append(report)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    ITEMS.append((item, len(item.stash.get(MEASUREMENTS, []))))


def pytest_sessionfinish():
    sent = [dict(report.user_properties).get("gpucluster") for report in REPORTS if report.when == "call"]
    measured = [one for each in sent if each for one in each["measurements"]]
    line = {
        "of reports": [[one["value"], one["samples"]] for one in measured],
        "before": [number for _, number in ITEMS],
        "of tests": [len(item.stash.get(MEASUREMENTS, [])) for item, _ in ITEMS],
    }
    with open(f"held-{os.environ.get('RANK', '0')}.json", "w") as file:
        json.dump(line, file)
"""


def assert_recorded(run, ranks):
    """All samples of all ranks are in the journal, in the test that failed, too."""
    results = run.journal.results
    assert [result.outcome for result in results] == ["passed", "failed", "passed"]
    for result in results:
        [judged] = result.measurements
        assert {rank: len(samples) for rank, samples in judged.samples.items()} == dict.fromkeys(range(ranks), 100)


def test_samples_are_recorded_and_no_rank_holds_them(tmp_path):
    run = torchrun.torchrun(tmp_path, {"test_it.py": SUITE, "conftest.py": HELD})
    assert_recorded(run, ranks=2)
    held = [json.loads(next(tmp_path.rglob(f"held-{rank}.json")).read_text()) for rank in (0, 1)]
    assert held[0]["of reports"] == [[1.0, {}]] * 3
    for one in held:
        assert one["before"] == [1, 1, 1]
        assert one["of tests"] == [0, 0, 0]


def test_a_rank_alone_lets_them_go_too(project):
    project.suite(SUITE, conftest=HELD)
    left = project.run_apart("-p", "no:randomly", forked=False)
    assert_recorded(left, ranks=1)
    held = json.loads((project.path / "held-0.json").read_text())
    assert (held["of reports"], held["of tests"]) == ([[1.0, {}]] * 3, [0, 0, 0])


@pytest.mark.parametrize("samples", [{}, {"0": [1.0, 2.0]}])
def test_a_record_keeps_its_values_and_the_list_that_a_report_shares(samples):
    from pytest_gpucluster.journal.records import CollectedTest
    from pytest_gpucluster.journal.test_record import TestRecord

    record = TestRecord(test=CollectedTest(nodeid="a.py::b", classname="a", name="b", file="a.py", line=1))
    shared = record.measurements
    line = {"metric": "m.tflops", "value": 1.0, "samples": samples}
    shared.append(line)
    sent = replace(record).line()["measurements"][0]
    record.drop_samples()
    assert record.measurements is shared
    assert shared == [{"metric": "m.tflops", "value": 1.0, "samples": {}}]
    assert sent["samples"] == samples
