"""A workload: the sizes, shapes and times that a suite measures with, and the time that its tests take. Pure.

    workload.matmul.sizes                     # (4096, 8192, 16384)
    workload.all_reduce.sampling              # Sampling(warmup_seconds=2.0, ...)

``config.workload_loader`` reads workloads; the modules of ``pytest_gpucluster/config/criteria`` declare their sections.

:func:`predict` covers only what the workload gives in seconds: warm-up and samples of the criteria below. What they
need in addition, and all other tests, is counted and named instead. After ``warmup``, samples are taken for at least
``window`` and at most twice ``longest`` (``metrics.sampling.Sampling``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

from pytest_gpucluster.config.declaration import Criterion, Section, Span, Spec
from pytest_gpucluster.metrics.catalogue import declared
from pytest_gpucluster.metrics.codec import AnyText, to_json
from pytest_gpucluster.metrics.sampling import Sampling
from pytest_gpucluster.text import duration_text, plural, some_of

PROFILES = ("quick", "full", "soak", "cpu")
USUAL_PROFILE = "full"
CPU_PROFILE = "cpu"
"""The one of a rehearsal on cpu, whatever was asked for."""
SECTIONS: tuple[Section, ...] = declared("SECTIONS")
KEYS: Mapping[str, Spec] = {path: spec for section in SECTIONS for path, (_, spec) in section.keys.items()}
"""Path of every key, such as ``nccl.all_reduce.latency_sizes`` -> what it means and how it is written."""
CRITERIA: Mapping[str, Criterion] = {criterion.name: criterion for criterion in declared("CRITERIA")}


class Workload(SimpleNamespace):
    """What is measured with: one profile, complete. Each attribute but ``profile`` is a declared section."""

    profile: str

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a workload cannot be changed: {name}")


@dataclass(frozen=True, kw_only=True)
class WorkloadRecord:
    """What was run, as the journal and reports state it."""

    profile: str = ""
    file: str = ""
    values: Mapping[str, AnyText] = field(default_factory=dict)
    """Path of each key -> its value as written."""
    origins: Mapping[str, AnyText] = field(default_factory=dict)
    """Path of each key -> file, line and column; or where else, and how, an operator has set it."""
    weakened: tuple[AnyText, ...] = ()
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
    def compared(self) -> list[str]:
        """What must be the same on every rank: with different sizes a collective would hang."""
        return [f"{key} = {value}" for key, value in {"profile": self.profile, **self.values}.items()]

    def line(self) -> dict[str, Any]:
        """Return the journal's line."""
        body = {name: value for name, value in to_json(self).items() if value or name != "weakened"}
        return {"type": "workload", **body}

    def __str__(self) -> str:
        over = f", overridden: {'; '.join(self.overridden)}" if self.overridden else ""
        return f"{self.profile} ({self.file}){over}"


def build(profile: str, values: Mapping[str, Any]) -> Workload:
    """Make a workload of the values of all keys.

    Raises:
        KeyError: a key has no value.
        ValueError: two values contradict each other.
    """
    sections = {}
    for section in SECTIONS:
        plain: dict[str, Any] = {}
        for path, (place, _) in section.keys.items():
            if len(place) == 1:
                plain[place[0]] = values[path]
            else:
                plain.setdefault(place[0], {})[place[1]] = values[path]
        nested = {name: Sampling(**value) if isinstance(value, dict) else value for name, value in plain.items()}
        sections[section.attribute] = section.type(**nested)
    return Workload(profile=profile, **sections)


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
        tests = plural(self.tests, "test")
        text = f"{time} of warm-up and samples in {tests}, if all are run; in addition set-up and verifying"
        if not self.other_tests:
            return text
        return f"{text}, and {plural(self.other_tests, 'test')} of unknown length ({some_of(self.others, 4)})"


def predict(tests: Iterable[tuple[str, str | None]], workload: Workload) -> Predicted:
    """Return how long the tests are going to measure.

    Args:
        tests: name and criterion of every test that is going to run, such as ("test_hbm[copy]", "hbm").
        workload: what they measure with.
    """
    span, known, others = Span(), 0, []
    for name, criterion in tests:
        declaration = CRITERIA.get(criterion or "")
        rule = None if declaration is None else declaration.span
        if rule is None:
            others.append(criterion or name)
            continue
        span, known = span + rule(workload, name), known + 1
    return Predicted(span=span, tests=known, others=tuple(dict.fromkeys(others)), other_tests=len(others))
