"""GPU criteria: compute, memory, health, burn-in, memory patterns, determinism; the telemetry of every test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pytest_gpucluster.config.declaration import (
    MB,
    TB,
    WEEK_SECONDS,
    Criterion,
    Section,
    Span,
    Spec,
    series,
)
from pytest_gpucluster.config.value_types import Amount, Choice, Duration, Ratio, Sizes, Whole
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.sampling import Sampling


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


def _matmul(docs: Mapping[str, str]) -> Iterator[Metric]:
    for kind, doc in docs.items():
        yield Metric(
            name=f"matmul.{kind}.tflops",
            unit="TFLOPS",
            better="higher",
            peak=f"{kind}_tflops",
            doc=f"Dense square product in {doc}: 2 n^3 operations over the time of one product.",
        )
    for kind, doc in docs.items():
        yield Metric(
            name=f"matmul.{kind}.best_tflops",
            unit="TFLOPS",
            better="higher",
            peak=f"{kind}_tflops",
            recorded="a best of many flatters; the square product is judged",
            doc=f"Dense product in {doc} of the shape and layout that a search found to be the fastest, measured anew:"
            " 2 m n k operations over the time of one product. Recorded; a best of many is compared with no limit.",
        )


def _hbm(docs: Mapping[str, str]) -> Iterator[Metric]:
    for kind, doc in docs.items():
        yield Metric(
            name=f"hbm.{kind}.bandwidth",
            unit="TB/s",
            better="higher",
            peak="hbm_tb_per_second",
            doc=f"Device memory: {doc}, over the time of one pass.",
        )


METRICS = (
    *_matmul(
        {
            "bf16": "bfloat16",
            "fp16": "half precision",
            "tf32": "fp32 with TF32 tensor cores allowed",
            "fp32": "true fp32, TF32 off",
            "fp8": "fp8 (e4m3) with bf16 output",
        }
    ),
    *_hbm(
        {
            "copy": "device to device copy, bytes read plus bytes written",
            "read": "reduction, bytes read",
            "write": "fill, bytes written",
        }
    ),
    Metric(
        name="inventory.ranks",
        unit="ranks",
        better="none",
        recorded="the inventory's checks decide",
        doc="Ranks that reported before the first test. Recorded; the inventory's checks decide.",
    ),
    Metric(
        name="gpu.findings",
        unit="findings",
        better="lower",
        doc="What is wrong with the GPU, as NVML and the kernel log report it.",
    ),
    Metric(
        name="gpu.usable_dtypes",
        unit="dtypes",
        better="higher",
        doc="Dtypes in which a small product on the GPU equals the CPU's.",
    ),
    Metric(
        name="gpu.memory.total",
        unit="GB",
        better="higher",
        doc="Device memory as NVML counts it, what the driver keeps for itself included.",
    ),
    Metric(
        name="gpu.memory.free",
        unit="%",
        better="higher",
        recorded="gpu.findings asks for 95 % and names the processes that use the rest",
        doc="Device memory that no other process uses, as a part of the total.",
    ),
    Metric(
        name="gpu.temperature",
        unit="degC",
        better="lower",
        recorded="gpu.findings compares it with the card's own limits",
        doc="Temperature of the GPU under load.",
    ),
    Metric(
        name="gpu.power_limit",
        unit="%",
        better="higher",
        recorded="gpu.findings compares it with the card's own default",
        doc="Enforced power limit as a part of the card's default.",
    ),
    Metric(
        name="burn_in.retention",
        unit="%",
        better="higher",
        doc="Rate of the last minute of a burn-in as a part of the first minute's, or of the last and first tenth. What"
        " is missing to 100 % is the decay.",
    ),
    Metric(
        name="burn_in.completed",
        unit="%",
        better="higher",
        recorded="a burn-in that is cut short is an error in any case",
        doc="How far the burn-in came, as a part of the time that was asked for.",
    ),
    Metric(
        name="burn_in.slowed",
        unit="%",
        better="lower",
        doc="Part of a burn-in in which NVML reported a thermal or hardware slowdown or a power brake, the longest"
        " of them.",
    ),
    Metric(
        name="burn_in.temperature",
        unit="degC",
        better="lower",
        recorded="gpu.findings compares it with the card's own limits",
        doc="Highest temperature during the burn-in.",
    ),
    Metric(
        name="burn_in.power",
        unit="W",
        better="none",
        recorded="neither more nor less is better",
        doc="Median power during the burn-in. Recorded.",
    ),
    Metric(
        name="gpu.memory_patterns.wrong_words",
        unit="words",
        better="lower",
        doc="64-bit words of device memory that were not read as they were written, counted in each pass anew.",
    ),
    Metric(
        name="gpu.memory_patterns.share",
        unit="%",
        better="higher",
        doc="Device memory that the patterns were written to, as a part of the total.",
    ),
    Metric(
        name="gpu.determinism.repeated",
        unit="%",
        better="higher",
        doc="Computations that gave the same bits every time on this GPU.",
    ),
    Metric(
        name="gpu.determinism.agreed",
        unit="%",
        better="higher",
        doc="Computations in which this GPU gave the bits of the majority of its model.",
    ),
)


SECTIONS = (
    Section("matmul", Matmul),
    Section("matmul.search", MatmulSearch),
    Section("hbm", Hbm),
    Section("health", Health),
    Section("telemetry", Telemetry),
    Section("burn_in", BurnIn),
    Section("memory_patterns", MemoryPatterns),
    Section("determinism", Determinism),
)


BURN_IN_SLACK = 1.2
"""A burn-in's deadline as a multiple of its duration."""


def _burn_in(workload: Any, name: str) -> Span:
    seconds = workload.burn_in.duration_seconds
    return Span(least_seconds=seconds, most_seconds=BURN_IN_SLACK * seconds)


def _health(workload: Any, name: str) -> Span:
    seconds = workload.health.load_seconds
    return Span(least_seconds=seconds, most_seconds=seconds)


def _matmul_search(workload: Any, name: str) -> Span:
    """Each candidate is looked at and, but for the first, warmed up as long; fp8 is multiplied in one layout."""
    search = workload.matmul_search
    count = len(search.shapes) * (1 if "[fp8]" in name else len(search.layouts))
    looks = (2 * count - 1) * search.look_seconds + search.sampling.warmup_seconds
    return Span(least_seconds=looks, most_seconds=looks) + series(search.sampling)


CRITERIA = (
    Criterion("gpu.compute", "gpu.usable_dtypes"),
    Criterion("gpu.health", "gpu.findings", "gpu.memory.*", "gpu.temperature", "gpu.power_limit", span=_health),
    Criterion("gpu.fleet", "inventory.ranks"),
    Criterion(
        "matmul",
        "matmul.bf16.tflops",
        "matmul.fp16.tflops",
        "matmul.tf32.tflops",
        "matmul.fp32.tflops",
        "matmul.fp8.tflops",
        span=lambda workload, name: series(workload.matmul.sampling, len(workload.matmul.sizes)),
    ),
    Criterion(
        "matmul.search",
        "matmul.bf16.best_tflops",
        "matmul.fp16.best_tflops",
        "matmul.tf32.best_tflops",
        "matmul.fp32.best_tflops",
        "matmul.fp8.best_tflops",
        span=_matmul_search,
    ),
    Criterion("hbm", "hbm.*", span=lambda workload, name: series(workload.hbm.sampling, len(workload.hbm.sizes_bytes))),
    Criterion("burn_in", "burn_in.*", span=_burn_in),
    Criterion("gpu.memory_patterns", "gpu.memory_patterns.*"),
    Criterion("gpu.determinism", "gpu.determinism.*"),
)
