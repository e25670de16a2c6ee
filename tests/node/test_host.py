"""The facts of a host, as the kernel shows them."""

import os
from pathlib import Path

import pytest
from complaints import in_order
from each import of_each
from fake_host import HEALTHY, MOUNTS, facts, limits, plant, space, status, who

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.files import mount_of, read_mounts
from pytest_gpucluster.metrics.finding import Identity
from pytest_gpucluster.node import host, kernel_log, pci
from pytest_gpucluster.node.health import counters
from pytest_gpucluster.node.host import IPC_LOCK, WORKERS, Cgroup, Limit, Processors, SharedMemory
from pytest_gpucluster.node.host_checks import Place, own_place, require_local
from pytest_gpucluster.node.pci import unlisted_gpus
from pytest_gpucluster.node.sysfs import PCI_DEVICES, Tree

JOB = "/sys/fs/cgroup/system.slice/job"
OWN = len(os.sched_getaffinity(0))


def test_a_host_without_limits_gives_all_that_it_has(tmp_path):
    found = facts(tmp_path, ranks=8)
    assert (found.ranks, found.cpus, found.nofile, found.tasks) == (8, 128, 1048576, 4194304)
    assert (found.memlock_ratio, found.memory_bytes) == (1.0, 2113568112 * 1024)
    assert found.shm_bytes == 10**12


def test_the_control_group_s_limits_hold_where_they_are_tighter(tmp_path):
    found = facts(
        tmp_path,
        {
            f"{JOB}/memory.max": "64000000000\n",
            f"{JOB}/cpu.max": "1200000 100000\n",
            f"{JOB}/pids.max": "512\n",
            f"{JOB}/cpuset.cpus.effective": "0-31\n",
        },
    )
    assert (found.memory_bytes, found.cpus, found.tasks) == (64 * 10**9, 12, 512)
    assert found.shm_bytes == 64 * 10**9, "files there count as memory of the group"
    less = {f"{JOB}/cpuset.cpus.effective": "0-2\n", f"{JOB}/cpu.max": "900000 100000"}
    assert facts(tmp_path / "cpuset", less).cpus == 3, "the cpuset is less than the quota"
    for nofile, most in (("unlimited", 1048576), (4096, 4096)):
        assert facts(tmp_path / str(nofile), {"/proc/self/limits": limits(nofile=nofile)}).nofile == most


def test_a_rank_counts_on_its_part_and_on_no_more_than_it_may_run_on(tmp_path):
    # The test's own CPUs, of which the planted host may have more.
    assert facts(tmp_path, ranks=128).cpus_per_rank == 1
    assert facts(tmp_path, ranks=256).cpus_per_rank == 0.5
    assert facts(tmp_path, ranks=1).cpus_per_rank == min(128, OWN)


@of_each(
    "case",
    [("unlimited", 0, 1.0), (10**15, 0, 1.0), (65536, 1 << IPC_LOCK, 1.0), (65536, 0, 65536 / (2113568112 * 1024))],
)
def test_locked_memory_is_a_part_of_what_there_is(tmp_path, case):
    memlock, capabilities, ratio = case
    files = {"/proc/self/limits": limits(memlock=memlock), "/proc/self/status": status(capabilities)}
    assert facts(tmp_path, files).memlock_ratio == pytest.approx(ratio)


def test_workers_without_a_launcher_share_the_node(tmp_path):
    assert facts(tmp_path, environ={WORKERS: "8"}).ranks == 8
    assert facts(tmp_path, environ={WORKERS: "nonsense"}).ranks == 1


def test_ranks_of_other_nodes_do_not_count(tmp_path):
    inventory = [who(0), who(1), who(2, node_rank=1), who(3, host="gpu-08")]
    assert facts(tmp_path, inventory=inventory).ranks == 2


def test_the_gpus_of_this_node_are_there_with_their_paths(tmp_path):
    files = {"/sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n"}
    inventory = [
        who(0, pci="00000000:3B:00.0"),
        who(1, pci="00000000:99:00.0"),
        who(2, node_rank=1, pci="00000000:3B:00.0"),
    ]
    found = facts(tmp_path, files, inventory=inventory).gpus
    assert [(gpu.who.index, gpu.path is None) for gpu in found] == [(0, False), (1, True)]


