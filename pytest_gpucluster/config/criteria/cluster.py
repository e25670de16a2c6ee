"""Criteria of the cluster around the GPUs: inventory, connections, names, clocks, file system, scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpucluster.config.declaration import KIB, MIB, Criterion, Section, value
from pytest_gpucluster.config.value_types import Amount, Duration, Whole
from pytest_gpucluster.metrics.catalogue import read_metrics


@dataclass(frozen=True, kw_only=True)
class Connectivity:
    """Connections between all nodes before any process group is made; their clocks and names."""

    deadline_seconds: float = value(
        "how long a connection may be silent before it counts as broken", Duration(0.1, 600)
    )
    payload_bytes: int = value(
        "what is sent over each connection and back; many packets, so that different MTUs show", Amount(KIB, 64 * MIB)
    )
    clock_samples: int = value("how often each node asks the first one for its time", Whole(1, 10000))
    lookup_seconds: float = value("how long to wait for the lookup of a host's name or address", Duration(0.1, 600))


@dataclass(frozen=True, kw_only=True)
class SharedFilesystem:
    """Files that every node must see alike. How fast large ones are, `checkpoint` measures."""

    file_bytes: int = value("what each node writes, and every other node reads", Amount(KIB, 1024 * MIB))
    renames: int = value(
        "how often a file is replaced by renaming another one, while every node reads it", Whole(2, 1_000_000)
    )
    small_files: int = value("files of 4 KiB that each node makes, reads and removes", Whole(1, 1_000_000))


METRICS = read_metrics("""
connectivity.nodes: nodes, higher, world
    Nodes that reach every node and are reached by all, over plain TCP.
    recorded: connectivity.pairs has the limit for all of them
slurm.nodes: nodes, higher, world
    Nodes of the job that Slurm calls allocated and healthy.
    recorded: a node in another state ends the test as an error
connectivity.pairs: %, higher, world
    Pairs of nodes that reach each other, both directions and each node itself counted, of all pairs.
connectivity.connect: ms, lower, node
    The slowest of a node's connections to all nodes: connecting, and one exchange of a few bytes.
connectivity.rendezvous: ms, lower, node
    Time that the store through which the ranks have met takes to answer a node.
clock.skew: ms, lower, node
    Difference of a node's clock from the median of the other nodes' clocks.
dns.forward: s, lower, node
    The slowest lookup of a node's name, of all names, from this node.
dns.reverse: s, lower, node
    The slowest lookup of the name of a node's address, of all addresses, from this node.
shared_filesystem.visible: s, lower, node
    The longest time until a node has seen what another one has written to a file that was there before.
    recorded: what is not seen within 90 s ends the test as a failure
shared_filesystem.verified: ratio, higher, node
    Files of other nodes that a node has read as they were written, of all that it has read.
shared_filesystem.whole_reads: %, higher, node
    Reads that found a whole file, of all reads of a file that is being replaced by renames.
shared_filesystem.free: %, higher, node
    Free space of the shared file system, as a node sees it, of all its space.
shared_filesystem.free_inodes: %, higher, node
    Free inodes, of all of them; not measured where a file system has no fixed number.
shared_filesystem.small_files: files/s, higher, node
    Files of 4 KiB that one rank of a node makes, reads and removes, over the time, while all nodes do so.
    recorded: file systems differ; set a limit by what yours was bought for
slurm.controller: s, lower, world
    Time that Slurm's controller takes to answer scontrol ping.
scheduler.findings: findings, lower, node
    What of the scheduler's promises a node does not keep.
    recorded: a finding ends the test as an error
""")


SECTIONS = (
    Section("connectivity", Connectivity, metrics=("connectivity.*", "dns.*", "clock.*")),
    Section("shared_filesystem", SharedFilesystem, metrics=("shared_filesystem.*",)),
)


CRITERIA = (
    Criterion("inventory", "inventory.ranks"),
    Criterion("connectivity", "connectivity.*"),
    Criterion("dns", "dns.*"),
    Criterion("clock_skew", "clock.skew"),
    Criterion("shared_filesystem", "shared_filesystem.*", group="storage"),
    Criterion("slurm", "slurm.*"),
    Criterion("slurm.allocation", "scheduler.findings"),
    Criterion("kubernetes", "scheduler.findings"),
)
