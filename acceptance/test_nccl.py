"""Does the fabric between the GPUs carry what it should, and correctly?"""

import pytest

from pytest_gpucluster.benchmarks.collectives import all_reduce
from pytest_gpucluster.units import parse

# Smaller payloads are recorded: their time is mostly latency, and limits on busbw hold from the last size up.
SIZES = {
    "cuda": ("1 MB", "10 MB", "100 MB", "1 GB"),
    "cpu": ("64 kB", "256 kB", "1 MB"),
}
TIMES = {
    "cuda": {"seconds": 3.0, "warmup_seconds": 1.0},
    "cpu": {"seconds": 0.2, "warmup_seconds": 0.05},
}


@pytest.mark.nccl
@pytest.mark.needs_ranks(2)
@pytest.mark.criterion("nccl.all_reduce")
def test_all_reduce(cluster, measure):
    """Accepted: on every rank the largest all-reduce reaches the limit's busbw, and all sums are right.

    Why: each training step ends in an all-reduce of the gradients. Bus bandwidth (busbw) is that of
    nccl-tests: it stands beside the links' own speed whatever the number of ranks. The slowest rank decides.

    When it fails: inside one node look at NVLink (``nvidia-smi nvlink -s``) and the Fabric Manager; across
    nodes at the InfiniBand ports (``ibstat``: rate, state) and at what NCCL chose (``NCCL_DEBUG=INFO``: a
    line "via NET/Socket" means that it does not use InfiniBand). Run halves of the nodes to find the slow
    one. A wrong sum: take the named rank's GPU, and then the one that contributed it, out of service and
    repeat.

    On cpu this rehearses with gloo.
    """
    kind = cluster.device.type
    for size in SIZES[kind]:
        result = all_reduce(cluster.group, cluster.device, payload_bytes=int(parse(size).to("B")), **TIMES[kind])
        measure(
            "nccl.all_reduce.busbw",
            result.busbw_bytes_per_second,
            unit="B/s",
            samples=result.samples_busbw_bytes_per_second,
            record_only=size != SIZES[kind][-1],
            size=size,
        )
        measure(
            "nccl.all_reduce.algbw",
            result.algbw_bytes_per_second,
            unit="B/s",
            samples=result.samples_algbw_bytes_per_second,
            record_only=True,
            size=size,
        )
