"""Flipped bits, planted at the seams of the checks, and what the checks make of them: behind docs/corruption.md.

The checks are the product's own, on CPU and with small sizes; what is planted is drawn from a seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from pytest_gpucluster.benchmarks import collectives
from pytest_gpucluster.benchmarks import collectives as collective_calls
from pytest_gpucluster.benchmarks.burn_in import Course, burn_in
from pytest_gpucluster.benchmarks.clock import ManualClock
from pytest_gpucluster.benchmarks.dtypes import ARITHMETICS, arithmetic
from pytest_gpucluster.benchmarks.hbm import measure_hbm
from pytest_gpucluster.benchmarks.matmul import Shape, measure_shape, multiplier, usual_layout
from pytest_gpucluster.benchmarks.memory_passes import Operations
from pytest_gpucluster.benchmarks.memory_patterns import PATTERNS, Cells, Survey, go_through
from pytest_gpucluster.benchmarks.training import ddp, fsdp, step, step_check, throughput
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.sharding import local
from pytest_gpucluster.benchmarks.training.throughput_setup import Setup
from pytest_gpucluster.benchmarks.verify import bits_of
from pytest_gpucluster.config import workload_loader
from pytest_gpucluster.config.workload import Workload
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.judge import loader
from pytest_gpucluster.metrics.sampling import Sampling

SEED = 20261
CPU = torch.device("cpu")
LIMITS, SKU = loader.load(), "H100 SXM"
_SHORT = Sampling(warmup_seconds=0.0, window_seconds=2.0, longest_seconds=2.0, tolerance_ratio=0.01)
"""Blocks, and so bursts, are as long as in the profiles."""
_SMALL_N, _K, _BURSTS = 32, 16384, 4
_STEPS = 2
_SIZES = {"batch": 4, "steps": _STEPS}
_GEOMETRY = Geometry(layers=2, width=64, heads=4, vocab=256, sequence=32)


def workload(profile: str) -> Workload:
    """Return the workload of a profile as it is shipped."""
    path = Path(__file__).parent.parent / "acceptance" / "workloads.yaml"
    return workload_loader.load(path, profile=profile).workload


Errors = Sequence[tuple[str, float]]
"""Metric, and what a check has found for it. One may come twice."""


class Flip:
    """Flips one bit of one element, both drawn, in operation ``at``; or in each operation with the chance ``rate``.

    Attributes:
        random: what draws.
        calls: operations so far.
    """

    def __init__(self, random: Random, *, at: int | None = None, rate: float = 0.0) -> None:
        self.random, self.calls = random, 0
        self._at, self._rate = at, rate
        self._last: tuple[torch.Tensor, int, int] | None = None

    def __call__(self, *tensors: torch.Tensor) -> bool:
        """Count an operation, and flip a bit in what it has made if it is its turn; return whether it was."""
        self.calls += 1
        if self.calls - 1 != self._at and not (self._rate and self.random.random() < self._rate):
            return False
        [tensor] = self.random.choices(tensors, [one.numel() for one in tensors])
        bit = self.random.randrange(8 * tensor.itemsize)
        # The highest bit of a signed word is its negative part.
        mask = -(1 << bit) if bit == 8 * tensor.itemsize - 1 else 1 << bit
        self._last = bits_of(tensor.detach()), self.random.randrange(tensor.numel()), mask
        self.undo()
        return True

    def undo(self) -> None:
        """Turn the last bit over once more."""
        if self._last is not None:
            words, place, mask = self._last
            words[place] ^= mask


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One check and where its operations are struck.

    Attributes:
        run: lets the check run with a flip planted; returns whether it has found something.
        ranks: processes that run it together; one of them is struck.
        places: of so many operations, those of which one is struck.
        fewer: it is slow, and run so many times less often than others.
    """

    run: Callable[[Flip], bool]
    ranks: int = 1
    places: Callable[[int], Sequence[int]] = range
    fewer: int = 1


class Found(NamedTuple):
    """How many flips a check has found, how many were planted one at a time, and how many operations it has."""

    count: int
    planted: int
    operations: int

    @property
    def share(self) -> float:
        """The part that was found."""
        return self.count / self.planted


