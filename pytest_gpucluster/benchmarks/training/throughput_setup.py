"""What is trained to measure its throughput, and how much memory that takes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster.benchmarks.training.decoder import Geometry

Strategy = Literal["ddp", "fsdp"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp")

TOKENS_DEFINITION = (
    "tokens/s per GPU: input tokens of one rank in a step, all positions, none of which is padding, over the time of "
    "the step; the median of the steady steps; the slowest rank decides"
)
FLOPS_DEFINITION = (
    "FLOPs per token: 6 for each weight that a token is multiplied with (all but the embedding), and 6 x layers x "
    "width x sequence for causal attention, of which half counts; what is recomputed does not count"
)
MFU_DEFINITION = "MFU: tokens/s per GPU x FLOPs per token over the dense bf16 peak of the data sheet"

_STATE_BYTES = 16
"""A weight, its gradient and both moments of AdamW, all fp32."""

_SPARE = 1.1
"""What the allocator cannot use, and the communication's own buffers. Source: this suite's rule."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, and how.

    Attributes:
        geometry: of the decoder.
        strategy: ddp: each rank has the whole model. fsdp: each rank has a part, see ``sharding``.
        batch: rows of each rank in a step.
        compiled: blocks are compiled, if there is a compiler.
        recompute: blocks are computed again in backward, and keep only their input.
        workers: processes that read ahead.
        prefetch: batches that each of them reads ahead.

    Raises: ValueError if a number or the strategy is out of its range.
    """

    geometry: Geometry
    strategy: Strategy
    batch: int
    compiled: bool
    recompute: bool
    workers: int
    prefetch: int

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}, not {self.strategy!r}")
        for name, least in (("batch", 1), ("workers", 0), ("prefetch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def tokens(self) -> int:
        """Tokens of each rank in a step."""
        return self.batch * self.geometry.sequence

    def needed_bytes(self, ranks: int) -> int:
        """Estimate the memory that a rank needs, from above: what is kept of weights and activations in training.

        Weights, gradients and moments: 16 bytes for each weight of this rank. Beside them with ddp a bf16 copy, and the
        buckets of the all-reduce; with fsdp the whole weights and gradients of embedding and head, and of the two
        blocks that are there at a time. Of a block are kept for each token, in bf16 or fp32 as autocast has it, the
        stream and its norms, queries, keys, values and what the MLP multiplies; of the logits a bf16 and three fp32
        tensors. Source: this suite's count of the tensors that the decoder saves for backward.

        Args:
            ranks: that share the training.
        """
        sizes = self.geometry
        of_block = 2 * sizes.width * (sizes.width + sizes.key_width) + 3 * sizes.width * sizes.mlp_width
        if self.strategy == "ddp":
            state = sizes.parameters * (_STATE_BYTES + 2 + (4 if ranks > 1 else 0))
        else:
            whole = 2 * sizes.vocab * sizes.width + 2 * of_block
            state = sizes.parameters * _STATE_BYTES // ranks + whole * (2 + 2 + 4)
        kept = 32 * sizes.width + 8 * sizes.mlp_width
        blocks = kept + 4 * sizes.width * sizes.layers if self.recompute else kept * sizes.layers
        return int(_SPARE * (state + self.tokens * (blocks + (2 + 3 * 4) * sizes.vocab)))
