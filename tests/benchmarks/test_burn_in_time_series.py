from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pytest_gpucluster.benchmarks.burn_in import Point, TimeSeries
from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement


def course(rates: list[float], *, seconds: float, each: float = 1.0, path: Path | None = None) -> TimeSeries:
    made = TimeSeries(seconds, path)
    for number, tflops in enumerate(rates, start=1):
        made.add(Point(at_seconds=number * each, products=3, busy_seconds=0.9 * each, tflops=tflops))
    return made


def test_in_a_long_burn_in_the_first_and_the_last_minute_are_compared() -> None:
    # 20 minutes, a point a second: fast for a minute, slow for the last one, something else between them.
    found = course([800.0] * 60 + [500.0] * 1080 + [720.0] * 60, seconds=1200)
    assert (found.first_tflops, found.last_tflops) == (800.0, 720.0)
    assert found.retention == pytest.approx(0.9)
    assert found.tflops == 500.0


def test_in_a_short_burn_in_the_first_and_the_last_tenth_are_compared() -> None:
    found = course([800.0] * 2 + [500.0] * 16 + [600.0] * 2, seconds=20)
    assert (found.first_tflops, found.last_tflops) == (800.0, 600.0)


def test_points_that_are_longer_than_a_tenth_are_the_ends_themselves() -> None:
    assert course([800.0, 400.0], seconds=20, each=10).retention == 0.5
    assert course([800.0, 100.0, 400.0], seconds=30, each=10).retention == 0.5


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([], "the burn-in has no point in its time series, after 0 s of 20 s, and no product: too few"),
        ([1.0], "the burn-in has one point in its time series, after 1 s of 20 s, and 3 products, 1 TFLOPS: too few"),
    ],
    ids=["none", "one"],
)
def test_too_few_points_are_inconclusive(rates: list[float], said: str) -> None:
    found = course(rates, seconds=20)
    for ask in (lambda: found.retention, found.require_ends):
        with pytest.raises(InconclusiveMeasurement) as caught:
            ask()
    assert str(caught.value).startswith(said)


def test_a_burn_in_without_a_point_has_no_rate() -> None:
    with pytest.raises(InconclusiveMeasurement, match=r"no rate after 0 s of 20 .*no product"):
        _ = course([], seconds=20).tflops


def test_how_far_it_came_is_told_and_only_the_end_makes_it_complete() -> None:
    found = course([700.0] * 5, seconds=20)
    assert found.progress_text == "after 5 s of 20 s, and 15 products, 700 TFLOPS"
    assert (found.products, found.completed, found.is_complete) == (15, 0.25, False)
    assert course([700.0] * 30, seconds=20).completed == 1.0
    assert not course([700.0] * 30, seconds=20).is_complete


SEEN = {
    "temperature_celsius": [40.0, 71.0, 83.0],
    "power_watts": [90.0, 698.0, 702.0],
    "throttle_share": {"sw_power_cap": 0.98, "hw_thermal": 0.25, "sw_thermal": 0.1},
    "samples": 3,
}
BAD = ("hw_thermal", "sw_thermal", "hw_slowdown")


def test_of_a_complete_burn_in_the_rates_are_judged_and_what_the_gpu_reached_is_recorded() -> None:
    found = course([700.0] * 20, seconds=20)
    found.is_complete = True
    told = {
        one.metric: (one.value, one.unit, one.record_only) for one in found.metric_values("bf16", SEEN, slowdowns=BAD)
    }
    assert told == {
        "burn_in.completed": (1.0, "ratio", True),
        "matmul.bf16.tflops": (700.0, "TFLOPS", False),
        "burn_in.retention": (1.0, "ratio", False),
        "burn_in.slowed": (0.25, "ratio", False),
        "burn_in.temperature": (83.0, "degC", True),
        "burn_in.power": (698.0, "W", True),
    }


def test_of_a_part_of_a_burn_in_everything_is_recorded_and_nothing_judged() -> None:
    told = list(course([700.0] * 5, seconds=20).metric_values("bf16", SEEN))
    assert len(told) == 6
    assert all(one.record_only for one in told)
    assert [one.metric for one in course([700.0], seconds=20).metric_values("fp8", {})] == [
        "burn_in.completed",
        "matmul.fp8.tflops",
    ]
    assert [one.metric for one in course([], seconds=20).metric_values("fp8", {})] == ["burn_in.completed"]


def test_a_gpu_at_its_power_limit_is_not_slowed_down() -> None:
    told = course([1.0], seconds=20).metric_values("bf16", {"throttle_share": {"sw_power_cap": 0.98}}, slowdowns=BAD)
    assert [one.value for one in told if "slowed" in one.metric] == [0.0]


@pytest.mark.parametrize(
    ("seen", "lacks"),
    [
        (
            {"temperature_celsius": [1, 2, 3], "not_available": {"throttle": "not supported"}},
            r"lacks throttle_share \(throttle: not supported\)",
        ),
        ({"samples": 0}, r"lacks throttle_share and temperature_celsius \(no reason given\)"),
    ],
    ids=["no throttle reasons", "nothing"],
)
def test_a_burn_in_that_nobody_watched_is_an_error(seen: dict[str, object], lacks: str) -> None:
    with pytest.raises(EnvironmentBroken, match=rf"GPU 3: telemetry of.*-in {lacks}"):
        TimeSeries.require_telemetry(seen, "GPU 3")
    TimeSeries.require_telemetry(SEEN, "GPU 3")
    TimeSeries.require_telemetry({}, "cpu")


def test_each_point_is_on_disk_as_soon_as_it_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "course.csv"
    path.write_text("of an earlier attempt", encoding="ascii")
    found = course([700.0, 650.5], seconds=20, path=path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"seconds": "1.000", "products": "3", "busy_seconds": "0.900000", "tflops": "700"},
        {"seconds": "2.000", "products": "3", "busy_seconds": "0.900000", "tflops": "650.5"},
    ]
    found.add(Point(at_seconds=3.0, products=1, busy_seconds=0.1, tflops=9.0))
    assert path.read_text().endswith("3.000,1,0.100000,9\n")
