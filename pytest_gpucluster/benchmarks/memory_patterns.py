"""Does device memory hold what is written to it? Most of it, with patterns that faults of cells and lines show in.

``memory`` measures how fast a few buffers are; this is about the cells of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from pytest_gpucluster.benchmarks.bit_patterns import PATTERNS, WORD_BYTES, Pass, Words
from pytest_gpucluster.benchmarks.footprint import free_bytes, memory_returned, total_bytes
from pytest_gpucluster.benchmarks.memory_survey import PLACES_LISTED, Fault, Survey
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.time_budget import MEASURING, counted
from pytest_gpucluster.metrics.units import did_you_mean

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
