import json
import math

import pytest
from each import of_each
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import MeasurementError, UnitError
from pytest_gpucluster.metrics import datasheets, units
from pytest_gpucluster.metrics import measurement as metrics
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.measurement import Measurement, measurement
from pytest_gpucluster.metrics.sampling import Sampling, series

BUSBW = "nccl.all_reduce.busbw"


@of_each("metric", list(metrics.METRICS.values()))
def test_every_metric_has_a_unit_a_description_and_a_peak_that_exists(metric):
    unit = units.unit(metric.unit)
    assert metric.doc
    if metric.peak is not None:
        assert unit.dimension == units.unit(datasheets.PEAK_UNITS[metric.peak]).dimension


STOPPED = {"by": "interval", "samples": 8, "seconds": 3.0, "extended": False}
STOPPED |= {"width_ratio": 0.004, "allowed_ratio": 0.01}


def test_an_unknown_metric_is_refused_with_the_one_that_was_meant():
    with pytest.raises(MeasurementError, match=r"'nccl.allreduce.busbw'; .* 'nccl\.all_reduce\.busbw'"):
        metrics.known("nccl.allreduce.busbw")
    with pytest.raises(MeasurementError, match=r"'zzz'; .*pytest_gpucluster_metrics"):
        measurement("zzz", 1, unit="GB/s")


@pytest.fixture
def site_metric(monkeypatch):
    registry = dict(metrics.METRICS)
    monkeypatch.setattr(metrics, "_REGISTRY", registry)
    return Metric(name="site.scratch.bandwidth", unit="GB/s", better="higher", doc="our scratch file system")


def test_a_site_may_register_its_metric_once_and_only_with_a_unit_that_exists(site_metric):
    assert metrics.register(site_metric) is site_metric
    metrics.register(site_metric)
    assert measurement("site.scratch.bandwidth", 2, unit="TB/s").value == 2000.0
    other = Metric(name=site_metric.name, unit="GB/s", better="lower", doc="something else")
    with pytest.raises(MeasurementError, match=r"'site\.scratch\.bandwidth'"):
        metrics.register(other)
    with pytest.raises(UnitError, match="'GBps'"):
        metrics.register(Metric(name="x", unit="GBps", better="higher", doc="x"))


def test_value_and_samples_are_converted_to_the_canonical_unit():
    made = measurement("hbm.copy.bandwidth", 3020, unit="GB/s", samples=[3000, 3040], labels={"gpu": 3})
    assert made == Measurement(
        metric="hbm.copy.bandwidth", value=3.02, unit="TB/s", samples=(3.0, 3.04), labels={"gpu": "3"}
    )


class OneElement:
    """Stands for a numpy scalar or a tensor of one element."""

    def __float__(self):
        return 442.1


class ManyElements:
    def __float__(self):
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


def test_anything_that_converts_to_float_is_a_number():
    assert measurement(BUSBW, OneElement(), unit="GB/s", samples=(OneElement(),)).samples == (442.1,)


@of_each(
    "case",
    [
        ("442", {}, "'442' is no number"),
        (None, {}, "None is no number"),
        (True, {}, "True is no number"),
        (1j, {}, "1j.* is no number"),
        (ManyElements(), {}, "2 elements"),
        (10**400, {}, "too large"),
        (1.0, {"samples": ["x"]}, "'x' is no number"),
        (1.0, {"samples": "123"}, "samples must be a sequence of numbers"),
        (1.0, {"samples": 7}, "samples must be a sequence of numbers"),
        (1.0, {"unit": "gb/s"}, "unknown unit 'gb/s'; did you mean 'GB/s' or 'Gb/s'"),
        (1.0, {"unit": "GiB"}, "GiB is a unit of amount of data"),
        (1.0, {"unit": None}, "the unit must be text such as 'GB/s'"),
        (1.0, {"record_only": "yes"}, "record_only must be True or False"),
    ],
)
def test_what_is_no_measurement_is_refused_and_names_the_metric(case):
    value, arguments, message = case
    with pytest.raises(MeasurementError, match=message) as caught:
        measurement(BUSBW, value, **({"unit": "GB/s"} | arguments))
    assert str(caught.value).startswith(BUSBW)


