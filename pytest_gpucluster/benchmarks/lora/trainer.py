"""The training of LoRA's adapters: its data, the checks that all ranks start equal, and the training loop.

The model is sharded and the global batch is fixed. Equality of the ranks is checked before the first step: later each
rank keeps only a part, and a difference would not be seen.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import get_total_norm

from pytest_gpucluster.benchmarks.group import Ranks, on_first_rank
from pytest_gpucluster.benchmarks.lora.dataset import Row
from pytest_gpucluster.benchmarks.lora.model import Base, MaskedLoss, is_outer_factor, make_adapted
from pytest_gpucluster.benchmarks.lora.packing import Packed, Render, global_batch, segments, share
from pytest_gpucluster.benchmarks.lora.training_plan import Plan, Recipe, cosine, micro_batches, seed_of_step
from pytest_gpucluster.benchmarks.storage import checkpoint
from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint, fingerprints
from pytest_gpucluster.benchmarks.training.parity import Share
from pytest_gpucluster.benchmarks.training.sharding import local, mesh_of, shard, watch_gradients
from pytest_gpucluster.benchmarks.training.step import accumulate, adamw, clip_gradients, optimizer_step
from pytest_gpucluster.benchmarks.training.throughput_setup import lacking_compiler
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.loss_curve import Point


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of a training.

    Attributes:
        train, held_out: blocks of tokens; no held-out conversation is in a training block.
        held_out_rows: the conversations of ``held_out``, for function calls.
        tokenizer: of the blocks.
        origin: where the rows come from, for reports.
        notes: remarks on them, for reports.
        render: how they are written.
    """

    train: Packed
    held_out: Packed
    held_out_rows: Sequence[Row]
    tokenizer: Any
    origin: str
    notes: tuple[str, ...] = ()
    render: Render = segments

    @property
    def sha256(self) -> str:
        """Of the tokens to train on, and their loss mask."""
        digest = hashlib.sha256(self.train.tokens.numpy().tobytes())
        digest.update(self.train.loss_mask.numpy().tobytes())
        return digest.hexdigest()


def trainable_blocks(packed: Packed, sequence: int) -> Packed:
    """Return the blocks whose loss mask is not empty, cut to ``sequence``: the others train nothing.

    Raises: EnvironmentBroken if there is none.
    """
    some = packed.loss_mask[:, :sequence].any(dim=1)
    if not some.any():
        raise EnvironmentBroken(
            f"none of {len(packed)} blocks of {sequence} tokens has a text of the assistant: give other data, or a "
            "longer sequence"
        )
    return replace(
        packed,
        tokens=packed.tokens[some, : sequence + 1].contiguous(),
        loss_mask=packed.loss_mask[some, :sequence].contiguous(),
    )


EPSILON = 1e-8
"""Of AdamW: torch's and transformers' own, with which the final loss of the acceptance was reached. With it a wrong
scale of the gradients hardly changes the weights; it is found in the gradients themselves (``training.parity``).
Source: Kingma and Ba, "Adam" (arXiv:1412.6980), section 2."""

STARTING_STEPS = 3
"""Steps at the beginning that are slower than the others: memory is allocated and kernels are selected in them."""

Loss = Callable[[torch.Tensor, float], torch.Tensor]
"""Return the loss to differentiate: of the sum over a micro-batch's mask, and the number of targets of the mean."""


def token_mean(masked_sum: torch.Tensor, targets_per_rank: float) -> torch.Tensor:
    """Return a micro-batch's part of the mean over all targets in the global batch's mask.

    The gradients of the ranks are averaged. So the number of these targets on all ranks, divided by the ranks, makes
    the mean the true one, also where some ranks have more of them than others.
    """
    return masked_sum / targets_per_rank


@dataclass(frozen=True, kw_only=True)
class Components:
    """The replaceable parts of the training loop: tests inject a faulty one."""

    make: Callable[..., Any] = make_adapted
    model: Callable[[Any], MaskedLoss] = MaskedLoss
    shard: Callable[..., MaskedLoss] = shard
    share: Callable[..., list[int]] = share
    loss: Loss = token_mean
    learning_rate: Callable[[int, Recipe], float] = cosine
    update: Callable[[nn.Module, torch.optim.Optimizer], None] = optimizer_step
    save: Callable[..., Path] = checkpoint.save


COMPONENTS = Components()


