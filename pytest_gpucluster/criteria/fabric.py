"""Fabric criteria: ports, NCCL's environment, collectives, links between GPUs; the search for a culprit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pytest_gpucluster.config.declaration import (
    DAY_SECONDS,
    MB,
    TB,
    Criterion,
    Section,
    Span,
    Spec,
    series,
)
from pytest_gpucluster.config.value_types import Amount, Duration, Ratio, Whole
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """All-reduce between GPUs. Sizes stay as they are written: they are labels of the measurements, too."""

    sizes: Annotated[
        tuple[str, ...],
        Spec(
            doc="what each rank contributes; the limits say from which size on they hold",
            kind=Amount(least_bytes=4, most_bytes=TB, multiple_of=4, as_written=True),
            is_list=True,
        ),
    ]
    latency_sizes: Annotated[
        tuple[str, ...],
        Spec(
            doc="what each rank contributes where the time of one all-reduce is recorded",
            kind=Amount(least_bytes=4, most_bytes=100 * MB, multiple_of=4, as_written=True),
            is_list=True,
        ),
    ]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The collectives other than all-reduce: all_gather, reduce_scatter, all_to_all, broadcast, send_recv. Sizes are
    those of nccl-tests, and labels of the measurements, too."""

    sizes: Annotated[
        tuple[str, ...],
        Spec(
            doc="the larger one of what each rank gives and gets; the limits say from which size on they hold",
            kind=Amount(least_bytes=4, most_bytes=TB, multiple_of=4, as_written=True),
            is_list=True,
        ),
    ]
    latency_sizes: Annotated[
        tuple[str, ...],
        Spec(
            doc="the same where the time of one call is recorded; a part is one element at least",
            kind=Amount(least_bytes=4, most_bytes=100 * MB, multiple_of=4, as_written=True),
            is_list=True,
        ),
    ]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between two GPUs, pair after pair: GPUs - 1 rounds within nodes, nodes - 1 rounds across them."""

    size: Annotated[
        str,
        Spec(
            doc="what one GPU sends to the other at a time; a rank needs twice as much memory",
            kind=Amount(least_bytes=4, most_bytes=TB, multiple_of=4, as_written=True),
        ),
    ]
    round_seconds: Annotated[
        float,
        Spec(
            key="round",
            doc="how long the pairs of a round are measured, both directions included",
            kind=Duration(least_seconds=0.01, most_seconds=600),
        ),
    ]
    repeats: Annotated[
        int,
        Spec(
            doc="most rounds that measure again, alone, what is far behind: a pair, or a rail of two nodes",
            kind=Whole(least=0, most=1000),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """The search for the culprit after a collective has failed: all-reduces in smaller and smaller groups."""

    budget_seconds: Annotated[
        float,
        Spec(
            key="budget",
            doc="most time that the whole run may search, after all of its failures; 0 s: not at all",
            kind=Duration(least_seconds=0, most_seconds=DAY_SECONDS),
        ),
    ]
    probe_seconds: Annotated[
        float,
        Spec(
            key="probe",
            doc="a group that has not finished by then, making it included, has failed",
            kind=Duration(least_seconds=0.5, most_seconds=3600),
        ),
    ]
    size: Annotated[
        str,
        Spec(
            doc="what each rank contributes; the limits for it are floors of a group",
            kind=Amount(least_bytes=4, most_bytes=TB, multiple_of=4, as_written=True),
        ),
    ]
    min_ratio: Annotated[
        float,
        Spec(
            doc="below this part of the busbw that is usual for as many nodes or GPUs, a group is slow",
            kind=Ratio(least=0.01, most=1),
        ),
    ]
    sampling: Sampling


def _collectives(docs: Mapping[str, tuple[str, str, str]]) -> Iterator[Metric]:
    for name, (title, payload, factor) in docs.items():
        yield Metric(
            name=f"nccl.{name}.algbw",
            unit="GB/s",
            better="higher",
            recorded="busbw carries the limit",
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
            recorded="busbw of the slowest rank carries the limit",
            doc="The same from the mean of all ranks' times, as nccl-tests prints it; busbw decides.",
        )
        yield Metric(
            name=f"nccl.{name}.latency",
            unit="us",
            better="lower",
            recorded="no measurement to set a limit by",
            doc=f"Time of one small {name}. The slowest rank decides.",
        )


_SHARED = " times (n - 1) / n"


METRICS = (
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
        recorded="it depends on the cards that were ordered, so set yours",
        doc="Rate of the slowest of these ports, width times speed of its link; of as many as there are GPUs, the "
        "fastest first. Nothing is sent.",
    ),
    Metric(
        name="nccl.environment.findings",
        unit="findings",
        better="lower",
        recorded="the findings themselves decide",
        doc="Variables of NCCL, UCX and CUDA that hurt, or differ between ranks. Recorded; the findings decide.",
    ),
    Metric(
        name="nccl.all_reduce.algbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        recorded="busbw carries the limit; algbw is compared with the link peak only",
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
        recorded="busbw of the slowest rank carries the limit",
        doc="The same from the mean of all ranks' times, as nccl-tests prints it; busbw decides.",
    ),
    Metric(
        name="nccl.all_reduce.latency",
        unit="us",
        better="lower",
        recorded="no measurement to set a limit by",
        doc="Time of one small all-reduce. The slowest rank decides.",
    ),
    Metric(
        name="link.bandwidth",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        doc="One GPU to one other, the slowest link of the rank, without those whose culprit is another rank.",
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


SECTIONS = (
    Section("nccl.all_reduce", AllReduce, attribute="all_reduce"),
    Section("nccl.collectives", Collectives, attribute="collectives"),
    Section("links", Links),
    Section("isolation", Isolation),
)


def _all_reduce(workload: Any, name: str) -> Span:
    """One GPU alone takes one small and the largest size."""
    swept = workload.all_reduce
    count = 2 if "[gpu-" in name else len({*swept.sizes, *swept.latency_sizes})
    return series(swept.sampling, count)


def _collectives_span(workload: Any, name: str) -> Span:
    swept = workload.collectives
    return series(swept.sampling, len({*swept.sizes, *swept.latency_sizes}))


CRITERIA = (
    Criterion("fabric.ports", "fabric.*"),
    Criterion("nccl.environment", "nccl.environment.*"),
    Criterion("links", "link.*"),
    Criterion("nccl.all_reduce", "nccl.all_reduce.*", span=_all_reduce),
    Criterion(
        "nccl.collectives",
        "nccl.all_gather.*",
        "nccl.reduce_scatter.*",
        "nccl.all_to_all.*",
        "nccl.broadcast.*",
        "nccl.send_recv.*",
        span=_collectives_span,
    ),
)
