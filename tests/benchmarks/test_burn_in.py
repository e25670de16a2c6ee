"""A burn-in on the CPU: how long it lasts, what it verifies, and what it leaves when it is cut short."""

import contextlib
import csv

import pytest
import torch
from device_parts import timed_by

from pytest_gpucluster.benchmarks.burn_in import Point, TimeSeries, burn_in
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement, WrongResult

CPU = torch.device("cpu")
N = 64
EACH_SECONDS = 0.01
"""What a product takes by the clock of these tests."""
FIRST = 2
"""Products before the burn-in: the first one of each kind."""


class Device:
    """Multiplies, lets its clock advance, and does to one product what a test wants."""

    def __init__(self, at=-1, fault=lambda out: None):
        self.clock = ManualClock()
        self.seconds = EACH_SECONDS
        self._at, self._fault, self._calls = at, fault, 0

    def __call__(self, a, b, out):
        torch.mm(a, b, out=out)
        self.clock.advance(self.seconds)
        if self._calls == FIRST + self._at:
            self._fault(out)
        self._calls += 1


def burn(device, course, *, interval=1.0, **more):
    with timed_by(device.clock, product=lambda **of: device):
        burn_in(CPU, course, n=N, dtype="fp32", interval_seconds=interval, **more)


def test_it_lasts_as_long_as_is_asked_for_and_every_product_is_in_its_course():
    device, course = Device(), TimeSeries(10.0)
    burn(device, course)
    assert course.is_complete
    assert 10.0 <= course.seconds_done < 11.0
    assert [point.products for point in course.points] == [128] * len(course.points)
    assert course.tflops == pytest.approx(2 * N**3 / EACH_SECONDS / 1e12)
    assert course.retention == pytest.approx(1.0)


def test_a_device_that_slows_down_does_not_keep_its_rate():
    device, course = Device(), TimeSeries(20.0)

    def show(step, of, **figures):
        device.seconds = EACH_SECONDS * (1 + step / of)

    burn(device, course, progress=show)
    assert course.retention == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (lambda out: out.view(torch.int32)[0, 7].bitwise_xor_(1), "1 of 4096 elements, first at row 0, column 7"),
        (lambda out: out[1].fill_(float("nan")), "64 of 4096 elements, first at row 1, column 0: found nan"),
    ],
    ids=["one bit", "a row of NaN"],
)
def test_a_wrong_product_is_told_with_its_place_and_its_time(fault, found):
    device, course = Device(at=700, fault=fault), TimeSeries(3600.0)
    with pytest.raises(WrongResult, match="burn-in fp32 n=64: product 700 is wrong in ") as caught:
        burn(device, course)
    assert found in str(caught.value)
    # Of the points before it; the one that it is in does not count.
    assert str(caught.value).endswith(f"; {course.progress_text}")
    assert course.progress_text.startswith("after 6.4 s of 3600 s, and 640 products, ")
    assert not course.is_complete


@pytest.mark.parametrize(
    ("stop", "raised"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (pytest.fail.Exception("out of time"), EnvironmentBroken)],
    ids=["Ctrl-C", "a release"],
)
def test_what_was_seen_before_an_interruption_is_kept_and_told(tmp_path, stop, raised):
    def fault(out):
        raise stop

    path = tmp_path / "course.csv"
    device, course = Device(at=700, fault=fault), TimeSeries(3600.0, path)
    with pytest.raises(raised, match=r"burn-in stopped after 6.4 s of 3600 s, and 640 products") as caught:
        burn(device, course)
    assert str(caught.value).startswith(f"{stop}; " if str(stop) else "burn-in stopped")
    assert len(course.points) == len(path.read_text().splitlines()) - 1 == 5
    assert not course.is_complete


def test_the_time_left_is_shown_second_by_second_and_telemetry_is_open_meanwhile():
    shown = []
    opened = []

    @contextlib.contextmanager
    def window():
        opened.append("open")
        yield
        opened.append("closed")

    def show(step, of, **figures):
        assert opened == ["open"]
        assert set(figures) == {"tflops"}
        shown.append((step, of))

    # Many points a second: the same step twice would begin the display anew.
    burn(Device(), TimeSeries(10.0), interval=0.1, progress=show, during=window())
    steps = [step for step, _ in shown]
    assert steps == sorted(set(steps))
    assert shown[-1] == (10, 10)
    assert opened == ["open", "closed"]


def course(rates, *, seconds, each=1.0, path=None):
    made = TimeSeries(seconds, path)
    for number, tflops in enumerate(rates, start=1):
        made.add(Point(at_seconds=number * each, products=3, busy_seconds=0.9 * each, tflops=tflops))
    return made


def test_in_a_long_burn_in_the_first_and_the_last_minute_are_compared():
    # 20 minutes, a point a second: fast for a minute, slow for the last one, something else between them.
    found = course([800.0] * 60 + [500.0] * 1080 + [720.0] * 60, seconds=1200)
    assert found.ends == (800.0, 720.0)
    assert found.retention == pytest.approx(0.9)
    assert found.tflops == 500.0


def test_in_a_short_burn_in_the_first_and_the_last_tenth_are_compared():
    found = course([800.0] * 2 + [500.0] * 16 + [600.0] * 2, seconds=20)
    assert found.ends == (800.0, 600.0)


def test_points_that_are_longer_than_a_tenth_are_the_ends_themselves():
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
def test_too_few_points_are_inconclusive(rates, said):
    found = course(rates, seconds=20)
    for ask in (lambda: found.retention, found.require_ends):
        with pytest.raises(InconclusiveMeasurement) as caught:
            ask()
    assert str(caught.value).startswith(said)


def test_a_burn_in_without_a_point_has_no_rate():
    with pytest.raises(InconclusiveMeasurement, match=r"no rate after 0 s of 20 .*no product"):
        _ = course([], seconds=20).tflops


def test_how_far_it_came_is_told_and_only_the_end_makes_it_complete():
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


def test_of_a_complete_burn_in_the_rates_are_judged_and_what_the_gpu_reached_is_recorded():
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


def test_of_a_part_of_a_burn_in_everything_is_recorded_and_nothing_judged():
    told = list(course([700.0] * 5, seconds=20).metric_values("bf16", SEEN))
    assert len(told) == 6
    assert all(one.record_only for one in told)
    assert [one.metric for one in course([700.0], seconds=20).metric_values("fp8", {})] == [
        "burn_in.completed",
        "matmul.fp8.tflops",
    ]
    assert [one.metric for one in course([], seconds=20).metric_values("fp8", {})] == ["burn_in.completed"]


def test_a_gpu_at_its_power_limit_is_not_slowed_down():
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
def test_a_burn_in_that_nobody_watched_is_an_error(seen, lacks):
    with pytest.raises(EnvironmentBroken, match=rf"GPU 3: telemetry of.*-in {lacks}"):
        TimeSeries.require_telemetry(seen, "GPU 3")
    TimeSeries.require_telemetry(SEEN, "GPU 3")
    TimeSeries.require_telemetry({}, "cpu")


def test_each_point_is_on_disk_as_soon_as_it_is_taken(tmp_path):
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
