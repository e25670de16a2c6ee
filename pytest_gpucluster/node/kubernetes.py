"""Checks of a pod's resources: shared memory, CPUs, RDMA, locked memory."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpucluster.metrics.finding import Finding, environment, finding, note
from pytest_gpucluster.node.host import NodeSnapshot

DEFAULT_SHM_BYTES = 64 * 2**20
"""The default of container runtimes. Source: OCI image and runtime tools, `--shm-size`;
containerd mounts /dev/shm with size=65536k."""


def examine(node: NodeSnapshot, *, nnodes: int) -> list[Finding]:
    """Return the findings on a pod.

    Args:
        node: as the pod sees it.
        nnodes: of the whole run: with several, RDMA is required where the node has it.
    """
    return [*_resources(node), *_shm(node), *_rdma(node, nnodes)]


def _resources(pod: NodeSnapshot) -> Iterator[Finding]:
    quota, limit = pod.cgroup.cpus, pod.cgroup.memory_bytes
    if not pod.cgroup.versions:
        yield environment(
            "kubernetes.resources",
            pod.host,
            "no control group can be read, so the pod's limits are unknown",
            allowed="/sys/fs/cgroup is mounted in the pod",
            remedy="mount it read only, as container runtimes do by default",
        )
    elif quota is not None and quota < pod.ranks:
        yield environment(
            "kubernetes.resources",
            pod.host,
            f"{pod.ranks} ranks get the time of {quota:g} CPUs",
            allowed="at least one CPU for each rank",
            remedy="raise resources.limits.cpu of the pod, or remove it: ranks that use it up are throttled",
        )
    else:
        parts = [f"{quota:g} CPUs" if quota is not None else "no CPU limit"]
        parts.append(f"{limit / 2**30:.4g} GiB of memory" if limit is not None else "no memory limit")
        yield note(
            "kubernetes.resources",
            pod.host,
            f"the pod has {' and '.join(parts)}",
            allowed="enough for the ranks",
            remedy="without a memory limit, pods of the node kill each other when it runs out",
        )


def _shm(pod: NodeSnapshot) -> Iterator[Finding]:
    shm = pod.memory.shm
    remedy = "mount an emptyDir with medium: Memory and a sizeLimit at /dev/shm"
    if shm is None or shm.kind is None:
        yield environment("kubernetes.shm", pod.host, "/dev/shm is not mounted", allowed="shared memory", remedy=remedy)
    elif shm.kind != "tmpfs":
        yield environment(
            "kubernetes.shm", pod.host, f"/dev/shm is {shm.kind}, not memory", allowed="tmpfs", remedy=remedy
        )
    elif shm.total_bytes <= DEFAULT_SHM_BYTES:
        yield environment(
            "kubernetes.shm",
            pod.host,
            f"/dev/shm has {shm.total_bytes / 2**20:.4g} MiB, the default of a container",
            allowed="more than that: NCCL and data loader workers share memory there",
            remedy=remedy,
        )


def _rdma(pod: NodeSnapshot, nnodes: int) -> Iterator[Finding]:
    if not pod.hcas:
        return
    if not pod.verbs:
        yield finding(
            "environment" if nnodes > 1 else "note",
            "kubernetes.rdma",
            pod.host,
            f"the node has {len(pod.hcas)} RDMA devices ({', '.join(pod.hcas)}), and the pod has no access: there is "
            "no /dev/infiniband/uverbs*",
            allowed="the node's RDMA devices, in a run of several nodes",
            remedy="request the device plugin's RDMA resource (resources.limits, such as rdma/hca_shared_devices_a: 1)",
        )
        return
    limits = pod.limits
    if limits is None or (not limits.may_lock_all and limits.memlock.soft is not None):
        found = "its limits are unknown" if limits is None else f"memlock is {limits.memlock.soft} B"
        yield environment(
            "kubernetes.ipc_lock",
            pod.host,
            f"the pod has RDMA devices, but its locked memory is limited: it has no IPC_LOCK, and {found}",
            allowed="the capability IPC_LOCK, or unlimited memlock",
            remedy='add it to the container: securityContext: {capabilities: {add: ["IPC_LOCK"]}}',
        )
