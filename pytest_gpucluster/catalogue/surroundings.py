"""Metrics of what surrounds the GPUs: the network between hosts, names, clocks, shared files, the scheduler."""

from __future__ import annotations

from pytest_gpucluster.catalogue.metric import Metric

SURROUNDINGS = (
    Metric(
        name="connectivity.nodes",
        unit="nodes",
        better="higher",
        scope="world",
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
        doc="Nodes of the job that Slurm calls allocated and healthy.",
    ),
    Metric(
        name="scheduler.findings",
        unit="findings",
        better="lower",
        scope="node",
        doc="What of the scheduler's promises a node does not keep.",
    ),
)
