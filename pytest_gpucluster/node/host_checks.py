"""Checks of a host: findings about its settings, the values that are compared with limits, each with what was found and
how to raise it, and whether a rank and its host memory are on the NUMA node of its GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.finding import Finding, Kind, environment, finding, identity, note
from pytest_gpucluster.node.host import SHM, NodeSnapshot
from pytest_gpucluster.node.sysfs import Tree, format_ranges, parse_ranges
from pytest_gpucluster.text import plural

PERFORMANCE = "performance"
Wanted = Mapping[str, str]
"""The intended settings: name of a key of the workload's section ``host`` -> its value. "any" accepts all."""


def examine_host(facts: NodeSnapshot, wanted: Wanted) -> list[Finding]:
    """Apply every check. Harmful settings are faults of the environment, not of a GPU."""
    return [finding for check in CHECKS for finding in check(facts, wanted)]


def _shm(facts: NodeSnapshot, wanted: Wanted) -> Iterator[Finding]:
    shm = facts.memory.shm
    if shm is not None and shm.kind != "tmpfs":
        yield environment(
            "shm_is_no_memory",
            facts.host,
            f"{SHM} is {f'a {shm.kind}' if shm.kind else 'not a mount of its own'}",
            allowed="a tmpfs: NCCL and data loaders exchange data through it at each step",
            remedy="mount it as the distribution does (systemd: dev-shm.mount), or let the container runtime do it",
        )


def _governor(facts: NodeSnapshot, wanted: Wanted) -> Iterator[Finding]:
    # Source: Linux kernel, Documentation/admin-guide/pm/cpufreq.rst, generic scaling governors.
    processors = facts.processors
    if not processors.governors:
        found = "the kernel shows no CPU frequency governor, as in most virtual machines"
        yield note("governor", facts.host, found, remedy="nothing here; the hypervisor sets it")
    # The "powersave" of a driver that follows the load does not keep the lowest clock.
    slow = {
        name: cpus - processors.autonomous if name == "powersave" else cpus
        for name, cpus in sorted(processors.governors.items())
        if name != PERFORMANCE
    }
    if any(slow.values()):
        found = ", ".join(f"{name} on the CPUs {format_ranges(cpus)}" for name, cpus in slow.items() if cpus)
        yield finding(
            "environment" if wanted["governor"] == PERFORMANCE else "note",
            "governor",
            facts.host,
            f"the CPU frequency governor is {found}",
            allowed=f"{PERFORMANCE} on all CPUs: a CPU with a low clock launches kernels late",
            remedy="`cpupower frequency-set -g performance` on this host, and a service that does so at each boot; or "
            "accept it: --gpucluster-workload host.governor=any",
        )


def _numa(facts: NodeSnapshot, wanted: Wanted) -> Iterator[Finding]:
    # Source: Linux kernel, Documentation/admin-guide/sysctl/kernel.rst, numa_balancing; AMD, "Instinct MI300X system
    # optimization", disable NUMA auto-balancing.
    balancing, nodes = facts.processors.numa_balancing, len(facts.processors.nodes)
    if nodes > 1 and balancing:
        yield finding(
            "environment" if wanted["numa_balancing"] == "off" else "note",
            "numa_balancing",
            facts.host,
            f"automatic NUMA balancing is on, with {nodes} NUMA nodes (kernel.numa_balancing={balancing})",
            allowed="off, where ranks are bound to their GPU's node: it causes page faults",
            remedy="`sysctl kernel.numa_balancing=0`, and the same in /etc/sysctl.d",
        )


def _iommu(facts: NodeSnapshot, wanted: Wanted) -> Iterator[Finding]:
    # Source: as pci_path.
    for gpu in facts.gpus:
        if gpu.path is None or not gpu.path.is_translated:
            continue
        # On Arm the GPU may reach memory through the SMMU by design, as on Grace.
        strict = wanted["iommu"] == "passthrough" and facts.machine == "x86_64"
        yield finding(
            "environment" if strict else "note",
            "iommu",
            gpu.who,
            f"an IOMMU translates the addresses of this GPU (type of its group: {gpu.path.iommu})",
            allowed="passthrough, or none: translation sends data between GPU and network card through the CPU",
            remedy="iommu=pt on the kernel's command line, or VT-d / AMD-Vi off in the BIOS; or accept it: "
            "--gpucluster-workload host.iommu=any",
        )
    hidden = [gpu for gpu in facts.gpus if gpu.path is None]
    if hidden:
        found = f"unknown whether an IOMMU translates for {len(hidden)} of {len(facts.gpus)} GPUs"
        remedy = "look at /sys/kernel/iommu_groups/*/type on the host, where DMA and DMA-FQ translate"
        yield note("iommu", facts.host, found, remedy=remedy)


