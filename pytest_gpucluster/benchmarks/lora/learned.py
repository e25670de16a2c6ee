"""What a LoRA training has come to, and how much was found out about it. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_gpucluster.benchmarks.lora.evaluation import CallScore
from pytest_gpucluster.benchmarks.lora.parity import Parity
from pytest_gpucluster.metrics.loss_curve import Curve
from pytest_gpucluster.metrics.sampling import Sampling, Series

LAST = 10
"""Steps at the end whose mean loss is the final one. Source: acceptance of 2 nodes x 8 H100 SXM 80GB."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """How much is found out beside the training itself.

    Attributes:
        parity_steps, parity_batch, parity_sequence: of the steps that one rank repeats; the batch is made a multiple of
            the ranks.
        parity_precisions: in which these steps are taken.
        checkpoint_every: steps from one checkpoint to the next. As many, at most, are taken a second time.
        calls: function calls that the trained model is asked for, by all ranks of a group together; 0 for none.
        call_tokens: of an answer, at most.
        sampling: how sure the rate must be.
    """

    parity_steps: int
    parity_batch: int
    parity_sequence: int
    parity_precisions: tuple[str, ...]
    checkpoint_every: int
    calls: int
    call_tokens: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a training that was finite to its end has come to. Ratios are parts of 1.

    Attributes:
        final_loss: mean of the last ``LAST`` losses.
        held_out_before, held_out_after: mean loss of held-out blocks.
        moved_adapters: of the adapters' B matrices, how many have moved.
        unchanged_base: of the frozen tensors on this rank, how many are the same bit by bit.
        replayed_steps: of the steps that were taken again from a checkpoint, after how many this rank's weights were
            the same as the first time, bit by bit.
        resume_error: largest difference of a loss the second time.
        replayed: steps that were taken again.
        reload_error: difference of the held-out loss after ``final/`` was read again.
        group_error: largest difference of a loss to that of the first group; None where there is one group only.
        calls: function calls of held-out conversations; None if none were asked for.
    """

    final_loss: float
    held_out_before: float
    held_out_after: float
    moved_adapters: float
    unchanged_base: float
    replayed_steps: float
    resume_error: float
    replayed: int
    reload_error: float
    group_error: float | None
    calls: CallScore | None


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """What was found on this rank.

    Attributes:
        finite_steps: part of the steps, of all phases, in which what this rank contributed is finite.
        parity: by precision.
        curve: of the training.
        learned: None where a step was not finite on some rank, and nothing more was tried.
        tokens_per_second: of this GPU, in the steady steps, those that were taken again among them; None where there
            are too few, as where a training was resumed near its end.
        flops_per_token: by the formula.
        peak_bytes: of the GPU's memory, in training; None on cpu.
        recomputes: whether activations were recomputed.
        groups, ranks: how many groups trained at once, of how many ranks.
        resumed_at: the step of the checkpoint that the training went on from; 0: it began anew.
        notes: for the report.
    """

    finite_steps: float
    parity: Mapping[str, Parity]
    curve: Curve
    learned: Learned | None
    tokens_per_second: Series | None
    flops_per_token: int
    peak_bytes: int | None
    recomputes: bool
    groups: int
    ranks: int
    resumed_at: int
    notes: tuple[str, ...]
