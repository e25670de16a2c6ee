"""How a burn-in goes: its rate over time, kept as it comes, so that a burn-in that is cut short leaves what it saw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement
from pytest_gpucluster.metrics.stats import median

LONGEST_END_SECONDS = 60.0
"""The first and the last minute are compared ..."""

END_SHARE = 0.1
"""... and in a burn-in of less than ten minutes its first and its last tenth."""

HOT, POWER = "temperature_celsius", "power_watts"
"""Keys of a telemetry window's summary, each [minimum, median, maximum]."""
SHARES = "throttle_share"
"""Another one: throttle reason -> the part of the time in which it was there."""

HEADER = "seconds,products,busy_seconds,tflops\n"


@dataclass(frozen=True, kw_only=True)
class Point:
    """The rate over some products one after the other.

    Attributes:
        at_seconds: when the last of them was done and verified, since the burn-in began.
        products: how many.
        busy_seconds: what they took by themselves, without their verification.
        tflops: the rate of that time, in 10**12 floating point operations a second.
    """

    at_seconds: float
    products: int
    busy_seconds: float
    tflops: float


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A value for ``measure``: its metric, the unit that it is in, and whether it is only recorded."""

    metric: str
    value: float
    unit: str
    record_only: bool


class Course:
    """The points of a burn-in so far.

    Args:
        seconds: how long the burn-in is to last.
        path: where each point is written to as it comes, as CSV. A file that is there is replaced.
    """

    def __init__(self, seconds: float, path: Path | None = None) -> None:
        self.seconds = seconds
        self.points: list[Point] = []
        self.is_complete = False
        """All of it is done. Nothing else is a burn-in that was passed."""
        self._path = path
        if path is not None:
            path.write_text(HEADER, encoding="ascii")

    def add(self, point: Point) -> None:
        """Take the next point, and put it on disk at once: the process may be killed at any time."""
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
        """How far it is, in seconds."""
        return self.points[-1].at_seconds if self.points else 0.0

    @property
    def completed(self) -> float:
        """How far it is, as a part of what was asked for: 1 is all of it."""
        return 1.0 if self.is_complete else min(1.0, self.seconds_done / self.seconds)

    @property
    def reached(self) -> str:
        """How far it is, in words.

        >>> Course(7200.0).reached
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
            raise InconclusiveMeasurement(f"the burn-in has no rate {self.reached}")
        return median([point.tflops for point in self.points])

    @property
    def has_ends(self) -> bool:
        """Whether there are two points at least: one has no beginning and no end."""
        return len(self.points) > 1

    def require_ends(self) -> None:
        """Raise where ``has_ends`` is false: then nothing is known of a decay.

        Raises: InconclusiveMeasurement
        """
        if not self.has_ends:
            raise InconclusiveMeasurement(
                f"the burn-in has {'one point' if self.points else 'no point'} of its course, {self.reached}: too few"
                " to compare its beginning with its end. Choose a longer burn_in.duration, or a shorter"
                " burn_in.interval"
            )

    def readings(self, dtype: str, seen: Mapping[str, Any], *, slowdowns: Iterable[str] = ()) -> Iterator[Reading]:
        """Yield what is known by now, to be put on record however the burn-in ends.

        Rates of a part of the time are only recorded: it may be that nothing has become warm.

        Args:
            dtype: of the products.
            seen: a telemetry window's summary; what it lacks is left out.
            slowdowns: names of throttle reasons that a GPU in good order does not have.
        """
        part = not self.is_complete
        yield Reading(metric="burn_in.completed", value=self.completed, unit="ratio", record_only=True)
        if self.points:
            yield Reading(metric=f"matmul.{dtype}.tflops", value=self.tflops, unit="TFLOPS", record_only=part)
        if self.has_ends:
            yield Reading(metric="burn_in.retention", value=self.retention, unit="ratio", record_only=part)
        if SHARES in seen:
            worst = max((seen[SHARES].get(name, 0.0) for name in slowdowns), default=0.0)
            yield Reading(metric="burn_in.slowed", value=worst, unit="ratio", record_only=part)
        if HOT in seen:
            yield Reading(metric="burn_in.temperature", value=seen[HOT][-1], unit="degC", record_only=True)
        if POWER in seen:
            yield Reading(metric="burn_in.power", value=seen[POWER][1], unit="W", record_only=True)

    @staticmethod
    def require_watched(seen: Mapping[str, Any], where: str) -> None:
        """Raise where nobody can tell whether the GPU was slowed down. On cpu ``seen`` is empty, and nothing is asked.

        Raises: EnvironmentBroken with ``where`` and why telemetry is not available.
        """
        lacking = [key for key in (SHARES, HOT) if key not in seen] if seen else []
        if lacking:
            why = (
                "; ".join(f"{key}: {text}" for key, text in seen.get("not_available", {}).items()) or "no reason given"
            )
            raise EnvironmentBroken(
                f"{where}: telemetry of the burn-in lacks {' and '.join(lacking)} ({why}), so it is not known whether"
                " heat or the power supply slowed this GPU down. Look at driver and NVML (nvidia-smi -q -d PERFORMANCE)"
            )

    @property
    def first_tflops(self) -> float:
        """The median rate of the first minute or tenth, in TFLOPS. Raises: as ``retention``."""
        return self._ends[0]

    @property
    def last_tflops(self) -> float:
        """The median rate of the last minute or tenth, in TFLOPS. Raises: as ``retention``."""
        return self._ends[1]

    @property
    def retention(self) -> float:
        """The rate of the last minute or tenth as a part of the first one's: 0.97 is a decay of 3 %.

        Raises: InconclusiveMeasurement if there are fewer than two points, which have no beginning and no end.
        """
        return self.last_tflops / self.first_tflops

    @property
    def _ends(self) -> tuple[float, float]:
        self.require_ends()
        end = min(LONGEST_END_SECONDS, END_SHARE * self.seconds_done)
        first = [point.tflops for point in self.points if point.at_seconds <= end]
        last = [point.tflops for point in self.points if point.at_seconds > self.seconds_done - end]
        # A point that takes longer than the end itself is the end; the last one always is in it.
        return median(first or [self.points[0].tflops]), median(last)
