"""What one run of nccl-tests has told, whichever way it was written.

Source: nccl-tests, src/util.cu (the table and the JSON file), src/common.cu (``test_typenames``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

PROGRAMS: Mapping[str, str] = MappingProxyType(
    {
        "all_reduce": "all_reduce_perf",
        "all_gather": "all_gather_perf",
        "reduce_scatter": "reduce_scatter_perf",
        "all_to_all": "alltoall_perf",
        "broadcast": "broadcast_perf",
        "send_recv": "sendrecv_perf",
    }
)
"""Our collective -> the program of nccl-tests that measures it."""

DTYPES: Mapping[str, str] = MappingProxyType({"bf16": "bfloat16", "fp16": "half", "fp32": "float", "fp64": "double"})
"""Our dtype -> that of ``-d``."""

IN_PLACE, OUT_OF_PLACE = "in-place", "out-of-place"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One half of a line.

    Attributes:
        busbw: in GB/s; NaN is what the program wrote as such.
        resolution: in GB/s; the last printed digit may be off by half of it.
        wrong: elements that were not as expected; None where the data were not looked at.
    """

    busbw: float
    resolution: float = 0.0
    wrong: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size in one dtype. ``figures`` has the halves that were measured, by ``IN_PLACE`` and ``OUT_OF_PLACE``."""

    size_bytes: int
    dtype: str
    redop: str = ""
    figures: Mapping[str, Figure]


@dataclass(frozen=True, kw_only=True)
class Output:
    """A run that came to its end.

    Attributes:
        origin: the file, or the command.
        collective: ours; None where the output does not tell.
        ranks: GPUs that took part.
        processes: that they were shared by.
        hosts: their short names.
        nccl: version of the library, or an empty text.
        rows: in their order.
        out_of_bounds: what the program counted at its end.
        speeds_only: another program kept the speeds of one half, and nothing about the data.
    """

    origin: str
    collective: str | None
    ranks: int
    processes: int
    hosts: tuple[str, ...]
    nccl: str
    rows: tuple[Row, ...]
    out_of_bounds: int
    speeds_only: bool = False

    @property
    def wrong(self) -> float:
        """Return how many wrong elements there were in all, or what the program counted, whichever is more."""
        told = sum(figure.wrong or 0 for row in self.rows for figure in row.figures.values())
        return max(told, self.out_of_bounds)


def collective_of(program: str) -> str | None:
    """Return our name of what a program measures, from its path or name.

    >>> collective_of("./build/alltoall_perf"), collective_of("hypercube_perf")
    ('all_to_all', None)
    """
    name = re.sub(r"_mpi$", "", program.rpartition("/")[2].strip())
    return next((ours for ours, theirs in PROGRAMS.items() if theirs == name), None)


def nccl_version(code: int) -> str:
    """Return NCCL's version from its number.

    >>> nccl_version(22703), nccl_version(2708)
    ('2.27.3', '2.7.8')

    Source: nccl.h, ``NCCL_VERSION(X, Y, Z)``: with four digits up to 2.8.
    """
    major, rest = divmod(code, 10_000) if code >= 10_000 else divmod(code, 1_000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


def short_name(host: str) -> str:
    """Return a host's name up to its first dot, as nccl-tests tells it.

    >>> short_name("gpu-01.example")
    'gpu-01'
    """
    return host.partition(".")[0]


def world(last_rank: int, per_process: int) -> tuple[int, int]:
    """Return the number of ranks and of processes.

    The JSON file lists only the first GPU of each process, the table all of them; both tell the highest process.

    >>> world(0, 8), world(8, 8), world(15, 8), world(15, 1)
    ((8, 1), (16, 2), (16, 2), (16, 16))
    """
    processes = last_rank // per_process + 1
    return processes * per_process, processes
