"""Everything that the checks look at, gathered and frozen: a check asks nobody and always says the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.kernel_log import KernelLog
from pytest_gpucluster.metrics.datasheets import Promise
from pytest_gpucluster.metrics.finding import Finding, Identity, Kind
from pytest_gpucluster.nvml import Absence, NotAvailable, Nvml
from pytest_gpucluster.nvml_queries import QUERIES
from pytest_gpucluster.pci_bus import PciGpu
from pytest_gpucluster.process_table import Who

UNDER_LOAD = (
    "clock.sm",
    "power.draw",
    "temperature.gpu",
    "temperature.margin",
    "throttle.reasons",
    "pcie.generation",
    "pcie.width",
)
"""What means something under load only: an idle GPU is cool, and its links are slow."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Why a query gave no value."""

    reason: str
    kind: Absence


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What NVML said at one moment: query -> value, and query -> why there is none."""

    values: Mapping[str, Any]
    missing: Mapping[str, Missing] = field(default_factory=dict)

    def get(self, query: str) -> Any:
        """Return a value, or None where there is none."""
        return self.values.get(query)


def take(nvml: Nvml, uuid: str, queries: Iterable[str] = tuple(QUERIES)) -> Snapshot:
    """Ask all queries, one after the other. When the GPU is lost, the rest is not asked."""
    values: dict[str, Any] = {}
    missing: dict[str, Missing] = {}
    lost: Missing | None = None
    for query in queries:
        if lost is not None:
            missing[query] = lost
            continue
        try:
            values[query] = nvml.read(uuid, query)
        except NotAvailable as error:
            missing[query] = Missing(reason=str(error), kind=error.kind)
            lost = missing[query] if error.kind == "lost" else None
    return Snapshot(values=values, missing=missing)


@dataclass(frozen=True, kw_only=True)
class Node:
    """What one rank of a node says for all of them: the GPUs on the bus, in NVML and in the job.

    ``bus_unreadable`` says why nothing is known of the bus; then ``unlisted`` being empty means nothing.
    """

    nvml_gpus: int
    answering: int
    ranks: int
    unlisted: tuple[PciGpu, ...] = ()
    bus_unreadable: str = ""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One GPU, before, under and after load, and what else is known of it.

    Attributes:
        sku, promise: its kind, and what that promises; None for an unknown one.
        is_slice: it is a MIG slice.
        own_pids: of this job's ranks on this node; what they hold is no leak.
        held_bytes: what this process's allocator holds on the GPU.
        who: pid -> who that is, for the processes that NVML names.
        mig: "on" or "off", as declared.
        node: what this rank says for its node; None where another rank does.
        load_error: how the load ended, if the GPU was lost under it.
        load_failure: what the load raised, if the GPU still answers: CUDA's own word on what has happened to it.
    """

    gpu: Identity
    sku: str | None
    promise: Promise | None
    before: Snapshot
    under_load: tuple[Snapshot, ...]
    after: Snapshot
    kernel_log: KernelLog
    is_slice: bool = False
    own_pids: frozenset[int] = frozenset()
    held_bytes: int = 0
    who: Mapping[int, Who] = field(default_factory=dict)
    mig: str = "off"
    node: Node | None = None
    load_error: str = ""
    load_failure: RuntimeError | None = None

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """All of them, in the order of time."""
        return (self.before, *self.under_load, self.after)

    @property
    def mig_is_on(self) -> bool:
        """Tell whether the card is cut into slices, which have no NVLinks."""
        return self.is_slice or bool(self.before.get("mig.mode"))

    def loaded(self, query: str) -> list[Any]:
        """Return all values of a query that were read under load."""
        return [snapshot.values[query] for snapshot in self.under_load if query in snapshot.values]

    def worst(self, query: str) -> Any:
        """Return the largest value of a query at any time; None where there is none."""
        return max((s.values[query] for s in self.snapshots if query in s.values), default=None)

    def finding(
        self, code: str, kind: Kind, found: str, *, allowed: str, remedy: str, gpu: Identity | None = None
    ) -> Finding:
        """Make a finding on this GPU, or on another one of its node."""
        return Finding(code=code, kind=kind, gpu=gpu or self.gpu, found=found, allowed=allowed, remedy=remedy)
