"""The figures of a host that limits are set for: each with what was found, and the way to more of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gpucluster.affinity import shown
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.host.facts import HostFacts
from pytest_gpucluster.host.memory import SHM


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One figure: ``value`` in ``unit``, what was found on the host, and the way to more of it."""

    metric: str
    value: float
    unit: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.metric}: {self.found}; for more: {self.remedy}"


def readings(facts: HostFacts) -> Iterator[Reading]:
    """Yield every figure.

    Raises: EnvironmentBroken if one of them is not known: then nobody can say that it is enough.
    """
    for one in (_nofile, _memlock, _shm, _cpus, _tasks, _memory):
        yield one(facts)


def _reading(
    facts: HostFacts, metric: str, value: float | None, unit: str, *, found: str, remedy: str, source: str
) -> Reading:
    if value is None:
        raise EnvironmentBroken(
            f"{facts.host}: {metric} is not known: {source} tells nothing; a figure is needed to be held against the "
            "limit; make /proc, /sys and /dev/shm visible to the job, as container runtimes do by default"
        )
    return Reading(metric=metric, value=value, unit=unit, found=found, remedy=remedy)


def _nofile(facts: HostFacts) -> Reading:
    limit = facts.limits.nofile if facts.limits else None
    found = f"open files {_amount(limit.soft)}, which can be raised to {_amount(limit.hard)}" if limit else ""
    return _reading(
        facts,
        "host.nofile",
        facts.nofile,
        "files",
        found=found,
        remedy="nofile in /etc/security/limits.d, LimitNOFILE= of slurmd or containerd, docker --ulimit nofile=65536",
        source="/proc/self/limits, Max open files",
    )


def _memlock(facts: HostFacts) -> Reading:
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


def _shm(facts: HostFacts) -> Reading:
    shm, total = facts.memory.shm, facts.shm_bytes
    found = f"{_gb(shm.free_bytes)} of {_gb(shm.total_bytes)} are free, for {_ranks(facts)}" if shm else ""
    return _reading(
        facts,
        "host.shm",
        None if total is None else total / facts.ranks / 1e9,
        "GB",
        found=f"{SHM}: {found}{_of_group(facts)}",
        remedy=f"remove what ended jobs have left in {SHM}; docker --shm-size=32g or --ipc=host; in Kubernetes an "
        f"emptyDir with medium: Memory at {SHM}",
        source=f"the file system at {SHM}",
    )


def _cpus(facts: HostFacts) -> Reading:
    online, group = facts.processors.online, facts.cgroup
    parts = [f"{len(online)} CPUs are online" if online is not None else "CPUs that are online: not told"]
    parts += [f"the control group may run on {shown(group.cpuset)}"] if group.cpuset is not None else []
    parts += [f"and use the time of {_amount(group.cpus)}"] if group.cpus is not None else []
    parts += [] if group.versions else ["no control group can be seen, so its limits are not known"]
    parts.append(f"this rank may run on {shown(facts.own_cpus)}; {_ranks(facts)} on the node")
    return _reading(
        facts,
        "host.cpus",
        facts.cpus_per_rank,
        "CPUs",
        found=", ".join(parts),
        remedy="srun --cpus-per-task, DefCpuPerGPU of the partition, requests and limits of the pod, docker --cpus",
        source="/sys/devices/system/cpu/online",
    )


def _tasks(facts: HostFacts) -> Reading:
    limits, found = facts.limits, ""
    if limits is not None:
        found = f"this user may have {_amount(limits.nproc.soft)}, the node {_amount(limits.tasks_at_most)}"
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


def _memory(facts: HostFacts) -> Reading:
    total = facts.memory.total_bytes
    found = "" if total is None else f"the node has {_gb(total)}, for {_ranks(facts)}"
    return _reading(
        facts,
        "host.memory",
        None if facts.memory_bytes is None else facts.memory_bytes / facts.ranks / 1e9,
        "GB",
        found=found + _of_group(facts),
        remedy="srun --mem=0 or --mem-per-gpu; requests and limits of the pod; docker --memory",
        source="/proc/meminfo, MemTotal",
    )


def _of_group(facts: HostFacts) -> str:
    limit = facts.cgroup.memory_bytes
    return "" if limit is None else f"; the control group may use {_gb(limit)}"


def _ranks(facts: HostFacts) -> str:
    return "1 rank" if facts.ranks == 1 else f"{facts.ranks} ranks"


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.3g} GB"


def _amount(limit: float | None, unit: str = "") -> str:
    return "unlimited" if limit is None else f"{limit:,.10g} {unit}".rstrip()
