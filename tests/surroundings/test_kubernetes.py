"""A pod that was given what ranks need passes; what is missing is named with the line to add."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpucluster.host.cgroup import Cgroup
from pytest_gpucluster.host.memory import SharedMemory
from pytest_gpucluster.host.process_limits import Limit, ProcessLimits
from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.surroundings.kubernetes import DEFAULT_SHM_BYTES, Pod, examine, read

GIB = 2**30
LIMIT = Limit(soft=1024, hard=1024)
LIMITS = ProcessLimits(nofile=LIMIT, memlock=Limit(soft=65536, hard=65536), nproc=LIMIT, may_lock_all=True)
SHM = SharedMemory(kind="tmpfs", total_bytes=64 * GIB, free_bytes=64 * GIB)
POD = Pod(
    cgroup=Cgroup(versions=(2,), memory_bytes=512 * GIB, cpus=64.0),
    shm=SHM,
    limits=LIMITS,
    hcas=("mlx5_0", "mlx5_1"),
    verbs=("uverbs0", "uverbs1"),
)
NOT_FREE = replace(LIMITS, may_lock_all=False)


def test_a_pod_with_everything_has_a_note_of_its_resources_only() -> None:
    [finding] = examine("node-a", POD, ranks=8, nnodes=2)
    assert (finding.kind, finding.found) == ("note", "the pod has 64 CPUs and 512 GiB of memory")
    [finding] = examine("node-a", replace(POD, cgroup=Cgroup(versions=(2,))), ranks=8, nnodes=2)
    assert (finding.kind, finding.found) == ("note", "the pod has no limit of CPUs and no limit of memory")


@pytest.mark.parametrize(
    ("pod", "code", "told"),
    [
        pytest.param(
            replace(POD, cgroup=Cgroup()), "kubernetes.resources", "no control group can be looked at", id="no cgroup"
        ),
        pytest.param(
            replace(POD, cgroup=Cgroup(versions=(2,), cpus=4.0)),
            "kubernetes.resources",
            "8 ranks get the time of 4 CPUs",
            id="few CPUs",
        ),
        pytest.param(replace(POD, shm=None), "kubernetes.shm", "/dev/shm is not mounted", id="no shm"),
        pytest.param(
            replace(POD, shm=replace(SHM, kind=None)),
            "kubernetes.shm",
            "/dev/shm is not mounted",
            id="shm of the image",
        ),
        pytest.param(
            replace(POD, shm=replace(SHM, kind="overlay")),
            "kubernetes.shm",
            "/dev/shm is overlay, and no memory",
            id="shm on disk",
        ),
        pytest.param(
            replace(POD, shm=replace(SHM, total_bytes=DEFAULT_SHM_BYTES)),
            "kubernetes.shm",
            "/dev/shm has 64 MiB",
            id="the default shm",
        ),
        pytest.param(
            replace(POD, verbs=()),
            "kubernetes.rdma",
            "the node has 2 RDMA devices (mlx5_0, mlx5_1), and the pod may open none",
            id="no RDMA resource",
        ),
        pytest.param(
            replace(POD, limits=NOT_FREE),
            "kubernetes.ipc_lock",
            "it has no IPC_LOCK, and memlock is 65536 B",
            id="no IPC_LOCK",
        ),
        pytest.param(
            replace(POD, limits=None), "kubernetes.ipc_lock", "and its limits are not known", id="unknown limits"
        ),
    ],
)
def test_what_is_missing_is_an_error_that_says_what_to_add(pod: Pod, code: str, told: str) -> None:
    findings = [one for one in examine("node-a", pod, ranks=8, nnodes=2) if one.kind != "note"]
    assert [(one.code, one.kind) for one in findings] == [(code, "environment")]
    assert told in findings[0].found
    assert findings[0].remedy


def test_unlimited_memlock_does_instead_of_the_capability() -> None:
    free = replace(NOT_FREE, memlock=Limit(soft=None, hard=None))
    assert all(one.kind == "note" for one in examine("node-a", replace(POD, limits=free), ranks=8, nnodes=2))


def test_on_one_node_rdma_is_not_needed() -> None:
    assert all(one.kind == "note" for one in examine("node-a", replace(POD, verbs=()), ranks=8, nnodes=1))


def test_a_node_without_rdma_devices_needs_neither_them_nor_ipc_lock() -> None:
    plain = replace(POD, hcas=(), verbs=(), limits=NOT_FREE)
    assert all(one.kind == "note" for one in examine("node-a", plain, ranks=8, nnodes=2))


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
    pod = read(Tree(root=tmp_path), lambda path: (2 * GIB, GIB))
    assert (pod.cgroup.memory_bytes, pod.cgroup.cpus) == (32 * GIB, 8.0)
    assert pod.shm == SharedMemory(kind="tmpfs", total_bytes=2 * GIB, free_bytes=GIB)
    assert (pod.hcas, pod.verbs) == (("mlx5_0",), ("uverbs0",))
    assert pod.limits is not None
    assert pod.limits.may_lock_all


def test_where_the_kernel_shows_nothing_nothing_is_known(tmp_path: Path) -> None:
    pod = read(Tree(root=tmp_path))
    assert pod == Pod(cgroup=Cgroup(), shm=None, limits=None, hcas=(), verbs=())
    codes = {one.code for one in examine("node-a", pod, ranks=1, nnodes=2) if one.kind == "environment"}
    assert codes == {"kubernetes.resources", "kubernetes.shm"}
