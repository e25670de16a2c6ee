"""Whether training steps on one device are right: compared with the CPU, and with another precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free
from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.fingerprint import (
    Errors,
    StepRecord,
    errors,
    take_step,
    unchanged_weights,
    weights_of,
)
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.step import Training
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.products import numerics
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.time_budget import VERIFYING, counted

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class StepCheck:
    """The result.

    Attributes:
        fp32: the device's steps in fp32 compared with the CPU's.
        bf16: the device's steps in bf16 compared with its own in fp32.
    """

    fp32: Errors
    bf16: Errors


@releases_memory()
def check_step(
    device: torch.device,
    geometry: Geometry,
    *,
    batch: int,
    steps: int,
) -> StepCheck:
    """Take the same training steps on the device in fp32 and in bf16, and on the CPU in fp32, TF32 being off.

    Args:
        device: where to train.
        geometry: of the decoder.
        batch: rows of a step.
        steps: number of steps.

    Raises:
        WrongResult: a loss or gradient is not finite, or a weight has not changed.
        EnvironmentBroken: too little memory is free.
    """
    require_free(
        device,
        needed_bytes(geometry, batch),
        f"training {geometry.parameters / 1e6:.3g}M parameters",
        instead="choose a smaller one, such as --gpucluster-workload training.width=256",
    )
    with counted(VERIFYING), numerics("highest"):
        data = PackedTokens(rows=batch * steps, sequence=geometry.sequence, vocab=geometry.vocab, seed=0)
        batches = torch.split(torch.stack([data[row] for row in range(len(data))]), batch)

        def run(where: torch.device, precision: str) -> list[StepRecord]:
            training = Training(make_decoder(geometry, where, seed=0), where, precision=precision)
            place, start = f"{where} in {precision}", weights_of(training.model)
            taken = [
                take_step(training, rows.to(where), where=f"{place}, step {step}")
                for step, rows in enumerate(batches, start=1)
            ]
            if still := unchanged_weights(training.model, start):
                raise WrongResult(
                    f"{place}: {len(still)} of {len(list(training.model.parameters()))} weight tensors have not "
                    f"changed in {steps} steps: {', '.join(still[:8])}. The optimizer must change all of them"
                )
            return taken

        start = weights_of(make_decoder(geometry, CPU, seed=0))
        with accelerator(device).computed_by_host():
            reference = run(CPU, "fp32")
        fp32, bf16 = run(device, "fp32"), run(device, "bf16")
        return StepCheck(fp32=errors(fp32, reference, start), bf16=errors(bf16, fp32, start))


def needed_bytes(geometry: Geometry, batch: int) -> int:
    """Estimate the memory of two models in training: weights, gradients and both moments of AdamW, all fp32; and of
    the activations: some 40 of a block's width, and the logits three times, if nothing is recomputed.
    """
    tokens = batch * geometry.sequence
    activations = 4 * tokens * (40 * geometry.layers * geometry.width + 3 * geometry.vocab)
    return 2 * 16 * geometry.parameters + activations
