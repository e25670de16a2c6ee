"""What a look through a memory has found, kept while it goes on, so that one that is cut short leaves what it saw."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pytest_gpucluster.errors import WrongResult

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
