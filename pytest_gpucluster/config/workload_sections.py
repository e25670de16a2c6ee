"""The sections of a workload about GPU, host, links and network, and :class:`Spec`, the definition of one key.

GPU: matmul, memory, health, telemetry, burn-in. Host: its expected setup, and its link to each GPU. Between GPUs:
collectives, isolation, links. Around them: connectivity between hosts, names, clocks, the shared file system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pytest_gpucluster.config.value_types import Amount, Choice, Duration, Kind, Ratio, Sizes, Whole, repeated
from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.metrics.sampling import Sampling

KIB, MIB = 2**10, 2**20
MB, GB, TB = 10**6, 10**9, 10**12
DAY_SECONDS = 86400


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a key means and how its value is written."""

    doc: str
    kind: Kind
    key: str = ""
    """How the file calls it, if not like the attribute."""
    is_list: bool = False

    @property
    def allowed(self) -> str:
        """What is allowed, in a few words."""
        return f"a list; each item is {self.kind.allowed}" if self.is_list else self.kind.allowed

    def read(self, texts: Sequence[str]) -> tuple[Any, list[tuple[int, str]]]:
        """Return the value, and what is wrong with which of its texts. A list becomes a tuple."""
        values: list[Any] = []
        complaints: list[tuple[int, str]] = []
        for index, text in enumerate(texts):
            try:
                values.append(self.kind.read(text))
            except (ValueError, UnitError) as error:
                complaints.append((index, str(error)))
        if complaints:
            return None, complaints
        twice = repeated(texts, values)
        if twice is not None:
            index, text = twice
            return None, [(index, f"{text}; each value is measured once")]
        return (tuple(values) if self.is_list else values[0]), []


SAMPLING = {
    "warmup_seconds": Spec(
        key="warmup",
        doc="least time of load before the first sample counts",
        kind=Duration(least_seconds=0, most_seconds=DAY_SECONDS),
    ),
    "window_seconds": Spec(
        key="window",
        doc="least total time of the samples",
        kind=Duration(least_seconds=0.01, most_seconds=DAY_SECONDS),
    ),
    "longest_seconds": Spec(
        key="longest",
        doc="most total time of the samples without certainty about the median, extended once; not below window",
        kind=Duration(least_seconds=0.01, most_seconds=DAY_SECONDS),
    ),
    "tolerance_ratio": Spec(
        key="tolerance",
        doc="certain is a median whose 95 % interval is no wider than this part of it",
        kind=Ratio(least=0.0001, most=3),
    ),
}
"""Attribute of :class:`~pytest_gpucluster.metrics.sampling.Sampling` -> its key, where a section has a ``sampling``."""


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
            doc="copies one after the other, until all of them are verified; each rank pins this multiple of size",
            kind=Whole(least=1, most=256),
        ),
    ]
    sampling: Sampling


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
class Connectivity:
    """Connections between all nodes before any process group is made; their clocks and names."""

    deadline_seconds: Annotated[
        float,
        Spec(
            key="deadline",
            doc="how long a connection may be silent before it counts as broken",
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
            doc="how long to wait for the lookup of a host's name or address",
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
