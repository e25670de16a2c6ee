"""One number for many tensors, made on their device, which changes whenever they do."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_AT_ONCE = 2**24
"""Elements that are summed at a time: they take 16 bytes each meanwhile."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """Return the sum of all elements' bits, each times an odd number that its position gives, modulo 2^64.

    A change of any one element always shows, because an odd factor makes no difference vanish modulo 2^64. So do two
    elements of up to 32 bits that have changed places, if there are fewer than 2^31 in all: their difference is then
    off by less than 2^64. The sum is the same in whatever order it is made. One wait for each device.
    """
    position = 0
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        words = flat.view(_WORDS[flat.element_size()])
        for part in torch.split(words, _AT_ONCE):
            factors = torch.arange(position, position + part.numel(), device=part.device).mul_(2).add_(1)
            sums.setdefault(part.device, []).append(factors.mul_(part).sum())
            position += part.numel()
    return sum(int(torch.stack(of_device).sum()) for of_device in sums.values()) % 2**64
