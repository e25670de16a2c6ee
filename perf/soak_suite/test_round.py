"""A short rehearsal: a plain test, two criteria, a meeting of all ranks. Around and inside of them a fault is made."""

from unittest.mock import patch

import pytest
from planting import Struck, strike
from stamps import meet, stamp

from pytest_gpucluster.benchmarks import collectives, matmul
from pytest_gpucluster.device.interface import Accelerator
from pytest_gpucluster.device.products import product
from pytest_gpucluster.metrics.sampling import Sampling

# As short as possible, with any spread: the values do not matter.
SAMPLING = Sampling(warmup_seconds=0.01, window_seconds=0.02, longest_seconds=5.0, tolerance_ratio=1e6)


def test_plain(cluster):
    strike("test_plain", "before", cluster)
    stamp("plain")
    strike("test_plain", "after", cluster)


@pytest.mark.criterion("matmul")
def test_matmul(cluster, measure):
    strike("test_matmul", "before", cluster)
    multiply = Struck("test_matmul", product)
    with patch.object(Accelerator, "product", lambda by, **of: multiply):
        result = matmul.measure_matmul(cluster.device, matmul.Shape.square(128), dtype="fp32", sampling=SAMPLING)
    measure("matmul.fp32.tflops", result.tflops, unit="TFLOPS", n=128)
    strike("test_matmul", "after", cluster)


@pytest.mark.criterion("nccl.all_reduce")
def test_all_reduce(cluster, measure):
    strike("test_all_reduce", "before", cluster)
    reduce = Struck("test_all_reduce", collectives.CALLS["all_reduce"])
    with patch.dict(collectives.CALLS, all_reduce=reduce):
        result = collectives.measure_collective(
            "all_reduce", cluster.group, cluster.device, payload_bytes=2**16, sampling=SAMPLING
        )
    measure("nccl.all_reduce.busbw", result.busbw, unit="B/s", size="64 kB", dtype="fp32", transport="gloo")
    strike("test_all_reduce", "after", cluster)


def test_meeting(cluster):
    strike("test_meeting", "before", cluster)
    meet(cluster, "all")
    strike("test_meeting", "after", cluster)
