"""Metrics of what holds the GPUs: the limits of the host, and the link between host and GPU."""

from __future__ import annotations

from pytest_gpucluster.catalogue.metric import Metric

HOST = (
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
