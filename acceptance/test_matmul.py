"""Does every GPU compute as fast as its kind should, and correctly?"""

import pytest

from pytest_gpucluster.benchmarks.matmul import measure_matmul

# On cuda: matrices far larger than the cache, after a warm-up that takes the GPU to its power limit.
WORKLOADS = {
    "cuda": {"n": 16384, "seconds": 3.0, "warmup_seconds": 2.0},
    "cpu": {"n": 256, "seconds": 0.3, "warmup_seconds": 0.1},
}


@pytest.mark.single_gpu
@pytest.mark.criterion("matmul")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_matmul(dtype, cluster, measure):
    """Accepted: every GPU multiplies large matrices at the limit's rate or above, and every product is right.

    Why: training is matrix products. A GPU that is hot, starved of power or faulty holds up all others at
    every step; one that computes wrongly spoils a model without a trace. fp32 is true fp32, with TF32 off.

    When it fails: a rate below the limit on one GPU: look at its temperature, power limit and clocks
    (``nvidia-smi -q -d TEMPERATURE,POWER,CLOCK,PERFORMANCE``), at airflow and at other jobs on it. On all
    GPUs: driver, power profile, or a limit meant for another GPU. A wrong product: take this GPU out of
    service and run the vendor's diagnostics (``dcgmi diag -r 3``).
    """
    workload = WORKLOADS[cluster.device.type]
    result = measure_matmul(cluster.device, dtype=dtype, **workload)
    measure(f"matmul.{dtype}.tflops", result.tflops, unit="TFLOPS", samples=result.samples_tflops, n=result.n)
