"""CPUs, their governors and NUMA nodes, as the kernel tells them."""

from __future__ import annotations

from pathlib import Path

from fake_host import plant

from pytest_gpucluster.host import processors
from pytest_gpucluster.host.processors import Processors
from pytest_gpucluster.host.tree import Tree


def test_cpus_are_grouped_by_their_governor(tmp_path: Path) -> None:
    files = {
        f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor": name
        for cpu, name in enumerate(("performance", "powersave", "powersave", "performance"))
    }
    found = processors.read(plant(tmp_path, {"/sys/devices/system/cpu/online": "0-3", **files}))
    assert found.governors == {"performance": {0, 3}, "powersave": {1, 2}}


def test_switched_off_cpus_nodes_and_balancing_are_read(tmp_path: Path) -> None:
    files = {"/sys/devices/system/cpu/offline": "2-3\n", "/proc/sys/kernel/numa_balancing": "1\n"}
    found = processors.read(plant(tmp_path, files))
    assert (found.offline, found.nodes, found.numa_balancing) == ({2, 3}, {0, 1}, 1)
    assert found.online == frozenset(range(128))


def test_what_is_not_told_is_none(tmp_path: Path) -> None:
    assert processors.read(plant(tmp_path, {}, healthy=False)) == Processors(online=None)


def test_this_machine_has_cpus() -> None:
    assert processors.read(Tree()).online
