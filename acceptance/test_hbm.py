"""Does every GPU move data in its own memory as fast as its kind should, and without an error?"""

import pytest

from pytest_gpucluster.benchmarks.hbm import measure_hbm

SETUP_SECONDS = 120.0  # filling the buffers


@pytest.fixture(autouse=True)
def deadline(request, workload):
    """Give the sizes the time that they may take, and as long again for verifying what was moved."""
    sampling = workload.hbm.sampling
    longest = sampling.warmup_seconds + sampling.at_most_seconds
    request.node.add_marker(pytest.mark.deadline(SETUP_SECONDS + 2 * len(workload.hbm.sizes_bytes) * longest))


@pytest.mark.single_gpu
@pytest.mark.criterion("hbm")
@pytest.mark.parametrize("kind", ["copy", "read", "write"])
def test_hbm(kind, cluster, workload, telemetry, measure):
    """Accepted: every GPU copies, reads and writes its own memory at the limit's rate or above, and all data are right.

    Why: apart from matrix products, most of a model's operations are bound by memory. A copy counts the bytes it reads
    and those it writes, a read is a sum, a write fills with one value. The largest buffer is compared with the limit,
    the others are recorded.

    When it fails: a rate below the limit on one GPU: look at the recorded memory clock, at ECC errors and row remaps
    (``nvidia-smi -q -d ECC,ROW_REMAPPER``), and at other jobs on it. On all GPUs: the driver (older ones copy
    more slowly), ECC modes, or a limit meant for another GPU. Inconclusive: something else uses the memory. Wrong
    data: take this GPU out of service and run the vendor's diagnostics (``dcgmi diag -r 3``).

    An error about memory: a copy needs two buffers, and another process may use what is missing.

    On cpu this rehearses with small buffers.
    """
    sizes = workload.hbm.sizes_bytes
    for payload_bytes in sizes:
        window = telemetry()
        result = measure_hbm(
            cluster.device, kind, payload_bytes=payload_bytes, sampling=workload.hbm.sampling, during=window
        )
        measure(
            f"hbm.{kind}.bandwidth",
            result.bytes_per_second,
            unit="B/s",
            telemetry=window.summary(),
            record_only=payload_bytes != max(sizes),
            size=result.size,
        )
