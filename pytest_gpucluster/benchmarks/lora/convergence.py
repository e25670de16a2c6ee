"""Whether a LoRA training learns what it should: the conditions, the result of each, and the figures.

A loss below a limit alone would miss most faults. So each condition is checked by itself: all is finite, the loss ends
low and that of held-out blocks falls, every adapter has moved and the base has not, some steps equal those of one rank,
steps after a checkpoint are the same a second time, bit by bit, and what was saved gives the same loss when it is read
again. Each figure is a condition or a recorded value of its own.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.dtypes import numerics
from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.lora.evaluation import CallScore, evaluate, reload_adapter, reloaded_loss
from pytest_gpucluster.benchmarks.lora.model import Base
from pytest_gpucluster.benchmarks.lora.recipe import Parity, check_parity, context_of, require_same_context, steps_of
from pytest_gpucluster.benchmarks.lora.reference_curve import Golden, require_same_experiment
from pytest_gpucluster.benchmarks.lora.throughput import steady_rate
from pytest_gpucluster.benchmarks.lora.trainer import Lesson, Loop, Pieces, Step, judged_blocks
from pytest_gpucluster.benchmarks.lora.training_plan import Recipe
from pytest_gpucluster.benchmarks.memory_budget import memory_returned
from pytest_gpucluster.benchmarks.storage import checkpoint
from pytest_gpucluster.benchmarks.storage.checkpoint import first
from pytest_gpucluster.benchmarks.training.fingerprint import relative
from pytest_gpucluster.benchmarks.training.throughput_setup import fresh_compiler
from pytest_gpucluster.benchmarks.verify import deterministic
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.loss_curve import Curve, Point, mean_of_last
from pytest_gpucluster.metrics.sampling import Sampling, Series
from pytest_gpucluster.metrics.time_budget import MEASURING, VERIFYING, counted

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


def converge(
    world: dist.ProcessGroup,
    group: dist.ProcessGroup,
    alone: dist.ProcessGroup,
    device: torch.device,
    *,
    base: Base,
    recipe: Recipe,
    checks: Checks,
    lesson: Lesson,
    folder: Path,
    final: Path,
    resume: bool = False,
    golden: Golden | None = None,
    progress: Callable[..., None] | None = None,
    pieces: Pieces | None = None,
) -> Convergence:
    """Train, and find out everything that tells a right training from a wrong one.

    Collective: every rank of the world must call this, with the same arguments.

    Args:
        world: all ranks.
        group: the ranks that train one model together, this one among them; as ``plan.group_size`` says.
        alone: the group of this rank only.
        device: where this rank trains.
        base: what is trained.
        recipe: how.
        checks: what else is found out.
        lesson: from what.
        folder: for checkpoints, this group's own, on a file system that its ranks share.
        final: the folder for the adapters when they are trained, on such a file system too.
        resume: go on from the newest checkpoint in ``folder``; without it older ones there are an error. The folder is
            removed at the end of a training that came to its end.
        golden: the curve that this one will be compared with; looked at here only to refuse one of another experiment
            before the first step.
        progress: shows how far it is.
        pieces: of the training on many ranks; by default ``PIECES`` of ``loop``.

    Raises:
        WrongResult: weights or data differ between ranks before the first step, or a checkpoint is broken.
        EnvironmentBroken: too little memory, a folder that cannot be used, or a checkpoint of another experiment.
        CurveError: the golden curve is of another experiment.
    """
    try:
        with memory_returned(circles=True), numerics("highest"), deterministic():
            return _Course(world, group, alone, device, base, recipe, checks, lesson, pieces, progress).run(
                folder, final, resume, golden
            )
    finally:
        # A traceback that is kept keeps this frame, and a gloo group that outlives its end aborts the process.
        del world, group, alone


class _Course:
    def __init__(
        self,
        world: dist.ProcessGroup,
        group: dist.ProcessGroup,
        alone: dist.ProcessGroup,
        device: torch.device,
        base: Base,
        recipe: Recipe,
        checks: Checks,
        lesson: Lesson,
        pieces: Pieces | None,
        progress: Callable[..., None] | None,
    ) -> None:
        self._world, self._group, self._alone, self._device = world, group, alone, device
        self._base, self._recipe, self._checks, self._lesson = base, recipe, checks, lesson
        self._pieces, self._progress = pieces, progress
        self._everyone, self._ranks = Ranks(world, device), Ranks(group, device)
        self._context = self._context_of(0)  # until there is a model
        self._points: list[Point] = []
        self._held_out: list[tuple[int, float]] = []
        self._notes: list[str] = []
        self._finite = self._taken = 0

    def run(self, folder: Path, final: Path, resume: bool, golden: Golden | None) -> Convergence:
        found = dict[str, Parity]()
        for precision in self._checks.parity_precisions:
            with counted(VERIFYING):
                found[precision] = self._parity(precision)
        if not self._all(all(one.all_finite for one in found.values())):
            return self._found(found, None, None)
        newest = self._newest(folder)
        if newest is None and resume:
            self._notes.append(f"there was no checkpoint in {folder.name} to resume from")
        if newest is not None and not resume:
            raise EnvironmentBroken(
                f"{folder} holds checkpoints already, the newest is {newest.name}. Go on from it with "
                "--gpucluster-resume, or choose another folder (--gpucluster-scratch)"
            )
        with counted(MEASURING), memory_returned(circles=True), self._compiler():
            trained = self._train(folder, final, newest, golden)
        finite = self._all(all(step.all_finite for step in trained.steps))
        group_error = self._group_error() if finite and self._everyone.count > self._ranks.count else None
        if not finite:
            return self._found(found, trained, None)
        with counted(VERIFYING), memory_returned(circles=True), self._compiler():
            replay = self._replay(folder, trained)
        with counted(VERIFYING), memory_returned(circles=True):
            reload_error, calls = self._reload(final)
        # Who starts again has nothing to go on from: the training has come to its end.
        first(self._group, lambda: shutil.rmtree(folder) if folder.exists() else None)
        learned = Learned(
            final_loss=mean_of_last(self._curve(), LAST),
            held_out_before=self._held_out[0][1],
            held_out_after=self._held_out[-1][1],
            moved_adapters=trained.moved_adapters,
            unchanged_base=trained.unchanged_base,
            replayed_steps=replay.same,
            resume_error=replay.loss_error,
            replayed=len(replay.steps),
            reload_error=reload_error,
            group_error=group_error,
            calls=calls,
        )
        return self._found(found, trained, learned, replay.steps)

    # ---- phases

    def _parity(self, precision: str) -> Parity:
        checks, ranks = self._checks, self._ranks.count
        recipe = self._recipe.compared(
            steps=checks.parity_steps,
            global_batch=-(-checks.parity_batch // ranks) * ranks,
            precision=precision,
        )
        packed = judged_blocks(self._lesson.train, checks.parity_sequence)
        found = check_parity(self._group, self._alone, self._device, self._base, recipe, packed, pieces=self._pieces)
        self._count(found.finite, found.taken)
        return found

    def _train(self, folder: Path, final: Path, newest: Path | None, golden: Golden | None) -> _Trained:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        loop = self._loop()
        self._context = self._context_of(loop.start)
        if golden is not None:
            require_same_experiment(golden, self._context)
        done = self._go_on(loop, newest) if newest is not None else 0
        if not done:
            self._held_out.append((0, loop.held_out_loss(self._lesson.held_out)))
        if loop.recomputes:
            why = "the workload asks for it" if self._recipe.recompute == "on" else "the memory demands it"
            self._notes.append(f"activations are recomputed: {why}")
        if self._recipe.compiled and loop.not_compiled:
            self._notes.append(f"torch.compile does not work here, so blocks run eagerly: {loop.not_compiled}")

        def seen(step: Step) -> None:
            self._points.append(_point(step))
            if step.step < self._recipe.steps and step.step % self._checks.checkpoint_every == 0:
                loop.save(folder, step.step, self._extra())
            if self._progress is not None:
                rate = loop.tokens_of_rank / step.seconds
                self._progress(step.step, self._recipe.steps, loss=step.loss, tokens_per_second=rate)

        steps = steps_of(loop, self._recipe.steps, first=done + 1, seen=seen)
        self._count(sum(step.finite for step in steps), len(steps))
        if not steps[-1].all_finite:
            self._points.append(_point(steps[-1]))
        else:
            self._held_out.append((self._recipe.steps, loop.held_out_loss(self._lesson.held_out)))
            loop.save_final(final)
        cuda = self._device.type == "cuda"
        return _Trained(
            steps=steps,
            resumed_at=done,
            tokens_of_rank=loop.tokens_of_rank,
            moved_adapters=loop.moved_adapters(),
            unchanged_base=loop.unchanged_base(),
            recomputes=loop.recomputes,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if cuda else None,
        )

    def _go_on(self, loop: Loop, newest: Path) -> int:
        """Go on from a checkpoint; return its step."""
        extra = loop.load(newest)
        require_same_context(newest, extra, self._context)
        self._points = [Point(**point) for point in extra["points"]]
        self._held_out = [(int(step), float(loss)) for step, loss in extra["held_out"]]
        self._notes.append(f"resumed from {newest.name}")
        return int(extra["step"])

    def _replay(self, folder: Path, trained: _Trained) -> _Replay:
        """Take the steps after the newest checkpoint again, with a model made anew."""
        newest = self._newest(folder)
        # Whatever memory is free by now: a forward pass that is recomputed may round otherwise, where it is compiled.
        loop = self._loop(recompute="on" if trained.recomputes else "off")
        begin = int(loop.load(newest)["step"]) if newest is not None else 0
        before = {step.step: step for step in trained.steps}
        again = steps_of(loop, self._recipe.steps, first=begin + 1)
        self._count(sum(step.finite for step in again), len(again))
        pairs = [(step, before[step.step]) for step in again]
        same = sum(one.weights == other.weights for one, other in pairs)
        return _Replay(
            steps=again,
            same=same / (self._recipe.steps - begin),
            loss_error=max(relative(one.loss, other.loss) for one, other in pairs),
        )

    def _reload(self, final: Path) -> tuple[float, CallScore | None]:
        """Read what was saved into a model made anew, whole on each rank."""
        checks, lesson = self._checks, self._lesson
        model = reload_adapter(
            self._base, final, self._device, precision=self._recipe.precision, seed=self._recipe.seed
        )
        loss = reloaded_loss(model, lesson.held_out, self._ranks, dist.get_rank(self._group), self._device)
        error = relative(loss, self._held_out[-1][1])
        if not checks.calls:
            return error, None
        each = -(-checks.calls // self._ranks.count)
        mine = list(lesson.held_out_rows)[dist.get_rank(self._group) :: self._ranks.count]
        score = evaluate(
            model, lesson.tokenizer, mine, device=self._device, limit=each, max_new_tokens=checks.call_tokens
        )
        fields = (score.asked, score.well_formed, score.right_function, score.right_arguments)
        asked, well_formed, function, arguments = (
            int(sum(column)) for column in zip(*self._ranks.gather(fields), strict=True)
        )
        return error, CallScore(
            asked=asked,
            well_formed=well_formed,
            right_function=function,
            right_arguments=arguments,
            unasked=score.unasked,
            answers=score.answers,
        )

    # ---- what they share

    def _context_of(self, weights: int) -> dict[str, str]:
        return context_of(self._base, self._recipe, self._lesson, ranks=self._ranks.count, weights=weights)

    def _loop(self, *, recompute: str = "") -> Loop:
        recipe = replace(self._recipe, recompute=recompute or self._recipe.recompute)
        return Loop(self._group, self._device, self._base, recipe, self._lesson.train, pieces=self._pieces)

    def _compiler(self) -> AbstractContextManager[None]:
        """Let what was compiled for a model go with it, and what is compiled again be the same."""
        return fresh_compiler(repeatable=True) if self._recipe.compiled else nullcontext()

    def _newest(self, folder: Path) -> Path | None:
        """Return the newest checkpoint as the first rank of the group sees it."""
        name: str = first(self._group, lambda: str(checkpoint.latest(folder) or ""))
        return Path(name) if name else None

    def _extra(self) -> dict[str, Any]:
        points = [vars(point) for point in self._points]
        return {"context": self._context, "points": points, "held_out": [list(pair) for pair in self._held_out]}

    def _all(self, good: bool) -> bool:
        """Tell whether something holds on all ranks of the world, so that all go on or none."""
        return all(told for [told] in self._everyone.gather([float(good)]))

    def _group_error(self) -> float:
        """Return the largest difference of this group's losses to those of the first group."""
        told = self._everyone.gather([point.loss for point in self._points])
        return max(relative(point.loss, other) for point, other in zip(self._points, told[0], strict=True))

    def _count(self, finite: int, taken: int) -> None:
        self._finite += finite
        self._taken += taken

    def _curve(self) -> Curve:
        return Curve(points=tuple(self._points), held_out=tuple(self._held_out), context=self._context)

    def _found(
        self,
        parity: Mapping[str, Parity],
        trained: _Trained | None,
        learned: Learned | None,
        again: Sequence[Step] = (),
    ) -> Convergence:
        rate = None
        if trained is not None:
            rate = steady_rate([trained.steps, again], trained.tokens_of_rank, self._checks.sampling)
        adapters = self._base.adapters
        return Convergence(
            finite_steps=self._finite / self._taken if self._taken else math.nan,
            parity=parity,
            curve=self._curve(),
            learned=learned,
            tokens_per_second=rate,
            flops_per_token=self._base.geometry.flops_per_token(
                int(self._lesson.train.judged.shape[1]),
                rank=adapters.rank,
                head_trained=adapters.trains_head,
            ),
            peak_bytes=trained.peak_bytes if trained is not None else None,
            recomputes=trained is not None and trained.recomputes,
            groups=self._everyone.count // self._ranks.count,
            ranks=self._ranks.count,
            resumed_at=trained.resumed_at if trained is not None else 0,
            notes=tuple(self._notes),
        )


