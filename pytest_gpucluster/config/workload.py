"""A workload: the sizes, shapes and times that a suite measures with, and the time that its tests take. Pure.

    workload.matmul.sizes                     # (4096, 8192, 16384)
    workload.all_reduce.sampling              # Sampling(warmup_seconds=2.0, ...)

``config.workload_loader`` reads workloads; ``config.workload_sections`` and ``config.training_sections`` define what
each key means. A new section is a class there and a line in :class:`Workload`.

:func:`predict` covers only what the workload gives in seconds: warm-up and samples of the criteria below. What they
need in addition, and all other tests, is counted and named instead. After ``warmup``, samples are taken for at least
``window`` and at most twice ``longest`` (``metrics.sampling.Sampling``).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pytest_gpucluster.config.training_sections import (
    Checkpoint,
    FailurePropagation,
    Fsdp,
    Lora,
    LoraThroughput,
    Scaling,
    Training,
    TrainingModel,
    TrainingThroughput,
    Vision,
)
from pytest_gpucluster.config.workload_sections import (
    SAMPLING,
    AllReduce,
    BurnIn,
    Collectives,
    Connectivity,
    Determinism,
    Hbm,
    Health,
    Host,
    HostLink,
    Isolation,
    Links,
    Matmul,
    MatmulSearch,
    MemoryPatterns,
    SharedFilesystem,
    Spec,
    Telemetry,
)
from pytest_gpucluster.metrics.sampling import Sampling

PROFILES = ("quick", "full", "soak", "cpu")
USUAL_PROFILE = "full"
CPU_PROFILE = "cpu"
"""The one of a rehearsal on cpu, whatever was asked for."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is measured with: one profile, complete. Each attribute but ``profile`` is a section of the file."""

    profile: str
    matmul: Annotated[Matmul, "matmul"]
    hbm: Annotated[Hbm, "hbm"]
    all_reduce: Annotated[AllReduce, "nccl.all_reduce"]
    collectives: Annotated[Collectives, "nccl.collectives"]
    links: Annotated[Links, "links"]
    isolation: Annotated[Isolation, "isolation"]
    telemetry: Annotated[Telemetry, "telemetry"]
    health: Annotated[Health, "health"]
    host: Annotated[Host, "host"]
    host_link: Annotated[HostLink, "host_link"]
    training: Annotated[Training, "training"]
    fsdp: Annotated[Fsdp, "fsdp"]
    checkpoint: Annotated[Checkpoint, "checkpoint"]
    throughput: Annotated[TrainingThroughput, "training.throughput"]
    throughput_contract: Annotated[TrainingModel, "training.throughput.contract"]
    throughput_large: Annotated[TrainingModel, "training.throughput.large"]
    throughput_sharded: Annotated[TrainingModel, "training.throughput.sharded"]
    scaling: Annotated[Scaling, "scaling"]
    failure_propagation: Annotated[FailurePropagation, "failure_propagation"]
    vision: Annotated[Vision, "vision"]
    lora_tiny: Annotated[Lora, "lora.tiny"]
    qwen2_lora: Annotated[Lora, "lora.qwen2"]
    lora_throughput: Annotated[LoraThroughput, "lora.throughput"]
    burn_in: Annotated[BurnIn, "burn_in"]
    memory_patterns: Annotated[MemoryPatterns, "memory_patterns"]
    determinism: Annotated[Determinism, "determinism"]
    matmul_search: Annotated[MatmulSearch, "matmul.search"]
    connectivity: Annotated[Connectivity, "connectivity"]
    shared_filesystem: Annotated[SharedFilesystem, "shared_filesystem"]


