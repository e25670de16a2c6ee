"""Whether device memory holds what is written to it: bit patterns, the passes, and what was found.

``benchmarks.hbm`` measures how fast a few buffers are; this tests the cells of most of the memory. A pass goes through
it in parts. In each part it first reads and compares what the pass before has left there, then it writes something
else. So every word that is written is read again, after all of the memory was written.

    walking_ones       one bit set in each word; in 64 steps it walks through all bits of every word
    walking_zeros      the same, with one bit clear in each word
    random             words of a generator, from a seed of their own in each part; then their complement
    moving_inversions  a word everywhere, turned over part by part upwards, and turned back part by part downwards

Source: moving inversions as memtest86 does them, https://www.memtest86.com/tech_memtest-algoritm.html; walking bits as
in memtester, README.tests. There single words take turns, here parts of the memory: a GPU has no order within one.
Results are kept as they are found, so that an interrupted test still leaves them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from pytest_gpucluster.benchmarks.memory_budget import free_bytes, memory_returned, total_bytes
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, counted
from pytest_gpucluster.metrics.units import did_you_mean

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


PLACES_LISTED = 32
"""So many are listed; the others are counted."""

_PLACES_IN_A_MESSAGE = 4
_BITS_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A 64-bit word of memory that was not read as it was written.

    Attributes:
        buffer: which of the buffers, from 0 on in the order of their allocation.
        offset_bytes: of the word in its buffer. It is no physical address: the driver alone knows that.
        expected, found: the word as unsigned numbers, when it was wrong for the first time; ``found`` is of a second
            look.
        during: the pass of the first time, in words.
        times: in how many passes it was wrong.
        wrong_bits: all bits that ever were wrong, as a number that has them set.
    """

    buffer: int
    offset_bytes: int
    expected: int
    found: int
    during: str
    times: int = 1
    wrong_bits: int = 0

    @property
    def xor(self) -> int:
        """The bits that differed the first time; 0 where the second look found the word right."""
        return self.expected ^ self.found

    def and_again(self, other: Fault) -> Fault:
        """Return what is known after the same word was wrong once more."""
        return replace(self, times=self.times + 1, wrong_bits=self.wrong_bits | self.xor | other.xor)

    def __str__(self) -> str:
        where = f"buffer {self.buffer}, byte {self.offset_bytes:#x}: expected {self.expected:#018x}"
        if self.xor:
            where += f", found {self.found:#018x}, xor {self.xor:#018x}"
        else:
            where += ", read wrong once and right when it was read again"
        wrong = self.wrong_bits | self.xor
        bits = [str(bit) for bit in range(64) if wrong >> bit & 1]
        if 0 < len(bits) <= _BITS_NAMED:
            where += f" (bit{'s' * (len(bits) > 1)} {', '.join(bits)})"
        return f"{where}, {self.during}" + (f", and {self.times - 1} more times" if self.times > 1 else "")


@dataclass(kw_only=True)
class Survey:
    """What has been seen so far.

    Attributes:
        pattern: what was written.
        device: whose memory.
        buffer_bytes: the size of each buffer.
        total_bytes: of the device, used or not; None if that is not known.
        passes, passes_wanted: ways through all buffers, and how many are asked for.
        wrong_words: words that were read wrong, counted in each pass anew.
        faults: the first ``PLACES_LISTED`` places of such words: (buffer, byte offset) -> what was seen there.
        is_complete: all passes are done. Nothing else is a memory that was found right.
    """

    pattern: str
    device: str = ""
    buffer_bytes: list[int] = field(default_factory=list)
    total_bytes: int | None = None
    passes: int = 0
    passes_wanted: int = 0
    wrong_words: int = 0
    faults: dict[tuple[int, int], Fault] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def tested_bytes(self) -> int:
        """How much memory is written and read."""
        return sum(self.buffer_bytes)

    @property
    def share(self) -> float:
        """The same as a part of all the device has; NaN where that is not known."""
        return self.tested_bytes / self.total_bytes if self.total_bytes else float("nan")

    @property
    def reached(self) -> str:
        """How far it is, in words.

        >>> Survey(pattern="random").reached
        'after 0 of 0 passes over 0 GB'
        """
        return f"after {self.passes} of {self.passes_wanted} passes over {self.tested_bytes / 1e9:.4g} GB"

    def take(self, fault: Fault) -> None:
        """Take one of the words that ``wrong_words`` counts."""
        place = fault.buffer, fault.offset_bytes
        known = self.faults.get(place)
        if known is not None:
            self.faults[place] = known.and_again(fault)
        elif len(self.faults) < PLACES_LISTED:
            self.faults[place] = fault

    @property
    def found(self) -> str:
        """How much is wrong, in words.

        >>> Survey(pattern="random", wrong_words=2).found
        'words were read wrong 2 times, at 0 places'
        """
        places = f"{len(self.faults)}{' or more' * (len(self.faults) >= PLACES_LISTED)}"
        times = f"{self.wrong_words} time{'s' * (self.wrong_words != 1)}"
        return f"words were read wrong {times}, at {places} place{'s' * (places != '1')}"

    def listed(self) -> str:
        """Return what was found as a text of some lines, for a file beside the report."""
        sizes = ", ".join(f"{number}: {size}" for number, size in enumerate(self.buffer_bytes))
        return "\n".join(
            [
                f"{self.device}: memory pattern {self.pattern}: {self.found}, {self.reached}",
                f"buffers and their bytes: {sizes or 'none'}",
                *map(str, self.faults.values()),
                "",
            ]
        )

    def require_right(self) -> None:
        """Raise where a word was read wrong.

        Raises: WrongResult with the count and the first places.
        """
        if not self.wrong_words:
            return
        shown = "; ".join(map(str, list(self.faults.values())[:_PLACES_IN_A_MESSAGE]))
        raise WrongResult(f"{self.device}: memory pattern {self.pattern}: {self.found}, {self.reached}: {shown}")


