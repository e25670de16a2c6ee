"""The setup of a training throughput: model and its memory, torch.compile, and the evidence of learning.

The evidence shows whether the timed steps were a training: losses, gradient norms, and how the weights changed.
torch.compile is applied to the blocks of a decoder, where there is a compiler.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.training.fingerprint import NOT_REDUCED, fingerprint, fingerprints, weight_defects
from pytest_gpucluster.benchmarks.training.model import Decoder, Geometry
from pytest_gpucluster.benchmarks.training.sharding import local
from pytest_gpucluster.benchmarks.training.step import STATE_BYTES, StepResult, Training
from pytest_gpucluster.device.interface import Accelerator
from pytest_gpucluster.text import first_line

Strategy = Literal["ddp", "fsdp"]

_KEPT_WIDTH = 64

_SPARE = 1.1
"""The allocator's losses, and the communication's own buffers. Source: this suite's rule."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training to measure.

    Attributes:
        geometry: of the decoder.
        strategy: ddp: each rank has the whole model. fsdp: each rank has a part, see ``sharding``.
        batch: rows of each rank in a step.
        compiled: blocks are compiled, if there is a compiler.
        recompute: blocks are computed again in backward, and keep only their input.
        workers: processes that read ahead.
        prefetch: batches that each of them reads ahead.
    """

    geometry: Geometry
    strategy: Strategy
    batch: int
    compiled: bool
    recompute: bool
    workers: int
    prefetch: int

    def kept(self, by: Accelerator) -> Setup:
        """Return what a device really trains of it: all, but a simulated device a small eager model with few tokens."""
        whole = self.geometry
        if by.kept(whole.width, _KEPT_WIDTH) == whole.width:
            return self
        small = Geometry(
            layers=by.kept(whole.layers, 2),
            width=_KEPT_WIDTH,
            heads=4,
            vocab=by.kept(whole.vocab, 256),
            sequence=by.kept(whole.sequence, 32),
        )
        return replace(self, geometry=small, batch=by.kept(self.batch, 4), compiled=False, workers=0)

    @property
    def tokens(self) -> int:
        """Tokens of each rank in a step."""
        return self.batch * self.geometry.sequence

    def needed_bytes(self, ranks: int) -> int:
        """Estimate the memory that a rank needs, from above: weights and activations in training.

        Weights, gradients and moments: 16 bytes for each weight of this rank. In addition with ddp a bf16 copy, and the
        buckets of the all-reduce; with fsdp the whole weights and gradients of embedding and head, and of the two
        blocks that are gathered at a time. Of a block are kept for each token, in bf16 or fp32 as autocast has it, the
        stream and its norms, queries, keys, values and the inputs of the MLP's products; of the logits a bf16 and three
        fp32 tensors. Source: this suite's count of the tensors that the decoder saves for backward.

        Args:
            ranks: that share the training.
        """
        sizes = self.geometry
        if self.strategy == "ddp":
            state = sizes.parameters * (STATE_BYTES + 2 + (4 if ranks > 1 else 0))
        else:
            whole = 2 * sizes.vocab * sizes.width + 2 * sizes.block_parameters
            state = sizes.parameters * STATE_BYTES // ranks + whole * (2 + 2 + 4)
        kept = 32 * sizes.width + 8 * sizes.mlp_width
        blocks = kept + 4 * sizes.width * sizes.layers if self.recompute else kept * sizes.layers
        return int(_SPARE * (state + self.tokens * (blocks + (2 + 3 * 4) * sizes.vocab)))


class Evidence:
    """The evidence that a training's steps were real ones, on this rank.

    Args:
        ranks: that train together.
        setup: of the training.
        training: that has not taken a step yet.

    Attributes:
        losses: of each step, in nats; the last step must have had the rows of the first one again.
        norms: of the gradients of each step, before they were clipped.
        tokens: of each step.
    """

    def __init__(self, ranks: Ranks, setup: Setup, training: Training) -> None:
        self._ranks, self._setup, self._training = ranks, setup, training
        self._start = fingerprints(training.model)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.tokens: list[int] = []

    def add(self, taken: Sequence[StepResult]) -> None:
        """Read the values of some steps off the device."""
        self.losses += torch.cat([one.losses for one in taken]).tolist()
        self.norms += torch.stack([one.gradient_norm for one in taken]).tolist()

    def defect(self) -> str:
        """Describe the defect of the training on this rank: "" if there is none. Collective."""
        # In each step the loss comes before the gradients, which carry a non-finite loss of one rank to all.
        values = [number for both in zip(self.losses, self.norms, strict=True) for number in both]
        bad = next((place for place, number in enumerate(values) if not math.isfinite(number)), math.inf)
        first = min(place for [place] in self._ranks.gather([bad]))
        differing = self._differing()
        if first < math.inf:
            if bad > first:
                return ""
            step, of_gradients = divmod(int(first), 2)
            what = "a gradients' norm" if of_gradients else "a loss"
            return (
                f"has {what} of {values[int(first)]:g} in step {step + 1}, and it must be finite. Repeat "
                "test_training_step there, and run the vendor's diagnostics (dcgmi diag -r 3)"
            )
        unexpected = {tokens for tokens in self.tokens if tokens != self._setup.tokens}
        if unexpected:
            return (
                f"has trained on {min(unexpected)} tokens in a step, and the setup has {self._setup.batch} x "
                f"{self._setup.geometry.sequence}: its rate would count missing tokens. Check how it reads its data"
            )
        if not self.losses[-1] < self.losses[0]:
            return (
                f"has a loss of {self.losses[-1]:.6g} after {len(self.losses)} steps on rows on which it was "
                f"{self.losses[0]:.6g} in the first step: it has not learned anything"
            )
        counts = {int(state["step"]) for state in self._training.optimizer.state.values()}
        if counts != {len(self.losses)}:
            return (
                f"has taken {len(self.losses)} training steps, and its optimizer {min(counts, default=0)}: work was "
                "skipped, so its rate is that of something else"
            )
        now = fingerprints(self._training.model)
        still = [
            name.removeprefix("module.")  # the name of the model inside DistributedDataParallel
            for name, weight in self._training.model.named_parameters()
            if now[name] == self._start[name] and local(weight).numel()
        ]
        if still:
            return (
                f"has {len(still)} of {len(self._start)} weight tensors that have not changed in {len(self.losses)} "
                f"steps: {', '.join(still[:8])}. Each of them must"
            )
        return differing

    def _differing(self) -> str:
        """Describe the defect if this rank's replica has other weights than most."""
        if self._setup.strategy != "ddp":
            return ""
        found = [value for [value] in self._ranks.gather_fingerprints(fingerprint(self._training.model.parameters()))]
        return weight_defects(found, f"after {len(self.losses)} steps", NOT_REDUCED).get(self._ranks.index, "")


