"""A burn-in on the CPU: how long it lasts, what it verifies, and what it leaves when it is cut short."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pytest_gpucluster.benchmarks.burn_in import TimeSeries, burn_in
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
N = 64
EACH_SECONDS = 0.01
"""What a product takes by the clock of these tests."""
FIRST = 2
"""Products before the burn-in: the first one of each kind."""


class Device:
    """Multiplies, lets its clock advance, and does to one product what a test wants."""

    def __init__(self, at: int = -1, fault: Callable[[torch.Tensor], object] = lambda out: None) -> None:
        self.clock = ManualClock()
        self.seconds = EACH_SECONDS
        self._at, self._fault, self._calls = at, fault, 0

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(a, b, out=out)
        self.clock.advance(self.seconds)
        if self._calls == FIRST + self._at:
            self._fault(out)
        self._calls += 1


def burn(device: Device, course: TimeSeries, *, interval: float = 1.0, **more: object) -> None:
    burn_in(
        CPU,
        course,
        n=N,
        dtype="fp32",
        interval_seconds=interval,
        clock=device.clock,
        multiply=device,
        now=lambda: device.clock.now_seconds,
        **more,  # type: ignore[arg-type]  # passed through
    )


def test_it_lasts_as_long_as_is_asked_for_and_every_product_is_in_its_course() -> None:
    device, course = Device(), TimeSeries(10.0)
    burn(device, course)
    assert course.is_complete
    assert 10.0 <= course.seconds_done < 11.0
    assert [point.products for point in course.points] == [128] * len(course.points)
    assert course.tflops == pytest.approx(2 * N**3 / EACH_SECONDS / 1e12)
    assert course.retention == pytest.approx(1.0)


def test_a_device_that_slows_down_does_not_keep_its_rate() -> None:
    device, course = Device(), TimeSeries(20.0)

    def show(step: int, of: int, **figures: float) -> None:
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
def test_a_wrong_product_is_told_with_its_place_and_its_time(
    fault: Callable[[torch.Tensor], object], found: str
) -> None:
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
def test_what_was_seen_before_an_interruption_is_kept_and_told(
    tmp_path: Path, stop: BaseException, raised: type[BaseException]
) -> None:
    def fault(out: torch.Tensor) -> None:
        raise stop

    path = tmp_path / "course.csv"
    device, course = Device(at=700, fault=fault), TimeSeries(3600.0, path)
    with pytest.raises(raised, match=r"burn-in stopped after 6.4 s of 3600 s, and 640 products") as caught:
        burn(device, course)
    assert str(caught.value).startswith(f"{stop}; " if str(stop) else "burn-in stopped")
    assert len(course.points) == len(path.read_text().splitlines()) - 1 == 5
    assert not course.is_complete


def test_the_time_left_is_shown_second_by_second_and_telemetry_is_open_meanwhile() -> None:
    shown: list[tuple[int, int]] = []
    opened: list[str] = []

    @contextlib.contextmanager
    def window() -> Iterator[None]:
        opened.append("open")
        yield
        opened.append("closed")

    def show(step: int, of: int, **figures: float) -> None:
        assert opened == ["open"]
        assert set(figures) == {"tflops"}
        shown.append((step, of))

    # Many points a second: the same step twice would begin the display anew.
    burn(Device(), TimeSeries(10.0), interval=0.1, progress=show, during=window())
    steps = [step for step, _ in shown]
    assert steps == sorted(set(steps))
    assert shown[-1] == (10, 10)
    assert opened == ["open", "closed"]


@pytest.mark.parametrize(
    ("seconds", "interval"), [(0.0, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, float("inf"))], ids=str
)
def test_a_time_that_is_none_is_refused(seconds: float, interval: float) -> None:
    with pytest.raises(ValueError, match=r"positive and"):
        burn(Device(), TimeSeries(seconds), interval=interval)