@dataclass(frozen=True, kw_only=True)
class WorkloadRecord:
    """What was run, as reports state it."""

    profile: str
    file: str
    values: Mapping[str, str]
    """Path of each key -> its value as written."""
    origins: Mapping[str, str]
    """Path of each key -> file, line and column; or where else, and how, an operator has set it."""
    weakened: tuple[str, ...] = ()
    """Each ``key=value`` that an operator has set and that may ask for less than the file, with the file's value."""

    @property
    def overridden(self) -> list[str]:
        """Each ``key=value`` that is not from the file."""
        return [
            f"{key}={value}"
            for key, value in self.values.items()
            if not self.origins.get(key, "").startswith(f"{self.file}:")
        ]

    @property
    def remarks(self) -> list[str]:
        """What a verdict must state: another profile than full, and what was overridden."""
        profile = [f"profile {self.profile}"] if self.profile not in (USUAL_PROFILE, CPU_PROFILE) else []
        return profile + ([f"workload overridden: {'; '.join(self.overridden)}"] if self.overridden else [])

    @property
    def compared(self) -> dict[str, str]:
        """What must be the same on every rank: with different sizes a collective would hang."""
        return {"profile": self.profile, **self.values}

    def line(self) -> dict[str, Any]:
        """Return the journal's line."""
        body = {"profile": self.profile, "file": self.file, "values": dict(self.values), "origins": dict(self.origins)}
        return {"type": "workload", **body, **({"weakened": list(self.weakened)} if self.weakened else {})}

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> WorkloadRecord:
        """Read what :meth:`line` has made."""
        weakened = tuple(line.get("weakened", ()))
        return cls(
            profile=line["profile"],
            file=line["file"],
            values=line["values"],
            origins=line["origins"],
            weakened=weakened,
        )

    def __str__(self) -> str:
        over = f", overridden: {'; '.join(self.overridden)}" if self.overridden else ""
        return f"{self.profile} ({self.file}){over}"


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the file."""

    path: str
    """Its key in a profile; the dots are levels of the file."""
    attribute: str
    """Of :class:`Workload`."""
    type: type
    keys: Mapping[str, tuple[str, ...]]
    """Path of each key -> the attribute that it fills, inside this section."""

    @property
    def doc(self) -> str:
        """What the section is about."""
        return " ".join((self.type.__doc__ or "").split())

    @property
    def window_and_longest(self) -> tuple[str, str] | None:
        """Return the paths of the two times that depend on each other, in a section that is sampled."""
        window, longest = f"{self.path}.window", f"{self.path}.longest"
        return (window, longest) if longest in self.keys else None


def _sections() -> Iterator[tuple[Section, dict[str, Spec]]]:
    for name, hint in _hints(Workload):
        path = next(iter(getattr(hint, "__metadata__", ())), None)
        if path is None:
            continue
        kind = typing.get_args(hint)[0]
        keys: dict[str, tuple[str, ...]] = {}
        specs: dict[str, Spec] = {}
        for attribute, of in _hints(kind):
            places: dict[tuple[str, ...], Spec] = {(attribute, part): spec for part, spec in SAMPLING.items()}
            if of is not Sampling:
                places = {(attribute,): of.__metadata__[0]}
            for place, spec in places.items():
                where = f"{path}.{spec.key or attribute}"
                keys[where], specs[where] = place, spec
        yield Section(path=path, attribute=name, type=kind, keys=keys), specs


def _hints(of: type) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(of, include_extras=True)
    return ((part.name, hints[part.name]) for part in dataclasses.fields(of))


SECTIONS: tuple[Section, ...] = tuple(section for section, _ in _sections())
KEYS: Mapping[str, Spec] = {path: spec for _, specs in _sections() for path, spec in specs.items()}
"""Path of every key, such as ``nccl.all_reduce.latency_sizes`` -> what it means and how it is written."""


def build(profile: str, values: Mapping[str, Any]) -> Workload:
    """Make a workload of the values of all keys.

    Raises:
        KeyError: a key has no value.
        ValueError: two values contradict each other.
    """
    sections = {}
    for section in SECTIONS:
        plain: dict[str, Any] = {}
        for path, place in section.keys.items():
            if len(place) == 1:
                plain[place[0]] = values[path]
            else:
                plain.setdefault(place[0], {})[place[1]] = values[path]
        nested = {name: Sampling(**value) if isinstance(value, dict) else value for name, value in plain.items()}
        sections[section.attribute] = section.type(**nested)
    return Workload(profile=profile, **sections)


_NAMES_SHOWN = 4
BURN_IN_SLACK = 1.2
"""A burn-in's deadline as a multiple of its duration."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A range of time."""

    least_seconds: float = 0.0
    most_seconds: float = 0.0

    def __add__(self, other: Span) -> Span:
        return Span(
            least_seconds=self.least_seconds + other.least_seconds, most_seconds=self.most_seconds + other.most_seconds
        )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is known of a run's time before its first test."""

    span: Span
    tests: int
    """How many tests it is of."""
    others: tuple[str, ...]
    """Criteria, or tests without one, whose time is not predicted; each once."""
    other_tests: int

    def __str__(self) -> str:
        """Return one sentence: never a time alone that could be taken for that of the whole run."""
        if not self.tests:
            return "the duration of these tests is unknown"
        span = self.span
        time = f"{duration_text(span.least_seconds)} to {duration_text(span.most_seconds)}"
        tests = f"{self.tests} test{'s' * (self.tests != 1)}"
        text = f"{time} of warm-up and samples in {tests}, if all are run; in addition set-up and verifying"
        if not self.other_tests:
            return text
        names = ", ".join(self.others[:_NAMES_SHOWN]) + (", ..." if len(self.others) > _NAMES_SHOWN else "")
        return f"{text}, and {self.other_tests} test{'s' * (self.other_tests != 1)} of unknown length ({names})"