def measured(name: str, trials: int, *, struck: bool = True) -> Found:
    """Plant flips in a check, ``trials`` of them or fewer where it is slow.

    Raises: RuntimeError if it finds something where nothing is planted.
    """
    trial, healthy = TRIALS[name], Flip(Random(SEED))
    if trial.run(healthy):
        raise RuntimeError(f"{name}: something is found where nothing was planted")
    count, rounds = 0, max(1, trials // trial.fewer)
    for number in range(rounds):
        random = Random(f"{SEED} {name} {number}")
        at = random.choice(trial.places(healthy.calls))
        count += trial.run(Flip(random, at=at if struck else None))
    return Found(count=count, planted=rounds, operations=healthy.calls)


def simulated(name: str, rounds: int, rate: float) -> int:
    """Return in how many of ``rounds`` runs a check finds something, if each operation is struck with this chance."""
    return sum(TRIALS[name].run(Flip(Random(f"{SEED} {rate} {name} {number}"), rate=rate)) for number in range(rounds))


def _raises(check: Callable[[], object]) -> bool:
    try:
        check()
    except WrongResult:
        return True
    return False


# ---- products and memory


def _products(dtype: str) -> Trial:
    def run(flip: Flip) -> bool:
        right = multiplier(CPU, arithmetic(dtype))

        def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            right(a, b, out)
            flip(out)

        course, seconds = Course(_BURSTS), itertools.count()
        given = {"n": _SMALL_N, "dtype": dtype, "interval_seconds": 1.0, "multiply": multiply}
        return _raises(lambda: burn_in(CPU, course, **given, now=lambda: float(next(seconds))))

    return Trial(run=run)


def _always(dtype: str) -> Trial:
    """The same bit of the same element is wrong in every product: only the reference can tell."""

    def run(flip: Flip) -> bool:
        kind, clock, seed = arithmetic(dtype), ManualClock(), flip.random.randrange(2**31)
        right, struck, drawn = multiplier(CPU, kind), flip(torch.zeros(1)), flip.random.getrandbits(64)

        def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            right(a, b, out)
            clock.advance(1.0)
            if struck:
                Flip(Random(drawn), at=0)(out)

        shape = Shape(m=32, n=32, k=_K, layout=usual_layout(kind))
        given = {"dtype": dtype, "sampling": _SHORT, "seed": seed, "clock": clock, "cache": 0, "instead": ""}
        return _raises(lambda: measure_shape(CPU, shape, **given, multiply=multiply))

    return Trial(run=run, places=lambda calls: (0,))


def _patterns(flip: Flip) -> bool:
    class Struck(Cells):
        def write(self, target: torch.Tensor, words: torch.Tensor) -> None:
            super().write(target, words)
            flip(target)

    found = False
    for pattern in PATTERNS:
        survey = Survey(pattern=pattern)
        given = {"share": 0.1, "most_bytes": 8192, "part_words": 256, "buffer_words": 512}
        go_through(CPU, survey, **given, cells=Struck())
        found |= survey.wrong_words > 0
    return found


def _passes(kind: str) -> Trial:
    def run(flip: Flip) -> bool:
        clock = ManualClock()

        class Struck(Operations):
            def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
                super().copy(source, target)
                flip(target)
                clock.advance(8 * 2**30 * 2 / 3e12)

            def read(self, source: torch.Tensor, total: torch.Tensor) -> None:
                struck = flip(source)
                super().read(source, total)
                if struck:  # the memory was right, and was read wrong
                    flip.undo()
                clock.advance(8 * 2**30 / 3e12)

            def write(self, target: torch.Tensor, value: int) -> None:
                super().write(target, value)
                flip(target)
                clock.advance(8 * 2**30 / 3e12)

        given = {"payload_bytes": 2**16, "sampling": _SHORT, "clock": clock, "operations": Struck(), "cache": 0}
        return _raises(lambda: measure_hbm(CPU, kind, **given))

    return Trial(run=run)


# ---- on several ranks


def _on_any_rank(found: bool) -> bool:
    told = torch.tensor(float(found))
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told)


