"""Host criteria: its limits and set-up, the link to each GPU."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpucluster.config.declaration import GB, KIB, Criterion, Section, value
from pytest_gpucluster.config.value_types import Amount, Choice, Whole
from pytest_gpucluster.metrics.catalogue import read_metrics
from pytest_gpucluster.metrics.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Host:
    """How the hosts are meant to be set up. With "any" the other setting is noted, and accepted."""

    governor: str = value(
        "which CPU frequency governor every CPU has, where the kernel shows one", Choice(("performance", "any"))
    )
    numa_balancing: str = value(
        "whether the kernel may move memory between NUMA nodes by itself", Choice(("off", "any"))
    )
    iommu: str = value(
        "whether an IOMMU may translate what a GPU sends; passthrough allows one that does not",
        Choice(("passthrough", "any")),
    )
    acs: str = value(
        "whether PCIe switch ports above a GPU may redirect (Access Control Services)", Choice(("off", "any"))
    )


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """Copies between pinned host memory and the GPU, each of which is verified."""

    size_bytes: int = value("what one copy moves", Amount(4 * KIB, GB, multiple_of=4096))
    copies: int = value(
        "copies one after the other, until all of them are verified; each rank pins this multiple of size",
        Whole(1, 256),
    )
    sampling: Sampling


METRICS = read_metrics("""
host.nofile: files, higher, node
    Files that a rank may have open (RLIMIT_NOFILE, the soft limit).
host.memlock: %, higher, node
    Memory that a rank may lock (RLIMIT_MEMLOCK), as a part of the node's; 100 % with CAP_IPC_LOCK.
host.shm: GB, higher, node
    Free space of /dev/shm, at most what the control group may use, over the ranks of the node.
host.memory: GB, higher, node
    Host memory, at most what the control group may use, over the ranks of the node.
    recorded: what a job needs of it depends on the job
host.cpus: CPUs, higher, node
    CPU time that a rank can count on: that of the control group over the ranks, no more than it may run on.
host.tasks: tasks, higher, node
    Processes and threads that may be started, over the ranks of the node.
host_link.h2d.bandwidth: GB/s, higher, peak host_gb_per_second
    Bytes from host to GPU, pinned memory, over time; the label mode says what else went on.
host_link.d2h.bandwidth: GB/s, higher, peak host_gb_per_second
    Bytes from GPU to host, pinned memory, over time; the label mode says what else went on.
""")


SECTIONS = (Section("host", Host, metrics=("host.*",)), Section("host_link", HostLink, metrics=("host_link.*",)))


CRITERIA = (
    Criterion("host.limits", "host.*"),
    Criterion("host_link", "host_link.*", group="computing"),
    Criterion("affinity", "inventory.ranks"),
)
