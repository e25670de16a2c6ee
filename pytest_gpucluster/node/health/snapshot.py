"""The data of the health checks, collected before and under load, and frozen; the verdict on it, and its values.

A check reads the snapshot only, so the same snapshot always gives the same result. Also whether the GPUs of all ranks
are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.metrics.datasheets import Promise, promise_of
from pytest_gpucluster.metrics.finding import Finding, Identity, identity, require_nothing
from pytest_gpucluster.metrics.measurement import Value
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.node import kernel_log, pci, processes
from pytest_gpucluster.node.kernel_log import KernelLog
from pytest_gpucluster.node.nvml import Nvml, NvmlValues, read_values
from pytest_gpucluster.node.pci import PciGpu
from pytest_gpucluster.node.processes import Process
from pytest_gpucluster.node.sysfs import pci_address
from pytest_gpucluster.text import rank_ranges

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

    ``bus_unreadable``: why the bus is unknown; then an empty ``unlisted`` means nothing. ``gpus``: PCI address -> the
    GPU of a rank, as it was at the start.
    """

    nvml_gpus: int
    answering: int
    ranks: int
    unlisted: tuple[PciGpu, ...] = ()
    bus_unreadable: str = ""
    gpus: Mapping[str, Identity] = field(default_factory=dict)


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

    @property
    def free_ratio(self) -> float | None:
        """Part of the memory that no other job uses; None where NVML does not report it.

        In a container NVML may list processes by the host's pids. This job's ranks are then not among them, and only
        what this process's allocator holds is counted as its own; its context, some 0.5 GB, counts as another's.
        """
        total, used = self.before.get("memory.total"), self.before.get("memory.used")
        if not total or used is None:
            return None
        own = sum(amount or 0 for pid, amount in self.processes.items() if pid in self.own_pids)
        return 1 - max(0, int(used) - max(own, self.held_bytes)) / float(total)

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
    here = [who for who in inventory if all(who[key] == me[key] for key in ("host", "node_rank"))]
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
        own_pids=frozenset(int(who["pid"]) for who in here),
        held_bytes=held_bytes,
        who={pid: sources.find_process(pid) for pid, _ in before.get("processes") or ()},
        mig=mig,
        kernel_log=sources.kernel_log(),
        node=_node(sources, int(me["local_world_size"]), here) if me["local_rank"] == 0 else None,
        load_error=load_error,
        load_failure=load_failure,
    )


def by_address(ranks: Iterable[Mapping[str, Any]]) -> dict[str, Identity]:
    """Return PCI address, as the kernel writes it, -> GPU, from the inventory of some ranks; on cpu they have none."""
    return {address: gpu for gpu in map(identity, ranks) if (address := pci_address(gpu.pci or ""))}


def _node(sources: Sources, ranks: int, here: Iterable[Mapping[str, Any]]) -> Node:
    gpus = sources.nvml.gpus()
    answering = [gpu.pci_bus_id for gpu in gpus if gpu is not None]
    found = Node(nvml_gpus=len(gpus), answering=len(answering), ranks=ranks, gpus=by_address(here))
    try:
        return replace(found, unlisted=sources.unlisted(answering))
    except OSError as error:  # a note reports it
        return replace(found, bus_unreadable=str(error))


def readings(snapshot: HealthSnapshot) -> Iterator[Value]:
    """Yield the values that NVML reported."""
    total, free = snapshot.before.get("memory.total"), snapshot.free_ratio
    if total is not None:
        # The limit is for a whole GPU; a slice has a part of its memory.
        yield Value("gpu.memory.total", total / 1e9, "GB", record_only=snapshot.is_slice)
    if free is not None:
        yield Value("gpu.memory.free", 100 * free, "%", record_only=True)
    hottest = max(snapshot.loaded("temperature.gpu"), default=None)
    if hottest is not None:
        yield Value("gpu.temperature", hottest, "degC", record_only=True)
    limit, default = snapshot.before.get("power.limit"), snapshot.before.get("power.limit.default")
    if limit is not None and default:
        yield Value("gpu.power_limit", 100 * limit / default, "%", record_only=True)


def require_healthy(snapshot: HealthSnapshot, findings: Iterable[Finding]) -> None:
    """Raise the findings of ``checks.examine_gpu``, each with its GPU and what to do; notes are printed.

    The failure of a load under CUDA is raised unchanged; the findings, which may explain it, are printed before.

    Raises:
        RuntimeError: the load's own failure.
        HardwareFault: the hardware is to be rejected.
        EnvironmentBroken: the environment is at fault: the GPU could not be checked, or other processes use it.
    """
    if snapshot.load_failure is not None:
        print("\n".join(map(str, findings)))
        raise snapshot.load_failure
    require_nothing(findings)


COMPARED = {
    "vbios": "VBIOS",
    "memory_bytes": "device memory in bytes",
    "power_limit_watts": "enforced power limit in W",
    "ecc": "ECC",
    "mig": "MIG",
}
"""Key of a rank's ``gpu`` in the inventory -> what it is."""

_MAY_BE_UNKNOWN = ("ecc", "mig")
"""Some cards have neither. Within a fleet the answer must still be the same."""

_MOST_NAMED = 16


def require_uniform(inventory: Sequence[Mapping[str, Any]]) -> None:
    """Compare the GPUs of all ranks, and name those that differ.

    Raises:
        HardwareFault: they differ; the message has each value and its ranks.
        EnvironmentBroken: a value is unknown on a rank.
    """
    unknown, different = [], []
    odd: set[int] = set()
    hosts = {int(who["rank"]): str(who["host"]) for who in inventory}
    for key, words in COMPARED.items():
        ranks = grouped((who["gpu"].get(key), int(who["rank"])) for who in inventory)
        missing = ranks.pop(None, [])
        if missing and (ranks or key not in _MAY_BE_UNKNOWN):
            unknown.append(f"{words}: not known of {rank_ranges(missing)}")
        if len(ranks) > 1:
            usual, *rare = sorted(ranks, key=lambda value: len(ranks[value]), reverse=True)
            tie = len(ranks[usual]) == len(ranks[rare[0]])  # which is right is unknown
            odd.update(*(ranks[value] for value in (ranks if tie else rare)))
            parts = [
                f"{value} on {rank_ranges(ranks[value])} ({', '.join(dict.fromkeys(hosts[r] for r in ranks[value]))})"
                for value in (*reversed(rare), usual)
            ]
            different.append(f"{words}: {'; '.join(parts)}")
    what_to_do = "what to do: bring the named nodes to the same firmware and settings, or have them replaced"
    if different:
        names = [f"- rank {who['rank']}: {identity(who)}" for who in inventory if int(who["rank"]) in odd]
        more = [f"- and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        first = f"GPUs of the fleet differ: {different[0]}"
        text = "\n".join([first, *different[1:], *names[:_MOST_NAMED], *more, what_to_do])
        raise HardwareFault(text, ranks=sorted(odd))
    if unknown:
        raise EnvironmentBroken(
            f"GPUs cannot be compared: {'; '.join(unknown)}\n"
            "what to do: look at the ranks' NVML (`nvidia-smi -q`), and run again where it answers"
        )
