"""Checks that a job uses what Slurm allocated on a node: GPUs, CPUs, memory. Pure, but for :func:`place_of`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.metrics.finding import Finding, environment, note
from pytest_gpucluster.node.limits import Cgroup
from pytest_gpucluster.node.sysfs import format_ranges

MIB = 2**20
_MORE_RATIO = 1.05
"""Tolerance of the memory limit. Slurm allows a job more with AllowedRAMSpace (cgroup.conf(5))."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What Slurm allocated to the job, or its step, on a node; None where unknown.

    Attributes:
        gpus: their number.
        cpus: their number.
        memory_bytes: of host memory.
    """

    gpus: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one rank is bound to, in plain JSON types."""

    rank: int
    cpus: tuple[int, ...]
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""


def place_of(rank: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the :class:`Place` of this process as plain JSON types."""
    cpus = sorted(os.sched_getaffinity(0))
    return {"rank": rank, "cpus": cpus, "visible_devices": environ.get("CUDA_VISIBLE_DEVICES")}


def allocation(environ: Mapping[str, str]) -> Allocation:
    """Read what was allocated on this node.

    Source: srun(1) and sbatch(1), OUTPUT ENVIRONMENT VARIABLES: SLURM_STEP_GPUS, SLURM_JOB_GPUS, SLURM_GPUS_ON_NODE,
    SLURM_CPUS_ON_NODE; SLURM_MEM_PER_NODE, SLURM_MEM_PER_CPU and SLURM_MEM_PER_GPU in MiB.

    >>> allocation({"SLURM_STEP_GPUS": "0-3,6", "SLURM_CPUS_ON_NODE": "32", "SLURM_MEM_PER_CPU": "1024"})
    Allocation(gpus=5, cpus=32, memory_bytes=34359738368)
    """
    listed = (_count_of_list(environ.get(name, "")) for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"))
    step, job = listed
    gpus = step or _number(environ, "SLURM_GPUS_ON_NODE") or job
    cpus = _number(environ, "SLURM_CPUS_ON_NODE")
    each = {
        "SLURM_MEM_PER_NODE": 1,
        "SLURM_MEM_PER_CPU": cpus,
        "SLURM_MEM_PER_GPU": gpus,
    }
    memory = None
    for name, times in each.items():
        mib = _number(environ, name)
        if mib and times and memory is None:  # 0 stands for all memory of the node
            memory = mib * times * MIB
    return Allocation(gpus=gpus, cpus=cpus, memory_bytes=memory)


def allocation_findings(
    host: str,
    given: Allocation,
    places: Sequence[Place],
    who: Sequence[Mapping[str, Any]],
    cgroup: Cgroup,
    *,
    on_cpu: bool,
    cores: int | None = None,
) -> list[Finding]:
    """Compare what a node's ranks are bound to with the allocation.

    Less than was allocated is an error, and so is access to GPUs and CPUs beyond it, which other jobs may use. An
    unlimited or larger memory limit is a note.

    Args:
        host: the node.
        given: what was allocated on it.
        places: of its ranks.
        who: inventory of the same ranks (``inventory.identify``).
        cgroup: its limits.
        on_cpu: a rehearsal, which uses no GPU.
        cores: number of cores of the ranks' CPUs; None if unknown.
    """
    return [
        *([] if on_cpu else _gpus(host, given, places, who)),
        *_cpus(host, given, places, cores),
        *_memory(host, given, cgroup),
    ]


def _gpus(host: str, given: Allocation, places: Sequence[Place], who: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    if given.gpus is None:
        yield environment(
            "slurm.gpus",
            host,
            "Slurm reports no GPUs (SLURM_STEP_GPUS, SLURM_GPUS_ON_NODE and SLURM_JOB_GPUS are not set)",
            allowed="GPUs are allocated to the job",
            remedy="request them (--gpus-per-node, --gres=gpu:8); otherwise another job may get the same ones",
        )
        return
    used = len({one["gpu"]["uuid"] for one in who if one.get("gpu")})
    visible = max((int(one.get("visible_gpus") or 0) for one in who), default=0)
    devices = ", ".join(
        dict.fromkeys("not set" if place.visible_devices is None else place.visible_devices for place in places)
    )
    if visible > given.gpus:
        yield environment(
            "slurm.gpus",
            host,
            f"a rank sees {visible} GPUs (CUDA_VISIBLE_DEVICES: {devices})",
            allowed=f"the {given.gpus} that were allocated",
            remedy="set ConstrainDevices=yes in cgroup.conf, and do not set CUDA_VISIBLE_DEVICES in the job",
        )
    elif max(used, visible) < given.gpus:
        yield environment(
            "slurm.gpus",
            host,
            f"the ranks see {max(used, visible)} GPUs (CUDA_VISIBLE_DEVICES: {devices})",
            allowed=f"the {given.gpus} that were allocated",
            remedy="start one rank for each GPU; if `nvidia-smi -L` in the job shows fewer too, a GPU is missing",
        )
    elif used < given.gpus:
        yield note(
            "slurm.gpus",
            host,
            f"ranks use {used} of {given.gpus} allocated GPUs",
            allowed="one rank for each GPU, for a node to be accepted as a whole",
            remedy=f"start {given.gpus} ranks on this node",
        )


def _cpus(host: str, given: Allocation, places: Sequence[Place], cores: int | None) -> Iterator[Finding]:
    cpus = {cpu for place in places for cpu in place.cpus}
    if len(cpus) < len(places):
        yield environment(
            "slurm.cpus",
            host,
            f"{len(places)} ranks share {len(cpus)} CPUs ({format_ranges(cpus)})",
            allowed="at least one CPU for each rank",
            remedy="give the step its CPUs: srun does not inherit --cpus-per-task from sbatch, so repeat it "
            "(srun --cpus-per-task=$SLURM_CPUS_PER_TASK), or request more",
        )
    if given.cpus is None:
        yield environment(
            "slurm.cpus",
            host,
            "Slurm reports no CPUs (SLURM_CPUS_ON_NODE is not set)",
            allowed="CPUs are allocated to the job",
            remedy="start the ranks by srun or in a batch script",
        )
    elif len(cpus) > given.cpus and cores is not None and cores <= given.cpus:
        # With CPUs=<number of cores> in slurm.conf, a job gets all threads of its cores.
        yield note(
            "slurm.cpus",
            host,
            f"the ranks may run on {len(cpus)} CPUs ({format_ranges(cpus)}), which are {cores} cores",
            allowed=f"the {given.cpus} CPUs that were allocated, which may be cores",
            remedy="nothing, if Slurm counts cores here (`scontrol show node`: CPUTot); else set ConstrainCores=yes",
        )
    elif len(cpus) > given.cpus:
        yield environment(
            "slurm.cpus",
            host,
            f"the ranks may run on {len(cpus)} CPUs ({format_ranges(cpus)})",
            allowed=f"the {given.cpus} that were allocated",
            remedy="set TaskPlugin=task/cgroup,task/affinity and ConstrainCores=yes: jobs disturb each other",
        )
    elif len(cpus) < given.cpus:
        yield note(
            "slurm.cpus",
            host,
            f"the ranks may run on {len(cpus)} CPUs ({format_ranges(cpus)}) of {given.cpus} allocated ones",
            remedy="look at --cpu-bind, if ranks wait for data",
        )


def _memory(host: str, given: Allocation, cgroup: Cgroup) -> Iterator[Finding]:
    if given.memory_bytes is None:
        return
    allowed = f"the {given.memory_bytes / 2**30:.4g} GiB that were allocated"
    limit = cgroup.memory_bytes
    if limit is not None and limit < given.memory_bytes / _MORE_RATIO:
        yield environment(
            "slurm.memory",
            host,
            f"the control group allows {limit / 2**30:.4g} GiB",
            allowed=allowed,
            remedy="look at AllowedRAMSpace in cgroup.conf, and at the limits of the container that this runs in",
        )
    elif limit is None or limit > given.memory_bytes * _MORE_RATIO:
        found = "no control group limits the memory" if limit is None else f"it is limited to {limit / 2**30:.4g} GiB"
        if not cgroup.versions:
            found = "no control group can be read"
        yield note(
            "slurm.memory",
            host,
            found,
            allowed=allowed,
            remedy="set ConstrainRAMSpace=yes in cgroup.conf: a job that uses more than its part gets others killed",
        )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def _count_of_list(text: str) -> int | None:
    """Count the numbers in a list such as "0-3,6"; None for anything else."""
    total = 0
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        if match is None:
            return None
        total += int(match[2] or match[1]) - int(match[1]) + 1
    return total