PART_WORDS = 2**25
"""256 MiB: several times the last cache of any GPU so far, so that what is compared comes from memory."""

BUFFER_WORDS = 2**29
"""4 GiB: one allocation of most of the memory may fail where several of them do not."""

_LOOK_WORDS = 2**20
"""Wrong words are looked for in so many at a time, to need little memory."""

Progress = Callable[..., None]
"""``progress(step, of, **figures)``: shown to whoever waits. A step is a pass."""

SHOWN_SECONDS = 2.0
"""Before that nobody has waited yet."""


class Cells:
    """What writes the memory; the seam at which tests plant faults."""

    def write(self, target: torch.Tensor, words: torch.Tensor) -> None:
        """Write words to a part of a buffer. Both are int64 of one dimension and of the same length."""
        target.copy_(words)


def go_through(
    device: torch.device,
    survey: Survey,
    *,
    share: float,
    most_bytes: int,
    rounds: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    cells: Cells | None = None,
    part_words: int = PART_WORDS,
    buffer_words: int = BUFFER_WORDS,
) -> None:
    """Write the survey's pattern to the free memory of a device, and read it back, pass by pass.

    Every word that is written is read again after all buffers were written, and compared on the device, bit by bit.
    Random words are made again from their seeds for that. A wrong word does not end it: where else memory is wrong
    tells whether it is a cell, a row or a line.

    The survey belongs to the caller, who has it however this ends.

    Args:
        device: whose memory.
        survey: takes what is found; its ``pattern`` is one of ``bit_patterns.PATTERNS``.
        share: the part of the free memory that is taken, with what the comparison needs.
        most_bytes: no more than this is written.
        rounds: how often the pattern is gone through.
        seed: of random words.
        progress: called after each pass that ends after ``SHOWN_SECONDS`` or later, with the passes done, those to do,
            and the figure ``wrong_words``.
        cells: what writes; by default torch's copy.
        part_words: a pass goes through the buffers in parts of so many words.
        buffer_words: a buffer has no more than this.

    Raises:
        EnvironmentBroken: too little memory is free, or it is not known how much.
        ValueError: an argument is out of its range.
    """
    if survey.pattern not in PATTERNS:
        raise ValueError(
            f"pattern is one of {', '.join(PATTERNS)}, not {survey.pattern!r}{did_you_mean(survey.pattern, PATTERNS)}"
        )
    if not 0 < share < 1 or rounds < 1 or part_words < 1 or buffer_words < 1:
        raise ValueError(
            f"share must be between 0 and 1, rounds, part_words and buffer_words at least 1: {share}, {rounds},"
            f" {part_words}, {buffer_words}"
        )
    survey.device, survey.total_bytes = str(device), total_bytes(device)
    words = _words_to_write(device, share, most_bytes, part_words)
    passes = list(PATTERNS[survey.pattern](rounds, seed))
    survey.passes_wanted = len(passes)
    try:
        with memory_returned():
            _go_through(device, survey, words, passes, progress, cells or Cells(), part_words, buffer_words)
    except torch.OutOfMemoryError as error:
        said = (
            f"{device}: memory pattern {survey.pattern}: {error}. Another process may have taken memory meanwhile"
            " (nvidia-smi names the processes); or choose a smaller share, such as --gpucluster-workload"
            " memory_patterns.share=80%"
        )
    else:
        survey.is_complete = True
        return
    # Here, where nothing refers to the error any more, whose frames hold the buffers.
    raise EnvironmentBroken(said)


