"""GPU criteria: compute, memory, health, burn-in, memory patterns, determinism; the telemetry of every test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.config.declaration import MB, TB, WEEK_SECONDS, Criterion, Section, Span, series, value
from pytest_gpucluster.config.value_types import Amount, Choice, Duration, Ratio, Sizes, Whole
from pytest_gpucluster.metrics.catalogue import read_metrics
from pytest_gpucluster.metrics.sampling import Sampling

# torch's scaled product, which multiplies fp8, takes no other sizes.
_SIDE = Whole(16, 65536, multiple_of=16)


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Products of two n x n matrices, in every dtype."""

    sizes: tuple[int, ...] = value("n of the n x n matrices; the largest is judged", _SIDE)
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class MatmulSearch:
    """The search for the shape and layout whose product is the fastest, in every dtype."""

    shapes: tuple[tuple[int, int, int], ...] = value(
        "the shapes to search among: m x k times k x n", Sizes(("m", "n", "k"), _SIDE)
    )
    layouts: tuple[str, ...] = value(
        "how the left and the right operand lie, n by rows, t by columns; fp8 is always multiplied as nt",
        Choice(("nn", "nt", "tn", "tt")),
    )
    look_seconds: float = value(
        "about how long each is looked at, after a warm-up of the same length", Duration(0.001, 3600)
    )
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Hbm:
    """Copying, reading and writing the GPU's own memory."""

    sizes_bytes: tuple[int, ...] = value(
        "size of one buffer, and a copy has two; the largest is judged", Amount(MB, TB, multiple_of=16)
    )
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Health:
    """The look at the GPU itself."""

    load_seconds: float = value("how long the GPU is kept busy before its PCIe link is looked at", Duration(0.01, 3600))
    mig: str = value("whether the GPUs are meant to be partitioned (Multi-Instance GPU)", Choice(("off", "on")))
    product_size: int = value(
        "n of the n x n products that are compared with the CPU's", Whole(16, 8192, multiple_of=16)
    )


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What each node's sampler reads of its GPUs while tests run."""

    interval_seconds: float = value("from one look at a GPU to the next", Duration(0.01, 60))


@dataclass(frozen=True, kw_only=True)
class BurnIn:
    """Products without a pause, each of them verified."""

    duration_seconds: float = value("how long", Duration(0.1, WEEK_SECONDS))
    interval_seconds: float = value(
        "about how long the products take whose rate is one point of the course", Duration(0.001, 600)
    )
    n: int = value("n of the n x n matrices", _SIDE)
    dtype: str = value("in which the products are taken", Choice(("bf16", "fp16", "tf32", "fp32", "fp8")))


@dataclass(frozen=True, kw_only=True)
class MemoryPatterns:
    """Patterns of bits written to device memory and read back."""

    share: float = value("the part of the free memory that is written", Ratio(0.01, 0.98))
    most_bytes: int = value("no more than this is written, however much is free", Amount(MB, 100 * TB))
    rounds: int = value("how often each pattern is gone through, random ones with other numbers", Whole(1, 10000))


@dataclass(frozen=True, kw_only=True)
class Determinism:
    """The same computation, which must give the same bits."""

    n: int = value("n of the n x n matrices", Whole(64, 16384, multiple_of=64))
    repeats: int = value("how often each GPU computes it", Whole(2, 10000))


_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "half precision",
    "tf32": "fp32 with TF32 tensor cores allowed",
    "fp32": "true fp32, TF32 off",
    "fp8": "fp8 (e4m3) with bf16 output",
}
_PASSES = {
    "copy": "device to device copy, bytes read plus bytes written",
    "read": "reduction, bytes read",
    "write": "fill, bytes written",
}


_MATMUL = """
matmul.{dtype}.tflops: TFLOPS, higher, peak {dtype}_tflops
    Dense square product in {doc}: 2 n^3 operations over the time of one product.
matmul.{dtype}.best_tflops: TFLOPS, higher, peak {dtype}_tflops
    Dense product in {doc} of the shape and layout that a search found to be the fastest, measured anew: 2 m n k
    operations over the time of one product. Recorded; a best of many is compared with no limit.
    recorded: a best of many flatters; the square product is judged
"""
_HBM = """
hbm.{kind}.bandwidth: TB/s, higher, peak hbm_tb_per_second
    Device memory: {doc}, over the time of one pass.
"""

