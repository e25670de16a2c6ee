"""Does training compute what it should: a step on each GPU alone, and the same step on all ranks together?"""

import pytest

from pytest_gpucluster.benchmarks.training.decoder import Geometry
from pytest_gpucluster.benchmarks.training.step_check import check_step


@pytest.fixture
def geometry(workload):
    """The decoder that is trained."""
    sizes = workload.training
    return Geometry(
        layers=sizes.layers, width=sizes.width, heads=sizes.heads, vocab=sizes.vocab, sequence=sizes.sequence
    )


@pytest.mark.training
@pytest.mark.single_gpu
@pytest.mark.criterion("training.step")
def test_training_step(cluster, geometry, workload, artifacts, measure):
    """Accepted: on every GPU some training steps in fp32 give the losses, gradients and weights of the same steps on
    the CPU, and steps in bf16 those of fp32 within the rounding of bf16. Every weight moves. A checkpoint of model and
    optimizer is read back bit by bit, and gives the same next loss.

    Why: this is the baseline. A GPU that computes wrongly is found here by its own rank, before its gradients are mixed
    with all others'. TF32 is off. The gradients' norm is taken before clipping, for AdamW hides a wrong scale.

    When it fails: on one GPU: repeat it there, run the vendor's diagnostics (``dcgmi diag -r 3``), and take it out of
    service. On all GPUs: look at the versions of driver, CUDA and torch. A checkpoint that differs: look at the file
    system of the report directory.

    On cpu the CPU is compared with itself, and bf16 with fp32.
    """
    sizes = workload.training
    found = check_step(cluster.device, geometry, batch=sizes.batch, steps=sizes.steps, folder=artifacts)
    for name, errors in (("", found.fp32), ("bf16_", found.bf16)):
        measure(f"training.step.{name}loss_error", errors.loss, unit="ratio", steps=sizes.steps)
        measure(f"training.step.{name}gradient_error", errors.gradient, unit="ratio", steps=sizes.steps)
        measure(f"training.step.{name}weight_error", errors.weight, unit="ratio", steps=sizes.steps)
