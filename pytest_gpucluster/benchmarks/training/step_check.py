"""Whether training steps on one device are right: compared with the CPU, another precision, and after a reload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free
from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.fingerprint import (
    Errors,
    StepRecord,
    errors,
    fingerprint,
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

Store = Callable[[dict[str, Any], Path], object]
"""Write a checkpoint to a file."""


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
    checkpoint: Path,
    store: Store = torch.save,
) -> StepCheck:
    """Take the same training steps on the device in fp32 and in bf16, and on the CPU in fp32, TF32 being off.

    Then model and optimizer are written to a file, read into another model, and must be the same bit by bit, and so
    must the next loss.

    Args:
        device: where to train.
        geometry: of the decoder.
        batch: rows of a step.
        steps: number of steps.
        checkpoint: the file to write, this rank's own; it is removed.
        store: by default ``torch.save``.

    Raises:
        WrongResult: a loss or gradient is not finite, a weight has not changed, or the checkpoint is not the saved one.
        EnvironmentBroken: too little memory is free.
    """
    require_free(
        device,
        needed_bytes(geometry, batch),
        f"training {geometry.parameters / 1e6:.3g}M parameters",
        instead="choose a smaller one, such as --gpucluster-workload training.width=256",
    )
    with counted(VERIFYING), numerics("highest"):
        # One batch more than steps: its loss is taken before and after the reload.
        data = PackedTokens(rows=batch * (steps + 1), sequence=geometry.sequence, vocab=geometry.vocab, seed=0)
        batches = torch.split(torch.stack([data[row] for row in range(len(data))]), batch)

        def run(where: torch.device, precision: str) -> tuple[Training, list[StepRecord]]:
            training = Training(make_decoder(geometry, where, seed=0), where, precision=precision)
            place, start = f"{where} in {precision}", weights_of(training.model)
            taken = [
                take_step(training, rows.to(where), where=f"{place}, step {step}")
                for step, rows in enumerate(batches[:steps], start=1)
            ]
            if still := unchanged_weights(training.model, start):
                raise WrongResult(
                    f"{place}: {len(still)} of {len(list(training.model.parameters()))} weight tensors have not "
                    f"changed in {steps} steps: {', '.join(still[:8])}. The optimizer must change all of them"
                )
            return training, taken

        start = weights_of(make_decoder(geometry, CPU, seed=0))
        with accelerator(device).computed_by_host():
            reference = run(CPU, "fp32")[1]
        bf16 = run(device, "bf16")[1]  # the models of both are freed by now
        training, fp32 = run(device, "fp32")
        other = Training(make_decoder(geometry, device, seed=1), device, precision="fp32")
        _check_checkpoint(training, other, batches[steps].to(device), checkpoint, store, where=str(device))
        return StepCheck(fp32=errors(fp32, reference, start), bf16=errors(bf16, fp32, start))


def needed_bytes(geometry: Geometry, batch: int) -> int:
    """Estimate the memory of two models in training: weights, gradients and both moments of AdamW, all fp32; and of
    the activations: some 40 of a block's width, and the logits three times, if nothing is recomputed.
    """
    tokens = batch * geometry.sequence
    activations = 4 * tokens * (40 * geometry.layers * geometry.width + 3 * geometry.vocab)
    return 2 * 16 * geometry.parameters + activations


def _check_checkpoint(
    training: Training, other: Training, rows: torch.Tensor, path: Path, store: Store, *, where: str
) -> None:
    try:
        store({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, path)
        read = torch.load(path, map_location=CPU, weights_only=True)
    finally:
        path.unlink(missing_ok=True)
    other.model.load_state_dict(read["model"])
    other.optimizer.load_state_dict(read["optimizer"])
    for what, saved, loaded in (
        ("model", fingerprint(training.model.parameters()), fingerprint(other.model.parameters())),
        ("optimizer", _optimizer_fingerprint(training), _optimizer_fingerprint(other)),
    ):
        if saved != loaded:
            raise WrongResult(
                f"{where}: the {what} read from the checkpoint is not the one that was written: fingerprint "
                f"{loaded:016x}, expected {saved:016x}. Check the file system of {path.parent}, then the GPU"
            )
    with torch.no_grad():
        before, after = training.loss(rows), other.loss(rows)
    if not torch.equal(before, after):
        raise WrongResult(
            f"{where}: the next loss after reloading the checkpoint is {float(after)!r}, without reloading "
            f"{float(before)!r}; they must be the same bit by bit"
        )


def _optimizer_fingerprint(training: Training) -> int:
    states = (training.optimizer.state[weight] for weight in training.model.parameters())
    return fingerprint(state[name] for state in states for name in sorted(state))