METRICS = (
    *(metric for dtype, doc in _DTYPES.items() for metric in read_metrics(_MATMUL.format(dtype=dtype, doc=doc))),
    *(metric for kind, doc in _PASSES.items() for metric in read_metrics(_HBM.format(kind=kind, doc=doc))),
    *read_metrics("""
inventory.ranks: ranks, none
    Ranks that reported before the first test. Recorded; the inventory's checks decide.
    recorded: the inventory's checks decide
gpu.findings: findings, lower
    What is wrong with the GPU, as NVML and the kernel log report it.
gpu.usable_dtypes: dtypes, higher
    Dtypes in which a small product on the GPU equals the CPU's.
gpu.memory.total: GB, higher
    Device memory as NVML counts it, what the driver keeps for itself included.
gpu.memory.free: %, higher
    Device memory that no other process uses, as a part of the total.
    recorded: gpu.findings asks for 95 % and names the processes that use the rest
gpu.power_limit: %, higher
    Enforced power limit as a part of the card's default.
    recorded: gpu.findings compares it with the card's own default
burn_in.retention: %, higher
    Rate of the last minute of a burn-in as a part of the first minute's, or of the last and first tenth. What is
    missing to 100 % is the decay.
burn_in.completed: %, higher
    How far the burn-in came, as a part of the time that was asked for.
    recorded: a burn-in that is cut short is an error in any case
gpu.memory_patterns.share: %, higher
    Device memory that the patterns were written to, as a part of the total.
gpu.determinism.repeated: %, higher
    Computations that gave the same bits every time on this GPU.
gpu.determinism.agreed: %, higher
    Computations in which this GPU gave the bits of the majority of its model.
gpu.temperature: degC, lower
    Temperature of the GPU under load.
    recorded: gpu.findings compares it with the card's own limits
burn_in.temperature: degC, lower
    Highest temperature during the burn-in.
    recorded: gpu.findings compares it with the card's own limits
burn_in.slowed: %, lower
    Part of a burn-in in which NVML reported a thermal or hardware slowdown or a power brake, the longest of them.
burn_in.power: W, none
    Median power during the burn-in. Recorded.
    recorded: neither more nor less is better
gpu.memory_patterns.wrong_words: words, lower
    64-bit words of device memory that were not read as they were written, counted in each pass anew.
"""),
)


SECTIONS = (
    Section("matmul", Matmul, metrics=("matmul.*",)),
    Section("matmul.search", MatmulSearch, metrics=("matmul.*.best_tflops",)),
    Section("hbm", Hbm, metrics=("hbm.*",)),
    Section("health", Health, metrics=("gpu.*",)),
    Section("telemetry", Telemetry, metrics=()),
    Section("burn_in", BurnIn, metrics=("burn_in.*",)),
    Section("memory_patterns", MemoryPatterns, metrics=("gpu.memory_patterns.*",)),
    Section("determinism", Determinism, metrics=("gpu.determinism.*",)),
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
    Criterion("gpu.compute", "gpu.usable_dtypes", group="verification"),
    Criterion("gpu.health", "gpu.findings", "gpu.memory.*", "gpu.temperature", "gpu.power_limit", span=_health),
    Criterion("gpu.fleet", "inventory.ranks"),
    Criterion(
        "matmul",
        *(f"matmul.{dtype}.tflops" for dtype in _DTYPES),
        group="computing",
        span=lambda workload, name: series(workload.matmul.sampling, len(workload.matmul.sizes)),
    ),
    Criterion(
        "matmul.search", *(f"matmul.{dtype}.best_tflops" for dtype in _DTYPES), group="computing", span=_matmul_search
    ),
    Criterion(
        "hbm",
        "hbm.*",
        group="computing",
        span=lambda workload, name: series(workload.hbm.sampling, len(workload.hbm.sizes_bytes)),
    ),
    Criterion("burn_in", "burn_in.*", group="computing", span=_burn_in),
    Criterion("gpu.memory_patterns", "gpu.memory_patterns.*", group="verification"),
    Criterion("gpu.determinism", "gpu.determinism.*", group="verification"),
)
