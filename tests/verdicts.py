"""Judging made short, for tests: values of all ranks held against limits."""

from dataclasses import replace

from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.judge import judge
from pytest_gpucluster.judge.misses import NOTHING
from pytest_gpucluster.metrics.measurement import measurement

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


def world_of(size):
    return {rank: f"rank {rank} (gpu-{rank // 8:02}, GPU {rank % 8} GPU-1f2e)" for rank in range(size)}


def hold(
    by_rank,
    *,
    size=8,
    ranks_per_node=8,
    sku="H100 SXM",
    gpu_name="NVIDIA H100 80GB HBM3",
    limits=LIMITS,
    telemetry=NOTHING,
):
    return judge(
        by_rank,
        world=world_of(size),
        node_of={rank: rank // ranks_per_node for rank in range(size)},
        limits=limits,
        sku=sku,
        gpu_name=gpu_name,
        telemetry=telemetry,
    )


def busbw(value, **arguments):
    return measurement(BUSBW, value, **({"unit": "GB/s", "labels": GB} | arguments))


def bf16(value, **arguments):
    return measurement(BF16, value, **({"unit": "TFLOPS"} | arguments))


def all_ranks(value=442.1, size=8, **others):
    """Every rank measured ``value``, but ``r3=312.4`` for rank 3."""
    return {rank: [busbw(others.get(f"r{rank}", value))] for rank in range(size)}
