"""Metrics of what connects the GPUs: collectives and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_gpucluster.catalogue.metric import Metric


def _collectives(docs: Mapping[str, tuple[str, str, str]]) -> Iterator[Metric]:
    for name, (title, payload, factor) in docs.items():
        yield Metric(
            name=f"nccl.{name}.algbw",
            unit="GB/s",
            better="higher",
            doc=f"{title}: {payload}, over the time of a call.",
        )
        yield Metric(
            name=f"nccl.{name}.busbw",
            unit="GB/s",
            better="higher",
            # No algorithm sends less than this formula counts: a rank must get, or give, all of it over its links.
            peak="link_gb_per_second",
            doc=f"{title} algbw{factor}, as nccl-tests defines it. The slowest rank decides.",
        )
        yield Metric(
            name=f"nccl.{name}.average_busbw",
            unit="GB/s",
            better="higher",
            doc="The same from the mean of all ranks' times, as nccl-tests prints it; busbw decides.",
        )
        yield Metric(
            name=f"nccl.{name}.latency",
            unit="us",
            better="lower",
            doc=f"Time of one small {name}. The slowest rank decides.",
        )


_SHARED = " times (n - 1) / n"

FABRIC = (
    Metric(
        name="fabric.active_ports",
        unit="ports",
        better="higher",
        scope="node",
        doc="InfiniBand or RoCE ports of a node that NCCL may use and that carry data.",
    ),
    Metric(
        name="fabric.port_rate",
        unit="Gb/s",
        better="higher",
        scope="node",
        doc="Rate of the slowest of these ports, width times speed of its link; of as many as there are GPUs, the "
        "fastest first. Nothing is sent.",
    ),
    Metric(
        name="nccl.environment.findings",
        unit="findings",
        better="lower",
        doc="Variables of NCCL, UCX and CUDA that hurt, or differ between ranks. Recorded; the findings decide.",
    ),
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
    Metric(
        name="link.bandwidth",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        doc="One GPU to one other, the slowest link of the rank, but for those that another rank is to blame for.",
    ),
    Metric(
        name="link.ratio_to_median",
        unit="ratio",
        better="higher",
        doc="This bandwidth over the median of all other pairs, in each direction.",
    ),
    *_collectives(
        {
            "all_gather": ("All-gather", "bytes of all ranks' parts", _SHARED),
            "reduce_scatter": ("Reduce-scatter", "bytes of the whole that is summed up", _SHARED),
            "all_to_all": ("All-to-all", "bytes that a rank gives to all ranks", _SHARED),
            "broadcast": ("Broadcast", "bytes of the first rank", ""),
            "send_recv": ("Ring of send and recv", "bytes that a rank sends to the next one", ""),
        }
    ),
)
