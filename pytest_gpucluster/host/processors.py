"""The CPUs of the node: which are there, at what speed they may run, and the memory nodes that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_gpucluster.host.tree import Tree

CPUS = "/sys/devices/system/cpu"
_AUTONOMOUS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""``scaling_driver`` in the active mode, in which the driver or the CPU itself follows the load, also with "powersave";
in the passive mode it is intel_cpufreq or amd-pstate. Source: Linux kernel,
Documentation/admin-guide/pm/intel_pstate.rst (Active Mode) and amd-pstate.rst (Active Mode)."""


@dataclass(frozen=True, kw_only=True)
class Processors:
    """What the kernel tells of the CPUs. None: it does not.

    Attributes:
        online: CPUs that run.
        offline: CPUs that are there and switched off.
        governors: what chooses the clock -> the CPUs that it does so for; empty where the clock is not the kernel's to
            choose, as in most virtual machines.
        autonomous: of these the CPUs whose driver has a governor "powersave" that is another one than the kernel's: it
            does not keep the lowest clock.
        nodes: NUMA nodes.
        numa_balancing: whether the kernel moves memory after the threads that use it: 0 is no.
    """

    online: frozenset[int] | None
    offline: frozenset[int] = frozenset()
    governors: Mapping[str, frozenset[int]] = field(default_factory=dict)
    autonomous: frozenset[int] = frozenset()
    nodes: frozenset[int] | None = None
    numa_balancing: int | None = None


def read(tree: Tree) -> Processors:
    """Read what the kernel tells of the CPUs.

    Source: Linux kernel, Documentation/admin-guide/cputopology.rst, Documentation/admin-guide/pm/cpufreq.rst
    (scaling_governor) and Documentation/admin-guide/sysctl/kernel.rst (numa_balancing).
    """
    online = tree.numbers(f"{CPUS}/online")
    governors: dict[str, set[int]] = {}
    autonomous: set[int] = set()
    for cpu in sorted(online or ()):
        governor = tree.text(f"{CPUS}/cpu{cpu}/cpufreq/scaling_governor")
        if governor:
            governors.setdefault(governor, set()).add(cpu)
            if tree.text(f"{CPUS}/cpu{cpu}/cpufreq/scaling_driver") in _AUTONOMOUS:
                autonomous.add(cpu)
    return Processors(
        online=online,
        offline=tree.numbers(f"{CPUS}/offline") or frozenset(),
        governors={governor: frozenset(cpus) for governor, cpus in governors.items()},
        autonomous=frozenset(autonomous),
        nodes=tree.numbers("/sys/devices/system/node/online"),
        numa_balancing=tree.number("/proc/sys/kernel/numa_balancing"),
    )
