"""Burn-in: a device at its highest power for a set time, every product verified, its rate recorded over time.

A device's first seconds do not predict the hour after it: heat builds up slowly, and a unit that is right a million
times may be wrong once. Points are stored as they are measured, so that an interrupted burn-in still has results.

:func:`keep_busy` loads a device and its link to the host, so that values sampled during that time apply under load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_gpucluster.benchmarks.blocks import NO_CONTEXT, Bursts, Progress
from pytest_gpucluster.benchmarks.matmul import KEPT, Products, prepare_shape, square_shape
from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.products import numerics
from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement, WrongResult
from pytest_gpucluster.metrics.measurement import Value
from pytest_gpucluster.metrics.stats import median
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

LONGEST_END_SECONDS = 60.0
"""The first and the last minute are compared ..."""

END_SHARE = 0.1
"""... and in a burn-in of less than ten minutes its first and its last tenth."""

TEMPERATURE, POWER = "temperature_celsius", "power_watts"
"""Keys of a telemetry window's summary, each [minimum, median, maximum]."""
THROTTLE_SHARE = "throttle_share"
"""Another key: throttle reason -> the part of the time in which it was active."""

HEADER = "seconds,products,busy_seconds,tflops\n"


@dataclass(frozen=True, kw_only=True)
class Point:
    """The rate over consecutive products.

    Attributes:
        at_seconds: when the last of them was verified, since the burn-in began.
        products: number of products.
        busy_seconds: their time, without verification.
        tflops: the rate over that time, in 10**12 floating point operations a second.
    """

    at_seconds: float
    products: int
    busy_seconds: float
    tflops: float


class TimeSeries:
    """The points of a burn-in so far.

    Args:
        seconds: the requested duration of the burn-in.
        path: the CSV file to which each point is written as it is measured. An existing file is replaced.
    """

    def __init__(self, seconds: float, path: Path | None = None) -> None:
        self.seconds = seconds
        self.points: list[Point] = []
        self.is_complete = False
        """The whole duration was completed. Otherwise the burn-in did not pass."""
        self._path = path
        if path is not None:
            path.write_text(HEADER, encoding="ascii")

    def add(self, point: Point) -> None:
        """Add the next point, and write it to disk at once: the process may be killed at any time."""
        self.points.append(point)
        if self._path is not None:
            with self._path.open("a", encoding="ascii") as file:
                file.write(f"{point.at_seconds:.3f},{point.products},{point.busy_seconds:.6f},{point.tflops:.6g}\n")

    @property
    def products(self) -> int:
        """Products so far, all verified."""
        return sum(point.products for point in self.points)

    @property
    def seconds_done(self) -> float:
        """The time so far, in seconds."""
        return self.points[-1].at_seconds if self.points else 0.0

    @property
    def completed(self) -> float:
        """The completed part of the requested duration: 1 is all of it."""
        return 1.0 if self.is_complete else min(1.0, self.seconds_done / self.seconds)

    @property
    def progress_text(self) -> str:
        """The progress so far, as text.

        >>> TimeSeries(7200.0).progress_text
        'after 0 s of 7200 s, and no product'
        """
        after = f"after {self.seconds_done:.4g} s of {self.seconds:.4g} s"
        if not self.points:
            return f"{after}, and no product"
        return f"{after}, and {self.products} products, {self.tflops:.4g} TFLOPS"

    @property
    def tflops(self) -> float:
        """The median rate of all points, in TFLOPS.

        Raises: InconclusiveMeasurement if there is no point.
        """
        if not self.points:
            raise InconclusiveMeasurement(f"the burn-in has no rate {self.progress_text}")
        return median([point.tflops for point in self.points])

    @property
    def has_ends(self) -> bool:
        """Whether there are two points at least: one has no beginning and no end."""
        return len(self.points) > 1

    def require_ends(self) -> None:
        """Raise where ``has_ends`` is false: then the decay is unknown.

        Raises: InconclusiveMeasurement
        """
        if not self.has_ends:
            raise InconclusiveMeasurement(
                f"the burn-in has {'one point' if self.points else 'no point'} in its time series, "
                f"{self.progress_text}: too few"
                " to compare its beginning with its end. Choose a longer burn_in.duration, or a shorter"
                " burn_in.interval"
            )

    def metric_values(
        self, dtype: str, telemetry: Mapping[str, Any], *, slowdowns: Iterable[str] = ()
    ) -> Iterator[Value]:
        """Yield the values so far, to be recorded however the burn-in ends.

        Rates of a part of the time are only recorded: the device may not have reached its temperature.

        Args:
            dtype: of the products.
            telemetry: a telemetry window's summary; missing values are left out.
            slowdowns: names of throttle reasons that a healthy GPU does not have.
        """
        part = not self.is_complete
        yield Value("burn_in.completed", self.completed, "ratio", record_only=True)
        if self.points:
            yield Value(f"matmul.{dtype}.tflops", self.tflops, "TFLOPS", record_only=part)
        if self.has_ends:
            yield Value("burn_in.retention", self.retention, "ratio", record_only=part)
        if THROTTLE_SHARE in telemetry:
            worst = max((telemetry[THROTTLE_SHARE].get(name, 0.0) for name in slowdowns), default=0.0)
            yield Value("burn_in.slowed", worst, "ratio", record_only=part)
        if TEMPERATURE in telemetry:
            yield Value("burn_in.temperature", telemetry[TEMPERATURE][-1], "degC", record_only=True)
        if POWER in telemetry:
            yield Value("burn_in.power", telemetry[POWER][1], "W", record_only=True)

    @staticmethod
    def require_telemetry(telemetry: Mapping[str, Any], where: str) -> None:
        """Raise where it is unknown whether the GPU was throttled. On cpu ``telemetry`` is empty, and not required.

        Raises: EnvironmentBroken with ``where`` and the reason why telemetry is not available.
        """
        missing = [key for key in (THROTTLE_SHARE, TEMPERATURE) if key not in telemetry] if telemetry else []
        if missing:
            why = (
                "; ".join(f"{key}: {text}" for key, text in telemetry.get("not_available", {}).items())
                or "no reason given"
            )
            raise EnvironmentBroken(
                f"{where}: telemetry of the burn-in lacks {' and '.join(missing)} ({why}), so it is unknown whether"
                " heat or the power supply slowed this GPU down. Check driver and NVML (nvidia-smi -q -d PERFORMANCE)"
            )

    @property
    def retention(self) -> float:
        """The rate of the last minute or tenth as a part of the first one's: 0.97 is a decay of 3 %.

        Raises: InconclusiveMeasurement if there are fewer than two points.
        """
        first, last = self.ends
        return last / first

    @property
    def ends(self) -> tuple[float, float]:
        """The median rates of the first and of the last minute or tenth, in TFLOPS. Raises: as ``retention``."""
        self.require_ends()
        end = min(LONGEST_END_SECONDS, END_SHARE * self.seconds_done)
        first = [point.tflops for point in self.points if point.at_seconds <= end]
        last = [point.tflops for point in self.points if point.at_seconds > self.seconds_done - end]
        # A point that takes longer than the end itself is the end; the last one is always in it.
        return median(first or [self.points[0].tflops]), median(last)


