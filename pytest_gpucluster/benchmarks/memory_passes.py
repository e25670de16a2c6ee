"""Passes over device memory: copy, read, write. Each pass leaves a trace, by which it is verified.

Consecutive passes over one set of buffers are shifted, so that where a pass failed, the data of an earlier pass are at
a wrong place. Several sets, used in turn, keep small buffers out of the cache.
"""

from __future__ import annotations

import torch

from pytest_gpucluster.benchmarks.verify import PART_WORDS, Difference, Pattern, PatternWriter, signed, wrong_words_text
from pytest_gpucluster.device.interface import Accelerator
from pytest_gpucluster.errors import WrongResult

WORD_BYTES = 8

STEP_WORDS = 64
"""The shift of one pass against the next: 512 bytes, so that all begin as aligned as an allocation does."""

KEPT_WORDS = 8192
"""Of a larger buffer on a simulated device: more than all shifts together."""

PASSES_AT_ONCE = 64
"""Passes until the next verification: a quarter of a second of 8 GiB copies is about as many."""

_READ_PLACES = 3
"""Reads use this number of places in turn, so that not all sums are the same."""

_DATA = Pattern(start=0)

_NO_DATA = _DATA.word(-1)
"""A word that no buffer has as data: the pattern reaches it after 2**64 words."""


class _Passes:
    """What all kinds have in common."""

    max_in_flight = PASSES_AT_ONCE

    def __init__(self, words: int, operations: Accelerator, name: str) -> None:
        self._words, self._operations, self._name = words, operations, name

    @staticmethod
    def touched_bytes(words: int) -> int:
        """Bytes that one pass moves."""
        return words * WORD_BYTES


class Copies(_Passes):
    """Copies from one buffer to the other and back, each to the next place: read plus written bytes count.

    Each copy moves the result of the one before it. So when the data are unchanged after many copies, every one of
    them was right and complete, and one check shows it. For the next copies the data are written again.
    """

    def __init__(self, device: torch.device, words: int, sets: int, operations: Accelerator, *, name: str) -> None:
        super().__init__(words, operations, name)
        self._writer = PatternWriter(device, words)
        length = words + PASSES_AT_ONCE * STEP_WORDS
        self._sets = [(_empty(device, length), _empty(device, length)) for _ in range(sets)]
        self._first = 0  # of those since the data were written
        self._write_data()

    @staticmethod
    def needed_bytes(words: int, sets: int) -> int:
        """Memory for buffers and verification."""
        return 2 * sets * (words + PASSES_AT_ONCE * STEP_WORDS) * WORD_BYTES + PatternWriter.needed_bytes(words)

    @staticmethod
    def touched_bytes(words: int) -> int:
        return 2 * words * WORD_BYTES

    def start(self, index: int) -> None:
        pair, copies = self._copies_of_set(index)
        self._operations.copy(self._place(pair, copies), self._place(pair, copies + 1))

    def _copies_of_set(self, index: int) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        """Return the set whose turn it is, and the number of its copies since the data were written."""
        sets = len(self._sets)
        return self._sets[index % sets], (index - self._first) // sets

    def _place(self, pair: tuple[torch.Tensor, torch.Tensor], copies: int) -> torch.Tensor:
        """The place of the data after this number of copies. The data before it are one or two places off."""
        return pair[copies % 2][copies * STEP_WORDS :][: self._words]

    def verify(self, done: range) -> None:
        for index in done[-len(self._sets) :]:
            pair, copies = self._copies_of_set(index)
            data = self._place(pair, copies + 1)
            wrong = self._writer.compare(data, _DATA)
            if wrong is not None:
                raise WrongResult(
                    f"{self._name}: {_defect_text(wrong, data, _DATA.word(wrong.offset))}; after copies {self._first}"
                    f" to {done[-1]}, each of the result of the one before it"
                )
        self._first = done.stop
        self._write_data()

    def _write_data(self) -> None:
        for ours, theirs in self._sets:
            self._writer.fill(ours[: self._words], _DATA)
            ours[self._words :].fill_(_NO_DATA)
            theirs.fill_(_NO_DATA)


