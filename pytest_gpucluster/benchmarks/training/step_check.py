"""Whether training steps on one device are right: compared with the CPU, and with another precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free
from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.fingerprint import distance, gradients_of, relative, weights_of
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.parity import Parity
from pytest_gpucluster.benchmarks.training.step import STATE_BYTES, Training
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.products import numerics
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.stats import largest
from pytest_gpucluster.metrics.time_budget import VERIFYING, counted

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The values of one step. The tensors are fp32 on the CPU, all weights in one row."""

    loss: float
    gradient_norm: float
    gradients: torch.Tensor
    weights: torch.Tensor


@releases_memory()
def check_step(device: torch.device, geometry: Geometry, *, batch: int, steps: int) -> tuple[Parity, Parity]:
    """Take the same training steps on the device in fp32 and in bf16, and on the CPU in fp32, TF32 being off.

    Args:
        device: where to train.
        geometry: of the decoder.
        batch: rows of a step.
        steps: number of steps.

    Returns: the device's steps in fp32 compared with the CPU's, and those in bf16 compared with its own in fp32.

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
        start = weights_of(make_decoder(geometry, CPU, seed=0))

        def run(where: torch.device, precision: str) -> list[StepRecord]:
            training = Training(make_decoder(geometry, where, seed=0), where, precision=precision)
            place = f"{where} in {precision}"
            taken = [_take(training, rows.to(where), f"{place}, step {at}") for at, rows in enumerate(batches, start=1)]
            names, weights = zip(*training.model.named_parameters(), strict=True)
            before = torch.split(start, [weight.numel() for weight in weights])
            pairs = zip(names, weights, before, strict=True)
            if still := [name for name, weight, old in pairs if torch.equal(weight.detach().flatten().cpu(), old)]:
                raise WrongResult(
                    f"{place}: {len(still)} of {len(names)} weight tensors have not changed in {steps} steps: "
                    f"{', '.join(still[:8])}. The optimizer must change all of them"
                )
            return taken

        with accelerator(device).computed_by_host():
            reference = run(CPU, "fp32")
        fp32, bf16 = run(device, "fp32"), run(device, "bf16")
        return errors(fp32, reference, start), errors(bf16, fp32, start)


def _take(training: Training, rows: torch.Tensor, where: str) -> StepRecord:
    result = training.backward([rows])
    loss, norm = float(result.losses.mean()), float(result.gradient_norm)
    for what, value in (("loss", loss), ("gradients' norm", norm)):
        if not math.isfinite(value):
            raise WrongResult(f"{where}: the {what} is {value}, and must be finite")
    gradients = gradients_of(training.model)
    training.update()
    return StepRecord(loss=loss, gradient_norm=norm, gradients=gradients, weights=weights_of(training.model))


def errors(found: Sequence[StepRecord], reference: Sequence[StepRecord], start: torch.Tensor) -> Parity:
    """Return the distance of some steps from as many others.

    That of the gradients is of their norm before clipping, or of the clipped ones, if that is larger: the norm sees a
    wrong scale, the distance a wrong direction. That of the weights is a part of the way that they have gone.

    Args:
        found, reference: the steps.
        start: the weights before the first one, in one row.
    """
    parity = Parity()
    for one, other in zip(found, reference, strict=True):
        norms = relative(one.gradient_norm, other.gradient_norm)
        parity.loss_errors.append(relative(one.loss, other.loss))
        parity.gradient_errors.append(largest((norms, distance(one.gradients, other.gradients))))
        parity.weight_errors.append(distance(one.weights, other.weights, since=start))
    return parity


def needed_bytes(geometry: Geometry, batch: int) -> int:
    """Estimate the memory of two models in training: weights, gradients and both moments of AdamW, all fp32; and of
    the activations: some 40 of a block's width, and the logits three times, if nothing is recomputed.
    """
    tokens = batch * geometry.sequence
    activations = 4 * tokens * (40 * geometry.layers * geometry.width + 3 * geometry.vocab)
    return 2 * STATE_BYTES * geometry.parameters + activations