PROGRESS_SECONDS = 5.0
"""Progress is reported only for measurements that take at least this long."""


@releases_memory()
def burn_in(
    device: torch.device,
    series: TimeSeries,
    *,
    n: int,
    dtype: str,
    interval_seconds: float,
    during: AbstractContextManager[object] = NO_CONTEXT,
    progress: Progress | None = None,
) -> None:
    """Multiply random n x n matrices without a pause for ``series.seconds``, and verify every product.

    The first products are compared with a true fp32 reference, element by element, and each later one on the device
    with the first of its kind, bit by bit: see ``matmul``. The comparisons keep the memory busy while the multipliers
    rest, some 3 % of the time.

    The series belongs to the caller, who has it however this ends. It is complete only on success.

    Args:
        device: to burn in.
        series: to which the points are added.
        n, dtype: rows and columns of the matrices; the dtype as in ``matmul.measure_matmul``.
        interval_seconds: about how long the products of one point take.
        during: entered during the burn-in.
        progress: called about once a second, in a burn-in of ``PROGRESS_SECONDS`` or more, with the seconds so far,
            those requested, and the figure ``tflops``.

    Raises:
        WrongResult: a product is wrong; names it, its first wrong element, and the time.
        EnvironmentBroken: the run was ended during the burn-in; states its progress. Or too little memory is free, the
            device has no fp8, or the environment overrides the choice between fp32 and TF32.
        InconclusiveMeasurement: the clock did not advance.
        KeyboardInterrupt: of the operator; states the progress of the burn-in.
        ValueError: n or dtype is out of its range.
    """
    instead = "choose smaller matrices, such as --gpucluster-workload burn_in.n=8192"
    buffers = prepare_shape(device, square_shape(n, dtype), dtype=dtype, instead=instead)
    name, by, total = f"{device}: burn-in {dtype} n={n}", accelerator(device), math.ceil(series.seconds)
    try:
        with numerics(buffers.kind.float32_precision):
            products = Products(device, buffers, name=name, seed=0)
            bursts, now = Bursts(products, by.clock()), by.now
            begin, gone, reported = now(), 0.0, 0
            with counted(MEASURING), during:
                while gone < series.seconds:
                    done, busy = 0, 0.0
                    until = min(gone + interval_seconds, series.seconds)
                    while gone < until:
                        busy += bursts.burst(products.max_in_flight)
                        done += products.max_in_flight
                        gone = now() - begin
                    tflops = done * products.flops / busy / 1e12
                    series.add(Point(at_seconds=gone, products=done, busy_seconds=busy, tflops=tflops))
                    step = int(gone) if gone < series.seconds else total
                    if progress is not None and step > reported and series.seconds >= PROGRESS_SECONDS:
                        reported = step
                        progress(step, total, tflops=tflops)
    except WrongResult as error:
        raise WrongResult(f"{error}; {series.progress_text}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"burn-in stopped {series.progress_text}") from None
    except Exception:
        raise  # its type and text are matched for errors of the device
    except BaseException as stop:  # how a rank is stopped when the run is over, or past its deadline
        raise EnvironmentBroken(f"{stop}; burn-in stopped {series.progress_text}") from stop
    series.is_complete = True


SAMPLE_SECONDS = 0.2
"""How long the device continues to work after a sample, about."""

ROWS, ROWS_ON_CPU = 8192, 256
"""Rows and columns of the matrices. A product of 8192 takes a data center GPU to its power limit."""

COPY_BYTES = 64 * 2**20
"""Enough for one copy to last milliseconds on a PCIe link, so that the link does not enter a sleep state in between."""

PRODUCTS_PER_COPY = 4
"""This number takes longer than the copy on every GPU: then the multipliers never wait for the link."""

_MEASURED_SECONDS = 0.1
_STEPS_AT_MOST = 10_000


@releases_memory()
def keep_busy(device: torch.device, sample: Callable[[], None], *, seconds: float) -> int:
    """Multiply bf16 matrices and copy from the host until the time is up, and call ``sample`` under this load.

    Products and copies are enqueued for the time of the last sample and ``SAMPLE_SECONDS`` more; ``sample`` is called
    while they run, then they are waited for. On cpu, where nothing runs by itself, it is called after them.

    Args:
        device: to keep busy.
        sample: called at least once, from this thread.
        seconds: how long.

    Returns: the number of calls of ``sample``.

    Raises: RuntimeError if the device failed.
    """
    with counted(MEASURING):
        step, now = _Step(device), accelerator(device).now
        each = _seconds_of(step, now)
        until, samples, sample_seconds = now() + seconds, 0, 0.0
        while samples == 0 or now() < until:
            step.enqueue(max(1, min(_STEPS_AT_MOST, round((SAMPLE_SECONDS + sample_seconds) / each))))
            begin = time.monotonic()
            sample()
            sample_seconds = min(time.monotonic() - begin, seconds)
            step.wait()
            samples += 1
        return samples


def _seconds_of(step: _Step, now: Callable[[], float]) -> float:
    """Measure one step from a growing number of them, which also loads the kernels and raises the clocks."""
    count = 1
    while True:
        begin = now()
        step.enqueue(count)
        step.wait()
        took = now() - begin
        if took >= _MEASURED_SECONDS or count >= _STEPS_AT_MOST:
            return max(took / count, 1e-6)
        count *= 2


class _Step:
    """Some products and one copy, which run at the same time where the device has streams."""

    def __init__(self, device: torch.device) -> None:
        generator, self._by = torch.Generator(device).manual_seed(0), accelerator(device)
        rows = ROWS_ON_CPU if self._by.capability is None else ROWS
        n = self._by.kept(rows, KEPT)
        # Random: zeros would let the device run cooler than real work.
        self._a, self._b = (
            torch.randn(n, n, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self._out = torch.empty_like(self._a)
        self._multiply = self._by.product(scaled=False, of=(rows, rows, rows))
        # Pinned, or the copy would go through a buffer of the driver at a fraction of the link's speed.
        streams = self._by.asynchronous
        self._host = torch.empty(COPY_BYTES if streams else 2**16, dtype=torch.uint8, pin_memory=streams)
        self._there = torch.empty_like(self._host, device=device, pin_memory=False)
        self._side, self._clock = self._by.side_stream(), self._by.clock()

    def enqueue(self, count: int) -> None:
        real = self._clock.real(count)
        with self._clock.scaled(count / real):
            for _ in range(real):
                for _ in range(PRODUCTS_PER_COPY):
                    self._multiply(self._a, self._b, self._out)
                with self._by.on(self._side):
                    self._by.copy_over_link("h2d", self._host, self._there)

    def wait(self) -> None:
        self._by.synchronize()