_SAMPLE_ELEMENTS = 8


def missing_compiler(device: torch.device) -> str:
    """Return why torch.compile does not work for a device: "" if it does. Compiles, runs and checks a small function.

    For a GPU it needs triton, and a C compiler for triton's launchers; for the CPU a C++ compiler. Source:
    torch.compile's documentation, "torch.compile Troubleshooting".
    """
    given = torch.arange(_SAMPLE_ELEMENTS, dtype=torch.float32, device=device)
    try:
        with fresh_compiler():
            found = torch.compile(_sample, fullgraph=True, dynamic=False)(given)
    # All errors of a missing or broken compiler: torch's own RuntimeErrors, those of a process's start or its exit
    # code (triton calls a C compiler by itself), and a failed import of triton.
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        return _described(error)
    if not torch.equal(found, _sample(given)):
        return f"its compiled code is wrong: {found.tolist()}, expected {_sample(given).tolist()}"
    return ""


def lacking_compiler(ranks: Ranks, device: torch.device) -> str:
    """Return why not all ranks can compile, so that none does, for some would be faster than others: "" if all can.
    Collective.
    """
    mine = missing_compiler(device)
    lacking = [index for index, [lacks] in enumerate(ranks.gather([bool(mine)])) if lacks]
    return mine or (f"{ranks.name(lacking[0])} has no compiler, and all ranks must run alike" if lacking else "")


def compile_blocks(model: Decoder) -> None:
    """Have each block of a decoder compiled when it first runs; to be called before the blocks are sharded.

    Compiled by block, not as a whole, all blocks share one compiled function, and the ranks share gradients of one
    block while the next one computes. Source: pytorch/torchtitan, which compiles so.
    """
    for block in model.blocks:
        # With fullgraph code that cannot be compiled is an error, not a silent return to Python.
        block.compile(fullgraph=True, dynamic=False)


def compile_failed(error: BaseException) -> str:
    """Return the compiler's error in a line: "" if the error is none of the compiler's."""
    return _described(error) if isinstance(error, torch._dynamo.exc.TorchDynamoException) else ""


@contextmanager
def fresh_compiler(*, repeatable: bool = False) -> Iterator[None]:
    """Free what was compiled before, and on exit what was compiled inside.

    torch keeps a limited number of versions of each function, and references to what they use.

    Args:
        repeatable: compile the same code the second time, with the same bits. By default the compiler measures which
            order of summation is faster, and the next time another one may win.
    """
    torch._dynamo.reset()
    try:
        # The blocks are small enough: cutting them further at the ends of DDP's buckets gains nothing, and cannot be
        # done where they are recomputed.
        with torch._dynamo.config.patch(optimize_ddp=False), _unmeasured(repeatable), warnings.catch_warnings():
            # The compiler warns of torch's own code. Where warnings are errors, that would look like no compiler.
            warnings.filterwarnings("ignore", module=r"torch\.")
            yield
    finally:
        torch._dynamo.reset()


def _unmeasured(wanted: bool) -> AbstractContextManager[object]:
    """Keep the compiler from measurements that change numbers. Source: "deterministic" of torch/_inductor/config.py."""
    if not wanted:
        return nullcontext()
    inductor: Any = importlib.import_module("torch._inductor.config")  # slow, so only where something is compiled
    return inductor.patch(deterministic=True) if hasattr(inductor, "deterministic") else nullcontext()


def _sample(given: torch.Tensor) -> torch.Tensor:
    return given * 3 + 1


def _described(error: BaseException) -> str:
    # Some of torch's errors begin with a line that announces the next.
    lines = (line for line in str(error).splitlines() if line.strip() and not line.rstrip().endswith("raised:"))
    return f"{type(error).__name__}: {first_line(next(lines, ''))}".replace(os.path.expanduser("~"), "~")
