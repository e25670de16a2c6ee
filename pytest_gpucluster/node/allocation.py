"""Checks that a job can use what its scheduler has given it on a node: GPUs, CPUs and memory that Slurm allocated; the
shared memory, CPU time and RDMA devices that ranks in a pod of Kubernetes need. Pure, but for :func:`place_of`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.metrics.finding import Finding, Kind, finding
from pytest_gpucluster.node.host import Cgroup, NodeSnapshot
from pytest_gpucluster.node.sysfs import format_ranges

GIB, MIB = 2**30, 2**20
_MORE_RATIO = 1.05
"""Tolerance of the memory limit. Slurm allows a job more with AllowedRAMSpace (cgroup.conf(5))."""

Problem = tuple[Kind, str, str, str, str]
"""Kind and code of a finding, what was found, what is allowed, and what to do."""


def _findings(host: str, *checks: Iterator[Problem]) -> list[Finding]:
    return [
        finding(kind, code, host, found, allowed=allowed, remedy=remedy)
        for check in checks
        for kind, code, found, allowed, remedy in check
    ]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What Slurm allocated to the job, or its step, on a node: numbers of GPUs and CPUs, and host memory; None where
    unknown."""

    gpus: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None


def place_of(rank: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what this process is bound to: ``rank``, ``cpus``, ``visible_devices`` (null where it is not set)."""
    cpus = sorted(os.sched_getaffinity(0))
    return {"rank": rank, "cpus": cpus, "visible_devices": environ.get("CUDA_VISIBLE_DEVICES")}


def allocation(environ: Mapping[str, str]) -> Allocation:
    """Read what was allocated on this node.

    Source: srun(1) and sbatch(1), OUTPUT ENVIRONMENT VARIABLES: SLURM_STEP_GPUS, SLURM_JOB_GPUS, SLURM_GPUS_ON_NODE,
    SLURM_CPUS_ON_NODE; SLURM_MEM_PER_NODE, SLURM_MEM_PER_CPU and SLURM_MEM_PER_GPU in MiB.

    >>> allocation({"SLURM_STEP_GPUS": "0-3,6", "SLURM_CPUS_ON_NODE": "32", "SLURM_MEM_PER_CPU": "1024"})
    Allocation(gpus=5, cpus=32, memory_bytes=34359738368)
    """
    step, job = (_count_of_list(environ.get(name, "")) for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"))
    gpus = step or _number(environ, "SLURM_GPUS_ON_NODE") or job
    cpus = _number(environ, "SLURM_CPUS_ON_NODE")
    each = {"SLURM_MEM_PER_NODE": 1, "SLURM_MEM_PER_CPU": cpus, "SLURM_MEM_PER_GPU": gpus}
    sizes = (_number(environ, name) for name in each)
    # 0 stands for all memory of the node.
    memory = next((mib * times * MIB for mib, times in zip(sizes, each.values(), strict=True) if mib and times), None)
    return Allocation(gpus=gpus, cpus=cpus, memory_bytes=memory)


def allocation_findings(
    host: str,
    given: Allocation,
    places: Sequence[Mapping[str, Any]],
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
        places: of its ranks (:func:`place_of`).
        who: inventory of the same ranks (``inventory.identify``).
        cgroup: its limits.
        on_cpu: a rehearsal, which uses no GPU.
        cores: number of cores of the ranks' CPUs; None if unknown.
    """
    gpus = [] if on_cpu else [_gpus(given, places, who)]
    return _findings(host, *gpus, _cpus(given, places, cores), _memory(given, cgroup))


def _gpus(
    given: Allocation, places: Sequence[Mapping[str, Any]], who: Sequence[Mapping[str, Any]]
) -> Iterator[Problem]:
    if given.gpus is None:
        yield (
            "environment",
            "slurm.gpus",
            "Slurm reports no GPUs (SLURM_STEP_GPUS, SLURM_GPUS_ON_NODE and SLURM_JOB_GPUS are not set)",
            "GPUs are allocated to the job",
            "request them (--gpus-per-node, --gres=gpu:8); otherwise another job may get the same ones",
        )
        return
    used = len({one["gpu"]["uuid"] for one in who if one.get("gpu")})
    visible = max((int(one.get("visible_gpus") or 0) for one in who), default=0)
    values = [place["visible_devices"] for place in places]
    variables = dict.fromkeys("not set" if value is None else value for value in values)
    gpus = f"GPUs (CUDA_VISIBLE_DEVICES: {', '.join(variables)})"
    allowed = f"the {given.gpus} that were allocated"
    if visible > given.gpus:
        remedy = "set ConstrainDevices=yes in cgroup.conf, and do not set CUDA_VISIBLE_DEVICES in the job"
        yield "environment", "slurm.gpus", f"a rank sees {visible} {gpus}", allowed, remedy
    elif max(used, visible) < given.gpus:
        remedy = "start one rank for each GPU; if `nvidia-smi -L` in the job shows fewer too, a GPU is missing"
        yield "environment", "slurm.gpus", f"the ranks see {max(used, visible)} {gpus}", allowed, remedy
    elif used < given.gpus:
        allowed = "one rank for each GPU, for a node to be accepted as a whole"
        found, remedy = f"ranks use {used} of {given.gpus} allocated GPUs", f"start {given.gpus} ranks on this node"
        yield "note", "slurm.gpus", found, allowed, remedy


def _cpus(given: Allocation, places: Sequence[Mapping[str, Any]], cores: int | None) -> Iterator[Problem]:
    cpus = {cpu for place in places for cpu in place["cpus"]}
    found = f"the ranks may run on {len(cpus)} CPUs ({format_ranges(cpus)})"
    allowed = f"the {given.cpus} that were allocated"
    if len(cpus) < len(places):
        yield (
            "environment",
            "slurm.cpus",
            f"{len(places)} ranks share {len(cpus)} CPUs ({format_ranges(cpus)})",
            "at least one CPU for each rank",
            "give the step its CPUs: srun does not inherit --cpus-per-task from sbatch, so repeat it "
            "(srun --cpus-per-task=$SLURM_CPUS_PER_TASK), or request more",
        )
    if given.cpus is None:
        missing = "Slurm reports no CPUs (SLURM_CPUS_ON_NODE is not set)"
        remedy = "start the ranks by srun or in a batch script"
        yield "environment", "slurm.cpus", missing, "CPUs are allocated to the job", remedy
    elif len(cpus) > given.cpus and cores is not None and cores <= given.cpus:
        # With CPUs=<number of cores> in slurm.conf, a job gets all threads of its cores.
        remedy = "nothing, if Slurm counts cores here (`scontrol show node`: CPUTot); else set ConstrainCores=yes"
        yield "note", "slurm.cpus", f"{found}, which are {cores} cores", f"{allowed}, which may be cores", remedy
    elif len(cpus) > given.cpus:
        remedy = "set TaskPlugin=task/cgroup,task/affinity and ConstrainCores=yes: jobs disturb each other"
        yield "environment", "slurm.cpus", found, allowed, remedy
    elif len(cpus) < given.cpus:
        yield "note", "slurm.cpus", found, allowed, "look at --cpu-bind, if ranks wait for data"


def _memory(given: Allocation, cgroup: Cgroup) -> Iterator[Problem]:
    if given.memory_bytes is None:
        return
    limit, allowed = cgroup.memory_bytes, f"the {given.memory_bytes / GIB:.4g} GiB that were allocated"
    if limit is not None and limit < given.memory_bytes / _MORE_RATIO:
        remedy = "look at AllowedRAMSpace in cgroup.conf, and at the limits of the container that this runs in"
        yield "environment", "slurm.memory", f"the control group allows {limit / GIB:.4g} GiB", allowed, remedy
    elif limit is None or limit > given.memory_bytes * _MORE_RATIO:
        found = "no control group limits the memory" if cgroup.versions else "no control group can be read"
        found = found if limit is None else f"it is limited to {limit / GIB:.4g} GiB"
        remedy = "set ConstrainRAMSpace=yes in cgroup.conf: a job that uses more than its part gets others killed"
        yield "note", "slurm.memory", found, allowed, remedy


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def _count_of_list(text: str) -> int | None:
    """Count the numbers in a list such as "0-3,6"; None for anything else."""
    parts = [re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip()) for part in text.split(",")]
    counts = [int(part[2] or part[1]) - int(part[1]) + 1 for part in parts if part is not None]
    return sum(counts) if len(counts) == len(parts) else None


