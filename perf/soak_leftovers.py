"""Leftovers of a run: processes, sockets, temporary files, shared memory.

Other processes use the machine at the same time, so every leftover must be traced to the run. During the run its
processes are sampled twice a second: they have the run's token in their environment, and their open files are recorded.
Afterwards none of these may be left: a process with the token or in a session of theirs, a socket of theirs, a new file
in /tmp, /var/tmp or /dev/shm that one of them had open or that has one of their numbers in its name, a System V segment
that one of them made. The run's own TMPDIR must be empty except for announced names.

A process that lived for less than half a second and left a file with an unrelated name outside of TMPDIR is missed.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from torchrun import processes

SHARED = (Path("/dev/shm"), Path("/tmp"), Path("/var/tmp"))
"""Folders for temporary files that every process of a host shares."""
_SAMPLE_SECONDS = 0.5
_ENDING_SECONDS = 5.0
_SOCKET_TABLES = ("tcp", "tcp6", "udp", "udp6", "unix")
_SYSV_SEGMENTS = Path("/proc/sysvipc/shm")


class Observer:
    """Samples the processes of a run. A context manager; :meth:`leftovers` is for afterwards."""

    def __init__(self, token: str, pids: Iterable[int] = ()) -> None:
        self._token = token
        self._before = {folder: _entries(folder) for folder in SHARED}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-observer", daemon=True)
        self.pids: set[int] = set(pids)
        self.sessions: set[int] = set(pids)
        """A launcher leads one of its own, and so does each rank."""
        self.sockets: set[int] = set()
        """Inodes of the sockets that they had open."""
        self.opened: set[str] = set()
        """Files in the shared folders that they had open."""

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.sample()

    def sample(self) -> None:
        """Record the processes of the run, and their open files and sockets."""
        own = os.getsid(0)
        for pid in processes(self._token):
            self.pids.add(pid)
            with contextlib.suppress(OSError):
                self.sessions |= {os.getsid(pid)} - {own}
            for name in _opened(pid):
                found = re.fullmatch(r"socket:\[(\d+)\]", name)
                if found:
                    self.sockets.add(int(found[1]))
                elif name.startswith(tuple(f"{folder}/" for folder in SHARED)):
                    self.opened.add(name.removesuffix(" (deleted)"))

    def leftovers(self, tmp: Path, promised: Iterable[str] = ()) -> list[str]:
        """Return the leftovers of the run, each in a few words.

        Args:
            tmp: the run's own TMPDIR.
            promised: names in it that the run has announced.
        """
        return [
            *self._processes(),
            *self._sockets(),
            *(f"file in TMPDIR: {name}" for name in sorted(_entries(tmp) - set(promised))),
            *self._shared_files(tmp),
            *self._segments(),
        ]

    def _processes(self) -> list[str]:
        until = time.monotonic() + _ENDING_SECONDS
        while True:
            ours = set(processes(self._token)) | {pid for pid, session in _sessions() if session in self.sessions}
            commands = {pid: _command(pid) for pid in sorted(ours)}
            # One that is ending has given up its memory, and its command line with it: it may finish that.
            if all(commands.values()) or time.monotonic() > until:
                return [f"process {pid}: {command or 'no command line'}" for pid, command in commands.items()]
            time.sleep(_SAMPLE_SECONDS)

    def _sockets(self) -> list[str]:
        return [f"socket {inode}: {line}" for inode, line in _sockets() if inode in self.sockets]

    def _shared_files(self, tmp: Path) -> list[str]:
        found = []
        for folder in SHARED:
            for name in sorted(_entries(folder) - self._before[folder]):
                path = folder / name
                numbers = {int(number) for number in re.findall(r"\d{2,10}", name)}
                was_open = any(opened == str(path) or opened.startswith(f"{path}/") for opened in self.opened)
                if tmp.is_relative_to(path):
                    continue  # the round's own folder
                if was_open or numbers & self.pids or self._token in name:
                    found.append(f"file: {path}")
        return found

    def _segments(self) -> list[str]:
        """Source: proc(5), /proc/sysvipc/shm: key, shmid, perms, size, cpid, lpid, ..."""
        with contextlib.suppress(OSError):
            lines = [line.split() for line in _SYSV_SEGMENTS.read_text().splitlines()[1:]]
            return [f"System V segment {line[1]}" for line in lines if int(line[4]) in self.pids]
        return []


def _entries(folder: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return {entry.name for entry in folder.iterdir()}
    return set()


def _opened(pid: int) -> list[str]:
    """Return the open files of a process, also mapped ones, and its sockets."""
    found = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(entry))
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        found += {line.split(maxsplit=5)[5] for line in maps.splitlines() if " /" in line}
    return found


def _sessions() -> list[tuple[int, int]]:
    """Return every living process and its session. Source: proc_pid_stat(5), fields 3 and 6."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found.append((int(entry.name), int(fields[3])))
    return found


def _sockets() -> list[tuple[int, str]]:
    """Return every socket of this network namespace: its inode and its line. Source: proc(5), /proc/net."""
    found = []
    for table in _SOCKET_TABLES:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text(errors="replace").splitlines()[1:]:
                fields = line.split()
                # Connections in TIME-WAIT are the kernel's, and have no inode.
                inode = int(fields[6] if table == "unix" else fields[9])
                if inode:
                    found.append((inode, f"{table} {' '.join(fields[1:4])}"))
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "gone by now"