@of_each(
    "case",
    [
        (442.1, [440.0, 443.0], None),
        (0.0, [], None),
        (math.nan, [], "the value is NaN"),
        (math.inf, [], "the value is infinite"),
        (-math.inf, [], "the value is infinite"),
        (-1.0, [], "the value is negative (-1)"),
        (1.0, [1.0, math.nan, 1.0], "1 of 3 samples cannot be judged, the first is NaN"),
        (1.0, [math.nan, 1.0], "1 of 2 samples cannot be judged, the first is NaN"),
        (1.0, [1.0, math.inf, -math.inf], "2 of 3 samples cannot be judged, the first is infinite"),
        (1.0, [1.0, -2.0], "1 of 2 samples cannot be judged, the first is negative (-2)"),
        (1.0, [1e308, 1e308], None),
    ],
)
def test_what_cannot_be_judged_is_kept_and_says_why(case):
    value, samples, reason = case
    assert metrics.problem(measurement(BUSBW, value, unit="GB/s", samples=samples)) == reason


@given(st.floats(), st.lists(st.floats(), max_size=20), st.dictionaries(st.text(), st.text(), max_size=3))
def test_a_measurement_travels_through_strict_json_unchanged(value, samples, labels):
    made = measurement(BUSBW, value, unit="GB/s", samples=samples, labels=labels, record_only=True)
    wire = json.dumps(made.to_json(), allow_nan=False)
    back = Measurement.from_json(json.loads(wire))
    # NaN differs from itself, so the texts are compared.
    assert repr(back) == repr(made)


def test_a_series_brings_its_samples_and_its_interval():
    sampling = Sampling(warmup_seconds=0, window_seconds=1, longest_seconds=1, tolerance_ratio=0.01)
    made = measurement("hbm.copy.bandwidth", series([3000.0, 3100.0] * 6, sampling, spent_seconds=2), unit="GB/s")
    assert (made.value, made.interval) == (3.05, (3.0, 3.1))
    assert made.samples[:2] == (3.0, 3.1)
    assert "3.3 % wide" in made.inconclusive
    assert (made.stopped.by, made.stopped.samples, made.stopped.extended) == ("time", 12, True)
    assert Measurement.from_json(json.loads(json.dumps(made.to_json()))) == made
    no_number = measurement("hbm.copy.bandwidth", series([0.0] * 8, sampling, spent_seconds=2), unit="GB/s")
    sent = json.loads(json.dumps(no_number.to_json(), allow_nan=False))
    assert sent["stopped"]["width_ratio"] == "Infinity"
    assert Measurement.from_json(sent) == no_number
    with pytest.raises(MeasurementError, match="own samples"):
        measurement("hbm.copy.bandwidth", series([3.0] * 8, sampling, spent_seconds=2), unit="TB/s", samples=[1.0])


GOOD = measurement(BUSBW, 1.0, unit="GB/s").to_json()
MALFORMED = {
    "value": ["12", True, None, 10**400],
    "samples": [["x"], 3],
    "metric": ["zzz", 3],
    "unit": ["TB/s"],
    "labels": [["size"]],
    "record_only": [1],
    "interval": [[1.0], "wide"],
    "inconclusive": [3],
    "telemetry": [[1]],
    "stopped": [
        *("time", {"by": "time"}, {**STOPPED, "by": "boredom"}, {**STOPPED, "samples": 8.5}),
        *({**STOPPED, "extended": "no"}, {**STOPPED, "seconds": None}),
    ],
}


@of_each("broken", [{}, *(GOOD | {key: value} for key, values in MALFORMED.items() for value in values)])
def test_a_malformed_measurement_in_transit_is_refused(broken):
    with pytest.raises(MeasurementError):
        Measurement.from_json(broken)
