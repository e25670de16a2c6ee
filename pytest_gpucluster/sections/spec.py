"""What a key of a workload means and how its value is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.workload_values import Duration, Kind, Ratio, repeated

KIB, MIB = 2**10, 2**20
MB, GB, TB = 10**6, 10**9, 10**12
DAY_SECONDS = 86400


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a key means and how its value is written."""

    doc: str
    kind: Kind
    key: str = ""
    """How the file calls it, if not like the attribute."""
    is_list: bool = False

    @property
    def allowed(self) -> str:
        """What is allowed, in a few words."""
        return f"a list; each item is {self.kind.allowed}" if self.is_list else self.kind.allowed

    def read(self, texts: Sequence[str]) -> tuple[Any, list[tuple[int, str]]]:
        """Return the value, and what is wrong with which of its texts. A list becomes a tuple."""
        values: list[Any] = []
        complaints: list[tuple[int, str]] = []
        for index, text in enumerate(texts):
            try:
                values.append(self.kind.read(text))
            except (ValueError, UnitError) as error:
                complaints.append((index, str(error)))
        if complaints:
            return None, complaints
        twice = repeated(texts, values)
        if twice is not None:
            index, text = twice
            return None, [(index, f"{text}; each value is measured once")]
        return (tuple(values) if self.is_list else values[0]), []


SAMPLING = {
    "warmup_seconds": Spec(
        key="warmup",
        doc="at least so long the load runs before the first sample counts",
        kind=Duration(least_seconds=0, most_seconds=DAY_SECONDS),
    ),
    "window_seconds": Spec(
        key="window",
        doc="at least so long the samples take together",
        kind=Duration(least_seconds=0.01, most_seconds=DAY_SECONDS),
    ),
    "longest_seconds": Spec(
        key="longest",
        doc="without certainty about the median no longer than this, and then once more; not below window",
        kind=Duration(least_seconds=0.01, most_seconds=DAY_SECONDS),
    ),
    "tolerance_ratio": Spec(
        key="tolerance",
        doc="certain is a median whose 95 % interval is no wider than this part of it",
        kind=Ratio(least=0.0001, most=3),
    ),
}
"""Attribute of :class:`~pytest_gpucluster.sampling.Sampling` -> its key, in each section that has a ``sampling``."""
