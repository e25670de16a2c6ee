"""Limits, CPUs, memory, mounts and links of a host, from the kernel and NVML: what is missing is None."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from complaints import in_order
from each import of_each
from fake_host import MOUNTS, limits, plant, space, status, who
from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node import host
from pytest_gpucluster.node.host import IPC_LOCK, Limit, Processors, SharedMemory
from pytest_gpucluster.node.host_checks import Place, require_local
from pytest_gpucluster.node.nvml import NotAvailable
from pytest_gpucluster.node.pci import PcieLink
from pytest_gpucluster.node.sysfs import Tree


def refuse(path: Path) -> tuple[int, int]:
    raise FileNotFoundError(path)


# ---- files below a root ----------------------------------------------------------------------------------------------


def test_numbers_and_lists_are_read_and_anything_else_is_none(tmp_path: Path) -> None:
    tree, file = Tree(root=tmp_path), tmp_path / "proc/it"
    assert (tree.text("/proc/it"), tree.number("/proc/it"), tree.numbers("/proc/it")) == (None, None, None)
    assert tree.mounts() == ()
    file.parent.mkdir()
    for text, number in {"12\n": 12, "-1": -1, "max": None, "": None, "1 2": None}.items():
        file.write_text(text)
        assert tree.number("/proc/it") == number
    for text, numbers in {"0-2,8\n": {0, 1, 2, 8}, "all": None, "": set()}.items():
        file.write_text(text)
        assert tree.numbers("/proc/it") == numbers


# ---- limits of a process ---------------------------------------------------------------------------------------------


def test_soft_and_hard_limits_are_read_and_unlimited_is_none(tmp_path: Path) -> None:
    found = host.read_process_limits(
        plant(tmp_path, {"/proc/self/limits": limits(nofile=1024, memlock=65536, nproc=4096)})
    )
    assert found is not None
    assert (found.nofile, found.memlock) == (Limit(soft=1024, hard=1048576), Limit(soft=65536, hard=65536))
    assert (found.nproc.soft, found.max_files, found.max_tasks) == (4096, 1048576, 4194304)
    found = host.read_process_limits(plant(tmp_path, {"/proc/self/limits": limits(nofile="unlimited")}))
    assert found is not None
    assert (found.nofile.soft, found.memlock.soft) == (None, None)
    for text in ("", "Max open files            1024                 4096                 files\n"):
        assert host.read_process_limits(plant(tmp_path, {"/proc/self/limits": text})) is None
    assert host.read_process_limits(Tree(root=tmp_path / "none")) is None


@of_each(
    "case",
    [
        (1 << IPC_LOCK, "0 0 4294967295", True),
        (1 << IPC_LOCK, None, True),
        (~(1 << IPC_LOCK) & 2**41 - 1, "0 0 4294967295", False),
        # A container without root.
        (1 << IPC_LOCK, "0 100000 65536", False),
    ],
)
def test_memory_may_be_locked_without_limit_by_a_capability_that_holds_on_the_host(
    tmp_path: Path, case: tuple[Any, ...]
) -> None:
    capabilities, uid_map, may = case
    files = {"/proc/self/status": status(capabilities), "/proc/self/uid_map": uid_map}
    (tmp_path / "proc/self/uid_map").unlink(missing_ok=True)
    found = host.read_process_limits(plant(tmp_path, files))
    assert found is not None
    assert found.may_lock_all is may


# ---- processors and memory -------------------------------------------------------------------------------------------


def test_cpus_governors_nodes_and_balancing_are_read(tmp_path: Path) -> None:
    governors = {
        f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor": name
        for cpu, name in enumerate(("performance", "powersave", "powersave", "performance"))
    }
    files = {"/sys/devices/system/cpu/online": "0-3", "/sys/devices/system/cpu/offline": "4-5\n", **governors}
    found = host.read_processors(plant(tmp_path / "host", {**files, "/proc/sys/kernel/numa_balancing": "1\n"}))
    assert found.governors == {"performance": {0, 3}, "powersave": {1, 2}}
    assert (found.online, found.offline, found.numa_balancing) == (set(range(4)), {4, 5}, 1)
    assert [node.node for node in found.nodes] == [0, 1]
    assert host.read_processors(Tree(root=tmp_path / "none")) == Processors(online=None)


def test_memory_is_read_in_bytes(tmp_path: Path) -> None:
    found = host.read_memory(plant(tmp_path / "host", {}), space(64, 60))
    assert found.total_bytes == 2113568112 * 1024
    assert found.shm == SharedMemory(kind="tmpfs", total_bytes=64, free_bytes=60)
    assert found.transparent == "madvise"
    found = host.read_memory(Tree(root=tmp_path / "none"), refuse)
    assert (found.total_bytes, found.shm, found.transparent) == (None, None, None)
    # What lies at /dev/shm is the last mount there.
    for mounts, kind in {"": None, MOUNTS + "31 1 0:9 / /dev/shm rw - ext4 /dev/sda rw\n": "ext4"}.items():
        found = host.read_memory(plant(tmp_path / "host", {"/proc/self/mountinfo": mounts}), space())
        assert found.shm is not None
        assert found.shm.kind == kind


WHO = who(5, pci="00000000:3B:00.0")
NODE_1 = Place(cpus=frozenset({64}), nodes=frozenset({1}))


def test_memory_on_the_gpu_s_node_or_on_an_unknown_one_passes() -> None:
    for nodes in ({1: 1.0}, {1: 0.96, 0: 0.04}, {}):
        require_local(WHO, nodes, NODE_1)
    require_local(WHO, {0: 1.0}, None)


@pytest.mark.parametrize(("nodes", "part"), [({0: 1.0}, "0 %"), ({0: 0.5, 1: 0.5}, "50 %")], ids=["none", "half"])
def test_memory_elsewhere_is_an_error_that_names_gpu_node_and_part(nodes: dict[int, float], part: str) -> None:
    with pytest.raises(EnvironmentBroken) as caught:
        require_local(WHO, nodes, NODE_1)
    assert in_order(str(caught.value), f"GPU 5 (GPU-5, PCI 00000000:3B:00.0) gpu-07 {part} rank 5 NUMA node 1 numactl")


# ---- the PCIe link, at its best under load ---------------------------------------------------------------------------


def link(**changes: object) -> PcieLink:
    planted = {f"pcie.{name}": value for name, value in changes.items()}
    return PcieLink(FakeNvml({"GPU-1": {**HEALTHY_H100, **planted}}), "GPU-1")


def looked(seen: PcieLink, times: int = 1) -> str:
    for _ in range(times):
        seen()
    return seen.report().get("pcie", "")


def test_a_link_is_reported_at_its_best_and_missing_values_are_named() -> None:
    generations = iter([1, 4, 3])
    assert looked(link()) == "gen5 x16 under load"
    assert looked(link(generation=lambda: next(generations), width=8), 3) == "gen4 x8 under load"
    assert in_order(looked(link(generation=NotAvailable("not supported")), 2), "x16, generation not supported")
    assert in_order(looked(PcieLink(FakeNvml({}), "GPU-1")), "generation lost")
    assert looked(PcieLink(None, None)) == looked(link(), times=0) == "", "nothing is read on cpu"
