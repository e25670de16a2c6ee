"""Sections about a GPU by itself: matmul, memory, health."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.sections.spec import MB, TB, Spec
from pytest_gpucluster.workload_values import Amount, Choice, Duration, Ratio, Sizes, Whole

WEEK_SECONDS = 7 * 86400


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Products of two n x n matrices, in every dtype."""

    sizes: Annotated[
        tuple[int, ...],
        Spec(
            doc="n of the n x n matrices; the largest is judged",
            # torch._scaled_mm, which multiplies fp8, takes no other sizes.
            kind=Whole(least=16, most=65536, multiple_of=16),
            is_list=True,
        ),
    ]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class MatmulSearch:
    """The search for the shape and layout whose product is the fastest, in every dtype."""

    shapes: Annotated[
        tuple[tuple[int, int, int], ...],
        Spec(
            doc="the shapes to search among: m x k times k x n",
            kind=Sizes(names=("m", "n", "k"), each=Whole(least=16, most=65536, multiple_of=16)),
            is_list=True,
        ),
    ]
    layouts: Annotated[
        tuple[str, ...],
        Spec(
            doc="how the left and the right operand lie, n by rows, t by columns; fp8 is always multiplied as nt",
            kind=Choice(words=("nn", "nt", "tn", "tt")),
            is_list=True,
        ),
    ]
    look_seconds: Annotated[
        float,
        Spec(
            key="look",
            doc="about how long each is looked at, after a warm-up of the same length",
            kind=Duration(least_seconds=0.001, most_seconds=3600),
        ),
    ]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Hbm:
    """Copying, reading and writing the GPU's own memory."""

    sizes_bytes: Annotated[
        tuple[int, ...],
        Spec(
            key="sizes",
            doc="size of one buffer, and a copy has two; the largest is judged",
            kind=Amount(least_bytes=MB, most_bytes=TB, multiple_of=16),
            is_list=True,
        ),
    ]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Health:
    """The look at the GPU itself."""

    load_seconds: Annotated[
        float,
        Spec(
            key="load",
            doc="how long the GPU is kept busy before its PCIe link is looked at",
            kind=Duration(least_seconds=0.01, most_seconds=3600),
        ),
    ]
    mig: Annotated[
        str,
        Spec(doc="whether the GPUs are meant to be partitioned (Multi-Instance GPU)", kind=Choice(words=("off", "on"))),
    ]
    product_size: Annotated[
        int,
        Spec(
            doc="n of the n x n products that are compared with the CPU's",
            kind=Whole(least=16, most=8192, multiple_of=16),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What each node's sampler reads of its GPUs while tests run."""

    interval_seconds: Annotated[
        float,
        Spec(
            key="interval",
            doc="from one look at a GPU to the next",
            kind=Duration(least_seconds=0.01, most_seconds=60),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class BurnIn:
    """Products without a pause, each of them verified."""

    duration_seconds: Annotated[
        float,
        Spec(
            key="duration",
            doc="how long; --gpucluster-soak sets it",
            kind=Duration(least_seconds=0.1, most_seconds=WEEK_SECONDS),
        ),
    ]
    interval_seconds: Annotated[
        float,
        Spec(
            key="interval",
            doc="about how long the products take whose rate is one point of the course",
            kind=Duration(least_seconds=0.001, most_seconds=600),
        ),
    ]
    n: Annotated[
        int,
        Spec(doc="n of the n x n matrices", kind=Whole(least=16, most=65536, multiple_of=16)),
    ]
    dtype: Annotated[
        str,
        Spec(doc="in which the products are taken", kind=Choice(words=("bf16", "fp16", "tf32", "fp32", "fp8"))),
    ]


@dataclass(frozen=True, kw_only=True)
class MemoryPatterns:
    """Patterns of bits written to device memory and read back."""

    share: Annotated[
        float,
        Spec(doc="the part of the free memory that is written", kind=Ratio(least=0.01, most=0.98)),
    ]
    most_bytes: Annotated[
        int,
        Spec(
            key="most",
            doc="no more than this is written, however much is free",
            kind=Amount(least_bytes=MB, most_bytes=100 * TB),
        ),
    ]
    rounds: Annotated[
        int,
        Spec(
            doc="how often each pattern is gone through, random ones with other numbers",
            kind=Whole(least=1, most=10000),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Determinism:
    """The same computation, which must give the same bits."""

    n: Annotated[
        int,
        Spec(doc="n of the n x n matrices", kind=Whole(least=64, most=16384, multiple_of=64)),
    ]
    repeats: Annotated[
        int,
        Spec(doc="how often each GPU computes it", kind=Whole(least=2, most=10000)),
    ]
