"""Checks of a host: findings about its settings, and the values that are compared with limits.

Each value comes with what was found and how to raise it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.finding import Finding, Kind, environment, finding, note
from pytest_gpucluster.node.host import NodeSnapshot
from pytest_gpucluster.node.limits import SHM
from pytest_gpucluster.node.sysfs import format_ranges

ANY, PERFORMANCE = "any", "performance"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The intended settings, from the workload's section ``host``. "any" accepts all."""

    governor: str = PERFORMANCE
    numa_balancing: str = ANY
    iommu: str = "passthrough"
    acs: str = "off"


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
    governors = facts.processors.governors
    remedy = "`cpupower frequency-set -g performance` on this host, and a service that does so at each boot"
    if not governors:
        found = "the kernel shows no CPU frequency governor, as in most virtual machines"
        yield note("governor", facts.host, found, remedy="nothing here; the hypervisor sets it")
        return
    others = {name: cpus for name, cpus in governors.items() if name != PERFORMANCE}
    if follows := others.get("powersave", frozenset()) & facts.processors.autonomous:
        others["powersave"] -= follows
        yield note(
            "governor",
            facts.host,
            "the CPU frequency governor is powersave, of a driver that follows the load, on the CPUs "
            f"{format_ranges(follows)}",
            allowed=f"anything; {PERFORMANCE} keeps the clock up between launches",
            remedy=remedy,
        )
    others = {name: cpus for name, cpus in others.items() if cpus}
    if others:
        found = ", ".join(f"{name} on the CPUs {format_ranges(cpus)}" for name, cpus in sorted(others.items()))
        yield finding(
            "environment" if wanted.governor == PERFORMANCE else "note",
            "governor",
            facts.host,
            f"the CPU frequency governor is {found}",
            allowed=f"{PERFORMANCE} on all CPUs: a CPU with a low clock launches kernels late",
            remedy=f"{remedy}; or accept it: --gpucluster-workload host.governor=any",
        )


def _offline(facts: NodeSnapshot, wanted: Wanted) -> Iterator[Finding]:
    if facts.processors.offline:
        found = f"the CPUs {format_ranges(facts.processors.offline)} are switched off"
        yield note("cpus_offline", facts.host, found, remedy="nothing, if intended, such as SMT off")


def _numa(facts: NodeSnapshot, wanted: Wanted) -> Iterator[Finding]:
    # Source: Linux kernel, Documentation/admin-guide/sysctl/kernel.rst, numa_balancing; AMD, "Instinct MI300X system
    # optimization", disable NUMA auto-balancing.
    several = len(facts.processors.nodes) > 1
    balancing = facts.processors.numa_balancing
    if several and balancing:
        kind: Kind = "environment" if wanted.numa_balancing == "off" else "note"
        yield finding(
            kind,
            "numa_balancing",
            facts.host,
            f"automatic NUMA balancing is on, with {len(facts.processors.nodes)} NUMA nodes "
            f"(kernel.numa_balancing={balancing})",
            allowed="off, where ranks are bound to their GPU's node: it causes page faults",
            remedy="`sysctl kernel.numa_balancing=0`, and the same in /etc/sysctl.d",
        )
    unknown = [str(gpu.who) for gpu in facts.gpus if gpu.node is None]
    if several and unknown:
        found = f"the kernel reports no NUMA node for: {'; '.join(unknown)}"
        remedy = "look at the BIOS or at the hypervisor's topology: ranks cannot be bound to their GPU's node"
        yield note("gpu_without_node", facts.host, found, allowed="a node for each GPU", remedy=remedy)
    known = [f"GPU {gpu.who.index}: node {gpu.node}" for gpu in facts.gpus if gpu.node is not None]
    if known:
        found = f"NUMA nodes: {', '.join(known)}"
        yield note("gpu_nodes", facts.host, found, remedy="nothing; the criterion affinity compares ranks")


def _iommu(facts: NodeSnapshot, wanted: Wanted) -> Iterator[Finding]:
    # Source: as pci_path.
    for gpu in facts.gpus:
        if gpu.path is None or not gpu.path.is_translated:
            continue
        # On Arm the GPU may reach memory through the SMMU by design, as on Grace.
        strict = wanted.iommu == "passthrough" and facts.machine == "x86_64"
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
            "environment" if wanted.acs == "off" else "note",
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


def _huge_pages(facts: NodeSnapshot, wanted: Wanted) -> Iterator[Finding]:
    reserved, transparent = facts.memory.reserved_pages, facts.memory.transparent
    parts = [f"transparent huge pages: {transparent}"] if transparent else []
    parts += [f"{reserved} reserved huge pages, which other memory cannot use"] if reserved else []
    if parts:
        yield note("huge_pages", facts.host, "; ".join(parts))


CHECKS: tuple[Callable[[NodeSnapshot, Wanted], Iterator[Finding]], ...] = (
    _shm,
    _governor,
    _offline,
    _numa,
    _iommu,
    _acs,
    _huge_pages,
)


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
    for one in (_nofile, _memlock, _shm_reading, _cpus, _tasks, _memory):
        yield one(facts)