@dataclass(frozen=True, kw_only=True)
class _Replay:
    steps: Sequence[Step]
    same: float
    loss_error: float


@dataclass(frozen=True, kw_only=True)
class _Trained:
    steps: Sequence[Step]
    resumed_at: int
    tokens_of_rank: int
    moved_adapters: float
    unchanged_base: float
    recomputes: bool
    peak_bytes: int | None


def _point(step: Step) -> Point:
    return Point(
        step=step.step,
        loss=step.loss,
        all_token_loss=step.all_token_loss,
        gradient_norm=step.gradient_norm,
        learning_rate=step.learning_rate,
    )


_PER_TFLOPS = 1e12


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One quantity, by the name of its metric, in a unit.

    ``recorded`` says that it is never judged, whatever limits there are.
    """

    metric: str
    value: float | Series
    unit: str
    labels: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = False


def figures_of(found: Convergence, *, peak_tflops: float | None) -> Iterator[Figure]:
    """Yield the figures of a training.

    Args:
        found: on this rank.
        peak_tflops: of the GPU's data sheet in bf16; None where it is not known, as on cpu: then there is no MFU.
    """
    context = found.curve.context
    labels = {
        "model": context["model"],
        "precision": context["precision"],
        "groups": str(found.groups),
        "group_ranks": str(found.ranks),
    }
    yield Figure(metric="lora.finite_steps", value=found.finite_steps, unit="ratio", labels=labels)
    for precision, parity in found.parity.items():
        if parity.taken > parity.steps:  # else not even all ranks together were finite
            compared = {"model": context["model"], "precision": precision, "steps": str(parity.steps)}
            yield Figure(metric="lora.loss_error", value=parity.loss_error, unit="ratio", labels=compared)
            yield Figure(metric="lora.gradient_error", value=parity.gradient_error, unit="ratio", labels=compared)
    if found.learned is None:
        return
    yield from _learned(found.learned, labels)
    beside = {**labels, "recompute": "on" if found.recomputes else "off"}
    yield from rate_figures(found.tokens_per_second, found.flops_per_token, found.peak_bytes, peak_tflops, beside)


def rate_figures(
    rate: Series | None,
    flops_per_token: int,
    peak_bytes: int | None,
    peak_tflops: float | None,
    labels: Mapping[str, str],
) -> Iterator[Figure]:
    """Yield tokens/s of a GPU, the part of its peak that they are, and the memory that they took.

    A rate that is not known is NaN: what a limit asks for and nobody has measured must not be left out.
    """
    yield Figure(
        metric="lora.tokens_per_second", value=math.nan if rate is None else rate, unit="tokens/s", labels=labels
    )
    if peak_tflops is not None:
        scale = flops_per_token / (peak_tflops * _PER_TFLOPS)
        utilisation = math.nan if rate is None else rate.scaled(scale)
        yield Figure(metric="lora.mfu", value=utilisation, unit="ratio", labels=labels)
    if peak_bytes is not None:
        yield Figure(metric="lora.peak_memory", value=float(peak_bytes), unit="B", labels=labels, recorded=True)


def _learned(learned: Learned, labels: Mapping[str, str]) -> Iterator[Figure]:
    yield Figure(metric="lora.final_loss", value=learned.final_loss, unit="nats", labels=labels)
    yield Figure(metric="lora.held_out_loss", value=learned.held_out_after, unit="nats", labels=labels)
    ratios = {
        "held_out_ratio": learned.held_out_after / learned.held_out_before,
        "moved_adapters": learned.moved_adapters,
        "unchanged_base": learned.unchanged_base,
        "replayed_steps": learned.replayed_steps,
        "resume_error": learned.resume_error,
        "reload_error": learned.reload_error,
    }
    for name, value in ratios.items():
        yield Figure(metric=f"lora.{name}", value=value, unit="ratio", labels=labels)
    if learned.group_error is not None:
        yield Figure(metric="lora.group_error", value=learned.group_error, unit="ratio", labels=labels)
    calls = learned.calls
    if calls is not None and calls.asked:
        asked = {**labels, "asked": str(calls.asked)}
        for name in ("well_formed", "right_function", "right_arguments"):
            share = getattr(calls, name) / calls.asked
            yield Figure(metric=f"lora.calls.{name}", value=share, unit="ratio", labels=asked)
