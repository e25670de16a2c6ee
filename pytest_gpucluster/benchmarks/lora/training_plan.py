"""The plan of a LoRA training: batches and schedule by rank, and the memory that it needs.

Global batches and schedule are pure, and the same whatever the number of ranks. The memory is estimated before the
training, to decide whether to recompute activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.lora.model import DTYPES, Base
from pytest_gpucluster.device.backends import accelerator

LARGEST_GROUP = 16
"""Ranks that train one model together, unless only more cross nodes. The others train it at the same time, in groups
that must agree. Source: acceptance of 2 nodes x 8 H100 SXM 80GB, which trained with 16."""

_SEEDS_APART = 1_000_003

COMPARED_RATE = 5e-3
"""The learning rate of steps that are compared: in ten of them the loss changes by more than 10 %. Else an adapter's A,
whose gradient is 0 at the beginning, would hardly count. Source: this suite's rule, docs/lora.md."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train.

    Attributes:
        steps: of the optimizer, in all.
        warmup_steps: in which the learning rate rises.
        global_batch: blocks of a step, of all ranks of a group together.
        micro_batch: maximum blocks that a rank takes at once.
        learning_rate: the highest.
        precision: ``fp32`` or ``bf16``.
        dropout: whether the adapters have theirs.
        recompute: ``on``, ``off``, or ``auto``: only where the memory would not suffice otherwise.
        compiled: whether each block is compiled.
        weight_decay: of AdamW.
        seed: of weights, order and dropout.

    Raises: ValueError if the warm-up is not shorter than the training.
    """

    steps: int
    warmup_steps: int
    global_batch: int
    micro_batch: int
    learning_rate: float
    precision: str = "bf16"
    dropout: bool = True
    recompute: str = "auto"
    compiled: bool = False
    weight_decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"steps must be more than warmup_steps, and are {self.steps} and {self.warmup_steps}")

    def compared(self, *, steps: int, global_batch: int, precision: str) -> Recipe:
        """Return the recipe of a few steps of two trainings that are compared: without dropout, which would differ
        between them, and at a learning rate at which they learn."""
        return replace(
            self,
            steps=steps,
            warmup_steps=max(1, steps // 10) if steps > 1 else 0,
            global_batch=global_batch,
            learning_rate=COMPARED_RATE,
            precision=precision,
            dropout=False,
            compiled=False,
        )


def cosine(step: int, recipe: Recipe) -> float:
    """Return the learning rate of a step, from 1: it rises linearly, then falls as half a cosine towards 0.

    Source: Loshchilov and Hutter, "SGDR" (arXiv:1608.03983), equation 5, without restarts; Goyal et al., "Accurate,
    Large Minibatch SGD" (arXiv:1706.02677), section 2.2, for the rise.
    """
    if step <= recipe.warmup_steps:
        return recipe.learning_rate * step / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps + 1)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def crosses_links(nodes: Sequence[int], size: int) -> bool:
    """Return whether each group of ``size`` consecutive ranks trains over links: those between nodes where there are
    several. One rank alone has none to cross."""
    if len(set(nodes)) == 1:
        return size > 1 or len(nodes) == 1
    return all(len(set(nodes[first : first + size])) > 1 for first in range(0, len(nodes), size))


def group_size(nodes: Sequence[int], global_batch: int) -> int:
    """Return how many consecutive ranks train together, so that groups of this size have every rank and cross links.

    It is the largest such number up to ``LARGEST_GROUP``, else the smallest; each rank has a block at least, and two of
    a batch of 128. Where no number crosses links, as with 131 nodes, one that does not is returned.

    Args:
        nodes: the node of each rank, in the order of ranks.
        global_batch: blocks of a step, of all ranks of a group.

    >>> [group_size([rank // 8 for rank in range(8 * nodes)], 128) for nodes in (1, 2, 3, 4, 5, 7, 17, 131)]
    [8, 16, 12, 16, 10, 14, 17, 8]
    """
    most = min(len(nodes), global_batch, 4 * LARGEST_GROUP)
    sizes = [size for size in range(1, most + 1) if len(nodes) % size == 0]
    sizes = [size for size in sizes if crosses_links(nodes, size)] or sizes
    return max((size for size in sizes if size <= LARGEST_GROUP), default=min(sizes))


def micro_batches(recipe: Recipe, ranks: int) -> tuple[int, int]:
    """Return how often each rank calls the model in a step, and how many blocks it takes at once, at most.

    A call of a sharded model is collective: ranks with a block less call it as often, with fewer blocks.

    >>> micro_batches(Recipe(steps=2, warmup_steps=1, global_batch=128, micro_batch=4, learning_rate=1.0), ranks=12)
    (3, 4)
    """
    most = -(-recipe.global_batch // ranks)
    calls = -(-most // recipe.micro_batch)
    return calls, -(-most // calls)


def seed_of_step(step: int, rank: int, seed: int) -> int:
    """Return the seed of a rank's dropout in a step."""
    return (seed * _SEEDS_APART + step) * _SEEDS_APART + rank


MARGIN = 1.1
"""The estimate may be off by a tenth, and the allocator leaves gaps. Source: this suite's rule."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training, and the memory that it needs.

    Attributes:
        base, recipe: the model, and how it is trained.
        sequence: positions of a block.
        ranks: that train one model together.
    """

    base: Base
    recipe: Recipe
    sequence: int
    ranks: int

    @property
    def micro_batch(self) -> int:
        """Blocks that a rank takes at once, at most."""
        return micro_batches(self.recipe, self.ranks)[1]

    def needed_bytes(self, *, recompute: bool) -> int:
        """Estimate the memory of one rank: the larger of the model's creation and of a training step.

        It is created whole on each rank, and then sharded. In a step each rank keeps its part of the base and of what
        is trained (fp32, gradient and two moments: 16 bytes), the gathered root and two gathered blocks, the
        activations, and the logits with their gradients in fp32.

        Kept of a token in each block, in bytes, with e bytes to a number: the inputs of the seven adapters after
        dropout and its masks, (6 hidden + intermediate) (e + 1); two norms in fp32, 8 hidden; queries, keys, values and
        what attention returns, 4 hidden e; gate, its activation and up, 3 intermediate e. Recomputing keeps only each
        block's input, and all that of one block.

        Source: counted in transformers' modeling_qwen2.py; not measured on a GPU so far.
        """
        geometry, adapters = self.base.geometry, self.base.adapters
        e, hidden, inner = DTYPES[self.recipe.precision].itemsize, geometry.width, geometry.mlp_width
        tokens = self.micro_batch * self.sequence
        root = 2 * geometry.vocab * hidden
        trained = geometry.adapter_parameters(adapters.rank) + len(adapters.saved) * geometry.vocab * hidden
        of_block = (geometry.parameters - root) // geometry.layers
        kept_of_token = (6 * hidden + inner) * (e + 1) + 8 * hidden + 4 * hidden * e + 3 * inner * e
        activations = tokens * kept_of_token * (1 if recompute else geometry.layers)
        if recompute:
            activations += tokens * hidden * e * geometry.layers
        logits = tokens * geometry.vocab * (e + 4 + 4)
        making = geometry.parameters * e + trained * 4
        state = (geometry.parameters * e + trained * 16) // self.ranks
        return int(MARGIN * max(making, state + (root + 2 * of_block) * e + activations + logits))

    def choose_recompute(self, everyone: Ranks, device: torch.device) -> tuple[bool, str]:
        """Return whether to recompute activations, and why there is too little memory: "" if there is enough.

        Activations are recomputed where the rank with the least free memory could not keep them. The first rank
        decides.

        Collective: each of ``everyone`` must call this.
        """
        free = int(min(free for [free] in everyone.gather([float(accelerator(device).free_bytes() or 0)])))
        needed = {recompute: self.needed_bytes(recompute=recompute) for recompute in (False, True)}
        how = self.recipe.recompute
        wanted = how == "on" or (how == "auto" and 0 < free < needed[False])
        recompute, lacking = map(bool, everyone.of_first([float(wanted), float(0 < free < needed[wanted])]))
        if not lacking:
            return recompute, ""
        return recompute, (
            f"training {self.base.label} on {self.ranks} ranks with {self.micro_batch} blocks of {self.sequence} tokens"
            f" at once needs about {needed[recompute] / 1e9:.3g} GB of memory on each, and the rank with the least has "
            f"{free / 1e9:.3g} GB free; end what else uses the device (nvidia-smi names the processes), use more "
            "ranks, or set a smaller micro_batch or sequence, such as --gpucluster-workload lora.qwen2.micro_batch=1"
        )
