"""Sections about a GPU by itself: matmul, memory, health."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.sections.spec import Spec
from pytest_gpucluster.workload_values import Amount, Choice, Duration, Whole

MB, TB = 10**6, 10**12


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
