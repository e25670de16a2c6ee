"""Sections about what surrounds the GPUs: the network between hosts, names, clocks, the shared file system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.sections.spec import KIB, MIB, Spec
from pytest_gpucluster.workload_values import Amount, Duration, Whole


@dataclass(frozen=True, kw_only=True)
class Connectivity:
    """Connections between all nodes before any process group is made; their clocks and names."""

    deadline_seconds: Annotated[
        float,
        Spec(
            key="deadline",
            doc="so long a connection may be silent before it counts as broken",
            kind=Duration(least_seconds=0.1, most_seconds=600),
        ),
    ]
    payload_bytes: Annotated[
        int,
        Spec(
            key="payload",
            doc="what is sent over each connection and back; many packets, so that different MTUs show",
            kind=Amount(least_bytes=KIB, most_bytes=64 * MIB),
        ),
    ]
    clock_samples: Annotated[
        int, Spec(doc="how often each node asks the first one for its time", kind=Whole(least=1, most=10_000))
    ]
    lookup_seconds: Annotated[
        float,
        Spec(
            key="lookup",
            doc="so long the lookup of a host's name or address is waited for",
            kind=Duration(least_seconds=0.1, most_seconds=600),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class SharedFilesystem:
    """Files that every node must see alike. How fast large ones are, `checkpoint` measures."""

    file_bytes: Annotated[
        int,
        Spec(
            key="file",
            doc="what each node writes, and every other node reads",
            kind=Amount(least_bytes=KIB, most_bytes=1024 * MIB),
        ),
    ]
    renames: Annotated[
        int,
        Spec(
            doc="how often a file is replaced by renaming another one, while every node reads it",
            kind=Whole(least=2, most=1_000_000),
        ),
    ]
    small_files: Annotated[
        int, Spec(doc="files of 4 KiB that each node makes, reads and removes", kind=Whole(least=1, most=1_000_000))
    ]
