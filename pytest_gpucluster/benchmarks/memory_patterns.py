"""Whether device memory keeps the data written to it: bit patterns, the passes, and the faults.

``benchmarks.hbm`` measures the rate of a few buffers; this tests the cells of most of the memory. A pass goes through
it in parts. In each part it first reads and compares the data of the pass before, then it writes other data. So every
word that is written is read again, after all of the memory was written.

    walking_ones       one bit set in each word; in 64 steps it walks through all bits of every word
    walking_zeros      the same, with one bit clear in each word
    random             words of a generator, from a seed of their own in each part; then their complement
    moving_inversions  a word everywhere, inverted part by part upwards, and inverted back part by part downwards

Source: moving inversions as memtest86 does them, https://www.memtest86.com/tech_memtest-algoritm.html; walking bits as
in memtester, README.tests. They process single words in order, this one parts of the memory: a GPU has no order within
one.
Results are stored as they are found, so that an interrupted test still has them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from pytest_gpucluster.benchmarks.blocks import Progress
from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, counted
from pytest_gpucluster.metrics.units import require_one_of

WORD_BYTES = 8
WORD_BITS = 64

_ALTERNATING = (0x0000000000000000, 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)
"""The words of moving inversions: with their complements every bit is next to an equal and next to another one."""

_LOWEST = -(2**63)


class Words:
    """The words of one part of the memory in a pass, computed on demand, in memory that is reused.

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
        """Return the memory that it takes for parts of this number of words."""
        # While the table is computed, there are the bits, the ones and the shifted ones.
        return (longest + 3 * (longest + WORD_BITS)) * WORD_BYTES

    def walking(self, count: int, first_bit: int) -> torch.Tensor:
        """Return words with one bit set each: bit ``first_bit`` of the first one, the next bit of the next word."""
        return self._walking[first_bit : first_bit + count]

    def all_alike(self, count: int, word: int) -> torch.Tensor:
        """Return the same word ``count`` times."""
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
"""``make(words, part, count)``: the words of a part. The tensor is valid until the next one is made."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One way through the memory.

    Attributes:
        expects: the words expected in each part; None: unknown.
        writes: the words written to it then; None: nothing.
        downwards: from the last part to the first.
        what: a description of the pass, for an error.
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
            upright, inverse = of(word), of(~word)
            yield Pass(expects=None, writes=upright, what=f"{word:#018x} written")
            yield Pass(expects=upright, writes=inverse, what=f"{word:#018x} inverted upwards")
            yield Pass(expects=inverse, writes=upright, what=f"{word:#018x} inverted back downwards", downwards=True)
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
"""Maximum number of places that are listed; the others are counted."""

_PLACES_IN_A_MESSAGE = 4
_BITS_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A 64-bit word of memory that was not read as it was written.

    Attributes:
        buffer: which of the buffers, from 0 on in the order of their allocation.
        offset_bytes: of the word in its buffer. It is no physical address: only the driver knows that.
        expected, found: the word as unsigned numbers, when it was wrong for the first time; ``found`` is of a second
            read.
        during: the pass of the first time, as text.
        times: number of passes in which it was wrong.
        wrong_bits: all bits that were wrong in any pass, as a number that has them set.
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
        """The bits that differed the first time; 0 where the second read found the word right."""
        return self.expected ^ self.found

    def repeated(self, other: Fault) -> Fault:
        """Return the fault of the same word that was wrong once more."""
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
    """The results so far.

    Attributes:
        pattern: that is written.
        device: whose memory.
        buffer_bytes: the size of each buffer.
        total_bytes: of the device, used or not; None if that is unknown.
        passes, passes_wanted: passes through all buffers so far, and in all.
        wrong_words: words that were read wrong, counted again in each pass.
        faults: the first ``PLACES_LISTED`` places of such words: (buffer, byte offset) -> the fault.
        is_complete: all passes are done. Otherwise the memory did not pass.
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
        """Bytes of memory that are written and read."""
        return sum(self.buffer_bytes)

    @property
    def share(self) -> float:
        """The same as a part of all the device has; NaN where that is unknown."""
        return self.tested_bytes / self.total_bytes if self.total_bytes else float("nan")

    @property
    def progress_text(self) -> str:
        """The progress so far, as text.

        >>> Survey(pattern="random").progress_text
        'after 0 of 0 passes over 0 GB'
        """
        return f"after {self.passes} of {self.passes_wanted} passes over {self.tested_bytes / 1e9:.4g} GB"

    def add(self, fault: Fault) -> None:
        """Add one of the words that ``wrong_words`` counts."""
        place = fault.buffer, fault.offset_bytes
        known = self.faults.get(place)
        if known is not None:
            self.faults[place] = known.repeated(fault)
        elif len(self.faults) < PLACES_LISTED:
            self.faults[place] = fault

    @property
    def faults_text(self) -> str:
        """The number of faults, as text.

        >>> Survey(pattern="random", wrong_words=2).faults_text
        'words were read wrong 2 times, at 0 places'
        """
        places = f"{len(self.faults)}{' or more' * (len(self.faults) >= PLACES_LISTED)}"
        times = f"{self.wrong_words} time{'s' * (self.wrong_words != 1)}"
        return f"words were read wrong {times}, at {places} place{'s' * (places != '1')}"

    def report(self) -> str:
        """Return the faults as a text of some lines, for a file of the report."""
        sizes = ", ".join(f"{number}: {size}" for number, size in enumerate(self.buffer_bytes))
        return "\n".join(
            [
                f"{self.device}: memory pattern {self.pattern}: {self.faults_text}, {self.progress_text}",
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
        examples = "; ".join(map(str, list(self.faults.values())[:_PLACES_IN_A_MESSAGE]))
        raise WrongResult(
            f"{self.device}: memory pattern {self.pattern}: {self.faults_text}, {self.progress_text}: {examples}"
        )


PART_WORDS = 2**25
"""256 MiB: several times the last cache of any GPU so far, so that the compared data come from memory."""

BUFFER_WORDS = 2**29
"""4 GiB: one allocation of most of the memory may fail where several of them do not."""

KEPT_WORDS = 2**16
"""Of more memory on a simulated device."""

_SEARCH_WORDS = 2**20
"""Wrong words are searched for in this number at a time, to need little memory."""

PROGRESS_SECONDS = 2.0
"""Before that no progress is reported."""


def write_part(target: torch.Tensor, words: torch.Tensor) -> None:
    """Write words to a part of a buffer, both int64 of one dimension and of the same length. Tests inject faults."""
    target.copy_(words)


@releases_memory()
def run_pattern(
    device: torch.device,
    survey: Survey,
    *,
    share: float,
    most_bytes: int,
    rounds: int = 1,
    progress: Progress | None = None,
) -> None:
    """Write the survey's pattern to the free memory of a device, and read it back, pass by pass.

    Every word that is written is read again after all buffers were written, and compared on the device, bit by bit.
    Random words are computed again from their seeds for that. A wrong word does not end it: the places of the others
    show whether it is a cell, a row or a line.

    The survey belongs to the caller, who has it however this ends.

    Args:
        device: whose memory.
        survey: to which faults are added; its ``pattern`` is one of ``PATTERNS``.
        share: the part of the free memory to use, including what the comparison needs.
        most_bytes: maximum number of bytes written.
        rounds: repeats of the pattern.
        progress: called after each pass that ends after ``PROGRESS_SECONDS`` or later, with the passes so far, those in
            all, and the figure ``wrong_words``.

    Raises:
        EnvironmentBroken: too little memory is free, or the free memory is unknown.
        ValueError: there is no such pattern.
    """
    require_one_of("pattern", survey.pattern, PATTERNS)
    survey.device, survey.total_bytes = str(device), accelerator(device).total_bytes()
    words = _words_to_write(device, share, most_bytes)
    passes = list(PATTERNS[survey.pattern](rounds, 0))
    survey.passes_wanted = len(passes)
    try:
        memory = _Memory(device, survey, words)
        begin = time.monotonic()
        for number, step in enumerate(passes, start=1):
            with counted(MEASURING):
                memory.run_pass(step)
            survey.passes = number
            if progress is not None and time.monotonic() - begin >= PROGRESS_SECONDS:
                progress(number, len(passes), wrong_words=survey.wrong_words)
    except torch.OutOfMemoryError as error:
        raise EnvironmentBroken(
            f"{device}: memory pattern {survey.pattern}: {error}. Another process may have taken memory during the test"
            " (nvidia-smi names the processes); or choose a smaller share, such as --gpucluster-workload"
            " memory_patterns.share=80%"
        ) from None
    survey.is_complete = True


def _words_to_write(device: torch.device, share: float, most_bytes: int) -> int:
    free = accelerator(device).free_bytes()
    if free is None:
        raise EnvironmentBroken(f"{device}: the free memory is unknown, so it cannot be tested")
    check_bytes = comparison_bytes(min(PART_WORDS, most_bytes // WORD_BYTES))
    words = min(int(share * free) - check_bytes, most_bytes) // WORD_BYTES
    if words < 1:
        raise EnvironmentBroken(
            f"{device}: {100 * share:g} % of the {free / 1e9:.3g} GB of memory that are free are too little to test,"
            f" for comparing takes {check_bytes / 1e9:.3g} GB; end what else uses this device (nvidia-smi names"
            " the processes)"
        )
    return words


def comparison_bytes(part_words: int) -> int:
    """Return the memory for computing and comparing parts of this number of words."""
    return Words.needed_bytes(part_words) + part_words


class _Memory:
    """The buffers, and the passes through them."""

    def __init__(self, device: torch.device, survey: Survey, words: int) -> None:
        self._survey, by = survey, accelerator(device)
        kept = by.kept(words, KEPT_WORDS)
        longest = min(PART_WORDS, BUFFER_WORDS, kept)
        self._words = Words(device, longest)
        self._mask = torch.empty(longest, dtype=torch.bool, device=device)
        self._parts: list[tuple[int, int, torch.Tensor]] = []
        """Of each part: its buffer, its first word in it, the words."""
        for number, first in enumerate(range(0, kept, BUFFER_WORDS)):
            buffer = torch.empty(min(BUFFER_WORDS, kept - first), dtype=torch.int64, device=device)
            survey.buffer_bytes.append(buffer.nbytes * words // kept)
            for start in range(0, len(buffer), PART_WORDS):
                self._parts.append((number, start, buffer[start : start + PART_WORDS]))

    def run_pass(self, step: Pass) -> None:
        """Go through all parts once."""
        order = range(len(self._parts))
        for index in reversed(order) if step.downwards else order:
            buffer, start, part = self._parts[index]
            if step.expects is not None:
                expected = step.expects(self._words, index, len(part))
                self._compare(part, expected, buffer, start, step.what)
            if step.writes is not None:
                write_part(part, step.writes(self._words, index, len(part)))

    def _compare(self, part: torch.Tensor, expected: torch.Tensor, buffer: int, start: int, during: str) -> None:
        """Count the words that differ, and add the first of them. It waits for the device."""
        mask = torch.ne(part, expected, out=self._mask[: len(part)])
        if not bool(mask.any()):
            return
        self._survey.wrong_words += int(mask.sum())
        left = PLACES_LISTED
        for first in range(0, len(part), _SEARCH_WORDS):
            if not left:
                return
            offsets = first + mask[first : first + _SEARCH_WORDS].nonzero().flatten()[:left]
            left -= len(offsets)
            values = (offsets.tolist(), expected[offsets].tolist(), part[offsets].tolist())
            for offset, right, found in zip(*values, strict=True):
                self._survey.add(
                    Fault(
                        buffer=buffer,
                        offset_bytes=(start + offset) * WORD_BYTES,
                        expected=right % 2**64,
                        found=found % 2**64,
                        during=during,
                    )
                )
