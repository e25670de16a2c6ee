"""What is written to memory to find cells that do not hold it: patterns of 64-bit words, each a series of passes.

A pass goes through all of a memory in parts. In each part it first reads what the pass before has left there, and
compares it, then it writes something else. So every word that is written is read again, after all of the memory was
written.

    walking_ones       one bit set in each word; in 64 steps it walks through all bits of every word
    walking_zeros      the same, with one bit clear in each word
    random             words of a generator, from a seed of their own in each part; then their complement
    moving_inversions  a word everywhere, turned over part by part upwards, and turned back part by part downwards

Source: moving inversions as memtest86 does them, https://www.memtest86.com/tech_memtest-algoritm.html; walking bits as
in memtester, README.tests. There single words take turns, here parts of the memory: a GPU has no order within one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

WORD_BYTES = 8
WORD_BITS = 64

_ALTERNATING = (0x0000000000000000, 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)
"""The words of moving inversions: with their complements every bit is beside an equal and beside another one."""

_LOWEST = -(2**63)


class Words:
    """The words of one part of the memory in a pass, made when they are needed, in memory that is used again.

    Args:
        device: where.
        longest: of all parts, in words.
    """

    def __init__(self, device: torch.device, longest: int) -> None:
        self._buffer = torch.empty(longest, dtype=torch.int64, device=device)
        # Bit i walks: word i of the table has it set. As many words more as there are bits, so that it can begin
        # with any of them.
        bits = torch.arange(longest + WORD_BITS, device=device).remainder_(WORD_BITS)
        self._walking = torch.bitwise_left_shift(torch.ones_like(bits), bits)
        self._random = torch.Generator(device)

    @staticmethod
    def needed_bytes(longest: int) -> int:
        """Return what it takes in memory for parts of so many words."""
        # While the table is made, there are the bits, the ones and the shifted ones.
        return (longest + 3 * (longest + WORD_BITS)) * WORD_BYTES

    def walking(self, count: int, first_bit: int) -> torch.Tensor:
        """Return words with one bit set each: bit ``first_bit`` of the first one, the next bit of the next word."""
        return self._walking[first_bit : first_bit + count]

    def all_alike(self, count: int, word: int) -> torch.Tensor:
        """Return the same word so many times."""
        return self._buffer[:count].fill_(word)

    def random(self, count: int, seed: int) -> torch.Tensor:
        """Return random words; the same ones for the same seed and count."""
        self._random.manual_seed(seed)
        # Without an upper end all 64 bits are drawn. Source: torch, docs of Tensor.random_, and aten's random_from_to.
        return self._buffer[:count].random_(_LOWEST, None, generator=self._random)

    def inverted(self, words: torch.Tensor) -> torch.Tensor:
        """Return the complement of words."""
        return torch.bitwise_not(words, out=self._buffer[: len(words)])


Make = Callable[[Words, int, int], torch.Tensor]
"""``make(words, part, count)``: what the words of a part are. The tensor is good until the next one is made."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One way through the memory.

    Attributes:
        expects: what must lie in each part; None: nothing is known of it.
        writes: what is written to it then; None: nothing.
        downwards: from the last part to the first.
        what: the pass in words, for an error.
    """

    expects: Make | None
    writes: Make | None
    what: str
    downwards: bool = False


def _walking(*, inverted: bool) -> Callable[[int, int], Iterator[Pass]]:
    def passes(rounds: int, seed: int) -> Iterator[Pass]:
        def of(bit: int) -> Make:
            def make(words: Words, part: int, count: int) -> torch.Tensor:
                walking = words.walking(count, bit)
                return words.inverted(walking) if inverted else walking

            return make

        steps = [of(bit) for bit in range(WORD_BITS)] * rounds
        yield from _one_after_the_other(steps, lambda step: f"step {step % WORD_BITS + 1} of {WORD_BITS}")

    return passes


def _random(rounds: int, seed: int) -> Iterator[Pass]:
    def of(number: int, *, inverted: bool) -> Make:
        def make(words: Words, part: int, count: int) -> torch.Tensor:
            # A seed of its own for each part and round; torch's generator on cpu takes 32 bits of it only.
            drawn = words.random(count, zlib.crc32(f"{seed} {number} {part}".encode()))
            return words.inverted(drawn) if inverted else drawn

        return make

    steps = [of(number, inverted=inverted) for number in range(rounds) for inverted in (False, True)]
    yield from _one_after_the_other(steps, lambda step: f"round {step // 2 + 1}{', inverted' * (step % 2)}")


def _one_after_the_other(steps: list[Make], what: Callable[[int], str]) -> Iterator[Pass]:
    """Yield passes that each read what the one before wrote; the last one only reads."""
    yield Pass(expects=None, writes=steps[0], what=what(0))
    for number, (old, new) in enumerate(zip(steps, [*steps[1:], None], strict=True)):
        yield Pass(expects=old, writes=new, what=what(number))


def _moving_inversions(rounds: int, seed: int) -> Iterator[Pass]:
    def of(word: int) -> Make:
        return lambda words, part, count: words.all_alike(count, word)

    for _ in range(rounds):
        for word in _ALTERNATING:
            upright, turned = of(word), of(~word)
            yield Pass(expects=None, writes=upright, what=f"{word:#018x} written")
            yield Pass(expects=upright, writes=turned, what=f"{word:#018x} turned over upwards")
            yield Pass(expects=turned, writes=upright, what=f"{word:#018x} turned back downwards", downwards=True)
            yield Pass(expects=upright, writes=None, what=f"{word:#018x} read at last")


PATTERNS: Mapping[str, Callable[[int, int], Iterator[Pass]]] = MappingProxyType(
    {
        "walking_ones": _walking(inverted=False),
        "walking_zeros": _walking(inverted=True),
        "random": _random,
        "moving_inversions": _moving_inversions,
    }
)
"""Name of a pattern -> its passes, ``passes(rounds, seed)``."""