def _reading(
    facts: NodeSnapshot, metric: str, value: float | None, unit: str, *, found: str, remedy: str, source: str
) -> Reading:
    if value is None:
        raise EnvironmentBroken(
            f"{facts.host}: {metric} is unknown: {source} cannot be read, so the limit cannot be checked; make "
            "/proc, /sys and /dev/shm visible to the job, as container runtimes do by default"
        )
    return Reading(metric=metric, value=value, unit=unit, found=found, remedy=remedy)


def _nofile(facts: NodeSnapshot) -> Reading:
    limit = facts.limits.nofile if facts.limits else None
    found = f"open files {_amount(limit.soft)}, hard limit {_amount(limit.hard)}" if limit else ""
    return _reading(
        facts,
        "host.nofile",
        facts.nofile,
        "files",
        found=found,
        remedy="nofile in /etc/security/limits.d, LimitNOFILE= of slurmd or containerd, docker --ulimit nofile=65536",
        source="/proc/self/limits, Max open files",
    )


def _memlock(facts: NodeSnapshot) -> Reading:
    limits, ratio = facts.limits, facts.memlock_ratio
    found = ""
    if limits is not None:
        found = f"locked memory {_amount(limits.memlock.soft, 'bytes')}"
        found += ", and CAP_IPC_LOCK, which makes it unlimited" if limits.may_lock_all else ", no CAP_IPC_LOCK"
    return _reading(
        facts,
        "host.memlock",
        None if ratio is None else 100 * ratio,
        "%",
        found=found,
        remedy="memlock unlimited in /etc/security/limits.d, LimitMEMLOCK=infinity of slurmd or containerd, docker "
        "--ulimit memlock=-1, or the capability IPC_LOCK for the pod",
        source="/proc/self/limits, Max locked memory, or /proc/meminfo",
    )


def _shm_reading(facts: NodeSnapshot) -> Reading:
    shm, total = facts.memory.shm, facts.shm_bytes
    found = f"{_gb(shm.free_bytes)} of {_gb(shm.total_bytes)} are free, for {_ranks(facts)}" if shm else ""
    return _reading(
        facts,
        "host.shm",
        None if total is None else total / facts.ranks / 1e9,
        "GB",
        found=f"{SHM}: {found}{_group_limit(facts)}",
        remedy=f"remove files of earlier jobs from {SHM}; docker --shm-size=32g or --ipc=host; in Kubernetes an "
        f"emptyDir with medium: Memory at {SHM}",
        source=f"the file system at {SHM}",
    )


def _cpus(facts: NodeSnapshot) -> Reading:
    online, group = facts.processors.online, facts.cgroup
    parts = [f"{len(online)} CPUs are online" if online is not None else "CPUs online: unknown"]
    parts += [f"the control group may run on {format_ranges(group.cpuset)}"] if group.cpuset is not None else []
    parts += [f"and use the time of {_amount(group.cpus)}"] if group.cpus is not None else []
    parts += [] if group.versions else ["no control group can be read, so its limits are unknown"]
    parts.append(f"this rank may run on {format_ranges(facts.own_cpus)}; {_ranks(facts)} on the node")
    return _reading(
        facts,
        "host.cpus",
        facts.cpus_per_rank,
        "CPUs",
        found=", ".join(parts),
        remedy="srun --cpus-per-task, DefCpuPerGPU of the partition, requests and limits of the pod, docker --cpus",
        source="/sys/devices/system/cpu/online",
    )


def _tasks(facts: NodeSnapshot) -> Reading:
    limits, found = facts.limits, ""
    if limits is not None:
        found = f"this user may have {_amount(limits.nproc.soft)}, the node {_amount(limits.max_tasks)}"
    return _reading(
        facts,
        "host.tasks",
        None if facts.tasks is None else facts.tasks / facts.ranks,
        "tasks",
        found=f"{found}, the control group {_amount(facts.cgroup.tasks)}; {_ranks(facts)} on the node",
        remedy="nproc in /etc/security/limits.d, TasksMax= of slurmd or containerd, podPidsLimit of the kubelet, "
        "docker --pids-limit, kernel.pid_max",
        source="/proc/self/limits, Max processes",
    )


def _memory(facts: NodeSnapshot) -> Reading:
    total = facts.memory.total_bytes
    found = "" if total is None else f"the node has {_gb(total)}, for {_ranks(facts)}"
    return _reading(
        facts,
        "host.memory",
        None if facts.memory_bytes is None else facts.memory_bytes / facts.ranks / 1e9,
        "GB",
        found=found + _group_limit(facts),
        remedy="srun --mem=0 or --mem-per-gpu; requests and limits of the pod; docker --memory",
        source="/proc/meminfo, MemTotal",
    )


def _group_limit(facts: NodeSnapshot) -> str:
    limit = facts.cgroup.memory_bytes
    return "" if limit is None else f"; the control group may use {_gb(limit)}"


def _ranks(facts: NodeSnapshot) -> str:
    return "1 rank" if facts.ranks == 1 else f"{facts.ranks} ranks"


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.3g} GB"


def _amount(limit: float | None, unit: str = "") -> str:
    return "unlimited" if limit is None else f"{limit:,.10g} {unit}".rstrip()
