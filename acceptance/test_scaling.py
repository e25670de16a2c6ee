"""How much of its own rate does each GPU keep when more of them train together?"""

from contextlib import nullcontext

import pytest

from pytest_gpucluster.benchmarks.collectives import measure_collective
from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.memory_budget import require_free
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.scaling import efficiency, gather_series, rates
from pytest_gpucluster.benchmarks.training.throughput_setup import Setup
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.metrics.units import parse

KINDS = {"node": ("node", "gpu"), "fabric": ("world", "node"), "total": ("world", "gpu")}
SETUP_SECONDS = 300.0  # compiling, connecting, filling and verifying


@pytest.fixture(autouse=True)
def deadline(request, cluster, workload):
    """Give each of two passes the time that its workload may take."""
    longest = max(
        config.sampling.warmup_seconds + config.sampling.at_most_seconds
        for config in (workload.scaling, workload.all_reduce)
    )
    seconds = 2 * (longest + SETUP_SECONDS)
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


@pytest.fixture(scope="session")
def known():
    """Earlier results by strategy and group size: one pass serves several ratios."""
    return {}


@pytest.fixture
def strategy(request):
    """How the ranks of a group share the training."""
    return "fsdp" if request.node.originalname == "test_sharded_scaling" else "ddp"


@pytest.fixture
def setup(cluster, strategy, workload):
    """What is trained: the same on each GPU for any size of its group."""
    config = workload.scaling
    training = Setup(
        geometry=Geometry.of(config),
        strategy=strategy,
        batch=config.batch,
        compiled=config.compiled == "on",
        recompute=config.recompute == "on",
        workers=config.workers,
        prefetch=config.prefetch,
    )
    needed = training.needed_bytes(1 if strategy == "fsdp" else cluster.world_size)
    available = accelerator(cluster.device).total_bytes()
    if available is not None and needed > available:
        pytest.skip(
            f"{training.geometry.parameters / 1e6:.4g}M parameters with {training.tokens} tokens a step: needs about "
            f"{needed / 1e9:.3g} GB on each rank, and {cluster.device} has {available / 1e9:.3g} GB in all: take a "
            "smaller batch or model (--gpucluster-workload scaling.batch=4)"
        )
    # Before any group trains: a rank that failed inside one would leave the others waiting.
    require_free(
        cluster.device,
        needed,
        f"training {training.geometry.parameters / 1e6:.4g}M parameters with {training.tokens} tokens a step",
        instead="take a smaller batch or model (--gpucluster-workload scaling.batch=4)",
    )
    return training


@pytest.fixture
def group_of(cluster, inventory, request):
    """Return the group that this rank is in: "gpu" (itself, and no group unless it has to shard), "node" or "world"."""
    groups = {
        "gpu": lambda: cluster.subgroups(1) if request.node.originalname == "test_sharded_scaling" else None,
        "node": lambda: cluster.node_group([who["node_rank"] for who in inventory]),
        "world": lambda: cluster.group,
    }
    return lambda scope: groups[scope]()


@pytest.fixture
def rates_of(cluster, group_of, known, progress, setup, strategy, telemetry, workload):
    """Train in the groups of a scope, all of them at once, unless that has been done; return the rates."""

    def measured(scope):
        group = group_of(scope)
        return rates(
            cluster.group,
            group,
            cluster.device,
            setup,
            sampling=workload.scaling.sampling,
            known=known.setdefault(strategy, {}),
            using=nullcontext() if scope == "gpu" else cluster.using(group),
            during=telemetry(),
            progress=progress,
        )

    return measured


@pytest.fixture
def labels(setup):
    """The conditions of every figure of scaling."""
    return {
        "strategy": setup.strategy,
        "parameters": setup.geometry.parameters,
        "batch": setup.batch,
        "tokens_per_gpu_and_step": setup.tokens,
    }


@pytest.mark.training
@pytest.mark.needs_ranks(2)
@pytest.mark.criterion("scaling")
def test_stragglers(rates_of, labels, measure):
    """Accepted: no GPU that trains by itself is far behind the others, while all of them train.

    Why: the slowest GPU sets the pace of every larger group. Here nothing is exchanged, so a rank that is behind is
    slow by itself. All GPUs are busy at once: power, cooling, CPU cores and memory are shared as in a large job. The
    rates of all ranks are recorded.

    When it fails: on the named rank look at clocks and throttle reasons (``nvidia-smi -q -d PERFORMANCE``), at what
    else runs on its CPU cores, and repeat ``-k matmul`` and ``-k hbm`` there.

    On cpu the ranks share the cores of one host.
    """
    result = rates_of("gpu")
    measure(
        "scaling.tokens_per_second",
        result.mine,
        unit="tokens/s",
        telemetry={"notes": list(result.notes)},
        group_size=1,
        **labels,
    )


