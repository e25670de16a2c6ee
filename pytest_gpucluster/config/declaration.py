"""How a criterion is declared: its metrics, its section of a workload, and the time that its tests take. Pure.

A module of ``pytest_gpucluster/config/criteria`` has three tables, each of which may be missing: ``METRICS`` (of
:class:`~pytest_gpucluster.metrics.catalogue.Metric`), ``SECTIONS`` and ``CRITERIA``. The package's listing finds it.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pytest_gpucluster.config.value_types import Duration, Kind, Ratio, repeated
from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.metrics.sampling import Sampling

KIB, MIB = 2**10, 2**20
MB, GB, TB = 10**6, 10**9, 10**12
DAY_SECONDS = 86400
WEEK_SECONDS = 7 * 86400


@dataclass(frozen=True)
class Spec:
    """What a key means and how its value is written.

    In a file a key is called as its attribute without the unit, ``_seconds``, ``_bytes`` or ``_ratio``, or ``key``. An
    attribute whose type is a tuple is a list there.
    """

    doc: str
    kind: Kind
    key: str = ""
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


def value(doc: str, kind: Kind, key: str = "") -> Any:
    """Declare an attribute of a section's class, as a field with its :class:`Spec`."""
    return dataclasses.field(metadata={"spec": Spec(doc, kind, key)})


SAMPLING = {
    "warmup": Spec("least time of load before the first sample counts", Duration(0, DAY_SECONDS)),
    "window": Spec("least total time of the samples", Duration(0.01, DAY_SECONDS)),
    "longest": Spec(
        "most total time of the samples without certainty about the median, extended once; not below window",
        Duration(0.01, DAY_SECONDS),
    ),
    "tolerance": Spec("certain is a median whose 95 % interval is no wider than this part of it", Ratio(0.0001, 3)),
}
"""The keys of a section that has a ``sampling``, in the order of the attributes of
:class:`~pytest_gpucluster.metrics.sampling.Sampling`."""


@dataclass(frozen=True)
class Section:
    """A section of a workload: its path in a profile (dots are levels of the file), and the class of its values.

    Each attribute of the class is a :func:`value`, or a ``Sampling``. ``attribute`` is its name in a workload, by
    default the path with underscores. ``metrics`` are patterns of the metrics that its values change, by default all:
    runs with other values of them are not comparable in these.
    """

    path: str
    type: type
    attribute: str = ""
    metrics: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        if not self.attribute:
            object.__setattr__(self, "attribute", self.path.replace(".", "_"))

    @property
    def doc(self) -> str:
        """What the section is about."""
        return " ".join((self.type.__doc__ or "").split())

    @cached_property
    def keys(self) -> Mapping[str, tuple[tuple[str, ...], Spec]]:
        """Path of each key -> the attribute that it fills, inside this section; and what it means."""
        found: dict[str, tuple[tuple[str, ...], Spec]] = {}
        hints = typing.get_type_hints(self.type)
        for attribute in dataclasses.fields(self.type):
            hint = hints[attribute.name]
            if hint is Sampling:
                for part, (key, spec) in zip(dataclasses.fields(Sampling), SAMPLING.items(), strict=True):
                    found[f"{self.path}.{key}"] = (attribute.name, part.name), spec
            else:
                spec = dataclasses.replace(attribute.metadata["spec"], is_list=typing.get_origin(hint) is tuple)
                key = spec.key or re.sub("_(?:seconds|bytes|ratio)$", "", attribute.name)
                found[f"{self.path}.{key}"] = (attribute.name,), spec
        return found


@dataclass(frozen=True, kw_only=True)
class Span:
    """A range of time."""

    least_seconds: float = 0.0
    most_seconds: float = 0.0

    def __add__(self, other: Span) -> Span:
        return Span(
            least_seconds=self.least_seconds + other.least_seconds, most_seconds=self.most_seconds + other.most_seconds
        )


class Criterion:
    """A criterion: its name, as its tests' marker has it, and its metrics.

    Args:
        name: such as "nccl.all_reduce".
        metrics: their names; ``*`` stands for the rest of one.
        group: of a rehearsal: where this one is too slow, another one of its group must pass. By default it is alone.
        span: of a workload and a test's name, what the test takes of the time that the workload gives in seconds:
            warm-up and samples. Without it the time is unknown.
    """

    def __init__(
        self, name: str, *metrics: str, group: str = "", span: Callable[[Any, str], Span] | None = None
    ) -> None:
        self.name, self.metrics, self.group, self.span = name, metrics, group or name, span


def series(sampling: Sampling, count: int = 1) -> Span:
    """Return the time of ``count`` series: after ``warmup`` at least ``window``, at most twice ``longest``."""
    return Span(
        least_seconds=count * (sampling.warmup_seconds + sampling.window_seconds),
        most_seconds=count * (sampling.warmup_seconds + sampling.at_most_seconds),
    )
