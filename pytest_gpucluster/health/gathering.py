"""Ask everything that is known of one GPU, before, under and after load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_gpucluster import kernel_log, pci_bus, process_table
from pytest_gpucluster.health.situation import UNDER_LOAD, Node, Situation, Snapshot, take
from pytest_gpucluster.kernel_log import KernelLog
from pytest_gpucluster.metrics.datasheets import promise_of
from pytest_gpucluster.metrics.finding import Identity, identity
from pytest_gpucluster.nvml import Nvml
from pytest_gpucluster.pci_bus import PciGpu
from pytest_gpucluster.process_table import Who

Load = Callable[[Callable[[], None]], None]
"""Keeps the GPU busy, and calls its argument again and again meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where what is known of the GPUs comes from. Tests put their own here."""

    nvml: Nvml
    kernel_log: Callable[[], KernelLog] = kernel_log.read
    unlisted: Callable[[Iterable[str]], tuple[PciGpu, ...]] = pci_bus.unlisted
    who_is: Callable[[int], Who] = process_table.who_is


def gather(
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
    before = take(sources.nvml, uuid)
    under_load: list[Snapshot] = []
    load_error, load_failure = "", None
    try:
        load(lambda: under_load.append(take(sources.nvml, uuid, UNDER_LOAD)))
    except RuntimeError as error:
        if _is_lost(take(sources.nvml, uuid, ("temperature.gpu",))):
            load_error = f"the load ended with {error}"
        else:
            load_failure = error
    after = take(sources.nvml, uuid)
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
