"""Do ranks that shard one model train as one process would, and hold only their part of it?"""

import pytest

from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.parity_check import compare_ranks


@pytest.mark.training
@pytest.mark.criterion("fsdp")
def test_fsdp(cluster, workload, measure):
    """Accepted: with FSDP2 (``fully_shard`` of each block and of the rest) every rank holds 1/N of each weight and of
    its moments, and no more. All ranks together take the training steps that one process takes with the same rows, in
    fp32 and in bf16: the same losses and gradients. The same training from the same seed leaves the same bits on every
    rank after every step, and so does the optimizer's step when it is repeated.

    Why: no two ranks have the same weights, so there are no replicas to compare. A rank whose part is wrong spoils the
    model for all, and the loss still falls. Only the replay, the repeated step and the one process see it.

    When it fails: the named rank's GPU first: repeat ``test_training_step`` and ``-k nccl``, and run the vendor's
    diagnostics (``dcgmi diag -r 3``). All ranks: reduce-scatter, all-gather or the software is wrong, so look at the
    versions of torch and NCCL, and at NCCL_* variables.

    On cpu this rehearses with gloo. With one rank nothing is sharded: there it is a test of the software.
    """
    sizes, alone = workload.fsdp, cluster.subgroups(1)
    labels = {"global_batch": cluster.world_size * sizes.batch, "steps": sizes.steps}
    for name, precision in (("", "fp32"), ("bf16_", "bf16")):
        result = compare_ranks(
            cluster.group,
            cluster.device,
            Geometry.of(sizes),
            strategy="fsdp",
            precision=precision,
            batch=sizes.batch,
            steps=sizes.steps,
            alone=alone,
        )
        measure(f"fsdp.{name}loss_error", result.loss, unit="ratio", **labels)
        measure(f"fsdp.{name}gradient_error", result.gradient, unit="ratio", **labels)
    measure("fsdp.share", result.share, unit="ratio")
