"""NCCL's own log: what carries a group's data, and by which algorithm, in NCCL's words.

NCCL reads the environment for it once, at its first message. So it is set early, and nothing of an operator's own
settings is changed: then what those leave on disk is read, or it is said why nothing is known.

Source: the formats are those of NCCL 2.18 to 2.30 (src/debug.cc, src/enqueue.cc, src/transport/*.cc); the variables,
NCCL User Guide, "Environment Variables", NCCL_DEBUG, NCCL_DEBUG_FILE, NCCL_DEBUG_SUBSYS.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster.nccl_choice import Choice, choice
from pytest_gpucluster.nccl_reasons import Reasons

SUBSYSTEMS = "INIT,ENV,GRAPH,NET,TUNING"
"""INIT has the connections, their transports and NVLS; TUNING has a line for each collective on a group's first rank;
ENV, GRAPH and NET tell why."""

MOST_BYTES = 2 * 2**20
"""How much of a log is kept beside the report, on each rank."""

_PRIVATE = "gpucluster-nccl-"
_TELLING_LEVELS = ("INFO", "ABORT", "TRACE")


def prepare(environment: MutableMapping[str, str]) -> None:
    """Let NCCL log to a file for each process in a private folder, unless the operator has said what it should log.

    Nothing is made on disk: that is done by :meth:`NcclLog.open`, before the first group.
    """
    if "NCCL_DEBUG" in environment or "NCCL_DEBUG_FILE" in environment:
        return
    # The name cannot be guessed: NCCL follows a link that somebody else has put there.
    folder = Path(tempfile.gettempdir()) / f"{_PRIVATE}{secrets.token_hex(8)}"
    environment["NCCL_DEBUG"] = "INFO"
    environment["NCCL_DEBUG_FILE"] = str(folder / "%p.log")
    environment.setdefault("NCCL_DEBUG_SUBSYS", SUBSYSTEMS)


def own_settings(environment: Mapping[str, str]) -> frozenset[str]:
    """Return which of NCCL's variables :func:`prepare` has set, so that they are nobody's leftover."""
    file = environment.get("NCCL_DEBUG_FILE", "")
    if not (file and NcclLog._is_private(Path(file))):
        return frozenset()
    by_us = {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}
    return frozenset(by_us | ({"NCCL_DEBUG_SUBSYS"} if environment.get("NCCL_DEBUG_SUBSYS") == SUBSYSTEMS else set()))


class NcclLog:
    """The log of this process, and which parts of it are of which communicator.

    NCCL connects ranks when they first need it, and its lines do not name the communicator. But a process that talks
    in one group at a time knows which one it was: what is written inside :meth:`reading` is that group's.

    Attributes:
        path: the file, or None where there is none.
        why_not: why there is none.
    """

    def __init__(self, path: Path | None, why_not: str = "") -> None:
        self.path, self.why_not = path, why_not
        self._start = 0
        self._reasons, self._reasons_read = Reasons(), 0
        self._parts: list[tuple[Hashable, int, int]] = []

    @classmethod
    def of(cls, environment: Mapping[str, str], *, pid: int, hostname: str | None = None) -> NcclLog:
        """Find the log of a process that has this environment. Nothing needs to be written yet."""
        level, file = environment.get("NCCL_DEBUG", ""), environment.get("NCCL_DEBUG_FILE", "")
        if level.upper() not in _TELLING_LEVELS:
            found = f"NCCL_DEBUG={level} is" if level else "NCCL_DEBUG_FILE without NCCL_DEBUG is"
            return cls(None, f"{found} set in the environment; unset it, or set NCCL_DEBUG=INFO")
        if not file:
            return cls(
                None, "NCCL_DEBUG is set in the environment without NCCL_DEBUG_FILE, so NCCL logs to the terminal"
            )
        if "%p" not in file:
            return cls(None, f"NCCL_DEBUG_FILE={file} has no %p, so that all ranks of a node write to one file")
        host = (hostname or socket.gethostname()).partition(".")[0]
        names = {"%%": "%", "%h": re.sub("[%/]", "-", host), "%p": str(pid)}
        return cls(Path(re.sub("%[%hp]", lambda place: names[place[0]], file)))

    def open(self) -> None:
        """Make the private folder that NCCL is about to write to. An operator's own folder is left to the operator.

        Raises:
            OSError: it cannot be made, or belongs to somebody else.
        """
        if self.path is not None and self._is_private(self.path):
            # Local workers share the folder of the process that started them.
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            if self.path.parent.is_symlink() or self.path.parent.stat().st_uid != os.getuid():
                raise PermissionError(f"{self.path.parent} belongs to somebody else")

    def remove(self) -> None:
        """Remove the log, and its folder with the last log in it. An operator's own file stays."""
        if self.path is not None and self._is_private(self.path):
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a sibling's log is still there, or nothing ever was
                self.path.parent.rmdir()

    def begin_again(self) -> None:
        """Forget what was read: the groups are gone, and new ones are about to be made."""
        self._start, self._parts = self._end(), []

    def closed(self, communicator: Hashable) -> None:
        """Forget what was read of a communicator that is gone: a later one of the same ranks makes its own choice."""
        self._parts = [(None if key == communicator else key, start, end) for key, start, end in self._parts]

    @contextlib.contextmanager
    def reading(self, communicator: Hashable) -> Iterator[None]:
        """Take what is written inside for a communicator's, where no other group of this process is used."""
        start = self._end()
        try:
            yield
        finally:
            self._parts.append((communicator, start, self._end()))

    def choice(self, communicator: Hashable, *, rest: bool = False) -> Choice:
        """Return what NCCL chose for a communicator.

        Args:
            communicator: as given to :meth:`reading`.
            rest: take what was written outside of any ``reading`` as well. For the group of all ranks, which anybody
                may use.
        """
        if self.path is None:
            return Choice(unknown=self.why_not)
        if not self.path.exists():
            return Choice(unknown=f"NCCL has written no log to {self.path}")
        mine = [(start, end) for key, start, end in self._parts if key == communicator]
        if rest:
            mine += self._outside()
        found = choice(line for start, end in sorted(mine) for line in self._lines(start, end))
        # NCCL looks for networks once for a process, so why it did not take one stands in any group's part.
        end = self._end()
        self._reasons.take(self._lines(self._reasons_read, end))
        self._reasons_read = max(self._reasons_read, end)
        return replace(found, reasons=self._reasons.found)

    def keep(self, target: Path, *, most_bytes: int = MOST_BYTES) -> None:
        """Copy the log to a file, of repeated lines the first one, up to a size. Does nothing where there is none."""
        if self.path is None or not self.path.exists():
            return
        seen: set[str] = set()
        left_out = written = 0
        with target.open("w", encoding="utf-8") as kept:
            for line in self._lines(0, self._end()):
                what = line.partition("NCCL INFO ")[2] or line
                if what in seen or written + len(line) > most_bytes:
                    left_out += 1
                    continue
                seen.add(what)
                written += kept.write(line)
            if left_out:
                kept.write(f"({left_out} lines left out here: repeated, or beyond {most_bytes} bytes)\n")

    def _outside(self) -> Iterator[tuple[int, int]]:
        position = self._start
        for _, start, end in sorted(self._parts, key=lambda part: part[1:]):
            if start > position:
                yield position, start
            position = max(position, end)
        yield position, self._end()

    def _lines(self, start: int, end: int) -> Iterator[str]:
        assert self.path is not None
        with self.path.open("rb") as file:
            file.seek(start)
            while start < end and (line := file.readline(end - start)):  # it ends early where somebody has cut the file
                start += len(line)
                yield line.decode("utf-8", errors="replace")

    def _end(self) -> int:
        with contextlib.suppress(OSError):
            if self.path is not None:
                return self.path.stat().st_size
        return 0

    @staticmethod
    def _is_private(path: Path) -> bool:
        return path.parent.name.startswith(_PRIVATE)