def predict(tests: Iterable[tuple[str, str | None]], workload: Workload) -> Predicted:
    """Return how long the tests are going to measure.

    Args:
        tests: name and criterion of every test that is going to run, such as ("test_hbm[copy]", "hbm").
        workload: what they measure with.
    """
    span, known, others = Span(), 0, []
    for name, criterion in tests:
        rule = _RULES.get(criterion or "")
        if rule is None:
            others.append(criterion or name)
            continue
        span, known = span + rule(workload, name), known + 1
    return Predicted(span=span, tests=known, others=tuple(dict.fromkeys(others)), other_tests=len(others))


def duration_text(seconds: float) -> str:
    """Return a time in a unit that a person plans with.

    >>> [duration_text(seconds) for seconds in (0.35, 42, 75, 3600, 90000)]
    ['0.35 s', '42 s', '1.2 min', '1 h', '25 h']
    """
    if seconds < 60:
        return f"{seconds:.2g} s"
    value, unit = (seconds / 60, "min") if seconds < 3600 else (seconds / 3600, "h")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f}".removesuffix(".0") + f" {unit}"


def _series(sampling: Sampling, count: int = 1) -> Span:
    return Span(
        least_seconds=count * (sampling.warmup_seconds + sampling.window_seconds),
        most_seconds=count * (sampling.warmup_seconds + sampling.at_most_seconds),
    )


def _all_reduce(workload: Workload, name: str) -> Span:
    """One GPU alone takes one small and the largest size."""
    swept = workload.all_reduce
    count = 2 if "[gpu-" in name else len({*swept.sizes, *swept.latency_sizes})
    return _series(swept.sampling, count)


def _burn_in(workload: Workload, name: str) -> Span:
    seconds = workload.burn_in.duration_seconds
    return Span(least_seconds=seconds, most_seconds=BURN_IN_SLACK * seconds)


def _health(workload: Workload, name: str) -> Span:
    seconds = workload.health.load_seconds
    return Span(least_seconds=seconds, most_seconds=seconds)


def _collectives(workload: Workload, name: str) -> Span:
    swept = workload.collectives
    return _series(swept.sampling, len({*swept.sizes, *swept.latency_sizes}))


def _matmul_search(workload: Workload, name: str) -> Span:
    """Each candidate is looked at and, but for the first, warmed up as long; fp8 is multiplied in one layout."""
    search = workload.matmul_search
    count = len(search.shapes) * (1 if "[fp8]" in name else len(search.layouts))
    looks = (2 * count - 1) * search.look_seconds + search.sampling.warmup_seconds
    return Span(least_seconds=looks, most_seconds=looks) + _series(search.sampling)


_RULES: Mapping[str, Callable[[Workload, str], Span]] = MappingProxyType(
    {
        "matmul": lambda workload, name: _series(workload.matmul.sampling, len(workload.matmul.sizes)),
        "matmul.search": _matmul_search,
        "hbm": lambda workload, name: _series(workload.hbm.sampling, len(workload.hbm.sizes_bytes)),
        "nccl.all_reduce": _all_reduce,
        "nccl.collectives": _collectives,
        "burn_in": _burn_in,
        "gpu.health": _health,
        "training.throughput": lambda workload, name: _series(workload.throughput.sampling),
    }
)
"""Criterion -> what one of its tests takes, as its test in ``acceptance/`` goes through the workload."""
