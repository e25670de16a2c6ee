"""Criteria of the cluster around the GPUs: inventory, connections, names, clocks, file system, scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.config.declaration import (
    KIB,
    MIB,
    Criterion,
    Section,
    Spec,
)
from pytest_gpucluster.config.value_types import Amount, Duration, Whole
from pytest_gpucluster.metrics.catalogue import Metric


@dataclass(frozen=True, kw_only=True)
class Connectivity:
    """Connections between all nodes before any process group is made; their clocks and names."""

    deadline_seconds: Annotated[
        float,
        Spec(
            key="deadline",
            doc="how long a connection may be silent before it counts as broken",
            kind=Duration(least_seconds=0.1, most_seconds=600),
        ),
    ]
    payload_bytes: Annotated[
        int,
        Spec(
            key="payload",
            doc="what is sent over each connection and back; many packets, so that different MTUs show",
            kind=Amount(least_bytes=KIB, most_bytes=64 * MIB),
        ),
    ]
    clock_samples: Annotated[
        int, Spec(doc="how often each node asks the first one for its time", kind=Whole(least=1, most=10_000))
    ]
    lookup_seconds: Annotated[
        float,
        Spec(
            key="lookup",
            doc="how long to wait for the lookup of a host's name or address",
            kind=Duration(least_seconds=0.1, most_seconds=600),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class SharedFilesystem:
    """Files that every node must see alike. How fast large ones are, `checkpoint` measures."""

    file_bytes: Annotated[
        int,
        Spec(
            key="file",
            doc="what each node writes, and every other node reads",
            kind=Amount(least_bytes=KIB, most_bytes=1024 * MIB),
        ),
    ]
    renames: Annotated[
        int,
        Spec(
            doc="how often a file is replaced by renaming another one, while every node reads it",
            kind=Whole(least=2, most=1_000_000),
        ),
    ]
    small_files: Annotated[
        int, Spec(doc="files of 4 KiB that each node makes, reads and removes", kind=Whole(least=1, most=1_000_000))
    ]


METRICS = (
    Metric(
        name="connectivity.nodes",
        unit="nodes",
        better="higher",
        scope="world",
        recorded="connectivity.pairs has the limit for all of them",
        doc="Nodes that reach every node and are reached by all, over plain TCP.",
    ),
    Metric(
        name="connectivity.pairs",
        unit="%",
        better="higher",
        scope="world",
        doc="Pairs of nodes that reach each other, both directions and each node itself counted, of all pairs.",
    ),
    Metric(
        name="connectivity.connect",
        unit="ms",
        better="lower",
        scope="node",
        doc="The slowest of a node's connections to all nodes: connecting, and one exchange of a few bytes.",
    ),
    Metric(
        name="connectivity.rendezvous",
        unit="ms",
        better="lower",
        scope="node",
        doc="Time that the store through which the ranks have met takes to answer a node.",
    ),
    Metric(
        name="clock.skew",
        unit="ms",
        better="lower",
        scope="node",
        doc="Difference of a node's clock from the median of the other nodes' clocks.",
    ),
    Metric(
        name="dns.forward",
        unit="s",
        better="lower",
        scope="node",
        doc="The slowest lookup of a node's name, of all names, from this node.",
    ),
    Metric(
        name="dns.reverse",
        unit="s",
        better="lower",
        scope="node",
        doc="The slowest lookup of the name of a node's address, of all addresses, from this node.",
    ),
    Metric(
        name="shared_filesystem.verified",
        unit="ratio",
        better="higher",
        scope="node",
        doc="Files of other nodes that a node has read as they were written, of all that it has read.",
    ),
    Metric(
        name="shared_filesystem.visible",
        unit="s",
        better="lower",
        scope="node",
        recorded="what is not seen within 90 s ends the test as a failure",
        doc="The longest time until a node has seen what another one has written to a file that was there before.",
    ),
    Metric(
        name="shared_filesystem.whole_reads",
        unit="%",
        better="higher",
        scope="node",
        doc="Reads that found a whole file, of all reads of a file that is being replaced by renames.",
    ),
    Metric(
        name="shared_filesystem.small_files",
        unit="files/s",
        better="higher",
        scope="node",
        recorded="file systems differ; set a limit by what yours was bought for",
        doc="Files of 4 KiB that one rank of a node makes, reads and removes, over the time, while all nodes do so.",
    ),
    Metric(
        name="shared_filesystem.free",
        unit="%",
        better="higher",
        scope="node",
        doc="Free space of the shared file system, as a node sees it, of all its space.",
    ),
    Metric(
        name="shared_filesystem.free_inodes",
        unit="%",
        better="higher",
        scope="node",
        doc="Free inodes, of all of them; not measured where a file system has no fixed number.",
    ),
    Metric(
        name="slurm.controller",
        unit="s",
        better="lower",
        scope="world",
        doc="Time that Slurm's controller takes to answer scontrol ping.",
    ),
    Metric(
        name="slurm.nodes",
        unit="nodes",
        better="higher",
        scope="world",
        recorded="a node in another state ends the test as an error",
        doc="Nodes of the job that Slurm calls allocated and healthy.",
    ),
    Metric(
        name="scheduler.findings",
        unit="findings",
        better="lower",
        scope="node",
        recorded="a finding ends the test as an error",
        doc="What of the scheduler's promises a node does not keep.",
    ),
)


SECTIONS = (
    Section("connectivity", Connectivity),
    Section("shared_filesystem", SharedFilesystem),
)


CRITERIA = (
    Criterion("inventory", "inventory.ranks"),
    Criterion("connectivity", "connectivity.*"),
    Criterion("dns", "dns.*"),
    Criterion("clock_skew", "clock.skew"),
    Criterion("shared_filesystem", "shared_filesystem.*"),
    Criterion("slurm", "slurm.*"),
    Criterion("slurm.allocation", "scheduler.findings"),
    Criterion("kubernetes", "scheduler.findings"),
)
