"""Metrics of what connects the GPUs: collectives and links."""

from __future__ import annotations

from pytest_gpucluster.catalogue.metric import Metric

FABRIC = (
    Metric(
        name="nccl.all_reduce.algbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        doc="All-reduce payload bytes over time: no rank takes in its payload faster than its links.",
    ),
    Metric(
        name="nccl.all_reduce.busbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        # The ring formula counts bytes that in-switch reduction and trees never send.
        peak_is_bound=False,
        doc="All-reduce algbw times 2 (n - 1) / n, as nccl-tests defines it. The slowest rank decides.",
    ),
    Metric(
        name="nccl.all_reduce.average_busbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        peak_is_bound=False,
        doc="The same from the mean of all ranks' times, as nccl-tests prints it; busbw decides.",
    ),
    Metric(
        name="nccl.all_reduce.latency",
        unit="us",
        better="lower",
        doc="Time of one small all-reduce. The slowest rank decides.",
    ),
)
