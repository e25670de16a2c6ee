"""Sections about what connects the GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.sections.spec import Spec
from pytest_gpucluster.workload_values import Amount

MB, TB = 10**6, 10**12


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