def _acs(facts: NodeSnapshot, wanted: Wanted) -> Iterator[Finding]:
    # Source: as pci_path.
    for gpu in facts.gpus:
        if gpu.path is None or not gpu.path.redirecting:
            continue
        ports = "; ".join(f"{port} ({', '.join(bits)})" for port, bits in gpu.path.redirecting)
        yield finding(
            "environment" if wanted["acs"] == "off" else "note",
            "acs",
            gpu.who,
            f"PCIe switch ports above this GPU redirect peer-to-peer traffic: {ports}",
            allowed="ACS off at switch ports, unless virtual machines need it",
            remedy="`setpci -s PORT ECAP_ACS+0x6.w=0000` for each port at each boot, or ACS off in the BIOS; or accept "
            "it: --gpucluster-workload host.acs=any",
        )
    hidden = [gpu for gpu in facts.gpus if gpu.path is None or gpu.path.hidden]
    if hidden:
        found = f"unknown whether ACS redirects for {len(hidden)} of {len(facts.gpus)} GPUs"
        remedy = "as root: `lspci -vvv | grep -i acsctl`, where no switch port may show ReqRedir+ or CmpltRedir+"
        yield note("acs", facts.host, found, remedy=remedy)


CHECKS: tuple[Callable[[NodeSnapshot, Wanted], Iterator[Finding]], ...] = (_shm, _governor, _numa, _iommu, _acs)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One value in ``unit``, what was found on the host, and how to raise it."""

    metric: str
    value: float
    unit: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.metric}: {self.found}; to raise it: {self.remedy}"


def readings(facts: NodeSnapshot) -> Iterator[Reading]:
    """Yield every value.

    Raises: EnvironmentBroken if one of them is unknown.
    """
    ranks, limits, group = facts.ranks, facts.limits, facts.cgroup
    of_ranks = f"for {plural(ranks, 'rank')}"
    of_group = "" if group.memory_bytes is None else f"; the control group may use {_gb(group.memory_bytes)}"
    if limits is None:
        raise _unknown(facts, "host.nofile is", "/proc/self/limits")
    if facts.memory_bytes is None or facts.memlock_ratio is None:
        raise _unknown(facts, "host.memlock is", "/proc/meminfo, MemTotal,")
    yield Reading(
        metric="host.nofile",
        value=_known(facts, "host.nofile", facts.nofile, "/proc/sys/fs/nr_open"),
        unit="files",
        found=f"open files {_amount(limits.nofile.soft)}, hard limit {_amount(limits.nofile.hard)}",
        remedy="nofile in /etc/security/limits.d, LimitNOFILE= of slurmd or containerd, docker --ulimit nofile=65536",
    )
    capability = "and CAP_IPC_LOCK, which makes it unlimited" if limits.may_lock_all else "no CAP_IPC_LOCK"
    yield Reading(
        metric="host.memlock",
        value=100 * facts.memlock_ratio,
        unit="%",
        found=f"locked memory {_amount(limits.memlock.soft, 'bytes')}, {capability}",
        remedy="memlock unlimited in /etc/security/limits.d, LimitMEMLOCK=infinity of slurmd or containerd, docker "
        "--ulimit memlock=-1, or the capability IPC_LOCK for the pod",
    )
    shm = facts.memory.shm
    yield Reading(
        metric="host.shm",
        value=_known(facts, "host.shm", facts.shm_bytes, f"the file system at {SHM}") / ranks / 1e9,
        unit="GB",
        found=f"{SHM}: {_gb(shm.free_bytes)} of {_gb(shm.total_bytes)} are free, {of_ranks}{of_group}" if shm else "",
        remedy=f"remove files of earlier jobs from {SHM}; docker --shm-size=32g or --ipc=host; in Kubernetes an "
        f"emptyDir with medium: Memory at {SHM}",
    )
    parts = [f"{len(facts.processors.online or ())} CPUs are online"]
    parts += [f"the control group may run on {format_ranges(group.cpuset)}"] if group.cpuset is not None else []
    parts += [f"and use the time of {_amount(group.cpus)}"] if group.cpus is not None else []
    parts += [] if group.versions else ["no control group can be read, so its limits are unknown"]
    yield Reading(
        metric="host.cpus",
        value=_known(facts, "host.cpus", facts.cpus_per_rank, "/sys/devices/system/cpu/online"),
        unit="CPUs",
        found=f"{', '.join(parts)}, {of_ranks}; this one may run on {format_ranges(facts.own_cpus)}",
        remedy="srun --cpus-per-task, DefCpuPerGPU of the partition, requests and limits of the pod, docker --cpus",
    )
    yield Reading(
        metric="host.tasks",
        value=_known(facts, "host.tasks", facts.tasks, "/proc/sys/kernel/pid_max") / ranks,
        unit="tasks",
        found=f"this user may have {_amount(limits.nproc.soft)}, the node {_amount(limits.max_tasks)}, the control "
        f"group {_amount(group.tasks)}, {of_ranks}",
        remedy="nproc in /etc/security/limits.d, TasksMax= of slurmd or containerd, podPidsLimit of the kubelet, "
        "docker --pids-limit, kernel.pid_max",
    )
    yield Reading(
        metric="host.memory",
        value=facts.memory_bytes / ranks / 1e9,
        unit="GB",
        found=f"{_gb(facts.memory_bytes)} {of_ranks}{of_group}",
        remedy="srun --mem=0 or --mem-per-gpu; requests and limits of the pod; docker --memory",
    )


def _known(facts: NodeSnapshot, metric: str, value: float | None, source: str) -> float:
    if value is None:
        raise _unknown(facts, f"{metric} is", source)
    return value


def _unknown(facts: NodeSnapshot, what: str, source: str) -> EnvironmentBroken:
    return EnvironmentBroken(
        f"{facts.host}: {what} unknown: {source} cannot be read, so the limit cannot be checked; make /proc, /sys and "
        "/dev/shm visible to the job, as container runtimes do by default"
    )


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.3g} GB"


def _amount(limit: float | None, unit: str = "") -> str:
    return "unlimited" if limit is None else f"{limit:,.10g} {unit}".rstrip()


BINDING = (
    "let the launcher bind each rank to its GPU's node: torchrun --numa-binding=node where torchrun has it, srun "
    "--gpu-bind=closest, or numactl --cpunodebind=... --membind=... around each rank"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """CPUs and NUMA nodes. ``nodes``: of a rank, those of its memory policy; of a GPU, its own."""

    cpus: frozenset[int]
    nodes: frozenset[int]


def own_place(tree: Tree | None = None) -> Place:
    """Return the CPUs and memory nodes of this process.

    Raises: EnvironmentBroken if the kernel does not report them.
    """
    tree = tree or Tree()
    found = re.search(r"^Mems_allowed_list:\s*([0-9,-]+)$", tree.text("/proc/self/status") or "", re.MULTILINE)
    if found is None:
        raise EnvironmentBroken("the memory nodes of this process are unknown: /proc/self/status has no list of them")
    return Place(cpus=tree.own_cpus(), nodes=parse_ranges(found[1]))


def place_of_gpu(pci: str | None, tree: Tree | None = None) -> Place | None:
    """Return the local CPUs and the node of a GPU; None where the kernel does not report them."""
    tree = tree or Tree()
    node, cpus = tree.numa_node(pci), tree.numbers(f"{tree.pci_device(pci)}/local_cpulist")
    return None if node is None or not cpus else Place(cpus=cpus, nodes=frozenset({node}))


def examine_affinity(who: Mapping[str, Any], rank: Place, gpu: Place | None) -> list[Finding]:
    """Compare the places of a rank and of its GPU.

    A rank with none of its GPU's local CPUs, or without its memory node, is misplaced: the launcher has bound it to
    another node. One that may also run elsewhere gets a note: the kernel may move it away.

    ``who`` is the rank's entry in the inventory.
    """
    rank_name = f"rank {who['rank']}"
    if gpu is None:
        remedy = "nothing on a machine with one node; else make /sys/bus/pci/devices visible to the job"
        return [note("affinity", identity(who), f"{rank_name} has no NUMA information about its GPU", remedy=remedy)]
    allowed = f"the CPUs {format_ranges(gpu.cpus)} and memory of node {format_ranges(gpu.nodes)}"
    runs, uses = (
        f"may run on the CPUs {format_ranges(rank.cpus)}",
        f"may use memory of node {format_ranges(rank.nodes)}",
    )
    problems: list[tuple[Kind, str]] = []
    if not rank.cpus & gpu.cpus:
        problems.append(("environment", f"{runs}, none of which is local to its GPU"))
    elif rank.cpus - gpu.cpus:
        problems.append(("note", f"{runs}, not all of which are local to its GPU"))
    if not rank.nodes & gpu.nodes:
        problems.append(("environment", f"{uses}, and not of its GPU's"))
    return [
        finding(kind, "affinity", identity(who), f"{rank_name} {found}", allowed=allowed, remedy=BINDING)
        for kind, found in problems
    ]


LEAST_LOCAL = 0.95
"""The kernel may place single pages elsewhere."""


def require_local(who: Mapping[str, Any], nodes: Mapping[int, float], gpu: Place | None) -> None:
    """Require that host memory was on the NUMA node of the GPU, where both are known.

    ``who`` is the rank's entry in the inventory, ``nodes`` NUMA node -> part of the memory on it; empty if unknown.

    Raises: EnvironmentBroken: the measurement included the link between the sockets.
    """
    if gpu is None or not nodes:
        return
    here = sum(part for node, part in nodes.items() if node in gpu.nodes)
    if here < LEAST_LOCAL:
        raise EnvironmentBroken(
            f"{identity(who)}: {100 * here:.3g} % of the host memory of rank {who['rank']} was on NUMA node "
            f"{format_ranges(gpu.nodes)}, local to this GPU; to measure its link, at least {100 * LEAST_LOCAL:g} % "
            f"must; check whether that node is full (`numactl -H`), and {BINDING}"
        )
