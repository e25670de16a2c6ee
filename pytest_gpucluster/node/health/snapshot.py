"""Everything that the health checks look at, collected before, under and after load, and frozen.

A check only reads a snapshot and queries nothing, so the same snapshot always gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gpucluster.metrics.datasheets import Promise, promise_of
from pytest_gpucluster.metrics.finding import Finding, Identity, Kind, identity
from pytest_gpucluster.node import kernel_log, pci, processes
from pytest_gpucluster.node.kernel_log import KernelLog
from pytest_gpucluster.node.nvml import Absence, NotAvailable, Nvml
from pytest_gpucluster.node.nvml_queries import QUERIES
from pytest_gpucluster.node.pci import PciGpu
from pytest_gpucluster.node.processes import Who

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


def take_snapshot(nvml: Nvml, uuid: str, queries: Iterable[str] = tuple(QUERIES)) -> Snapshot:
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


Load = Callable[[Callable[[], None]], None]
"""Keeps the GPU busy, and calls its argument again and again meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where what is known of the GPUs comes from. Tests put their own here."""

    nvml: Nvml
    kernel_log: Callable[[], KernelLog] = kernel_log.read
    unlisted: Callable[[Iterable[str]], tuple[PciGpu, ...]] = pci.unlisted_gpus
    who_is: Callable[[int], Who] = processes.who_is


def collect(
    sources: Sources,
    inventory: Sequence[Mapping[str, Any]],
    *,
    rank: int,
    sku: str | None,
    mig: str,
    load: Load,
    held_bytes: int,
) -> Situation:
    """Gather all that the checks look at.

    Args:
        sources: whom to ask.
        inventory: what every rank has said of itself (``inventory.identify``).
        rank: whose GPU it is about.
        sku: its kind.
        mig: "on" or "off", as declared.
        load: keeps this GPU busy.
        held_bytes: what this process's allocator holds on the GPU.

    Returns: the situation, also where the load has failed: ``load_failure`` is why, if the GPU still answers.
    """
    me = next(who for who in inventory if who["rank"] == rank)
    uuid = str(me["gpu"]["uuid"])
    before = take_snapshot(sources.nvml, uuid)
    under_load: list[Snapshot] = []
    load_error, load_failure = "", None
    try:
        load(lambda: under_load.append(take_snapshot(sources.nvml, uuid, UNDER_LOAD)))
    except RuntimeError as error:
        if _is_lost(take_snapshot(sources.nvml, uuid, ("temperature.gpu",))):
            load_error = f"the load ended with {error}"
        else:
            load_failure = error
    after = take_snapshot(sources.nvml, uuid)
    ranks = [who for who in inventory if (who["host"], who["node_rank"]) == (me["host"], me["node_rank"])]
    return Situation(
        gpu=_identity(sources.nvml, me, before),
        sku=sku,
        promise=promise_of(sku),
        is_slice=uuid.startswith("MIG-"),
        before=before,
        under_load=tuple(under_load),
        after=after,
        own_pids=frozenset(int(who["pid"]) for who in ranks),
        held_bytes=held_bytes,
        who={pid: sources.who_is(pid) for pid, _ in before.get("processes") or ()},
        mig=mig,
        kernel_log=sources.kernel_log(),
        node=_node(sources, int(me["local_world_size"])) if me["local_rank"] == 0 else None,
        load_error=load_error,
        load_failure=load_failure,
    )


def _identity(nvml: Nvml, me: Mapping[str, Any], before: Snapshot) -> Identity:
    """A GPU that is lost by now keeps the names that it had before the first test."""
    told = identity(me)
    known = nvml.find(str(told.uuid))
    return replace(
        told,
        index=known.index if known else told.index,
        serial=before.get("serial") or told.serial,
        pci=known.pci_bus_id if known else told.pci,
    )


def _node(sources: Sources, ranks: int) -> Node:
    answering = sources.nvml.pci_bus_ids()
    found: tuple[PciGpu, ...] = ()
    unreadable = ""
    try:
        found = sources.unlisted(answering)
    except OSError as error:  # named in a note, and taken for no answer
        unreadable = str(error)
    return Node(
        nvml_gpus=sources.nvml.count(),
        answering=len(answering),
        ranks=ranks,
        unlisted=found,
        bus_unreadable=unreadable,
    )


def _is_lost(snapshot: Snapshot) -> bool:
    return any(missing.kind == "lost" for missing in snapshot.missing.values())
