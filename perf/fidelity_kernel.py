"""A copy by a kernel in Triton: a third way, besides torch's and the CUDA runtime's. Needs Triton, and so a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS_PER_PROGRAM = 2048


@triton.jit
def _copy(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads the source itself
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < count
    tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


def copy_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """Start a copy of all int64 words of one buffer to another of the same size."""
    count = source.numel()
    _copy[(triton.cdiv(count, _WORDS_PER_PROGRAM),)](source, target, count, block=_WORDS_PER_PROGRAM)
