"""Fabric criteria: ports, NCCL's environment, collectives, links between GPUs; the search for a culprit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.config.declaration import DAY_SECONDS, MB, TB, Criterion, Section, Span, series, value
from pytest_gpucluster.config.value_types import Amount, Duration, Ratio, Whole
from pytest_gpucluster.metrics.catalogue import read_metrics
from pytest_gpucluster.metrics.sampling import Sampling

_PAYLOAD = Amount(4, TB, multiple_of=4, as_written=True)
_SMALL = Amount(4, 100 * MB, multiple_of=4, as_written=True)


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """All-reduce between GPUs. Sizes stay as they are written: they are labels of the measurements, too."""

    sizes: tuple[str, ...] = value("what each rank contributes; the limits say from which size on they hold", _PAYLOAD)
    latency_sizes: tuple[str, ...] = value(
        "what each rank contributes where the time of one all-reduce is recorded", _SMALL
    )
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The collectives other than all-reduce: all_gather, reduce_scatter, all_to_all, broadcast, send_recv. Sizes are
    those of nccl-tests, and labels of the measurements, too."""

    sizes: tuple[str, ...] = value(
        "the larger one of what each rank gives and gets; the limits say from which size on they hold", _PAYLOAD
    )
    latency_sizes: tuple[str, ...] = value(
        "the same where the time of one call is recorded; a part is one element at least", _SMALL
    )
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between two GPUs, pair after pair: GPUs - 1 rounds within nodes, nodes - 1 rounds across them."""

    size: str = value(
        "what one GPU sends to the other at a time; a rank needs twice as much memory",
        Amount(8, TB, multiple_of=8, as_written=True),
    )
    round_seconds: float = value(
        "how long the pairs of a round are measured, both directions included", Duration(0.01, 600)
    )
    repeats: int = value(
        "most rounds that measure again, alone, what is far behind: a pair, or a rail of two nodes", Whole(0, 1000)
    )


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """The search for the culprit after a collective has failed: all-reduces in smaller and smaller groups."""

    budget_seconds: float = value(
        "most time that the whole run may search, after all of its failures; 0 s: not at all", Duration(0, DAY_SECONDS)
    )
    probe_seconds: float = value(
        "a group that has not finished by then, making it included, has failed", Duration(0.5, 3600)
    )
    size: str = value("what each rank contributes; the limits for it are floors of a group", _PAYLOAD)
    min_ratio: float = value(
        "below this part of the busbw that is usual for as many nodes or GPUs, a group is slow",
        Ratio(0.01, 1),
        key="min_ratio",
    )
    sampling: Sampling


_COLLECTIVES = {
    "all_gather": ("All-gather", "bytes of all ranks' parts", " times (n - 1) / n"),
    "reduce_scatter": ("Reduce-scatter", "bytes of the whole that is summed up", " times (n - 1) / n"),
    "all_to_all": ("All-to-all", "bytes that a rank gives to all ranks", " times (n - 1) / n"),
    "broadcast": ("Broadcast", "bytes of the first rank", ""),
    "send_recv": ("Ring of send and recv", "bytes that a rank sends to the next one", ""),
}
"""Collective -> its title, what its payload is, and the factor of its bus bandwidth."""


# No algorithm sends less than the formula of busbw counts: a rank must get, or give, all of it over its links. But that
# of all-reduce counts bytes that in-switch reduction and trees never send: its peak is no bound.
_COLLECTIVE = """
nccl.{name}.algbw: GB/s, higher, group
    {title}: {payload}, over the time of a call.
    recorded: busbw carries the limit
nccl.{name}.busbw: GB/s, higher, group, peak link_gb_per_second
    {title} algbw{factor}, as nccl-tests defines it. The slowest rank decides.
nccl.{name}.average_busbw: GB/s, higher, group
    The same from the mean of all ranks' times, as nccl-tests prints it; busbw decides.
    recorded: busbw of the slowest rank carries the limit
nccl.{name}.latency: us, lower, group
    Time of one small {name}. The slowest rank decides.
    recorded: no measurement to set a limit by
"""

METRICS = (
    *read_metrics("""
fabric.active_ports: ports, higher, node
    InfiniBand or RoCE ports of a node that NCCL may use and that carry data.
fabric.port_rate: Gb/s, higher, node
    Rate of the slowest of these ports, width times speed of its link; of as many as there are GPUs, the fastest
    first. Nothing is sent.
    recorded: it depends on the cards that were ordered, so set yours
nccl.environment.findings: findings, lower
    Variables of NCCL, UCX and CUDA that hurt, or differ between ranks. Recorded; the findings decide.
    recorded: the findings themselves decide
nccl.all_reduce.algbw: GB/s, higher, group, peak link_gb_per_second
    All-reduce payload bytes over time: no rank takes in its payload faster than its links.
    recorded: busbw carries the limit; algbw is compared with the link peak only
link.bandwidth: GB/s, higher, peak link_gb_per_second
    One GPU to one other, the slowest link of the rank, without those whose culprit is another rank.
nccl.all_reduce.busbw: GB/s, higher, group, peak link_gb_per_second, no bound
    All-reduce algbw times 2 (n - 1) / n, as nccl-tests defines it. The slowest rank decides.
nccl.all_reduce.average_busbw: GB/s, higher, group, peak link_gb_per_second, no bound
    The same from the mean of all ranks' times, as nccl-tests prints it; busbw decides.
    recorded: busbw of the slowest rank carries the limit
nccl.all_reduce.latency: us, lower, group
    Time of one small all-reduce. The slowest rank decides.
    recorded: no measurement to set a limit by
link.ratio_to_median: ratio, higher
    This bandwidth over the median of all other pairs, in each direction.
"""),
    *(
        metric
        for name, (title, payload, factor) in _COLLECTIVES.items()
        for metric in read_metrics(_COLLECTIVE.format(name=name, title=title, payload=payload, factor=factor))
    ),
)


SECTIONS = (
    Section("nccl.all_reduce", AllReduce, attribute="all_reduce", metrics=("nccl.*", "scaling.busbw_retention")),
    Section("nccl.collectives", Collectives, attribute="collectives", metrics=("nccl.*", "scaling.busbw_retention")),
    Section("links", Links, metrics=("link.*",)),
    Section("isolation", Isolation, metrics=()),
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
    Criterion("links", "link.*", group="communication"),
    Criterion("nccl.all_reduce", "nccl.all_reduce.*", group="communication", span=_all_reduce),
    Criterion(
        "nccl.collectives", *(f"nccl.{name}.*" for name in _COLLECTIVES), group="communication", span=_collectives_span
    ),
)
