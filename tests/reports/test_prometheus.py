"""metrics.prom: Prometheus takes it, nothing that is not known to be good is 1, and it stays small."""

import math
import re
import subprocess

import example_runs
import pytest
from each import of_each
from example_runs import read
from programs import require_program
from prometheus_client.parser import text_string_to_metric_families

from pytest_gpucluster.journal.verdict import VERDICTS
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.reports import prometheus

RUN = {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "2026-01-02T03:04:05Z", "device": "cuda"}


def measured(metric="hbm.copy.bandwidth", unit="TB/s", **more):
    return {"metric": metric, "unit": unit, "status": "passed", "value": 3.0, **more}


def result(*measurements, nodeid="t.py::a", outcome="passed"):
    return {"type": "test", "nodeid": nodeid, "outcome": outcome, "measurements": list(measurements)}


def samples(found, name):
    """The samples of a metric by their labels, without those that are empty."""
    text = found if isinstance(found, str) else prometheus.render(found)
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"gpucluster_{name}":
                labels = tuple(sorted((key, value) for key, value in sample.labels.items() if value))
                assert labels not in values
                values[labels] = sample.value
    return values


def one(found, name):
    [value] = samples(found, name).values()
    return value


def checked(text):
    """Return what Prometheus takes: gauges with a help, a name and labels in its letters, each series once."""
    seen = set()
    for family in text_string_to_metric_families(text):
        assert (family.type, bool(family.documentation)) == ("gauge", True), family.name
        assert re.fullmatch("gpucluster_[a-z][a-z0-9_]*", family.name)
        assert family.name not in seen
        seen.add(family.name)
        assert {sample.timestamp for sample in family.samples} <= {None}, "the collector refuses it"
        series = [tuple(sorted(sample.labels.items())) for sample in family.samples]
        assert len(series) == len(set(series)), family.name
        assert all(re.fullmatch("[a-z_][a-z0-9_]*|Hostname|UUID", label) for labels in series for label, _ in labels), (
            family.name
        )
    assert seen
    assert [line for line in text.splitlines() if not line.isprintable()] == []
    return text


def every_metric():
    limit = {"min": 1.0, "max": 5.0}
    every = [
        measured(metric.name, metric.unit, limit=limit, margin=0.5, median=3.0, values={"0": 3.0, "1": 3.1})
        for metric in measurement.METRICS.values()
    ]
    return prometheus.render(read(RUN, result(*every)))


@of_each("name", example_runs.NAMES)
def test_an_example_is_what_prometheus_takes_and_only_an_accepted_run_is_accepted(name):
    found = example_runs.journal_of(name)
    text = checked(prometheus.render(found))
    assert one(text, "run_accepted") == (name == "accepted")
    values = samples(text, "run_verdict")
    assert [dict(labels)["verdict"] for labels, value in values.items() if value] == [found.verdict]
    assert len(values) == len(VERDICTS)


def test_any_metric_of_the_suite_is_what_prometheus_takes():
    assert one(checked(every_metric()), "run_left_out_measurements") == 0


@pytest.mark.extended
def test_promtool_finds_nothing_to_say_and_does_speak_up():
    def check(text):
        command = [require_program("promtool"), "check", "metrics"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    texts = [every_metric(), hostile_labels(), *(prometheus.render(read(RUN, result(one))) for one in ODD_NAMES)]
    texts += [prometheus.render(example_runs.journal_of(name)) for name in example_runs.NAMES]
    assert [found for found in map(check, texts) if found != (0, "")] == []
    assert check("# HELP gpucluster_a_ms b\n# TYPE gpucluster_a_ms gauge\ngpucluster_a_ms 1\n")[0] == 3


def test_a_run_that_was_cut_off_is_not_accepted_however_well_it_went():
    found = read(RUN, result(measured()))
    assert one(found, "run_accepted") == 0
    assert one(found, "run_exit_code") == 11
    assert samples(found, "run_end_timestamp_seconds") == {}


@of_each("outcome", ["failed", "error", "skipped"])
def test_only_what_has_passed_is_passed(outcome):
    collected = {"type": "collected", "tests": [{"nodeid": f"t.py::{name}"} for name in "abcd"]}
    start = {"type": "start", "nodeid": "t.py::c"}
    lines = [RUN, collected, result(nodeid="t.py::a"), result(nodeid="t.py::b", outcome=outcome), start]
    values = {dict(labels)["test"]: value for labels, value in samples(read(*lines), "criterion_passed").items()}
    assert values == {"t.py::a": 1, "t.py::b": 0, "t.py::c": 0, "t.py::d": 0}
    rehearsed = {**RUN, "rehearsal": True, "device": "cpu"}
    assert set(samples(read(rehearsed, *lines[1:]), "criterion_passed").values()) == {0}


ODD_NAMES = [measured("site.scratch", "furlongs/fortnight"), measured("Größe", ""), measured("🐍", "")]


def test_a_value_has_its_metric_unit_and_labels_as_labels():
    [(key, value)] = samples(read(RUN, result(measured(labels={"size": "1 GB", "n": "2"}))), "measurement").items()
    labels = {"metric": "hbm.copy.bandwidth", "unit": "TB/s", "labels": "size=1 GB, n=2"}
    assert dict(key).items() >= labels.items()
    assert value == 3.0
    for odd in ODD_NAMES:
        [key] = samples(checked(prometheus.render(read(RUN, result(odd)))), "measurement")
        assert (dict(key)["metric"], dict(key).get("unit", "")) == (odd["metric"], odd["unit"])


def test_nan_stays_nan_and_a_value_that_is_missing_is_counted_as_left_out():
    bad = measured(status="error", value=math.nan)
    none = measured("hbm.read.bandwidth", status="error", value=None)
    found = read(RUN, result(bad, none, outcome="error"))
    assert math.isnan(one(found, "measurement"))
    assert one(found, "run_left_out_measurements") == 1


def test_the_number_of_series_is_bounded_and_what_failed_is_kept():
    many = [measured(labels={"size": str(size)}) for size in range(2 * prometheus.MOST_MEASUREMENTS)]
    failed = measured(status="failed", value=1.0, labels={"size": "last"})
    found = read(RUN, result(*many, failed, outcome="failed"))
    values = samples(found, "measurement")
    assert len(values) == prometheus.MOST_MEASUREMENTS
    assert 1.0 in values.values()
    assert one(found, "run_left_out_measurements") == prometheus.MOST_MEASUREMENTS + 1


HOSTILE_LABELS = {"gpu": "mine", "a b": "1", "a-b": "2", "__name__": "x", "7": "y", "": "z", "Größe": "w"}


def hostile_labels():
    return prometheus.render(read(RUN, result(measured(labels=HOSTILE_LABELS))))


def test_labels_of_any_name_are_text_that_stays_bounded_and_apart():
    [labels] = samples(checked(hostile_labels()), "measurement")
    assert dict(labels)["labels"] == "gpu=mine, a b=1, a-b=2, __name__=x, 7=y, =z, Größe=w"
    flood = {f"k{number}": "v" for number in range(100)}
    long = [measured(labels={"size": "x" * 10_000 + end, **flood}) for end in "ab"]
    values = samples(checked(prometheus.render(read(RUN, result(*long)))), "measurement")
    assert len(values) == 2
    assert max(len(value) for key in values for _, value in key) <= 128
