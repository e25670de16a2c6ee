"""A node's part of a Slurm job: what its ranks are bound to, and what others have left on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.host import cgroup, processors
from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.metrics.finding import Finding, notice
from pytest_gpucluster.process_table import Who
from pytest_gpucluster.surroundings import leftovers
from pytest_gpucluster.surroundings.allocation import Place, allocation, examine, place_of
from pytest_gpucluster.surroundings.nodes import Board, Nodes

ROOT = Tree()
"""Where the kernel's files are. A test puts others here."""
_WITHIN_SECONDS = 60.0


class Sources(Protocol):
    """Where processes on GPUs are asked for: ``health.gathering.Sources``."""

    @property
    def nvml(self) -> Any: ...

    @property
    def who_is(self) -> Callable[[int], Who]: ...


def examine_allocation(
    board: Board,
    nodes: Nodes,
    inventory: Sequence[Mapping[str, Any]],
    environ: Mapping[str, str],
    *,
    rank: int,
    sources: Sources | None,
) -> list[Finding] | None:
    """Compare what the ranks of each node are bound to with what Slurm gave the job there, and look for leftovers.

    Every rank must call this. The rank that speaks for its node examines it.

    Args:
        board: where ranks tell what they are bound to.
        nodes: who speaks for whom.
        inventory: what every rank has said of itself.
        environ: the environment, with Slurm's variables.
        rank: this one.
        sources: NVML and the process table; None in a rehearsal on cpu.

    Returns: what was found; None on the other ranks.

    Raises: EnvironmentBroken if a rank of this node told nothing in time.
    """
    board.post("place", place_of(rank, environ))
    if nodes.speaks != rank:
        return None
    here = [who for who in inventory if who["node_rank"] == nodes.me]
    host = nodes.hosts[nodes.me]
    told = board.read("place", [int(who["rank"]) for who in here], within_seconds=_WITHIN_SECONDS)
    missing = [int(who["rank"]) for who in here if who["rank"] not in told]
    if missing:
        raise EnvironmentBroken(f"{host}: rank {missing[0]} did not tell in time what it is bound to")
    places = [
        Place(rank=one["rank"], cpus=tuple(one["cpus"]), visible_devices=one["visible_devices"])
        for one in told.values()
    ]
    given = allocation(environ)
    cores = _cores({cpu for place in places for cpu in place.cpus})
    findings = examine(host, given, places, here, cgroup.read(ROOT), on_cpu=sources is None, cores=cores)
    online = processors.read(ROOT).online
    alone = given.cpus is not None and online is not None and given.cpus >= len(online)
    began = environ.get("SLURM_JOB_START_TIME", "")  # since Slurm 22.05
    before = float(began) if began.isdecimal() else None
    findings += leftovers.of_files(host, uid=os.getuid(), before=before, alone=alone)
    if sources is not None:
        findings += _processes(host, here, sources)
    return findings


def _cores(cpus: Iterable[int]) -> int | None:
    """Return how many cores these CPUs are of; None if the kernel does not tell it of each.

    Source: Linux kernel, Documentation/admin-guide/cputopology.rst, thread_siblings_list.
    """
    siblings = {ROOT.numbers(f"{processors.CPUS}/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    return None if None in siblings else len(siblings)


def _processes(host: str, here: Sequence[Mapping[str, Any]], sources: Sources) -> list[Finding]:
    """Ask NVML who is on the GPUs of this node's ranks."""
    from pytest_gpucluster.nvml import NotAvailable

    on_gpus: dict[int, int | None] = {}
    findings = []
    for who in here:
        try:
            on_gpus |= dict(sources.nvml.read(str(who["gpu"]["uuid"]), "processes"))
        except NotAvailable as error:
            findings.append(
                notice(
                    "leftovers.process",
                    "environment",
                    host,
                    f"who is on GPU {who['gpu']['index']} is not known: {error}",
                    allowed="NVML tells the processes of a GPU",
                    remedy="look with `nvidia-smi` on this host",
                )
            )
    own = {int(who["pid"]) for who in here}
    return [*findings, *leftovers.of_processes(host, on_gpus, own=own, who_is=sources.who_is)]
