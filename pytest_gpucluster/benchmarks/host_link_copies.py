"""Verified copies between host and device, and the lock by which the processes of a node take turns.

The lock is on a file, because the processes may not know of each other. So a link is measured alone under torchrun,
where all ranks run the same test at once, and without a launcher. The kernel releases the lock of a process that ends.

Copies are compared bit by bit. Both sides hold the same pattern. A copy takes it from one side, at an offset that is
shifted from time to time, to one of many buffers on the other side, where it is compared with that side's own pattern.
So a copy that was not made, or only in part, leaves the data of an earlier copy with another shift.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType

import torch

from pytest_gpucluster.benchmarks.verify import FACTOR, difference_seen, wrong_words_text
from pytest_gpucluster.device.clock import Clock
from pytest_gpucluster.device.interface import Accelerator
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

WAIT_SECONDS = 60.0
"""A turn takes less than a second: only a hanging process can make another one wait this long."""

_POLL_SECONDS = 0.0005


def shared_path() -> Path:
    """Return the lock file that all processes of this user on this node share.

    With the node's own name in it, for a lock in a network folder would keep other nodes waiting, too.
    """
    return Path(tempfile.gettempdir()) / f"gpucluster-host-link-{os.uname().nodename}-{os.getuid()}.lock"


class Turn:
    """A process's access to the lock, as a context manager: in it, any number of turns.

    Source: flock(2): a lock belongs to the opened file, and ends with it.
    """

    def __init__(self) -> None:
        self._path = shared_path()
        self._file: int | None = None

    def __enter__(self) -> Turn:
        """Open the file.

        Raises: EnvironmentBroken if that fails: then the links cannot be measured one at a time.
        """
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EnvironmentBroken(
                f"ranks cannot take turns by {self._path}: {error.strerror}; set TMPDIR to a folder of this node that "
                "all of them can write to"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def begin(self) -> None:
        """Wait until it is this process's turn.

        Raises: EnvironmentBroken if the others do not release the lock in time.
        """
        assert self._file is not None
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise EnvironmentBroken(
                        f"no turn to measure a host link alone within {WAIT_SECONDS:g} s: another process holds "
                        f"{self._path} (`lslocks`); is one of the ranks hanging, or another run on this node?"
                    ) from None
                time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Release the lock. Without a turn nothing happens."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)


H2D, D2H = "h2d", "d2h"
DIRECTIONS = (H2D, D2H)

WORD_BYTES = 8

KEPT_WORDS = 1024
"""Of a longer copy on a simulated device."""

_STEP_WORDS = 64
"""How far the next round is shifted: 512 bytes, so that all begin as aligned as an allocation does."""
_SHIFTS = 3
_NO_DATA = -FACTOR
"""A word that is in no pattern of any possible size."""


def words_on_host(words: int, copies: int, directions: Sequence[str]) -> int:
    """Return the words of host memory needed: the pattern, and buffers for the copies from the device."""
    return words + (_SHIFTS - 1) * _STEP_WORDS + (copies * words if D2H in directions else 0)


def bytes_on_device(words: int, copies: int, directions: Sequence[str]) -> int:
    """Return the bytes of device memory needed, including the temporary ones of a comparison."""
    buffers = copies * words if H2D in directions else 0
    return WORD_BYTES * (words + (_SHIFTS - 1) * _STEP_WORDS + buffers) + words


class HostCopies:
    """Copies of ``words`` 8-byte words, numbered from 0; with two directions each number is one copy each way.

    Args:
        by: the back end of the device; it makes the copies.
        host: memory for the host's side, of ``words_on_host`` words.
        words: of one copy.
        copies: buffers of a direction: this number of copies are started until all of them are verified.
        directions: "h2d", "d2h" or both.
        name: for messages.
        turn: begun before copies are started, and ended when they are done; None where all copy at once.
    """

    def __init__(
        self,
        by: Accelerator,
        host: torch.Tensor,
        words: int,
        copies: int,
        directions: Sequence[str],
        *,
        name: str,
        turn: Turn | None = None,
    ) -> None:
        self.max_in_flight = copies
        self._by, self._words, self._name = by, words, name
        self._turn = turn
        pattern = words + (_SHIFTS - 1) * _STEP_WORDS
        there = torch.empty(pattern, dtype=torch.int64, device=by.place)
        self._sides = {H2D: (_write_pattern(host[:pattern]), _write_pattern(there)), D2H: (there, host[:pattern])}
        """Direction -> the pattern to copy, and the one of the other side to compare with."""
        rest = {D2H: host[pattern:]}
        if H2D in directions:
            rest[H2D] = torch.empty(copies * words, dtype=torch.int64, device=by.place)
        self._targets = {direction: rest[direction].fill_(_NO_DATA).view(copies, words) for direction in directions}
        self._side = by.side_stream() if len(self._targets) > 1 else None

    def start(self, index: int) -> None:
        """Start one copy in each direction. The second direction has a stream of its own, where there are streams."""
        for number, (direction, targets) in enumerate(self._targets.items()):
            source = self._place(self._sides[direction][0], index)
            with self._by.on(self._side if number else None):
                self._by.copy_over_link(direction, source, targets[index % len(targets)])

    def verify(self, done: range) -> None:
        """Wait for these copies, and compare each of them.

        Raises: WrongResult that names direction, copy, and the first wrong word.
        """
        self._by.synchronize()  # what has arrived on the host is compared by the host
        if self._turn is not None:
            self._turn.end()  # comparing takes longer than copying, and needs no link
        for direction, targets in self._targets.items():
            for index in done:
                expected = self._place(self._sides[direction][1], index)
                if not torch.equal(targets[index % len(targets)], expected):
                    raise WrongResult(self._description(direction, index, targets[index % len(targets)], expected))

    def timed(self, clock: Clock) -> Clock:
        """Return a clock whose regions are in this rank's turn, and include the second direction's stream as well."""
        return _CopyClock(clock, self._side, self._turn, self._by)

    def _place(self, pattern: torch.Tensor, index: int) -> torch.Tensor:
        shift = index // self.max_in_flight % _SHIFTS * _STEP_WORDS
        return pattern[shift : shift + self._words]

    def _description(self, direction: str, index: int, found: torch.Tensor, expected: torch.Tensor) -> str:
        wrong = difference_seen(found, expected, self._name)
        word, wanted = (int(side[wrong.offset]) for side in (found, expected))
        return f"{self._name}: {direction} copy {index}: {wrong_words_text(wrong, word, wanted, self._words)}"


class _CopyClock:
    """A clock for copies: a region begins and ends for both streams together, where there are two.

    The measurement calls ``get_ahead`` before each region: there a turn begins, and ``verify`` ends it.
    """

    def __init__(self, clock: Clock, side: torch.Stream | None, turn: Turn | None, by: Accelerator) -> None:
        self._clock, self._side, self._turn, self._by = clock, side, turn, by

    @contextmanager
    def region(self) -> Iterator[None]:
        with self._clock.region():
            self._by.fork(self._side)
            yield
            self._by.join(self._side)

    def read(self) -> list[float]:
        return self._clock.read()

    def synchronize(self) -> None:
        self._clock.synchronize()

    def real(self, count: int) -> int:
        return self._clock.real(count)

    def scaled(self, ratio: float) -> AbstractContextManager[None]:
        return self._clock.scaled(ratio)

    def get_ahead(self, launches: int, *, seconds: float) -> None:
        if self._turn is not None:
            self._turn.begin()
        self._clock.get_ahead(launches if self._side is None else 2 * launches, seconds=seconds)


def _write_pattern(pattern: torch.Tensor) -> torch.Tensor:
    """Write word j as j times the factor, modulo 2**64. Source: as ``pattern``."""
    torch.arange(len(pattern), out=pattern)
    return pattern.mul_(FACTOR)
