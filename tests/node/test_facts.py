"""The facts of a host with the limits of its container."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from each import of_each
from fake_host import HEALTHY, facts, limits, space, status, who

from pytest_gpucluster.node.host import IPC_LOCK, WORKERS

JOB = "/sys/fs/cgroup/system.slice/job"
OWN = len(os.sched_getaffinity(0))


def test_a_host_without_limits_gives_all_that_it_has(tmp_path: Path) -> None:
    found = facts(tmp_path, ranks=8)
    assert (found.ranks, found.cpus, found.nofile, found.tasks) == (8, 128, 1048576, 4194304)
    assert (found.memlock_ratio, found.memory_bytes) == (1.0, 2113568112 * 1024)
    assert found.shm_bytes == 10**12


def test_the_control_group_s_limits_hold_where_they_are_tighter(tmp_path: Path) -> None:
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


def test_a_rank_counts_on_its_part_and_on_no_more_than_it_may_run_on(tmp_path: Path) -> None:
    # The test's own CPUs, of which the planted host may have more.
    assert facts(tmp_path, ranks=128).cpus_per_rank == 1
    assert facts(tmp_path, ranks=256).cpus_per_rank == 0.5
    assert facts(tmp_path, ranks=1).cpus_per_rank == min(128, OWN)


@of_each(
    "case",
    [
        ("unlimited", 0, 1.0),
        (10**15, 0, 1.0),
        (65536, 1 << IPC_LOCK, 1.0),
        (65536, 0, 65536 / (2113568112 * 1024)),
    ],
)
def test_locked_memory_is_a_part_of_what_there_is(tmp_path: Path, case: tuple[Any, ...]) -> None:
    memlock, capabilities, ratio = case
    files = {"/proc/self/limits": limits(memlock=memlock), "/proc/self/status": status(capabilities)}
    assert facts(tmp_path, files).memlock_ratio == pytest.approx(ratio)


def test_workers_without_a_launcher_share_the_node(tmp_path: Path) -> None:
    assert facts(tmp_path, environ={WORKERS: "8"}).ranks == 8
    assert facts(tmp_path, environ={WORKERS: "nonsense"}).ranks == 1


def test_ranks_of_other_nodes_do_not_count(tmp_path: Path) -> None:
    inventory = [who(0), who(1), who(2, node_rank=1), who(3, host="gpu-08")]
    assert facts(tmp_path, inventory=inventory).ranks == 2


def test_the_gpus_of_this_node_are_there_with_their_paths(tmp_path: Path) -> None:
    files = {"/sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n"}
    inventory = [
        who(0, pci="00000000:3B:00.0"),
        who(1, pci="00000000:99:00.0"),
        who(2, node_rank=1, pci="00000000:3B:00.0"),
    ]
    found = facts(tmp_path, files, inventory=inventory).gpus
    assert [(gpu.who.index, gpu.path is None) for gpu in found] == [(0, False), (1, True)]


def test_what_the_kernel_does_not_report_is_unknown(tmp_path: Path) -> None:
    def refuse(path: Path) -> tuple[int, int]:
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
