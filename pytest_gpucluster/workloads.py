"""Workloads: the sizes, shapes and times that a suite measures with. Pure; ``workload_file`` reads them.

    workload.matmul.sizes                     # (4096, 8192, 16384)
    workload.all_reduce.sampling              # Sampling(warmup_seconds=2.0, ...)

``sections/`` has what each key means. A new section is a class there and a line in :class:`Workload`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.sections.fabric import AllReduce, Collectives, Isolation, Links
from pytest_gpucluster.sections.gpu import (
    BurnIn,
    Determinism,
    Hbm,
    Health,
    Matmul,
    MatmulSearch,
    MemoryPatterns,
    Telemetry,
)
from pytest_gpucluster.sections.host import Host, HostLink
from pytest_gpucluster.sections.lora import Lora, LoraThroughput
from pytest_gpucluster.sections.spec import SAMPLING, Spec
from pytest_gpucluster.sections.surroundings import Connectivity, SharedFilesystem
from pytest_gpucluster.sections.training import (
    Checkpoint,
    FailurePropagation,
    Fsdp,
    Scaling,
    Training,
    TrainingModel,
    TrainingThroughput,
    Vision,
)

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
        """Each ``key=value`` that the file does not say."""
        return [
            f"{key}={value}"
            for key, value in self.values.items()
            if not self.origins.get(key, "").startswith(f"{self.file}:")
        ]

    @property
    def remarks(self) -> list[str]:
        """What a verdict must say of it: another profile than full, and what was overridden."""
        said = [f"profile {self.profile}"] if self.profile not in (USUAL_PROFILE, CPU_PROFILE) else []
        return said + ([f"workload overridden: {'; '.join(self.overridden)}"] if self.overridden else [])

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