DEFAULT_SHM_BYTES = 64 * MIB
"""The default of container runtimes. Source: OCI image and runtime tools, `--shm-size`;
containerd mounts /dev/shm with size=65536k."""


def pod_findings(pod: NodeSnapshot, *, nnodes: int) -> list[Finding]:
    """Return the findings on a pod.

    Args:
        pod: the node as the pod sees it.
        nnodes: of the whole run: with several, RDMA is required where the node has it.
    """
    return _findings(pod.host, _pod(pod, nnodes))


def _pod(pod: NodeSnapshot, nnodes: int) -> Iterator[Problem]:
    if not pod.cgroup.versions:
        found = "no control group can be read, so the pod's limits are unknown"
        remedy = "mount it read only, as container runtimes do by default"
        yield "environment", "kubernetes.resources", found, "/sys/fs/cgroup is mounted in the pod", remedy
    elif pod.cgroup.cpus is not None and pod.cgroup.cpus < pod.ranks:
        found = f"{pod.ranks} ranks get the time of {pod.cgroup.cpus:g} CPUs"
        remedy = "raise resources.limits.cpu of the pod, or remove it: ranks that use it up are throttled"
        yield "environment", "kubernetes.resources", found, "at least one CPU for each rank", remedy
    shm = pod.memory.shm
    if shm is None or shm.kind != "tmpfs" or shm.total_bytes <= DEFAULT_SHM_BYTES:
        found = f"{shm.kind or 'not mounted'}, {shm.total_bytes / MIB:.4g} MiB" if shm else "not mounted"
        yield (
            "environment",
            "kubernetes.shm",
            f"/dev/shm is {found}",
            f"a tmpfs of more than a container's default, {DEFAULT_SHM_BYTES // MIB} MiB: NCCL and data loader workers "
            "share memory there",
            "mount an emptyDir with medium: Memory and a sizeLimit at /dev/shm",
        )
    limits = pod.limits
    if pod.hcas and not pod.verbs and nnodes > 1:
        yield (
            "environment",
            "kubernetes.rdma",
            f"the node has {len(pod.hcas)} RDMA devices ({', '.join(pod.hcas)}), and the pod has no access: there is "
            "no /dev/infiniband/uverbs*",
            "the node's RDMA devices, in a run of several nodes",
            "request the device plugin's RDMA resource (resources.limits, such as rdma/hca_shared_devices_a: 1)",
        )
    elif pod.hcas and pod.verbs and (limits is None or (not limits.may_lock_all and limits.memlock.soft is not None)):
        found = "its limits are unknown" if limits is None else f"memlock is {limits.memlock.soft} B"
        yield (
            "environment",
            "kubernetes.ipc_lock",
            f"the pod has RDMA devices, but its locked memory is limited: it has no IPC_LOCK, and {found}",
            "the capability IPC_LOCK, or unlimited memlock",
            'add it to the container: securityContext: {capabilities: {add: ["IPC_LOCK"]}}',
        )
