"""Sections about the host of the GPUs: how it is meant to be set up, and its link to each GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.sections.spec import GB, Spec
from pytest_gpucluster.workload_values import Amount, Choice, Whole


@dataclass(frozen=True, kw_only=True)
class Host:
    """How the hosts are meant to be set up. With "any" the other setting is noted, and accepted."""

    governor: Annotated[
        str,
        Spec(
            doc="which CPU frequency governor every CPU has, where the kernel shows one",
            kind=Choice(words=("performance", "any")),
        ),
    ]
    numa_balancing: Annotated[
        str,
        Spec(
            doc="whether the kernel may move memory between NUMA nodes by itself",
            kind=Choice(words=("off", "any")),
        ),
    ]
    iommu: Annotated[
        str,
        Spec(
            doc="whether an IOMMU may translate what a GPU sends; passthrough allows one that does not",
            kind=Choice(words=("passthrough", "any")),
        ),
    ]
    acs: Annotated[
        str,
        Spec(
            doc="whether PCIe switch ports above a GPU may redirect (Access Control Services)",
            kind=Choice(words=("off", "any")),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """Copies between pinned host memory and the GPU, each of which is verified."""

    size_bytes: Annotated[
        int,
        Spec(key="size", doc="what one copy moves", kind=Amount(least_bytes=4096, most_bytes=GB, multiple_of=4096)),
    ]
    copies: Annotated[
        int,
        Spec(
            doc="copies one after the other, until all of them are verified; each rank pins so many sizes",
            kind=Whole(least=1, most=256),
        ),
    ]
    sampling: Sampling