@dataclass(frozen=True, kw_only=True)
class Step(Point):
    """The values of one step, besides those of a curve's point; padding is left out of the loss of all tokens.

    Attributes:
        finite: whether this rank's losses and gradients are, before the exchange; or, if those of all ranks are, the
            norm; or, if it is too, this rank's part of the weights after the step.
        all_finite: whether that holds on all ranks.
        seconds: the step's time on this rank.
        tokens: input tokens of this rank, none of which is padding.
        weights: fingerprint of this rank's part of the trained weights, after the step.
    """

    finite: bool
    all_finite: bool
    seconds: float
    tokens: int
    weights: int


class Trainer:
    """The training loop, step by step.

    Collective: every rank of the group must create it, and call each method, with the same arguments.

    The weights are made from the seed on each rank and compared before they are sharded: FSDP2 broadcasts none.

    Args:
        group: the ranks that train one model together.
        device: where this rank trains.
        base: the model to train.
        recipe: how.
        packed: the blocks to train on, the same on every rank; each has a loss mask that is not empty.
        components: by default ``COMPONENTS`` of this module.
        sequence: positions of a block as planned, where these have fewer.

    Attributes:
        start: fingerprint of all weights before the first step, the base's and the adapters', before they are sharded.
        sequence: positions of a block.
        recomputes: whether activations are recomputed.
        not_compiled: why blocks are not compiled; "" if they are.

    Raises:
        WrongResult: weights or data are not the same on all ranks.
        EnvironmentBroken: too little memory is free.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        base: Base,
        recipe: Recipe,
        packed: Packed,
        *,
        components: Components | None = None,
        sequence: int | None = None,
    ) -> None:
        self._group, self._device, self._packed = group, device, packed
        self.recipe, self._components = recipe, components or COMPONENTS
        self.ranks, self._rank = Ranks(group, device), dist.get_rank(group)
        self.sequence = sequence or int(packed.loss_mask.shape[1])
        self._plan = Plan(base=base, recipe=recipe, sequence=self.sequence, ranks=self.ranks.count)
        self._micro = self._plan.micro_batch
        self.recomputes, lacking = self._plan.choose_recompute(self.ranks, device)
        if lacking:
            raise EnvironmentBroken(lacking)
        kept = base.kept(accelerator(device))
        self.model = self._components.model(
            self._components.make(kept, device, precision=recipe.precision, dropout=recipe.dropout, seed=recipe.seed)
        )
        self.start = fingerprint(self.model.parameters())
        found = {
            "the model's weights": self.start,
            "the blocks of tokens": fingerprint([packed.tokens, packed.loss_mask.to(torch.uint8)]),
        }
        of_ranks = self.ranks.gather_fingerprints(*found.values())
        for what, values in zip(found, zip(*of_ranks, strict=True), strict=True):
            usual = Counter(values).most_common(1)[0][0]
            if differing := [rank for rank, its in enumerate(values) if its != usual]:
                raise WrongResult(
                    f"before the first step {what} are not the same on all ranks: {self.ranks.name(differing[0])} "
                    f"differs from most, and {len(differing) - 1} more. Check the versions of torch and transformers, "
                    "the files on each node, and that rank's GPU"
                )
        if self.recomputes:
            self.model.causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.not_compiled = "" if recipe.compiled else "not asked for"
        if recipe.compiled and kept is base:  # a simulated device's model runs eagerly
            self.not_compiled = lacking_compiler(self.ranks, device)
            for block in () if self.not_compiled else self.model.blocks:
                block.compile(dynamic=False)
        # On one rank for its policy of mixed precision, without which peft would multiply its adapters in fp32.
        if self.ranks.count > 1 or recipe.precision != "fp32":
            self._components.shard(self.model, mesh_of(group, device), precision=recipe.precision)
        weights = dict(self.model.named_parameters())
        # Adapters that are frozen by mistake too: then they do not move, and are found by that.
        self._trained = {name: its for name, its in weights.items() if its.requires_grad or ".lora_" in name}
        self._before = fingerprints(self.model)
        self.optimizer = self.make_optimizer(self._trained.values())
        self._largest = torch.zeros((), device=device)
        # The largest element of this rank's gradients, from before the ranks exchange them.
        watch_gradients(
            self.model,
            lambda name, gradient: torch.maximum(
                self._largest, gradient.detach().abs().max().float(), out=self._largest
            ),
        )
        self._clock, self._by = accelerator(device).clock(), accelerator(device)
        most = -(-recipe.global_batch // self.ranks.count) * self.sequence  # the ranks wait for who has the most blocks
        self._flops = most * base.flops_per_token(self.sequence)

    # ---- training

    def step(self, number: int) -> Step:
        """Take one step, numbered from 1.

        Raises: EnvironmentBroken with the figures if the device runs out of memory.
        """
        # By step and rank: a resumed training draws the same dropout.
        torch.manual_seed(seed_of_step(number, self._rank, self.recipe.seed))
        blocks, mine, targets = self._begin(number, self._rank, self.ranks.count)
        sums, norm = torch.zeros(2, dtype=torch.float64), torch.zeros(())
        self._largest.zero_()
        try:
            with self._clock.region():
                sums = self._accumulate(mine, targets, self.ranks.count)
                norm = self.clip()
                self.update()
                self._by.trained(self._flops, self.ranks.group)
        except torch.OutOfMemoryError as error:
            needed = self._plan.needed_bytes(recompute=self.recomputes)
            raise EnvironmentBroken(
                f"{self._device}: out of memory in step {number} of {self._plan.base.label}: {error}. {self._micro} "
                f"blocks of {self.sequence} tokens at once, activations {'' if self.recomputes else 'not '}recomputed; "
                f"{needed / 1e9:.3g} GB were estimated. Set a smaller micro_batch, or recompute=on "
                "(--gpucluster-workload lora.qwen2.recompute=on)"
            ) from None
        self.optimizer.zero_grad(set_to_none=True)
        [seconds] = self._clock.read()
        weights = [local(weight.detach()) for weight in self._trained.values()]
        of_ranks = self.ranks.gather([*sums.tolist(), float(self._largest), float(get_total_norm(weights))])
        masked_sum, total_sum, *_ = (sum(column) for column in zip(*of_ranks, strict=True))
        finite = [math.isfinite(loss) and math.isfinite(largest) for loss, _, largest, _ in of_ranks]
        # What follows is of all ranks: where one's share is not finite, neither are the norm and the others' weights.
        if all(finite):
            finite = [math.isfinite(norm) and math.isfinite(weight) for *_, weight in of_ranks]
        return Step(
            step=number,
            loss=masked_sum / targets,
            all_token_loss=masked_sum / targets
            if self._packed.padded
            else total_sum / self._packed.loss_mask[blocks].numel(),
            gradient_norm=float(norm),
            learning_rate=self.optimizer.param_groups[0]["lr"],
            finite=finite[self._rank],
            all_finite=all(finite),
            seconds=seconds,
            tokens=self._packed.input_tokens(mine),
            weights=fingerprint(weights),
        )

    def steps(self, last: int, *, first: int = 1, on_step: Callable[[Step], None] = lambda step: None) -> list[Step]:
        """Take steps from ``first`` to ``last``, or to the first that is not finite on some rank: no later step has any
        meaning.

        Args:
            last, first: of the steps; the trainer is after the step before ``first``.
            on_step: called with each finite step.
        """
        taken = []
        for number in range(first, last + 1):
            taken.append(self.step(number))
            if not taken[-1].all_finite:
                break
            on_step(taken[-1])
        return taken

    @property
    def notes(self) -> list[str]:
        """Remarks on the training for the report."""
        notes = []
        if self.recomputes:
            why = "set in the workload" if self.recipe.recompute == "on" else "otherwise the memory would not suffice"
            notes.append(f"activations are recomputed: {why}")
        if self.recipe.compiled and self.not_compiled:
            notes.append(f"torch.compile does not work here, so blocks run eagerly: {self.not_compiled}")
        return notes

    @property
    def tokens_of_rank(self) -> int:
        """Input tokens of this rank in a step, padding included."""
        mine = share(range(self.recipe.global_batch), rank=self._rank, world_size=self.ranks.count)
        return len(mine) * self.sequence

    def share(self, number: int, *, rank: int, ranks: int) -> Share:
        """Accumulate the gradients of the share of a step that one of some ranks has, as that rank would."""
        _, mine, targets = self._begin(number, rank, ranks)
        summed, _ = self._accumulate(mine, targets, ranks).tolist()
        own = int(self._packed.loss_mask[mine].sum())
        return summed / own if own else math.nan, own

    def clip(self) -> torch.Tensor:
        """Clip the gradients, and return their norm before. Collective."""
        return clip_gradients(self.model)

    def update(self) -> None:
        """Take the optimizer's step."""
        self._components.update(self.model, self.optimizer)

    def make_optimizer(self, weights: Iterable[torch.Tensor]) -> torch.optim.AdamW:
        """Make the recipe's optimizer of some weights."""
        decay = self.recipe.weight_decay
        return adamw(weights, self.recipe.learning_rate, epsilon=EPSILON, weight_decay=decay)

    def _begin(self, number: int, rank: int, ranks: int) -> tuple[list[int], list[int], int]:
        """Set the learning rate of a step; return its blocks, a rank's share of them, and the targets of all."""
        for settings in self.optimizer.param_groups:
            settings["lr"] = self._components.learning_rate(number, self.recipe)
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        size, seed = self.recipe.global_batch, self.recipe.seed
        blocks = global_batch(number - 1, size=size, blocks=len(self._packed), seed=seed)
        mine = self._components.share(blocks, rank=rank, world_size=ranks)
        return blocks, mine, int(self._packed.loss_mask[blocks].sum())

    def _accumulate(self, mine: Sequence[int], targets: int, ranks: int) -> torch.Tensor:
        """Accumulate the gradients of the share of one of some ranks; return the losses' sums."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        calls, _ = micro_batches(self.recipe, ranks)

        def loss_of(blocks: Sequence[int]) -> torch.Tensor:
            masked_sum, total_sum = self._losses(self._packed, blocks)
            sums.add_(torch.stack((masked_sum.detach(), total_sum)))
            return self._components.loss(masked_sum, targets / ranks)

        accumulate(self.model, [share(mine, rank=call, world_size=calls) for call in range(calls)], loss_of)
        return sums

    def _losses(self, packed: Packed, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the model with some blocks. With none it is called as well, for the other ranks, and the sums are 0."""
        tokens, counts = packed.batch(blocks or [0], self._device)
        masked_sum, total_sum = self.model(tokens, counts if blocks else torch.zeros_like(counts))
        return masked_sum, total_sum if blocks else torch.zeros_like(total_sum)

    def held_out_loss(self, packed: Packed) -> float:
        """Return the mean loss over the loss mask of other blocks, without training on them."""
        ranks, loss_mask = self.ranks.count, packed.loss_mask
        calls = -(-len(packed) // ranks)  # equally many on each rank
        mine = list(range(self._rank, len(packed), ranks))
        summed = torch.zeros((), dtype=torch.float64, device=self._device)
        self.model.eval()
        with torch.no_grad():
            for at in range(0, calls, self._micro):
                summed += self._losses(packed, mine[at : at + self._micro])[0].double()
        # After a forward pass without backward the root would stay gathered.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return sum(loss for [loss] in self.ranks.gather([float(summed)])) / int(loss_mask.sum())

    # ---- checks

    def unchanged_base(self) -> float:
        """Return the part of the frozen tensors whose part on this rank is unchanged, bit by bit."""
        frozen = [name for name, weight in self.model.named_parameters() if not weight.requires_grad]
        now = fingerprints(self.model)
        return sum(now[name] == self._before[name] for name in frozen) / len(frozen)

    def moved_adapters(self) -> float:
        """Return the part of the adapters' B matrices whose part on this rank has changed; 1 if it has none of any."""
        parts = {name: local(its.detach()) for name, its in self._trained.items() if is_outer_factor(name)}
        moved = [fingerprint([part]) != self._before[name] for name, part in parts.items() if part.numel()]
        return sum(moved) / len(moved) if moved else 1.0

    # ---- checkpoints

    def save(self, folder: Path, step: int, extra: dict[str, Any]) -> None:
        """Save the trained weights, and the optimizer, as the checkpoint of a step."""
        self._components.save(
            folder, step, self.model, self.optimizer, group=self._group, extra=extra, trained_only=True
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint; return what was saved with it, and its ``step``."""
        return checkpoint.load(path, self.model, self.optimizer, group=self._group, trained_only=True)

    def save_final(self, folder: Path) -> None:
        """Write the adapters as peft reads them, by the first rank of the group."""
        # With cpu_offload only the first rank of the world would get it, and each group has its own.
        options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        whole: dict[str, Any] = get_model_state_dict(self.model.adapted, options=options)

        def write() -> None:
            state = {name: weight.cpu() for name, weight in whole.items()}
            # Without False peft would ask the hub how large the base's vocabulary is.
            self.model.adapted.save_pretrained(folder, state_dict=state, save_embedding_layers=False)

        on_first_rank(self._group, write)