@pytest.fixture
def scale(rates_of, labels, measure, strategy):
    """Measure the rates of both sizes of a kind, and their ratio, which is judged for ddp."""

    def scale(kind):
        above, below = KINDS[kind]
        smaller, larger = rates_of(below), rates_of(above)
        slowest = larger.of_rank[larger.slowest].median
        notes = [*larger.notes, f"slowest of {larger.group_size}: rank {larger.slowest} with {slowest:.6g} tokens/s"]
        for result in (smaller, larger):
            measure(
                "scaling.tokens_per_second",
                result.mine,
                unit="tokens/s",
                record_only=True,
                group_size=result.group_size,
                **labels,
            )
        measure(
            "scaling.efficiency",
            efficiency(larger.of_rank, smaller.of_rank),
            unit="ratio",
            record_only=strategy == "fsdp",
            telemetry={"notes": notes},
            kind=kind,
            group_size=larger.group_size,
            over=smaller.group_size,
            **labels,
        )

    return scale


each_kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param("node", marks=pytest.mark.needs_local_ranks(2)),
        pytest.param("fabric", marks=pytest.mark.needs_nodes(2)),
        pytest.param("total", marks=pytest.mark.needs_nodes(2)),
    ],
)


@pytest.mark.training
@pytest.mark.criterion("scaling")
@each_kind
def test_scaling(kind, scale):
    """Accepted: in groups of a node over one GPU (node), in the world over groups of a node (fabric), and in the world
    over one GPU (total) more than the limit of the tokens a second per GPU are left.

    Why: this is what a larger job loses. Node and fabric show where: inside the nodes or between them. It is weak
    scaling: the model, and the tokens per GPU and step, are the same in groups of each size, and both are stated, for
    with fewer tokens a step any network looks worse. All groups of one size train at once, all parameters, with DDP.
    The slowest rank of the larger groups is divided by the median rank of the smaller ones.

    When it fails: named by ``test_stragglers``, a slow GPU is the cause. Else, for node look at NVLink and ``-k nccl``
    of the scope node; for fabric at ``test_busbw_retention`` and ``-k nccl`` of the scope world. If both are good, the
    exchange does not hide behind the backward pass: look at the CPU cores of each rank, and at NCCL_* variables. More
    than the upper limit: the smaller groups were slowed down by something; repeat it. Inconclusive: likewise.

    On cpu this rehearses with gloo.
    """
    scale(kind)


@pytest.mark.training
@each_kind
def test_sharded_scaling(kind, scale):
    """No criterion: the same with FSDP2, which gathers the weights too. Its ratios are recorded."""
    scale(kind)


@pytest.mark.nccl
@pytest.mark.needs_nodes(2)
@pytest.mark.needs_local_ranks(2)
@pytest.mark.criterion("scaling.busbw_retention")
def test_busbw_retention(cluster, group_of, workload, telemetry, measure):
    """Accepted: the all-reduce of the whole world reaches more than the limit of the busbw that a node has for itself.

    Why: busbw is comparable for groups of any size, so this is what the network between the nodes leaves of the links
    inside. It says nothing about training: where the exchange hides behind computation, half may be plenty, and where
    it cannot hide, all of it may be too little. So it is a criterion apart from ``test_scaling``.

    When it fails: as for ``-k nccl`` of the scope world: InfiniBand ports (``ibstat``), NET/Socket in NCCL's log, or a
    node that is slow.

    On cpu this rehearses with gloo.
    """
    size = max(workload.all_reduce.sizes, key=lambda text: parse(text).to("B"))
    results = {}
    for scope in ("node", "world"):
        group = group_of(scope)
        with cluster.using(group):
            results[scope] = measure_collective(
                "all_reduce",
                group,
                cluster.device,
                payload_bytes=int(parse(size).to("B")),
                dtype="bf16",
                sampling=workload.all_reduce.sampling,
                during=telemetry(),
            )
    everyone = Ranks(cluster.group, cluster.device)
    node, world = (gather_series(everyone, results[scope].slowest_busbw) for scope in ("node", "world"))
    measure(
        "scaling.busbw_retention",
        efficiency(world, node),
        unit="ratio",
        size=size,
        dtype="bf16",
        group_size=results["world"].ranks,
        over=results["node"].ranks,
        **cluster.carried_by(cluster.group).labels,
    )