def test_what_the_kernel_does_not_report_is_unknown(tmp_path):
    def refuse(path):
        raise FileNotFoundError(path)

    without = {
        "limits": (("/proc/self/limits",), ("nofile", "memlock_ratio", "tasks")),
        "memory": (("/proc/meminfo",), ("memlock_ratio", "memory_bytes")),
        "cpus": (tuple(name for name in HEALTHY if "cpu" in name), ("cpus", "cpus_per_rank")),
    }
    for folder, (missing, unknown) in without.items():
        found = facts(tmp_path / folder, dict.fromkeys(missing))
        assert [getattr(found, name) for name in unknown] == [None] * len(unknown)
    assert facts(tmp_path / "refused", space=refuse).shm_bytes is None
    assert facts(tmp_path / "free", space=space(100, 40)).shm_bytes == 40


V2 = "30 1 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "".join(
    f"{number} 1 0:{number} {{root}} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
    for number, name in enumerate(("memory", "cpu,cpuacct", "pids", "cpuset"))
)


def read(root, files, *, mounts=V2, groups="0::/a/b\n"):
    planted = {"/proc/self/mountinfo": mounts, "/proc/self/cgroup": groups, **files}
    return host.read_cgroup(plant(root, planted, healthy=False))


def test_a_group_above_that_allows_less_decides(tmp_path):
    found = read(
        tmp_path,
        {
            "/sys/fs/cgroup/a/b/memory.max": "max\n",
            "/sys/fs/cgroup/a/memory.max": "1000\n",
            "/sys/fs/cgroup/a/b/pids.max": "500\n",
            "/sys/fs/cgroup/a/pids.max": "100\n",
            "/sys/fs/cgroup/a/cpu.max": "100000 100000\n",
        },
    )
    assert (found.memory_bytes, found.tasks, found.cpus) == (1000, 100, 1.0)


def test_in_a_container_the_mount_is_the_group(tmp_path):
    files = {"/sys/fs/cgroup/memory.max": "1000\n", "/sys/fs/cgroup/cpu.max": "max 1\n"}
    assert read(tmp_path / "root", files, groups="0::/\n") == Cgroup(versions=(2,), memory_bytes=1000)
    # Its own, dots, and one outside of what is mounted.
    mounts = "30 1 0:27 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    for group in ("/docker/abc", "/../../other", "/elsewhere"):
        found = read(tmp_path / "below", {"/sys/fs/cgroup/pids.max": "77\n"}, mounts=mounts, groups=f"0::{group}\n")
        assert found.tasks == 77


def version_1(root, **changes):
    files = {
        "memory/job/memory.limit_in_bytes": "9223372036854771712\n",
        "cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "pids/job/pids.max": "max\n",
        "cpuset/job/cpuset.cpus": "0-7\n",
        **changes,
    }
    groups = "9:name=systemd:/job\n4:memory:/job\n3:cpu,cpuacct:/job\n2:pids:/job\n1:cpuset:/job\n"
    planted = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()}
    return read(root, planted, mounts=V1.format(root="/"), groups=groups)


def test_version_1_without_limits_has_none(tmp_path):
    assert version_1(tmp_path) == Cgroup(versions=(1,), cpuset=frozenset(range(8)))


def test_version_1_s_limits_are_read_from_the_tree_of_each_controller(tmp_path):
    found = version_1(
        tmp_path,
        **{
            "memory/job/memory.limit_in_bytes": "1000000\n",
            "memory/memory.limit_in_bytes": "900000\n",
            "cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
            "pids/job/pids.max": "64\n",
            "cpuset/job/cpuset.effective_cpus": "0-3\n",
            "pids/memory.limit_in_bytes": "1\n",  # of another controller: says nothing there
        },
    )
    assert found == Cgroup(versions=(1,), memory_bytes=900000, cpus=2.5, tasks=64, cpuset=frozenset(range(4)))


def test_what_is_no_limit_is_taken_for_none(tmp_path):
    found = read(
        tmp_path,
        {"/sys/fs/cgroup/a/b/cpu.max": "100000 0\n", "/sys/fs/cgroup/a/b/cpuset.cpus.effective": "some\n"},
    )
    assert found == Cgroup(versions=(2,))


def refuse(path):
    raise FileNotFoundError(path)