def _words_to_write(device: torch.device, share: float, most_bytes: int, part_words: int) -> int:
    free = free_bytes(device)
    if free is None:
        raise EnvironmentBroken(f"{device}: it is not known how much memory is free, so it cannot be gone through")
    beside = needed_bytes_beside(min(part_words, most_bytes // WORD_BYTES))
    words = min(int(share * free) - beside, most_bytes) // WORD_BYTES
    if words < 1:
        raise EnvironmentBroken(
            f"{device}: {100 * share:g} % of the {free / 1e9:.3g} GB of memory that are free are too little to go"
            f" through, for comparing takes {beside / 1e9:.3g} GB; end what else uses this device (nvidia-smi names"
            " the processes)"
        )
    return words


def needed_bytes_beside(part_words: int) -> int:
    """Return the bytes of memory that making and comparing parts of so many words takes."""
    return Words.needed_bytes(part_words) + part_words


def _go_through(
    device: torch.device,
    survey: Survey,
    words: int,
    passes: Sequence[Pass],
    progress: Progress | None,
    cells: Cells,
    part_words: int,
    buffer_words: int,
) -> None:
    # A function of its own, for its frame holds all tensors: see memory_returned.
    memory = _Memory(device, survey, words, cells, part_words, buffer_words)
    begin = time.monotonic()
    for number, step in enumerate(passes, start=1):
        with counted(MEASURING):
            memory.go(step)
        survey.passes = number
        if progress is not None and time.monotonic() - begin >= SHOWN_SECONDS:
            progress(number, len(passes), wrong_words=survey.wrong_words)


class _Memory:
    """The buffers, and what goes through them."""

    def __init__(
        self, device: torch.device, survey: Survey, words: int, cells: Cells, part_words: int, buffer_words: int
    ) -> None:
        self._survey, self._cells = survey, cells
        longest = min(part_words, buffer_words, words)
        self._words = Words(device, longest)
        self._mask = torch.empty(longest, dtype=torch.bool, device=device)
        self._parts: list[tuple[int, int, torch.Tensor]] = []
        """Of each part: its buffer, its first word in it, the words."""
        for number, first in enumerate(range(0, words, buffer_words)):
            buffer = torch.empty(min(buffer_words, words - first), dtype=torch.int64, device=device)
            survey.buffer_bytes.append(buffer.nbytes)
            for start in range(0, len(buffer), part_words):
                self._parts.append((number, start, buffer[start : start + part_words]))

    def go(self, step: Pass) -> None:
        """Go through all parts once."""
        order = range(len(self._parts))
        for index in reversed(order) if step.downwards else order:
            buffer, start, part = self._parts[index]
            if step.expects is not None:
                expected = step.expects(self._words, index, len(part))
                self._compare(part, expected, buffer, start, step.what)
            if step.writes is not None:
                self._cells.write(part, step.writes(self._words, index, len(part)))

    def _compare(self, part: torch.Tensor, expected: torch.Tensor, buffer: int, start: int, during: str) -> None:
        """Count what differs, and take the first of it. It waits for the device."""
        mask = torch.ne(part, expected, out=self._mask[: len(part)])
        if not bool(mask.any()):
            return
        self._survey.wrong_words += int(mask.sum())
        left = PLACES_LISTED
        for first in range(0, len(part), _LOOK_WORDS):
            if not left:
                return
            offsets = first + mask[first : first + _LOOK_WORDS].nonzero().flatten()[:left]
            left -= len(offsets)
            seen = (offsets.tolist(), expected[offsets].tolist(), part[offsets].tolist())
            for offset, right, found in zip(*seen, strict=True):
                self._survey.take(
                    Fault(
                        buffer=buffer,
                        offset_bytes=(start + offset) * WORD_BYTES,
                        expected=right % 2**64,
                        found=found % 2**64,
                        during=during,
                    )
                )
