"""Fingerprints and sketches of weights, and the distance of two rows of numbers.

A fingerprint is one number for many tensors, computed on their device, which changes whenever they do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional

from pytest_gpucluster.benchmarks.training.sharding import local
from pytest_gpucluster.benchmarks.verify import bits_of


def weights_of(model: nn.Module) -> torch.Tensor:
    """Return a copy of all weights in one row, fp32 on the CPU."""
    return _row(weight.detach() for weight in model.parameters())


NOT_REDUCED = (
    "The gradients are not the same on all ranks: check the all-reduce (nccl.all_reduce in this run), what skips it, "
    "and the GPU and the links of a rank that differs by itself"
)
"""The cause where replicas of a model differ after a step."""

NOT_MADE_ALIKE = "They were not initialised equally from the seed: check the versions of torch, and its GPU"
"""The cause where they differ before the first step."""

TAKE_OUT = "take its GPU out of service and run the vendor's diagnostics (dcgmi diag -r 3)"


def weight_defects(found: Sequence[int], when: str, cause: str) -> dict[int, str]:
    """Describe, by rank, the defects of ranks whose weights are not those of most ranks: {} if there are none.

    Args:
        found: the fingerprint of each rank's weights.
        when, cause: for the message.
    """
    [(usual, times), *others] = Counter(found).most_common()
    if others and 2 * times <= len(found):
        kinds, count = 1 + len(others), len(found)
        text = f"has other weights {when} than other ranks: {kinds} kinds on {count} ranks, none on most. {cause}"
        return dict.fromkeys(range(len(found)), text)
    return {
        rank: f"has other weights {when} than most ranks: fingerprint {its:016x}, on {times} of {len(found)} ranks it "
        f"is {usual:016x}. {cause}"
        for rank, its in enumerate(found)
        if its != usual
    }


def relative(found: float, reference: float) -> float:
    """Return the difference of two numbers as a part of the reference."""
    return abs(found - reference) / abs(reference) if reference else math.inf


def distance(found: torch.Tensor, reference: torch.Tensor, since: torch.Tensor | None = None) -> float:
    """Return the distance of two rows of numbers, over the reference's norm, or its distance from ``since``."""
    length = (reference if since is None else reference - since).double().norm()
    return float((found - reference).double().norm() / length) if length else math.inf


def gradients_of(model: nn.Module) -> torch.Tensor:
    """Return a copy of all gradients in one row, fp32 on the CPU; a weight without one counts as 0."""
    weights = model.parameters()
    return _row(torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights)


def _row(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    # Always a copy: on cpu the weights themselves change in training.
    return torch.cat([tensor.flatten().to("cpu", torch.float32) for tensor in tensors])


_AT_ONCE = 2**24
"""Elements that are summed at a time: they take 16 bytes each."""


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """Return the sum of all elements' bits, each times an odd number from its position, modulo 2^64.

    A change of any one element always shows, because an odd factor makes no difference vanish modulo 2^64. So do two
    elements of up to 32 bits that have changed places, if there are fewer than 2^31 in all: their difference is then
    off by less than 2^64. The order of the summation does not matter. One wait for each device.
    """
    position = 0
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        for part in torch.split(bits_of(tensor.detach().contiguous()), _AT_ONCE):
            factors = torch.arange(position, position + part.numel(), device=part.device).mul_(2).add_(1)
            sums.setdefault(part.device, []).append(factors.mul_(part).sum())
            position += part.numel()
    return sum(int(torch.stack(of_device).sum()) for of_device in sums.values()) % 2**64


def fingerprints(model: nn.Module) -> dict[str, int]:
    """Return the fingerprint of each weight, of this rank's part if it is sharded, by its name."""
    return {name: fingerprint([local(weight.detach())]) for name, weight in model.named_parameters()}


def state_fingerprint(
    weights: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    part: Callable[[torch.Tensor], torch.Tensor] = local,
    state: Sequence[str] = ("exp_avg", "exp_avg_sq"),
) -> int:
    """Return the fingerprint of weights and of what AdamW keeps for them: by default of this rank's part, and of the
    moments. Collective, if ``part`` is."""
    names = list(weights)
    kept = (optimizer.state[weight][name] for weight in names if weight in optimizer.state for name in state)
    return fingerprint(part(tensor.detach()) for tensor in (*names, *kept))


SKETCH = 64
"""Numbers of a sketch: so a distance is known within some 10 %."""

_SIGNS = 0x1E3779B97F4A7C15
"""An odd number, whose products with consecutive places have a random bit. Source: Knuth, "The Art of Computer
Programming", volume 3, section 6.4."""


def sketch(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """Return ``SKETCH`` sums of the elements, each with a sign that depends on its place: fp64, on the tensor's device.

    Sketches add up as their tensors do, and their distance is about that of the tensors. So ranks compare gradients by
    direction and length that none of them has as a whole.

    Source: Charikar, Chen and Farach-Colton, "Finding Frequent Items in Data Streams" (ICALP 2002).

    Args:
        tensor: any, of floats.
        start: the place of its first element among all weights.
    """
    sums = torch.zeros(SKETCH, dtype=torch.float64, device=tensor.device)
    for part in torch.split(tensor.detach().flatten(), _AT_ONCE):
        signs = torch.arange(start, start + part.numel(), device=part.device).mul_(_SIGNS).bitwise_right_shift_(40)
        signed = part.double() * signs.bitwise_and_(1).mul_(2).sub_(1)
        sums += functional.pad(signed, (start % SKETCH, -(start + part.numel()) % SKETCH)).view(-1, SKETCH).sum(0)
        start += part.numel()
    return sums
