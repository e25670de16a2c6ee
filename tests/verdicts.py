"""Judging made short, for tests: values of all ranks held against limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.judge import Judgement, judge
from pytest_gpucluster.judge.limits import Thresholds
from pytest_gpucluster.judge.misses import NOTHING
from pytest_gpucluster.metrics.measurement import Measurement, measurement

BUSBW = "nccl.all_reduce.busbw"
ALGBW = "nccl.all_reduce.algbw"
BF16 = "matmul.bf16.tflops"
GB = {"size": "1 GB"}
SHIPPED = loader.load()
LIMITS = replace(
    SHIPPED,
    limits=tuple(
        replace(limit, min=700.0) if (limit.metric, limit.sku, limit.when) == (BF16, "H100 SXM", ()) else limit
        for limit in SHIPPED.limits
    ),
)
"""The shipped limits, but 700 TFLOPS for bf16 on H100 SXM also where no label says which sizes were measured."""


def world_of(size: int) -> dict[int, str]:
    return {rank: f"rank {rank} (gpu-{rank // 8:02}, GPU {rank % 8} GPU-1f2e)" for rank in range(size)}


def hold(
    by_rank: Mapping[int, list[Measurement]],
    *,
    size: int = 8,
    ranks_per_node: int = 8,
    sku: str | None = "H100 SXM",
    gpu_name: str | None = "NVIDIA H100 80GB HBM3",
    limits: Thresholds = LIMITS,
    telemetry: Mapping[int, Mapping[str, Any]] = NOTHING,
) -> Judgement:
    return judge(
        by_rank,
        world=world_of(size),
        node_of={rank: rank // ranks_per_node for rank in range(size)},
        limits=limits,
        sku=sku,
        gpu_name=gpu_name,
        telemetry=telemetry,
    )


def busbw(value: float, **arguments: object) -> Measurement:
    return measurement(BUSBW, value, **({"unit": "GB/s", "labels": GB} | arguments))  # type: ignore[arg-type]


def bf16(value: float, **arguments: object) -> Measurement:
    return measurement(BF16, value, **({"unit": "TFLOPS"} | arguments))  # type: ignore[arg-type]


def all_ranks(value: float = 442.1, size: int = 8, **others: float) -> dict[int, list[Measurement]]:
    """Every rank measured ``value``, but ``r3=312.4`` for rank 3."""
    return {rank: [busbw(others.get(f"r{rank}", value))] for rank in range(size)}
