"""What one rank sends to another, so that each word tells from whom, to whom and when it was sent.

Words are 32 bits, compared as whole numbers: there is no rounding and no NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

WORD_BYTES = 4
_CHUNK_WORDS = 2**22
"""The expected words are made for so many at a time, to need little memory beside the payload."""

_BYTES_BESIDE_WORD = 40
"""For each word of a chunk: an index and a hash in 8 bytes each, and what is made on the way."""

_ODD = 2654435761
"""Spreads neighbouring numbers over all 32 bits. Source: Knuth, "The Art of Computer Programming", volume 3, section
6.4, multiplicative hashing: 2^32 over the golden ratio, rounded to an odd number."""

_MASK = 0xFFFFFFFF
_POISON = -1
"""Lies where data are to arrive: no word of a payload that never came is right but by chance."""


def needed_bytes(payload_bytes: int) -> int:
    """Return how much memory sending and receiving so much takes, with the verification."""
    return 2 * payload_bytes + _BYTES_BESIDE_WORD * min(payload_bytes // WORD_BYTES, _CHUNK_WORDS)


def salt(sender: int, receiver: int, when: int) -> int:
    """Return a number of 32 bits for a payload: another one for each pair, direction and time."""
    mixed = 0
    for part in (sender, receiver, when):
        mixed = (mixed ^ part + 1) * _ODD & _MASK
        mixed ^= mixed >> 15
    return mixed


def fill(words: torch.Tensor, seed: int) -> None:
    """Write the payload of a salt into a one-dimensional int32 tensor."""
    for part, expected in _chunks(words, seed):
        part.copy_(expected)


def poison(words: torch.Tensor) -> None:
    """Make sure that nothing of an earlier payload is left."""
    words.fill_(_POISON)


def defect(words: torch.Tensor, seed: int) -> tuple[int, int, int, int] | None:
    """Return what is wrong with a payload that has arrived, or None. Waits for the device.

    Returns:
        how many words are wrong; of the first of them the offset in bytes, and what was found and expected there, as
        whole numbers of 32 bits without a sign.
    """
    count, start = 0, 0
    first = (0, 0, 0)
    for part, expected in _chunks(words, seed):
        wrong = part != expected
        here = int(wrong.sum())
        if here and not count:
            at = int(wrong.view(torch.uint8).argmax())
            first = ((start + at) * WORD_BYTES, int(part[at]) & _MASK, int(expected[at]) & _MASK)
        count += here
        start += len(part)
    return (count, *first) if count else None


def _chunks(words: torch.Tensor, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield part after part of the words, with what they must be."""
    for start in range(0, len(words), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        index = torch.arange(start, start + len(part), device=words.device)
        # Below 2^31 times below 2^32 stays within 64 bits. The upper half is the better mixed one.
        mixed = ((index + seed) & 0x7FFFFFFF).mul_(_ODD)
        mixed = mixed.bitwise_right_shift_(16).bitwise_and_(_MASK)
        # As signed numbers of 32 bits, which have the same bits.
        yield part, mixed.sub_((mixed >> 31) << 32).to(torch.int32)
