"""The tightest limit on the way up decides, in version 1 and 2, in a container and outside."""

from __future__ import annotations

from pathlib import Path

from fake_host import plant

from pytest_gpucluster.node import host
from pytest_gpucluster.node.host import Cgroup

V2 = "30 1 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "".join(
    f"{number} 1 0:{number} {{root}} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
    for number, name in enumerate(("memory", "cpu,cpuacct", "pids", "cpuset"))
)


def read(root: Path, files: dict[str, str], *, mounts: str = V2, groups: str = "0::/a/b\n") -> Cgroup:
    planted = {"/proc/self/mountinfo": mounts, "/proc/self/cgroup": groups, **files}
    return host.read_cgroup(plant(root, planted, healthy=False))


def test_version_2_is_read_and_unlimited_is_none(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {
            "/sys/fs/cgroup/a/b/memory.max": "68719476736\n",
            "/sys/fs/cgroup/a/b/cpu.max": "750000 100000\n",
            "/sys/fs/cgroup/a/b/pids.max": "max\n",
            "/sys/fs/cgroup/a/b/cpuset.cpus.effective": "4-7\n",
        },
    )
    assert found == Cgroup(versions=(2,), memory_bytes=64 * 2**30, cpus=7.5, tasks=None, cpuset=frozenset({4, 5, 6, 7}))


def test_a_group_above_that_allows_less_decides(tmp_path: Path) -> None:
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


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    files = {"/sys/fs/cgroup/memory.max": "1000\n", "/sys/fs/cgroup/cpu.max": "max 1\n"}
    assert read(tmp_path / "root", files, groups="0::/\n") == Cgroup(versions=(2,), memory_bytes=1000)
    # Its own, dots, and one outside of what is mounted.
    mounts = "30 1 0:27 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    for group in ("/docker/abc", "/../../other", "/elsewhere"):
        found = read(tmp_path / "below", {"/sys/fs/cgroup/pids.max": "77\n"}, mounts=mounts, groups=f"0::{group}\n")
        assert found.tasks == 77


def version_1(root: Path, **changes: str) -> Cgroup:
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


def test_version_1_without_limits_has_none(tmp_path: Path) -> None:
    assert version_1(tmp_path) == Cgroup(versions=(1,), cpuset=frozenset(range(8)))


def test_version_1_s_limits_are_read_from_the_tree_of_each_controller(tmp_path: Path) -> None:
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


def test_a_host_without_control_groups_says_that_nothing_was_seen(tmp_path: Path) -> None:
    assert read(tmp_path, {}, mounts="", groups="") == Cgroup()


def test_what_is_no_limit_is_taken_for_none(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {"/sys/fs/cgroup/a/b/cpu.max": "100000 0\n", "/sys/fs/cgroup/a/b/cpuset.cpus.effective": "some\n"},
    )
    assert found == Cgroup(versions=(2,))
