"""Do the other collectives than all-reduce reach their bandwidth, with correct results?"""

import pytest

from pytest_gpucluster.benchmarks.collectives import measure_collective
from pytest_gpucluster.metrics.units import parse

SCOPES = [
    pytest.param("node", id="node", marks=pytest.mark.needs_local_ranks(2)),
    # On one node the node is the world.
    pytest.param("world", id="world", marks=pytest.mark.needs_nodes(2)),
]
SETUP_SECONDS = 120.0  # making the groups, filling and verifying the payloads


@pytest.fixture(autouse=True)
def deadline(request, cluster, workload):
    """Give the sweep the time that its workload may take."""
    config = workload.collectives
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
@pytest.mark.isolate
@pytest.mark.criterion("nccl.collectives")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"])
@pytest.mark.parametrize("scope", SCOPES)
def test_collective(scope, collective, dtype, cluster, inventory, workload, telemetry, measure, record_property):
    """Accepted: on every rank the collective reaches the limit's busbw and is not far behind the other ranks, and every
    element arrives where it should, as it was sent or summed up.

    Why: sharded training lives on all_gather and reduce_scatter, mixtures of experts on all_to_all, pipelines on send
    and recv, every start on a broadcast. They take other ways through the fabric than all_reduce, which switches may
    reduce in the switch: a weak link or NIC shows here first. In a send_recv every rank sends to the next one at once;
    a broadcast starts at the group's first rank. Sizes, algbw and busbw are those of nccl-tests. All nodes are measured
    at once but each for itself, then all of them together.

    When it fails: if all_reduce is slow too, begin there. If only all_to_all or send_recv across nodes is, look at the
    single ports (``ibstat``) and rails: they cannot use a neighbour's NIC. Wrong data: take the named rank's GPU, and
    then the one whose data it should have got, out of service and repeat.

    On cpu this rehearses with gloo.
    """
    group = cluster.group if scope == "world" else cluster.node_group([who["node_rank"] for who in inventory])
    small, large = workload.collectives.latency_sizes, workload.collectives.sizes
    results = {}
    with cluster.using(group):
        for size in dict.fromkeys((*small, *large)):
            window = telemetry()
            result = measure_collective(
                collective,
                group,
                cluster.device,
                payload_bytes=int(parse(size).to("B")),
                dtype=dtype,
                sampling=workload.collectives.sampling,
                during=window,
            )
            results[size] = result, window.summary()
    transport = cluster.carried_by(group)
    for name, text in transport.properties(collective).items():
        record_property(f"nccl.{name}", text)

    name = f"nccl.{collective}"
    for size, (result, summary) in results.items():
        nnodes = cluster.nnodes if scope == "world" else 1
        labels = {"size": size, "dtype": dtype, "world_size": result.ranks, "nnodes": nnodes, **transport.labels}
        if size in small:
            measure(f"{name}.latency", result.latency, unit="s", telemetry=summary, **labels)
        if size in large:
            measure(f"{name}.algbw", result.algbw, unit="B/s", telemetry=summary, record_only=True, **labels)
            measure(f"{name}.busbw", result.busbw, unit="B/s", telemetry=transport.add_to(summary), **labels)
            measure(f"{name}.average_busbw", result.average_busbw, unit="B/s", record_only=True, **labels)