class Reads(_Passes):
    """Sums of a known pattern, each over the next place. Every sum is compared with the expected one."""

    def __init__(self, device: torch.device, words: int, sets: int, operations: Accelerator, *, name: str) -> None:
        super().__init__(words, operations, name)
        self._writer = PatternWriter(device, words)
        self._sets = [_empty(device, words + (_READ_PLACES - 1) * STEP_WORDS) for _ in range(sets)]
        for buffer in self._sets:
            self._writer.fill(buffer, _DATA)
        self._expected = [_DATA.total(shift * STEP_WORDS, words) for shift in range(_READ_PLACES)]
        # The initial value of a sum: none of the expected ones.
        self._none = next(signed(total + 1) for total in self._expected if signed(total + 1) not in self._expected)
        self._totals = torch.full((PASSES_AT_ONCE,), self._none, dtype=torch.int64, device=device)

    @staticmethod
    def needed_bytes(words: int, sets: int) -> int:
        """Memory for buffers and verification."""
        return sets * (words + (_READ_PLACES - 1) * STEP_WORDS) * WORD_BYTES + PatternWriter.needed_bytes(words)

    def start(self, index: int) -> None:
        shift = self._shift(index) * STEP_WORDS
        buffer = self._sets[index % len(self._sets)]
        self._operations.read(buffer[shift : shift + self._words], self._totals[index % PASSES_AT_ONCE])

    def _shift(self, index: int) -> int:
        return index // len(self._sets) % _READ_PLACES

    def verify(self, done: range) -> None:
        totals = self._totals.tolist()
        self._totals.fill_(self._none)
        wrong = [index for index in done if totals[index % PASSES_AT_ONCE] != self._expected[self._shift(index)]]
        if not wrong:
            return
        first = wrong[0]
        found, expected = totals[first % PASSES_AT_ONCE], self._expected[self._shift(first)]
        raise WrongResult(
            f"{self._name}: the sum of read {first} is wrong: found {_hex(found)}, expected {_hex(expected)};"
            f" {len(wrong)} of {len(done)} reads are wrong; {self._memory_text(first)}"
        )

    def _memory_text(self, index: int) -> str:
        buffer = self._sets[index % len(self._sets)]
        wrong = self._writer.compare(buffer, _DATA)
        if wrong is None:
            return "the memory itself has the written data"
        return f"in memory {_defect_text(wrong, buffer, _DATA.word(wrong.offset))}"


class Writes(_Passes):
    """Fills, each with another value and from the next place on.

    The data before the place of the next fill stay, so that after many fills the beginning of each one can still be
    checked, and the last one from beginning to end.
    """

    def __init__(self, device: torch.device, words: int, sets: int, operations: Accelerator, *, name: str) -> None:
        super().__init__(words, operations, name)
        self._sets = [_empty(device, words + PASSES_AT_ONCE * STEP_WORDS) for _ in range(sets)]
        for buffer in self._sets:
            buffer.fill_(_NO_DATA)
        self._first = 0  # of those whose traces are in the buffers

    @staticmethod
    def needed_bytes(words: int, sets: int) -> int:
        """Memory for buffers and verification."""
        return sets * (words + PASSES_AT_ONCE * STEP_WORDS) * WORD_BYTES + min(PART_WORDS, words)

    def start(self, index: int) -> None:
        self._operations.write(self._place(index), self._value(index))

    @staticmethod
    def _value(index: int) -> int:
        return _DATA.word(index + 1)  # word 0 is 0, and zeros are not data

    def _place(self, index: int) -> torch.Tensor:
        # Within a burst places only go up, whichever the set.
        shift = (index - self._first) * STEP_WORDS
        return self._sets[index % len(self._sets)][shift : shift + self._words]

    def _remaining(self, index: int, done: range) -> torch.Tensor:
        """The data of a write that are left: up to where the next one of its set began."""
        written, sets = self._place(index), len(self._sets)
        return written[: sets * STEP_WORDS] if index + sets in done else written

    def verify(self, done: range) -> None:
        counts = torch.stack([_count_different(self._remaining(index, done), self._value(index)) for index in done])
        wrong = counts.nonzero().flatten().tolist()  # waits for all of them
        if wrong:
            index = done[wrong[0]]
            remaining, value = self._remaining(index, done), self._value(index)
            difference = Difference(count=int(counts[wrong[0]]), offset=_first_different(remaining, value))
            raise WrongResult(
                f"{self._name}: {_defect_text(difference, remaining, value)};"
                f" after write {index}, {len(wrong)} of {len(done)} writes are wrong"
            )
        self._first = done.stop


def _count_different(words: torch.Tensor, value: int) -> torch.Tensor:
    """Count the words that are not ``value``, on the device."""
    parts = (words[start : start + PART_WORDS] for start in range(0, len(words), PART_WORDS))
    return torch.stack([(part != value).sum() for part in parts]).sum()


def _first_different(words: torch.Tensor, value: int) -> int:
    """Return the offset of the first word that is not ``value``; 0 if by now there is none, which the report shows.

    In parts, because torch's search for it takes no more than 2**31 words at once, and room for each that it finds.
    """
    for start in range(0, len(words), PART_WORDS):
        others = words[start : start + PART_WORDS] != value
        if others.any():
            return start + int(others.view(torch.uint8).argmax())  # the first of equal maxima
    return 0


def _empty(device: torch.device, words: int) -> torch.Tensor:
    return torch.empty(words, dtype=torch.int64, device=device)


def _defect_text(wrong: Difference, words: torch.Tensor, expected: int) -> str:
    return wrong_words_text(wrong, int(words[wrong.offset]), expected, len(words))


def _hex(word: int) -> str:
    return f"{word % 2**64:#018x}"


KINDS: dict[str, type[Copies] | type[Reads] | type[Writes]] = {"copy": Copies, "read": Reads, "write": Writes}
