"""A pod that was given what ranks need passes; what is missing is named with the line to add."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from complaints import in_order
from each import of_each

from pytest_gpucluster.node.allocation import DEFAULT_SHM_BYTES, pod_findings
from pytest_gpucluster.node.host import (
    Cgroup,
    Limit,
    Memory,
    NodeSnapshot,
    ProcessLimits,
    Processors,
    SharedMemory,
    read_node,
)
from pytest_gpucluster.node.sysfs import Tree

GIB = 2**30
LIMIT = Limit(soft=1024, hard=1024)
LIMITS = ProcessLimits(nofile=LIMIT, memlock=Limit(soft=65536, hard=65536), nproc=LIMIT, may_lock_all=True)
SHM = SharedMemory(kind="tmpfs", total_bytes=64 * GIB, free_bytes=64 * GIB)


def memory(shm: SharedMemory | None) -> Memory:
    return Memory(total_bytes=None, shm=shm, transparent=None)


POD = NodeSnapshot(
    host="node-a",
    ranks=8,
    machine="x86_64",
    own_cpus=frozenset({0}),
    cgroup=Cgroup(versions=(2,), memory_bytes=512 * GIB, cpus=64.0),
    memory=memory(SHM),
    processors=Processors(online=None),
    limits=LIMITS,
    hcas=("mlx5_0", "mlx5_1"),
    verbs=("uverbs0", "uverbs1"),
)
NOT_FREE = replace(LIMITS, may_lock_all=False)


def test_a_pod_with_everything_has_no_findings() -> None:
    assert pod_findings(POD, nnodes=2) == pod_findings(replace(POD, cgroup=Cgroup(versions=(2,))), nnodes=2) == []


def test_what_is_not_needed_is_not_demanded() -> None:
    free = replace(NOT_FREE, memlock=Limit(soft=None, hard=None))
    for pod, nnodes in (
        (replace(POD, limits=free), 2),  # unlimited memlock does instead of the capability
        (replace(POD, verbs=()), 1),
        (replace(POD, hcas=(), verbs=(), limits=NOT_FREE), 2),
    ):
        assert pod_findings(pod, nnodes=nnodes) == []


@of_each(
    "case",
    [
        (replace(POD, cgroup=Cgroup()), "resources", "control group"),
        (replace(POD, cgroup=Cgroup(versions=(2,), cpus=4.0)), "resources", "8 ranks 4 CPUs"),
        (replace(POD, memory=memory(None)), "shm", "/dev/shm"),
        (replace(POD, memory=memory(replace(SHM, kind=None))), "shm", "/dev/shm"),
        (replace(POD, memory=memory(replace(SHM, kind="overlay"))), "shm", "/dev/shm overlay"),
        (replace(POD, memory=memory(replace(SHM, total_bytes=DEFAULT_SHM_BYTES))), "shm", "/dev/shm tmpfs, 64 MiB"),
        (replace(POD, verbs=()), "rdma", "2 (mlx5_0, mlx5_1)"),
        (replace(POD, limits=NOT_FREE), "ipc_lock", "IPC_LOCK memlock 65536 B"),
        (replace(POD, limits=None), "ipc_lock", "limits"),
    ],
)
def test_what_is_missing_is_an_error_that_says_what_to_add(case: tuple[Any, ...]) -> None:
    pod, code, words = case
    findings = pod_findings(pod, nnodes=2)
    assert [(one.code, one.kind) for one in findings] == [(f"kubernetes.{code}", "environment")]
    assert in_order(findings[0].found, words)
    assert findings[0].remedy


def test_a_pod_is_read_from_what_the_kernel_shows(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": "30 1 0:30 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
        "31 1 0:31 / /dev/shm rw - tmpfs shm rw\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{32 * GIB}\n",
        "sys/fs/cgroup/cpu.max": "800000 100000\n",
        "sys/class/infiniband/mlx5_0/x": "",
        "dev/infiniband/uverbs0": "",
        "dev/infiniband/rdma_cm": "",
        "proc/self/limits": "Max locked memory  65536  65536  bytes\n"
        "Max open files  1024 1024 files\nMax processes 9 9 x\n",
        "proc/self/status": f"CapEff:\t{1 << 14:016x}\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "dev/shm").mkdir()
    pod = read_node(Tree(root=tmp_path), space=lambda path: (2 * GIB, GIB))
    assert (pod.cgroup.memory_bytes, pod.cgroup.cpus) == (32 * GIB, 8.0)
    assert pod.memory.shm == SharedMemory(kind="tmpfs", total_bytes=2 * GIB, free_bytes=GIB)
    assert (pod.hcas, pod.verbs) == (("mlx5_0",), ("uverbs0",))
    assert pod.limits is not None
    assert pod.limits.may_lock_all


def test_where_the_kernel_shows_nothing_nothing_is_known(tmp_path: Path) -> None:
    pod = read_node(Tree(root=tmp_path), host="node-a")
    assert (pod.cgroup, pod.memory.shm, pod.limits, pod.hcas, pod.verbs) == (Cgroup(), None, None, (), ())
    codes = {one.code for one in pod_findings(pod, nnodes=2)}
    assert codes == {"kubernetes.resources", "kubernetes.shm"}
