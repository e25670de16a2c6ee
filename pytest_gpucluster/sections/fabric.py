"""Sections about what connects the GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.sections.spec import DAY_SECONDS, MB, TB, Spec
from pytest_gpucluster.workload_values import Amount, Duration, Ratio, Whole


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
class Isolation:
    """The search for who is to blame after a collective has failed: all-reduces in smaller and smaller groups."""

    budget_seconds: Annotated[
        float,
        Spec(
            key="budget",
            doc="so long the whole run may search, after all of its failures together; 0 s: not at all",
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


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The collectives beside all-reduce: all_gather, reduce_scatter, all_to_all, broadcast, send_recv. Sizes are those
    of nccl-tests, and labels of the measurements, too."""

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
            doc="so long the pairs of a round are measured, both directions together",
            kind=Duration(least_seconds=0.01, most_seconds=600),
        ),
    ]
    repeats: Annotated[
        int,
        Spec(
            doc="so many rounds at most measure once more what is far behind, alone: a pair, or a rail of two nodes",
            kind=Whole(least=0, most=1000),
        ),
    ]
