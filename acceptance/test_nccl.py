"""Does the fabric between the GPUs reach its bandwidth, with correct results?"""

import pytest

from pytest_gpucluster.benchmarks.collectives import measure_collective
from pytest_gpucluster.metrics.units import parse

SCOPES = [
    # One GPU alone is named by its own failure; in a group the isolation has to search for it.
    pytest.param("gpu", id="gpu"),
    pytest.param("node", id="node", marks=[pytest.mark.needs_local_ranks(2), pytest.mark.isolate]),
    # On one node the node is the world.
    pytest.param("world", id="world", marks=[pytest.mark.needs_nodes(2), pytest.mark.isolate]),
]
SETUP_SECONDS = 120.0  # making the groups, filling and verifying the payloads


def bytes_of(size):
    """Return a size such as "1 GB" in bytes."""
    return int(parse(size).to("B"))


@pytest.fixture(autouse=True)
def deadline(request, cluster, workload):
    """Give the sweep the time that its workload may take."""
    config = workload.all_reduce
    longest = config.sampling.warmup_seconds + config.sampling.at_most_seconds
    seconds = SETUP_SECONDS + len({*config.sizes, *config.latency_sizes}) * longest
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


@pytest.fixture(autouse=True)
def nccl_log(request, cluster):
    """Leave NCCL's log of each rank in the test's folder, however the test ends."""
    folder = request.getfixturevalue("artifacts") if cluster.nccl_log.path is not None else None
    yield
    if folder is not None:
        cluster.nccl_log.keep(folder / f"nccl-rank-{cluster.rank}.log")


@pytest.mark.nccl
@pytest.mark.criterion("nccl.all_reduce")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("scope", SCOPES)
def test_all_reduce(scope, dtype, cluster, inventory, workload, telemetry, measure, record_property):
    """Accepted: on every rank the all-reduce reaches the limit's busbw, over the fabric that the limit expects, and
    all sums are right.

    Why: each training step ends in an all-reduce of the gradients. Bus bandwidth (busbw) is that of
    nccl-tests: comparable with the speed of the links for any number of ranks. The slowest rank decides. Each GPU is
    measured alone, then all nodes at once but each for itself, then all of them together: this separates a slow node
    from a slow network. One GPU has no link: there only the sums count, of one small and of the largest payload.

    When it fails: inside one node look at NVLink (``nvidia-smi nvlink -s``) and the Fabric Manager; across
    nodes at the InfiniBand ports (``ibstat``: rate, state). NCCL's choice is recorded with the test, and its log
    is in the test's folder: NET/Socket means that it does not use InfiniBand. Run halves of the nodes to
    find the slow one. A wrong sum: take the named rank's GPU, and then the one that contributed it, out of
    service and repeat. Inconclusive: something else uses the links or the GPUs.

    On cpu this rehearses with gloo.
    """
    groups = {
        "gpu": lambda: cluster.subgroups(1),
        "node": lambda: cluster.node_group([who["node_rank"] for who in inventory]),
        "world": lambda: cluster.group,
    }
    group = groups[scope]()
    alone = group.size() == 1
    small, large = workload.all_reduce.latency_sizes, workload.all_reduce.sizes
    if alone:
        small, large = small[:1], (max(large, key=bytes_of),)
    results = {}
    with cluster.using(group):
        for size in dict.fromkeys((*small, *large)):
            window = telemetry()
            result = measure_collective(
                "all_reduce",
                group,
                cluster.device,
                payload_bytes=bytes_of(size),
                dtype=dtype,
                sampling=workload.all_reduce.sampling,
                during=window,
            )
            results[size] = result, window.summary()
    transport = cluster.carried_by(group)
    for name, text in transport.properties().items():
        record_property(f"nccl.{name}", text)

    for size, (result, summary) in results.items():
        nnodes = cluster.nnodes if scope == "world" else 1
        labels = {"size": size, "dtype": dtype, "world_size": result.ranks, "nnodes": nnodes, **transport.labels}
        if size in small:
            measure("nccl.all_reduce.latency", result.latency, unit="s", telemetry=summary, record_only=alone, **labels)
        if size not in large:
            continue
        measure("nccl.all_reduce.algbw", result.algbw, unit="B/s", telemetry=summary, record_only=True, **labels)
        if not alone:
            measure("nccl.all_reduce.busbw", result.busbw, unit="B/s", telemetry=transport.add_to(summary), **labels)
            measure("nccl.all_reduce.average_busbw", result.average_busbw, unit="B/s", record_only=True, **labels)
