"""Does training compute what it should: a step on each GPU alone, and the same step on all ranks together?"""

import pytest

from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.parity_check import compare_ranks
from pytest_gpucluster.benchmarks.training.step_check import check_step
from pytest_gpucluster.metrics.finding import require_nothing
from pytest_gpucluster.node.host_checks import examine_affinity, own_place, place_of_gpu


@pytest.mark.training
@pytest.mark.single_gpu
@pytest.mark.criterion("training.step")
def test_training_step(cluster, workload, measure):
    """Accepted: on every GPU some training steps in fp32 give the losses, gradients and weights of the same steps on
    the CPU, and steps in bf16 those of fp32 within the rounding of bf16. Every weight moves.

    Why: this is the baseline. A GPU that computes wrongly is found here by its own rank, before its gradients are mixed
    with all others'. TF32 is off. The gradients' norm is taken before clipping, for AdamW hides a wrong scale.

    When it fails: on one GPU: repeat it there, run the vendor's diagnostics (``dcgmi diag -r 3``), and take it out of
    service. On all GPUs: look at the versions of driver, CUDA and torch.

    On cpu the CPU is compared with itself, and bf16 with fp32.
    """
    sizes = workload.training
    fp32, bf16 = check_step(cluster.device, Geometry.of(sizes), batch=sizes.batch, steps=sizes.steps)
    for name, errors in (("", fp32), ("bf16_", bf16)):
        measure(f"training.step.{name}loss_error", errors.loss, unit="ratio", steps=sizes.steps)
        measure(f"training.step.{name}gradient_error", errors.gradient, unit="ratio", steps=sizes.steps)
        measure(f"training.step.{name}weight_error", errors.weight, unit="ratio", steps=sizes.steps)


@pytest.mark.training
@pytest.mark.needs_ranks(2)
@pytest.mark.criterion("ddp")
def test_ddp(cluster, workload, measure):
    """Accepted: all ranks together take the training steps that one process takes with the same rows, in fp32 and in
    bf16: before the exchange each rank has the loss and the gradients that two others compute from its rows, after it
    all have their mean, and after every step the same weights on all ranks, bit by bit. Each rank reads its
    own rows: no two ranks share any, none is left out, and each epoch has another order.

    Why: a job whose ranks do not exchange gradients, read the same data or have drifted apart still trains, and its
    loss still falls. No message reports that the cluster is wasted, or that the model is wrong.

    When it fails: the named rank's GPU first: repeat ``test_training_step`` and ``-k nccl``, and run the vendor's
    diagnostics (``dcgmi diag -r 3``). No rank named alone: the all-reduce or the software is wrong, so look at the
    versions of torch and NCCL, and at NCCL_* variables.

    On cpu this rehearses with gloo.
    """
    sizes = workload.training
    for name, precision in (("", "fp32"), ("bf16_", "bf16")):
        result = compare_ranks(
            cluster.group,
            cluster.device,
            Geometry.of(sizes),
            strategy="ddp",
            precision=precision,
            batch=sizes.batch,
            steps=sizes.steps,
        )
        labels = {"global_batch": cluster.world_size * sizes.batch, "steps": sizes.steps}
        measure(f"ddp.{name}loss_error", result.loss, unit="ratio", **labels)
        measure(f"ddp.{name}gradient_error", result.gradient, unit="ratio", **labels)


@pytest.mark.single_gpu
@pytest.mark.needs_gpu
@pytest.mark.criterion("affinity")
def test_affinity(cluster, gpu, inventory, measure):
    """Accepted: each rank may run on CPUs near its GPU, and allocate memory there.

    Why: a rank that is bound to the CPUs of another NUMA node moves all its data across the link between the sockets,
    at each step. A rank that is not bound at all is noted: the kernel may move it to the other socket.

    When it fails: ``nvidia-smi topo -m`` shows the CPUs of each GPU. Bind the ranks as the finding says.
    """
    [who] = [who for who in inventory if who["rank"] == cluster.rank]
    findings = examine_affinity(who, own_place(), place_of_gpu(gpu.pci_bus_id))
    notes = [str(finding) for finding in findings if finding.kind == "note"]
    measure("inventory.ranks", len(inventory), unit="ranks", record_only=True, telemetry={"notes": notes})
    require_nothing(findings)
