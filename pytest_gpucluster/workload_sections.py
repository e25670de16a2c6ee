"""The sections of a workload: what can be set of each benchmark, what it means, how it is written and what is allowed.

All of that stands once, at the attribute that it fills: the loader, the command line, the JSON Schema and the documents
are made from it. A new key is one line; a new section is a class here and a line in ``workloads.Workload``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.workload_values import Amount, Choice, Duration, Kind, Ratio, Whole, repeated

_MB, _TB = 10**6, 10**12
_DAY_SECONDS = 86400


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
        doc="at least so long the load runs before the first sample counts",
        kind=Duration(least_seconds=0, most_seconds=_DAY_SECONDS),
    ),
    "window_seconds": Spec(
        key="window",
        doc="at least so long the samples take together",
        kind=Duration(least_seconds=0.01, most_seconds=_DAY_SECONDS),
    ),
    "longest_seconds": Spec(
        key="longest",
        doc="without certainty about the median no longer than this, and then once more; not below window",
        kind=Duration(least_seconds=0.01, most_seconds=_DAY_SECONDS),
    ),
    "tolerance_ratio": Spec(
        key="tolerance",
        doc="certain is a median whose 95 % interval is no wider than this part of it",
        kind=Ratio(least=0.0001, most=3),
    ),
}
"""Attribute of :class:`~pytest_gpucluster.sampling.Sampling` -> its key, in each section that has a ``sampling``."""


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
            kind=Amount(least_bytes=_MB, most_bytes=_TB, multiple_of=16),
            is_list=True,
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
            kind=Amount(least_bytes=4, most_bytes=_TB, multiple_of=4, as_written=True),
            is_list=True,
        ),
    ]
    latency_sizes: Annotated[
        tuple[str, ...],
        Spec(
            doc="what each rank contributes where the time of one all-reduce is recorded",
            kind=Amount(least_bytes=4, most_bytes=100 * _MB, multiple_of=4, as_written=True),
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
class Training:
    """Training a decoder to see that it is right: on each GPU alone, and on all ranks together."""

    layers: Annotated[int, Spec(doc="blocks of the decoder", kind=Whole(least=1, most=1000))]
    # A head is an even part of the width.
    width: Annotated[int, Spec(doc="width of the decoder", kind=Whole(least=64, most=65536, multiple_of=64))]
    heads: Annotated[int, Spec(doc="heads of its attention; width is an even multiple", kind=Whole(least=1, most=1024))]
    vocab: Annotated[int, Spec(doc="tokens that there are", kind=Whole(least=16, most=1_000_000))]
    sequence: Annotated[
        int, Spec(doc="tokens of a row, all of which are trained on", kind=Whole(least=8, most=1_000_000))
    ]
    batch: Annotated[int, Spec(doc="rows of each rank in a step", kind=Whole(least=1, most=65536))]
    steps: Annotated[int, Spec(doc="steps that are compared one by one", kind=Whole(least=2, most=1000))]