# ---- files below a root ----------------------------------------------------------------------------------------------


def test_numbers_and_lists_are_read_and_anything_else_is_none(tmp_path):
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


def test_soft_and_hard_limits_are_read_and_unlimited_is_none(tmp_path):
    found = host.read_process_limits(
        plant(tmp_path, {"/proc/self/limits": limits(nofile=1024, memlock=65536, nproc=4096)})
    )
    assert (found.nofile, found.memlock) == (Limit(soft=1024, hard=1048576), Limit(soft=65536, hard=65536))
    assert (found.nproc.soft, found.max_files, found.max_tasks) == (4096, 1048576, 4194304)
    found = host.read_process_limits(plant(tmp_path, {"/proc/self/limits": limits(nofile="unlimited")}))
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
def test_memory_may_be_locked_without_limit_by_a_capability_that_holds_on_the_host(tmp_path, case):
    capabilities, uid_map, may = case
    files = {"/proc/self/status": status(capabilities), "/proc/self/uid_map": uid_map}
    (tmp_path / "proc/self/uid_map").unlink(missing_ok=True)
    found = host.read_process_limits(plant(tmp_path, files))
    assert found.may_lock_all is may


# ---- processors and memory -------------------------------------------------------------------------------------------


def test_cpus_governors_nodes_and_balancing_are_read(tmp_path):
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


def test_memory_is_read_in_bytes(tmp_path):
    found = host.read_memory(plant(tmp_path / "host", {}), space(64, 60))
    assert found.total_bytes == 2113568112 * 1024
    assert found.shm == SharedMemory(kind="tmpfs", total_bytes=64, free_bytes=60)
    assert found.transparent == "madvise"
    found = host.read_memory(Tree(root=tmp_path / "none"), refuse)
    assert (found.total_bytes, found.shm, found.transparent) == (None, None, None)
    # What lies at /dev/shm is the last mount there.
    for mounts, kind in {"": None, MOUNTS + "31 1 0:9 / /dev/shm rw - ext4 /dev/sda rw\n": "ext4"}.items():
        found = host.read_memory(plant(tmp_path / "host", {"/proc/self/mountinfo": mounts}), space())
        assert found.shm.kind == kind


WHO = who(5, pci="00000000:3B:00.0")
NODE_1 = Place(cpus=frozenset({64}), nodes=frozenset({1}))


def test_memory_on_the_gpu_s_node_or_on_an_unknown_one_passes():
    for nodes in ({1: 1.0}, {1: 0.96, 0: 0.04}, {}):
        require_local(WHO, nodes, NODE_1)
    require_local(WHO, {0: 1.0}, None)


@pytest.mark.parametrize(("nodes", "part"), [({0: 1.0}, "0 %"), ({0: 0.5, 1: 0.5}, "50 %")], ids=["none", "half"])
def test_memory_elsewhere_is_an_error_that_names_gpu_node_and_part(nodes, part):
    with pytest.raises(EnvironmentBroken) as caught:
        require_local(WHO, nodes, NODE_1)
    assert in_order(str(caught.value), f"GPU 5 (GPU-5, PCI 00000000:3B:00.0) gpu-07 {part} rank 5 NUMA node 1 numactl")


def test_this_host_can_be_read(tmp_path):
    facts, here, (total, free) = host.collect_node([who(0)], rank=0), own_place(), host.space(tmp_path)
    assert facts.own_cpus == here.cpus == os.sched_getaffinity(0)
    assert facts.cpus
    assert here.nodes
    assert host.read_memory(Tree()).total_bytes
    assert 0 <= free <= total
    assert host.read_process_limits(Tree())
    assert host.read_processors(Tree()).online
    proc = mount_of(Path("/proc"), read_mounts())
    assert proc.kind == "proc"
    assert "/proc" in {mount.point for mount in Tree().mounts()}
    assert not Tree().has(PCI_DEVICES) or isinstance(unlisted_gpus(()), tuple)
    assert str(pci.read_peer_memory(Tree()))
    log = kernel_log.read()
    assert bool(log.why_not) != bool(log.source)
    taken = counters.read(counters.Sources(gpu=Identity(host="here"), of_node=True))
    assert ("infiniband" in taken.missing) != any(name.startswith("infiniband.") for name in taken.values)
