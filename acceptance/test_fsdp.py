"""Do ranks that shard one model train as one process would, and hold only their part of it?"""

import pytest

from pytest_gpucluster.benchmarks.training.fsdp import check_fully_sharded
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.sharding import measure_sharded_memory


@pytest.fixture
def geometry(workload):
    """The decoder that is trained."""
    sizes = workload.fsdp
    return Geometry(
        layers=sizes.layers, width=sizes.width, heads=sizes.heads, vocab=sizes.vocab, sequence=sizes.sequence
    )


@pytest.mark.training
@pytest.mark.criterion("fsdp")
def test_fsdp(cluster, geometry, workload, measure):
    """Accepted: with FSDP2 (``fully_shard`` of each block and of the rest) every rank holds 1/N of each weight and of
    its moments, and no more. All ranks together take the training steps that one process takes with the same rows, in
    fp32, in fp32 with the weights in the host's memory, and in bf16: the same losses and gradients. The losses are
    those of DistributedDataParallel, too. The same training from the same seed leaves the same bits on every rank
    after every step, and so does the optimizer's step when it is repeated.

    Why: no two ranks have the same weights, so there are no replicas to compare. A rank whose part is wrong spoils the
    model for all, and the loss still falls. Only the replay, the repeated step and the one process see it.

    When it fails: the named rank's GPU first: repeat ``test_training_step`` and ``-k nccl``, and run the vendor's
    diagnostics (``dcgmi diag -r 3``). All ranks: reduce-scatter, all-gather or the software is wrong, so look at the
    versions of torch and NCCL, and at NCCL_* variables.

    On cpu this rehearses with gloo. With one rank nothing is sharded: there it is a test of the software.
    """
    sizes = workload.fsdp
    result = check_fully_sharded(
        cluster.group,
        cluster.device,
        geometry,
        alone=cluster.subgroups(1),
        batch=sizes.batch,
        steps=sizes.steps,
    )
    labels = {"global_batch": result.fp32.global_batch, "steps": len(result.fp32.losses)}
    for name, cpu_offload, parity in (
        ("", "no", result.fp32),
        ("", "yes", result.offloaded),
        ("bf16_", "no", result.bf16),
    ):
        measure(f"fsdp.{name}loss_error", parity.loss, unit="ratio", cpu_offload=cpu_offload, **labels)
        measure(f"fsdp.{name}gradient_error", parity.gradient, unit="ratio", cpu_offload=cpu_offload, **labels)
    measure("fsdp.ddp_loss_error", result.ddp_loss_error, unit="ratio", **labels)
    measure("fsdp.share", result.share, unit="ratio")


@pytest.mark.training
@pytest.mark.criterion("fsdp")
def test_fsdp_memory(cluster, geometry, workload, measure):
    """Recorded: how much memory a rank needs to train, with the model on one rank, shared by the ranks of a node, and
    by all ranks; in bf16, all groups of one size at once. On a GPU it is the most that torch had allocated at a time;
    everywhere, and on cpu alone, what weights, gradients and moments take between two steps.

    Why: it says whether more ranks make room for a larger model, and how much of the memory is not shared.

    When it is more than expected: what does not fall with the ranks are activations and the weights that are gathered
    for one block at a time.
    """
    batch = workload.fsdp.batch
    for ranks in sorted({1, cluster.local_world_size, cluster.world_size}):
        memory = measure_sharded_memory(cluster.subgroups(ranks), cluster.device, geometry, batch=batch)
        counted = {"weights, gradients and moments": memory.state_bytes, "all that torch allocated": memory.peak_bytes}
        for what, found_bytes in counted.items():
            if found_bytes is not None:
                measure("fsdp.memory", found_bytes, unit="B", record_only=True, ranks=memory.ranks, counted=what)
