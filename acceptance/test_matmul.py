"""Does every GPU compute as fast as its SKU should, and correctly?"""

import pytest

from pytest_gpucluster.benchmarks.matmul import best_square, measure_matmul, square_shape

DTYPES = ["bf16", "fp16", "tf32", "fp32", pytest.param("fp8", marks=pytest.mark.needs_peak("fp8_tflops"))]
SETUP_SECONDS = 120.0  # making the operands and the reference


@pytest.fixture(autouse=True)
def deadline(request, workload):
    """Give the sizes the time that they may take, and as long again for verifying the products."""
    sampling = workload.matmul.sampling
    longest = sampling.warmup_seconds + sampling.at_most_seconds
    request.node.add_marker(pytest.mark.deadline(SETUP_SECONDS + 2 * len(workload.matmul.sizes) * longest))


@pytest.mark.single_gpu
@pytest.mark.criterion("matmul")
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul(dtype, cluster, workload, telemetry, measure):
    """Accepted: every GPU multiplies large matrices at the limit's rate or above, and every product is correct.

    Why: training is matrix products. A GPU that is hot, short of power or faulty slows all others down at every step;
    one that computes wrongly spoils a model without a message. fp32 is true fp32, with TF32 off. fp8 has e4m3 operands,
    a bf16 result and fast accumulation. The best of n = 4096, 8192 and 16384 is compared with the limit, each rank's
    own best; every size is recorded.

    When it fails: a rate below the limit on one GPU: look at the recorded clocks, power and throttle reasons
    (``nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE``), at airflow and at other jobs on it. On all GPUs: driver,
    power profile, or a limit meant for another GPU. Inconclusive: the rate did not settle; look for the same. A wrong
    product: take this GPU out of service and run the vendor's diagnostics (``dcgmi diag -r 3``).

    An error about memory: another process uses it.

    On cpu this rehearses with small matrices.
    """
    rates, summaries = {}, {}
    for n in workload.matmul.sizes:
        window = telemetry()
        result = measure_matmul(
            cluster.device, square_shape(n, dtype), dtype=dtype, sampling=workload.matmul.sampling, during=window
        )
        rates[n], summaries[n] = result.tflops, window.summary()
        measure(f"matmul.{dtype}.tflops", rates[n], unit="TFLOPS", telemetry=summaries[n], record_only=True, n=n)
    best = best_square(rates)
    measure(f"matmul.{dtype}.tflops", rates[best.n], unit="TFLOPS", telemetry=summaries[best.n], best_of=best.label)