def _collective(names: Sequence[str], dtype: str, looks: tuple[int, ...] = ()) -> Trial:
    """``looks``: the calls that are verified, where not all are; a flip in any other is not seen."""

    def run(flip: Flip) -> bool:
        name, clock = flip.random.choice(names), ManualClock()

        def call(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
            collectives.CALLS[name](sent, received, group)
            clock.advance(0.004)
            flip(received)

        given = {"payload_bytes": 4096, "dtype": dtype, "sampling": replace(_SHORT, window_seconds=0.4)}
        by = {"clock": clock, "call": call, "now": lambda: clock.now_seconds}
        measure = partial(collectives.measure_collective, name, dist.group.WORLD, CPU, **given, **by)
        return _on_any_rank(_raises(measure))

    places = (lambda calls: [look % calls for look in looks]) if looks else range
    return Trial(run=run, ranks=4, places=places)


LOOKS_AT_MOVED, LOOKS_AT_BF16 = (0, -2, -1), (0, -1)
"""The calls of a measurement that are verified: of what is moved before, by the windows' last and after; of sums in
bf16, which are not exact after the first call, before and after."""


def _parts(flip: Flip, what: str) -> step.Parts:
    """Return the parts of a step of which a logit, or a weight after the update, is struck."""

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wrong = logits.detach().clone()
        if what == "logit" and flip(wrong):
            logits = wrong + (logits - logits.detach())  # with the gradient as if nothing were
        return step.token_mean(logits, targets)

    def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        if what == "weight":
            flip(*(local(weight.detach()) for weight in model.parameters()))

    return step.Parts(loss=loss, update=update)


def _within(metric: str, error: float) -> bool:
    """Tell whether an error is within the shipped limit; NaN is not."""
    limit = LIMITS.limit(metric, sku=SKU, world_size=2, nnodes=1, labels={})
    return limit is not None and error <= limit.max


def _training(check: Callable[[step.Parts, Random], Errors], what: str, ranks: int = 2) -> Trial:
    """``check(parts, random)`` trains with parts that are struck, and returns the errors that have limits."""

    def run(flip: Flip) -> bool:
        errors: list[tuple[str, float]] = []
        wrong = _raises(lambda: errors.extend(check(_parts(flip, what), flip.random)))
        wrong = wrong or not all(_within(*one) for one in errors)
        return _on_any_rank(wrong) if ranks > 1 else wrong

    places = {
        # The reference on the CPU comes first, then the device in bf16 and in fp32.
        _single_step: lambda calls: range(_STEPS, 3 * _STEPS),
        # The first steps, of which there are some at whatever speed.
        _long: lambda calls: range(10),
    }
    return Trial(run=run, ranks=ranks, places=places.get(check, range), fewer=3)


def _single_step(parts: step.Parts, random: Random) -> Errors:
    with TemporaryDirectory() as folder, patch.object(step, "PARTS", parts):
        found = step_check.check_step(CPU, _GEOMETRY, **_SIZES, checkpoint=Path(folder) / "checkpoint.pt")
    errors = itertools.product((("", found.fp32), ("bf16_", found.bf16)), ("loss", "gradient", "weight"))
    return [(f"training.step.{name}{error}_error", getattr(of, error)) for (name, of), error in errors]


def _ddp(parts: step.Parts, random: Random) -> Errors:
    name, precision = random.choice((("", "fp32"), ("bf16_", "bf16")))
    given = {**_SIZES, "rank": dist.get_rank(), "world_size": 2, "precision": precision}
    pieces = ddp.Pieces(step=parts)
    found = ddp.check_data_parallel(dist.group.WORLD, CPU, _GEOMETRY, **given, pieces=pieces)
    return [(f"ddp.{name}loss_error", found.loss_error), (f"ddp.{name}gradient_error", found.gradient_error)]


@cache
def _alone() -> dist.ProcessGroup:
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def _fsdp(parts: step.Parts, random: Random) -> Errors:
    given = {**_SIZES, "alone": _alone(), "pieces": fsdp.Pieces(step=parts)}
    found = fsdp.check_fully_sharded(dist.group.WORLD, CPU, _GEOMETRY, **given)
    of = (("", found.fp32), ("", found.offloaded), ("bf16_", found.bf16))
    errors = [(f"fsdp.{name}{error}_error", getattr(one, error)) for name, one in of for error in ("loss", "gradient")]
    return [*errors, ("fsdp.ddp_loss_error", found.ddp_loss_error)]


def _long(parts: step.Parts, random: Random) -> Errors:
    how = {"compiled": False, "recompute": False, "workers": 0, "prefetch": 1}
    setup = Setup(geometry=_GEOMETRY, strategy="ddp", batch=_SIZES["batch"], **how)
    given = {"sampling": workload("cpu").throughput.sampling, "pieces": throughput.Pieces(step=parts)}
    throughput.throughput(dist.group.WORLD, CPU, setup, **given, in_parts=False)
    return []


TRIALS: Mapping[str, Trial] = {
    **{f"products {dtype}": _products(dtype) for dtype in ARITHMETICS},
    **{f"always {dtype}": _always(dtype) for dtype in ARITHMETICS},
    "patterns": Trial(run=_patterns),
    **{kind: _passes(kind) for kind in ("copy", "read", "write")},
    "all-reduce fp32": _collective(["all_reduce"], "fp32"),
    "all-reduce bf16": _collective(["all_reduce"], "bf16", LOOKS_AT_BF16),
    "moved": _collective(list(collective_calls.MOVES), "bf16", LOOKS_AT_MOVED),
    **{f"step {what}": _training(_single_step, what, ranks=1) for what in ("logit", "weight")},
    **{f"ddp {what}": _training(_ddp, what) for what in ("logit", "weight")},
    **{f"fsdp {what}": _training(_fsdp, what) for what in ("logit", "weight")},
    "long training weight": _training(_long, "weight"),
}
