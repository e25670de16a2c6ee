"""How fast is every GPU with the shape that suits it best? The figure to compare with vendors' numbers."""

import os

import pytest

from pytest_gpucluster.benchmarks.matmul_search import candidates, first_rank_chooses, search_matmul
from pytest_gpucluster.node.host import WORKERS

DTYPES = ["bf16", "fp16", "tf32", "fp32", pytest.param("fp8", marks=pytest.mark.needs_peak("fp8_tflops"))]
SETUP_SECONDS = 120.0  # making the operands and the reference of the measurement
SETUP_LOOK_SECONDS = 20.0  # the same of one candidate

LOCAL_WORKERS = int(os.environ.get(WORKERS, "1"))


def most_seconds(config):
    """Return how long the search may take, with as long again for verifying the products."""
    looks = len(config.shapes) * len(config.layouts)
    sampling = config.sampling
    longest = 2 * sampling.warmup_seconds + sampling.at_most_seconds + 2 * looks * config.look_seconds
    return SETUP_SECONDS + looks * SETUP_LOOK_SECONDS + 2 * longest


@pytest.fixture(autouse=True)
def deadline(request, workload):
    """Give the candidates and the measurement the time that they may take."""
    request.node.add_marker(pytest.mark.deadline(most_seconds(workload.matmul_search)))


@pytest.mark.criterion("matmul.search")
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_search(dtype, board, cluster, workload, telemetry, measure, record_property):
    """Accepted: for every shape and layout of the workload, every product is correct on every GPU. The rate of the
    fastest is recorded and not judged.

    Why: published comparisons of GPUs, such as those of mamf-finder, give the best over many shapes. A limit must not
    be compared with a best of many: it flatters, and the shape differs from run to run; ``test_matmul`` has the limit.
    The first rank times every candidate briefly and chooses one for all ranks; all of them then measure it by the same
    rules as everything else.

    When it fails: a wrong product: take this GPU out of service and run the vendor's diagnostics
    (``dcgmi diag -r 3``). An error about memory: choose smaller shapes in ``matmul.search.shapes``, or look
    for the process that uses it.

    On cpu this rehearses with two small shapes.
    """
    if LOCAL_WORKERS > 1:
        pytest.skip("local workers cannot agree on one shape: start with torchrun, or one worker")
    config = workload.matmul_search
    window = telemetry()
    with first_rank_chooses(board, cluster.rank, within_seconds=most_seconds(config)) as choose:
        result = search_matmul(
            cluster.device,
            candidates(dtype, config.shapes, config.layouts),
            dtype=dtype,
            trial_seconds=config.look_seconds,
            sampling=config.sampling,
            choose=choose,
            during=window,
        )
    record_property("matmul.search", result.trials_text)
    measure(
        f"matmul.{dtype}.best_tflops",
        result.best.tflops,
        unit="TFLOPS",
        telemetry=window.summary(),
        record_only=True,
        **result.best.shape.labels,
    )
