"""Host criteria: its limits and set-up, the link to each GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.config.declaration import (
    GB,
    Criterion,
    Section,
    Spec,
)
from pytest_gpucluster.config.value_types import Amount, Choice, Whole
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Host:
    """How the hosts are meant to be set up. With "any" the other setting is noted, and accepted."""

    governor: Annotated[
        str,
        Spec(
            doc="which CPU frequency governor every CPU has, where the kernel shows one",
            kind=Choice(words=("performance", "any")),
        ),
    ]
    numa_balancing: Annotated[
        str,
        Spec(
            doc="whether the kernel may move memory between NUMA nodes by itself",
            kind=Choice(words=("off", "any")),
        ),
    ]
    iommu: Annotated[
        str,
        Spec(
            doc="whether an IOMMU may translate what a GPU sends; passthrough allows one that does not",
            kind=Choice(words=("passthrough", "any")),
        ),
    ]
    acs: Annotated[
        str,
        Spec(
            doc="whether PCIe switch ports above a GPU may redirect (Access Control Services)",
            kind=Choice(words=("off", "any")),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """Copies between pinned host memory and the GPU, each of which is verified."""

    size_bytes: Annotated[
        int,
        Spec(key="size", doc="what one copy moves", kind=Amount(least_bytes=4096, most_bytes=GB, multiple_of=4096)),
    ]
    copies: Annotated[
        int,
        Spec(
            doc="copies one after the other, until all of them are verified; each rank pins this multiple of size",
            kind=Whole(least=1, most=256),
        ),
    ]
    sampling: Sampling


METRICS = (
    Metric(
        name="host.nofile",
        unit="files",
        better="higher",
        scope="node",
        doc="Files that a rank may have open (RLIMIT_NOFILE, the soft limit).",
    ),
    Metric(
        name="host.memlock",
        unit="%",
        better="higher",
        scope="node",
        doc="Memory that a rank may lock (RLIMIT_MEMLOCK), as a part of the node's; 100 % with CAP_IPC_LOCK.",
    ),
    Metric(
        name="host.shm",
        unit="GB",
        better="higher",
        scope="node",
        doc="Free space of /dev/shm, at most what the control group may use, over the ranks of the node.",
    ),
    Metric(
        name="host.cpus",
        unit="CPUs",
        better="higher",
        scope="node",
        doc="CPU time that a rank can count on: that of the control group over the ranks, no more than it may run on.",
    ),
    Metric(
        name="host.tasks",
        unit="tasks",
        better="higher",
        scope="node",
        doc="Processes and threads that may be started, over the ranks of the node.",
    ),
    Metric(
        name="host.memory",
        unit="GB",
        better="higher",
        scope="node",
        recorded="what a job needs of it depends on the job",
        doc="Host memory, at most what the control group may use, over the ranks of the node.",
    ),
    *(
        Metric(
            name=f"host_link.{direction}.bandwidth",
            unit="GB/s",
            better="higher",
            peak="host_gb_per_second",
            doc=f"Bytes from {way}, pinned memory, over time; the label mode says what else went on.",
        )
        for direction, way in (("h2d", "host to GPU"), ("d2h", "GPU to host"))
    ),
)


SECTIONS = (
    Section("host", Host),
    Section("host_link", HostLink),
)


CRITERIA = (
    Criterion("host.limits", "host.*"),
    Criterion("host_link", "host_link.*"),
    Criterion("affinity", "inventory.ranks"),
)
