"""Whether a LoRA training converges: the conditions, the result of each, and the figures.

A loss below a limit alone would miss most faults. So each condition is checked by itself: all is finite, the loss ends
low and that of held-out blocks falls, every adapter has moved and the base has not, some steps equal those of one rank,
steps after a checkpoint are the same a second time, bit by bit, and what was saved gives the same loss when it is read
again. Each figure is a condition or a recorded value of its own.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.group import Ranks, on_first_rank
from pytest_gpucluster.benchmarks.lora.evaluation import CallScore, evaluate, reload_adapter, reloaded_loss
from pytest_gpucluster.benchmarks.lora.experiment import Sizes, context_of, last_step, require_same_context
from pytest_gpucluster.benchmarks.lora.model import Base, TransformersLoss
from pytest_gpucluster.benchmarks.lora.packing import Packed
from pytest_gpucluster.benchmarks.lora.reference_curve import ReferenceCurve, require_same_experiment
from pytest_gpucluster.benchmarks.lora.throughput import Figure, LoraRate, steady_rate
from pytest_gpucluster.benchmarks.lora.trainer import Components, Step, Trainer, TrainingData, trainable_blocks
from pytest_gpucluster.benchmarks.lora.training_plan import Recipe, cosine
from pytest_gpucluster.benchmarks.memory_budget import memory_released, releases_memory
from pytest_gpucluster.benchmarks.storage import checkpoint
from pytest_gpucluster.benchmarks.training.fingerprint import relative
from pytest_gpucluster.benchmarks.training.parity import Parity, StepComparison
from pytest_gpucluster.benchmarks.training.throughput_setup import fresh_compiler
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.products import deterministic, numerics
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.loss_curve import Curve, Point, mean_of_last
from pytest_gpucluster.metrics.stats import largest
from pytest_gpucluster.metrics.time_budget import MEASURING, VERIFYING, counted

HELD_OUT_EVERY = 50
"""Steps from one held-out loss to the next, besides those before and after the training."""

LAST = 10
"""Steps at the end whose mean loss is the final one. Source: acceptance of 2 nodes x 8 H100 SXM 80GB."""


@releases_memory(cycles=True)
def check_parity(
    group: dist.ProcessGroup,
    alone: dist.ProcessGroup,
    device: torch.device,
    base: Base,
    recipe: Recipe,
    packed: Packed,
) -> tuple[Parity, float]:
    """Take the steps of a recipe on all ranks of a group, and compare each part of them with what one rank computes.

    Without it a training that learns less than it should passes: AdamW hides a wrong scale of the gradients, and a loss
    falls also where ranks do not share gradients or read the same data. What one rank computes has transformers' own
    loss.

    Collective: every rank of the group must call this, with the same arguments.

    Args: as of :func:`converge`; the recipe is without dropout, as ``Recipe.compared`` makes it.

    Returns: the differences, until the first step that is not finite on some rank; and the part of the adapters' B
        matrices that have changed on this rank.

    Raises: as ``Trainer``.
    """
    loss_mask = packed.loss_mask.clone()
    loss_mask[:, -1] = False  # transformers has no label there
    packed = trainable_blocks(replace(packed, loss_mask=loss_mask), loss_mask.shape[1])
    trainer = Trainer(group, device, base, recipe, packed)
    reference = Trainer(alone, device, base, recipe, packed, components=Components(model=TransformersLoss))
    ranks, parity = trainer.ranks, Parity()
    comparison = StepComparison(ranks, trainer, reference, device, reference.make_optimizer)

    def take(number: int) -> bool:
        return all(
            comparison.step(
                lambda: trainer.share(number, rank=ranks.index, ranks=ranks.count),
                lambda rank: reference.share(number, rank=rank, ranks=ranks.count),
                parity,
                rate=cosine(number, recipe),
            )
        )

    all(map(take, range(1, recipe.steps + 1)))
    return parity, trainer.moved_adapters()


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """The result on this rank.

    Attributes:
        finite_steps: part of the steps, of all phases, in which what this rank contributed is finite.
        parity: by precision.
        curve: of the training.
        result: what the training has shown, by the name of its metric after ``lora.``; without all_token_loss where it
            was stopped: a step was not finite on some rank, or an optimizer does not step. In nats final_loss and
            all_token_loss, the means of the last ``LAST`` losses, and held_out_loss; the others are ratios.
            held_out_ratio: of the loss of held-out blocks after the training and before. moved_adapters: part of the
            adapters' B matrices that have changed. unchanged_base: part of the frozen tensors on this rank that are the
            same bit by bit. replayed_steps: part of the steps replayed from a checkpoint after which this rank's
            weights were the same as the first time, bit by bit. resume_error: largest difference of a loss in the
            replay. reload_error: difference of the held-out loss after ``final/`` was loaded again. group_error:
            largest difference of a loss from that of the first group, where there are several.
        calls: function calls of held-out conversations; None if the workload has none.
        rate: in the steady steps, replayed ones included; it has the notes of all of it.
        labels: of the figures: model, recipe (``packed`` or ``contract``), precision, how many groups trained at once
            (groups), of how many ranks (group_ranks).
    """

    finite_steps: float
    parity: Mapping[str, Parity]
    curve: Curve
    result: Mapping[str, float]
    calls: CallScore | None
    rate: LoraRate
    labels: Mapping[str, str]


@releases_memory(cycles=True)
def converge(
    world: dist.ProcessGroup,
    group: dist.ProcessGroup,
    alone: dist.ProcessGroup,
    device: torch.device,
    *,
    base: Base,
    recipe: Recipe,
    sizes: Sizes,
    data: TrainingData,
    folder: Path,
    final: Path,
    resume: bool = False,
    reference: ReferenceCurve | None = None,
    curves: Path | None = None,
    progress: Callable[..., None] | None = None,
) -> Convergence:
    """Train, and run every check that separates a right training from a wrong one.

    Collective: every rank of the world must call this, with the same arguments.

    Args:
        world: all ranks.
        group: the ranks that train one model together, this one among them, of the size that
            ``training_plan.group_size`` returns.
        alone: the group of this rank only.
        device: where this rank trains.
        base: the model to train.
        recipe: how to train it.
        sizes: stop_after, the last step that is taken, if not 0; and of the further checks: parity_steps, parity_batch
            and parity_sequence, of the steps that a single rank repeats, in each of parity_precisions;
            checkpoint_every, for at most this many steps are replayed; calls and call_tokens, of the function calls
            that the trained model is prompted for, by all ranks of a group together; tolerance_ratio, of the rate.
        data: the blocks to train on, and those held out.
        folder: for checkpoints, this group's own, on a file system that its ranks share.
        final: the folder for the trained adapters, on such a file system too.
        resume: continue from the newest checkpoint in ``folder``; without it, existing checkpoints there are an error.
            The folder is removed once the training has completed.
        reference: the curve that this one will be compared with; used here only to reject one of another experiment
            before the first step.
        curves: a folder for the curve as CSV and, where tensorboard is installed, as an event file, both named after
            ``folder``. The group's first rank writes them step by step.
        progress: called with the step, the number of steps, the loss and the rate.

    Raises:
        WrongResult: weights or data differ between ranks before the first step, or a checkpoint is broken.
        EnvironmentBroken: too little memory, a folder that cannot be used, or a checkpoint of another experiment.
        CurveError: the reference curve is of another experiment.
    """
    with numerics("highest"), deterministic():
        run = _Run(world, group, alone, device, base, recipe, sizes, data, progress, curves)
        return run.converge(folder, final, resume, reference)


@dataclass(eq=False)
class _Run:
    _world: dist.ProcessGroup
    _group: dist.ProcessGroup
    _alone: dist.ProcessGroup
    _device: torch.device
    _base: Base
    _recipe: Recipe
    _sizes: Sizes
    _data: TrainingData
    _progress: Callable[..., None] | None
    _curves: Path | None

    def __post_init__(self) -> None:
        self._everyone, self._ranks = Ranks(self._world, self._device), Ranks(self._group, self._device)
        self._context = self._context_of(0)  # until there is a model
        self._last = last_step(self._sizes)
        self._points: list[Point] = []
        self._held_out: list[tuple[int, float]] = []
        self._notes = list(self._data.notes)
        self._finite: list[bool] = []
        self._steps: list[Step] = []
        self._again: list[Step] = []
        self._recomputes = False
        self._peak_bytes: int | None = None

    def converge(self, folder: Path, final: Path, resume: bool, reference: ReferenceCurve | None) -> Convergence:
        found, moved = dict[str, Parity](), 1.0
        sizes, batch = self._sizes, max(self._sizes.parity_batch, self._ranks.count)
        for precision in sizes.parity_precisions:
            recipe = self._recipe.compared(steps=sizes.parity_steps, global_batch=batch, precision=precision)
            with counted(VERIFYING):
                packed = trainable_blocks(self._data.train, sizes.parity_sequence)
                found[precision], part = check_parity(
                    self._group, self._alone, self._device, self._base, recipe, packed
                )
            moved = min(moved, part)
            self._finite += found[precision].finite
        if not self._on_all_ranks(all(self._finite)):
            return self._convergence(found)
        # A rank that does not step would have no state of its optimizer to save.
        if not self._on_all_ranks(moved > 0):
            return self._convergence(found, {"moved_adapters": moved})
        newest = self._newest(folder)
        if newest is None and resume:
            self._notes.append(f"there was no checkpoint in {folder.name} to resume from")
        if newest is not None and not resume:
            raise EnvironmentBroken(
                f"{folder} holds checkpoints already, the newest is {newest.name}. Go on from it with "
                "--gpucluster-resume, or choose another folder (--gpucluster-scratch)"
            )
        with counted(MEASURING), memory_released(cycles=True), self._compiler():
            result = self._train(folder, final, newest, reference)
        if not self._on_all_ranks(self._steps[-1].all_finite):
            return self._convergence(found)
        if self._everyone.count > self._ranks.count:
            first = self._everyone.of_first([point.loss for point in self._points])
            pairs = zip(self._points, first, strict=True)
            result["group_error"] = largest(relative(point.loss, other) for point, other in pairs)
        with counted(VERIFYING), memory_released(cycles=True), self._compiler():
            result["replayed_steps"], result["resume_error"] = self._replay(folder)
        with counted(VERIFYING), memory_released(cycles=True):
            result["reload_error"], calls = self._reload(final)
        # A restart has nothing to resume: the training is complete.
        on_first_rank(self._group, lambda: shutil.rmtree(folder) if folder.exists() else None)
        held_out, before = self._held_out[-1][1], self._held_out[0][1]
        result = {**self._last_losses(), "held_out_loss": held_out, "held_out_ratio": held_out / before, **result}
        return self._convergence(found, result, calls)

    # ---- phases

    def _train(
        self, folder: Path, final: Path, newest: Path | None, reference: ReferenceCurve | None
    ) -> dict[str, float]:
        """Train; return what the weights show."""
        memory = accelerator(self._device)
        memory.reset_peak()
        trainer = self._trainer()
        self._context = self._context_of(trainer.start)
        if reference is not None:
            require_same_experiment(reference, self._context, steps=self._last)
        done = self._go_on(trainer, newest) if newest is not None else 0
        if not done:
            self._held_out.append((0, trainer.held_out_loss(self._data.held_out)))
        self._notes += trainer.notes

        live = LiveCurve(None if dist.get_rank(self._group) else self._curves, folder.name)

        def on_step(step: Step) -> None:
            self._points.append(step)
            if not step.step % HELD_OUT_EVERY or step.step == self._last:
                self._held_out.append((step.step, trainer.held_out_loss(self._data.held_out)))
            live.write(self._curve())
            if step.step < self._last and step.step % self._sizes.checkpoint_every == 0:
                points = [{one.name: getattr(point, one.name) for one in fields(Point)} for point in self._points]
                held_out = [list(pair) for pair in self._held_out]
                trainer.save(folder, step.step, {"context": self._context, "points": points, "held_out": held_out})
            if self._progress is not None:
                rate = step.tokens / step.seconds
                self._progress(step.step, self._last, loss=step.loss, tokens_per_second=rate)

        with closing(live):
            live.write(self._curve())
            self._steps = trainer.steps(self._last, first=done + 1, on_step=on_step)
            if not self._steps[-1].all_finite:
                self._points.append(self._steps[-1])
                live.write(self._curve())
        self._finite += [step.finite for step in self._steps]
        if self._steps[-1].all_finite:
            trainer.save_final(final)
        self._recomputes, self._peak_bytes = trainer.recomputes, memory.peak_bytes()
        return {"moved_adapters": trainer.moved_adapters(), "unchanged_base": trainer.unchanged_base()}

    def _go_on(self, trainer: Trainer, newest: Path) -> int:
        extra = trainer.load(newest)
        require_same_context(newest, extra, self._context)
        self._points = [Point(**point) for point in extra["points"]]
        self._held_out = [(int(step), float(loss)) for step, loss in extra["held_out"]]
        self._notes.append(f"resumed from {newest.name}")
        if int(extra["step"]) >= self._last:
            raise EnvironmentBroken(
                f"{newest} is of step {extra['step']}, and this training ends at step {self._last}: choose another "
                "folder (--gpucluster-scratch), or take as many steps as before"
            )
        return int(extra["step"])

    def _replay(self, folder: Path) -> tuple[float, float]:
        """Take the steps after the newest checkpoint again, with a new model; return the part of them with the same
        weights, and the largest difference of a loss."""
        newest = self._newest(folder)
        # Not by the memory that is free by now: a recomputed forward pass may round otherwise, where it is compiled.
        trainer = self._trainer(recompute="on" if self._recomputes else "off")
        start = int(trainer.load(newest)["step"]) if newest is not None else 0
        before = {step.step: step for step in self._steps}
        self._again = trainer.steps(self._last, first=start + 1)
        self._finite += [step.finite for step in self._again]
        pairs = [(step, before[step.step]) for step in self._again]
        same = sum(one.weights == other.weights for one, other in pairs)
        error = largest(relative(one.loss, other.loss) for one, other in pairs)
        return same / (self._last - start), error

    def _reload(self, final: Path) -> tuple[float, CallScore | None]:
        """Load the saved adapters into a new model, whole on each rank."""
        sizes, data = self._sizes, self._data
        model = reload_adapter(
            self._base, final, self._device, precision=self._recipe.precision, seed=self._recipe.seed
        )
        loss = reloaded_loss(model, data.held_out, self._ranks, dist.get_rank(self._group), self._device)
        error = relative(loss, self._held_out[-1][1])
        if not sizes.calls:
            return error, None
        each = -(-sizes.calls // self._ranks.count)
        mine = list(data.held_out_rows)[dist.get_rank(self._group) :: self._ranks.count]
        score = evaluate(
            model,
            data.tokenizer,
            mine,
            device=self._device,
            limit=each,
            max_new_tokens=sizes.call_tokens,
            render=data.render,
        )
        totals: Counter[str] = sum(map(Counter, self._ranks.gather_objects(dict(score.counts))), Counter())
        return error, replace(score, counts={name: totals[name] for name in score.counts})

    # ---- shared by the phases

    def _context_of(self, weights: int) -> dict[str, str]:
        return context_of(self._base, self._recipe, self._data, ranks=self._ranks.count, weights=weights)

    def _trainer(self, *, recompute: str = "") -> Trainer:
        recipe = replace(self._recipe, recompute=recompute or self._recipe.recompute)
        return Trainer(self._group, self._device, self._base, recipe, self._data.train)

    def _compiler(self) -> AbstractContextManager[None]:
        """Free what was compiled with its model, and compile the same code the next time."""
        return fresh_compiler(repeatable=True) if self._recipe.compiled else nullcontext()

    def _newest(self, folder: Path) -> Path | None:
        """Return the newest checkpoint as the first rank of the group sees it."""
        name: str = on_first_rank(self._group, lambda: str(checkpoint.latest(folder) or ""))
        return Path(name) if name else None

    def _on_all_ranks(self, condition: bool) -> bool:
        """Return whether a condition holds on all ranks of the world, so that all continue or none."""
        return all(flag for [flag] in self._everyone.gather([float(condition)]))

    def _last_losses(self) -> dict[str, float]:
        """Return the mean loss of the last steps over what counts, and over all tokens: if padded only this."""
        last = {"final_loss": "loss", "all_token_loss": "all_token_loss"}
        if self._data.train.padded:
            del last["final_loss"]
        return {name: mean_of_last(self._curve(), LAST, of) for name, of in last.items()}

    def _curve(self) -> Curve:
        return Curve(points=tuple(self._points), held_out=tuple(self._held_out), context=self._context)

    def _convergence(
        self,
        parity: Mapping[str, Parity],
        result: Mapping[str, float] = MappingProxyType({}),
        calls: CallScore | None = None,
    ) -> Convergence:
        rate = LoraRate(
            tokens_per_second=steady_rate([self._steps, self._again], self._sizes.tolerance_ratio),
            flops_per_token=self._base.flops_per_token(
                self._data.train.input_tokens(range(len(self._data.train))) // len(self._data.train)
            ),
            peak_bytes=self._peak_bytes,
            recomputes=self._recomputes,
            notes=tuple(self._notes),
        )
        return Convergence(
            finite_steps=sum(self._finite) / len(self._finite) if self._finite else math.nan,
            parity=parity,
            curve=self._curve(),
            result=result,
            calls=calls,
            rate=rate,
            labels={
                "model": self._base.label,
                "recipe": "contract" if self._data.train.padded else "packed",
                "precision": self._recipe.precision,
                "groups": str(self._everyone.count // self._ranks.count),
                "group_ranks": str(self._ranks.count),
            },
        )


class LiveCurve:
    """The files of a curve, which are written at each step, so that a training that is killed leaves them:
    ``curve-NAME.csv`` in a folder and, where tensorboard is installed, ``tensorboard-NAME``. None without a folder."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._csv, self._events = folder and folder / f"curve-{name}.csv", None
        self._written = Curve(points=())
        if folder and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / f"tensorboard-{name}"))

    def write(self, curve: Curve) -> None:
        """Write a curve, which begins with what was written before. Raises: OSError."""
        if self._csv is not None:
            curve.write_csv(self._csv)
        if self._events is None:
            return
        points, held_out = curve.points[len(self._written.points) :], curve.held_out[len(self._written.held_out) :]
        scalars = [(one.name, point.step, getattr(point, one.name)) for point in points for one in fields(Point)[1:]]
        for name, step, value in [*scalars, *(("held_out_loss", step, loss) for step, loss in held_out)]:
            self._events.add_scalar(f"lora/{name}", value, step)
        self._events.flush()
        self._written = curve

    def close(self) -> None:
        """Close the event file."""
        if self._events is not None:
            self._events.close()


def figures_of(found: Convergence, *, peak_tflops: float | None) -> Iterator[Figure]:
    """Yield the figures of a training.

    Args:
        found: on this rank.
        peak_tflops: as of ``LoraRate.figures``.
    """
    labels = found.labels
    yield "lora.finite_steps", found.finite_steps, "ratio", labels
    for precision, parity in found.parity.items():
        compared = {"model": labels["model"], "precision": precision, "steps": str(len(parity.losses))}
        for name in ("loss", "gradient", "weight"):
            yield f"lora.{name}_error", getattr(parity, name), "ratio", compared
    for name, value in found.result.items():
        yield f"lora.{name}", value, "nats" if name.endswith("_loss") else "ratio", labels
    if "all_token_loss" not in found.result:
        return
    if found.calls is not None:
        asked = {**labels, **{name: str(found.calls.counts[name]) for name in ("asked", "not_due")}}
        for name, ratio in found.calls.ratios().items():
            if not math.isnan(ratio):
                yield f"lora.calls.{name}", ratio, "ratio", asked
    yield from found.rate.figures(peak_tflops, labels)
