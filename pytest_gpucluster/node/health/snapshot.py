"""The data of the health checks, collected before and under load, and frozen.

A check reads the snapshot only, so the same snapshot always gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gpucluster.metrics.datasheets import Promise, promise_of
from pytest_gpucluster.metrics.finding import Identity, identity
from pytest_gpucluster.node import kernel_log, pci, processes
from pytest_gpucluster.node.kernel_log import KernelLog
from pytest_gpucluster.node.nvml import Nvml, NvmlValues, read_values
from pytest_gpucluster.node.pci import PciGpu
from pytest_gpucluster.node.processes import Process

UNDER_LOAD = (
    "clock.sm",
    "power.draw",
    "temperature.gpu",
    "temperature.margin",
    "throttle.reasons",
    "pcie.generation",
    "pcie.width",
)
"""Queries that are meaningful under load only: an idle GPU is cool, and its links are slow."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """The GPUs of a node on the bus, in NVML and in the job, reported by one of its ranks.

    ``bus_unreadable``: why the bus is unknown; then an empty ``unlisted`` means nothing.
    """

    nvml_gpus: int
    answering: int
    ranks: int
    unlisted: tuple[PciGpu, ...] = ()
    bus_unreadable: str = ""


@dataclass(frozen=True, kw_only=True)
class HealthSnapshot:
    """One GPU before and under load, its processes, its node and the kernel log.

    Attributes:
        sku, promise: the SKU, and what its data sheet promises; None for an unknown one.
        is_slice: it is a MIG slice.
        own_pids: of this job's ranks on this node.
        held_bytes: device memory of this process's allocator.
        who: pid -> process, for the processes that NVML lists.
        mig: "on" or "off", as declared.
        node: None where another rank reports the node.
        load_error: how the load ended, if the GPU was lost under it.
        load_failure: what the load raised, if the GPU still answers.
    """

    gpu: Identity
    sku: str | None
    promise: Promise | None
    before: NvmlValues
    under_load: tuple[NvmlValues, ...]
    kernel_log: KernelLog
    is_slice: bool = False
    own_pids: frozenset[int] = frozenset()
    held_bytes: int = 0
    who: Mapping[int, Process] = field(default_factory=dict)
    mig: str = "off"
    node: Node | None = None
    load_error: str = ""
    load_failure: RuntimeError | None = None

    @property
    def all_values(self) -> tuple[NvmlValues, ...]:
        """All NVML values, in the order of time."""
        return (self.before, *self.under_load)

    @property
    def mig_is_on(self) -> bool:
        """Whether the GPU is partitioned into MIG slices, which have no NVLinks."""
        return self.is_slice or bool(self.before.get("mig.mode"))

    @property
    def processes(self) -> dict[int, int | None]:
        """The processes that NVML lists: pid -> bytes of memory, None where unknown."""
        return dict(self.before.get("processes") or ())

    def loaded(self, query: str) -> list[Any]:
        """Return all values of a query that were read under load."""
        return [values.values[query] for values in self.under_load if query in values.values]


Load = Callable[[Callable[[], None]], None]
"""Keeps the GPU busy, and calls its argument repeatedly during that time."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the snapshot is read from. Tests replace them."""

    nvml: Nvml
    kernel_log: Callable[[], KernelLog] = kernel_log.read
    unlisted: Callable[[Iterable[str]], tuple[PciGpu, ...]] = pci.unlisted_gpus
    find_process: Callable[[int], Process] = processes.find_process


def collect(
    sources: Sources,
    inventory: Sequence[Mapping[str, Any]],
    *,
    rank: int,
    sku: str | None,
    mig: str,
    load: Load,
    held_bytes: int,
) -> HealthSnapshot:
    """Collect the data of all checks.

    ``load`` keeps this rank's GPU busy; ``held_bytes`` is the device memory of this process's allocator.

    Returns: the snapshot, also where the load has failed: ``load_failure`` has the reason, if the GPU still answers.
    """
    me = next(who for who in inventory if who["rank"] == rank)
    own, nvml = identity(me), sources.nvml
    uuid = str(own.uuid)
    before = read_values(nvml, uuid)
    under_load: list[NvmlValues] = []
    load_error, load_failure = "", None
    try:
        load(lambda: under_load.append(read_values(nvml, uuid, UNDER_LOAD)))
    except RuntimeError as error:
        if read_values(nvml, uuid, ("temperature.gpu",)).lost:
            load_error = f"the load ended with {error}"
        else:
            load_failure = error
    # A GPU that is lost by now keeps the identity of the inventory.
    own = replace(own, serial=before.get("serial") or own.serial)
    if known := nvml.find(uuid):
        own = replace(own, index=known.index, pci=known.pci_bus_id)
    return HealthSnapshot(
        gpu=own,
        sku=sku,
        promise=promise_of(sku),
        is_slice=uuid.startswith("MIG-"),
        before=before,
        under_load=tuple(under_load),
        own_pids=frozenset(
            int(who["pid"]) for who in inventory if all(who[key] == me[key] for key in ("host", "node_rank"))
        ),
        held_bytes=held_bytes,
        who={pid: sources.find_process(pid) for pid, _ in before.get("processes") or ()},
        mig=mig,
        kernel_log=sources.kernel_log(),
        node=_node(sources, int(me["local_world_size"])) if me["local_rank"] == 0 else None,
        load_error=load_error,
        load_failure=load_failure,
    )


def _node(sources: Sources, ranks: int) -> Node:
    gpus = sources.nvml.gpus()
    answering = [gpu.pci_bus_id for gpu in gpus if gpu is not None]
    found = Node(nvml_gpus=len(gpus), answering=len(answering), ranks=ranks)
    try:
        return replace(found, unlisted=sources.unlisted(answering))
    except OSError as error:  # a note reports it
        return replace(found, bus_unreadable=str(error))
