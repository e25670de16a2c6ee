"""The node's part of a remote job: it runs and supervises a program there, and packs its folder for the way back.

The program is ended on request, when the other side hangs up, and when no heartbeat has come for too long: then the
connection is broken, though nothing on the node may ever report it. No process that it has started stays.

The folder is packed on the node, and unpacked on our side without trust in its content.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import io
import json
import math
import os
import select
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.runners import ssh

OUTPUT, ENDED = "output.log", "ended.json"
"""In the folder of a run: all that it has printed, and how it has ended."""
GRACE_SECONDS = 90.0
"""From the request to end until everything is killed: torchrun itself gives its ranks 30 s, and reports are written."""
_LEFT_SECONDS = 30.0
"""How long what a program has left may take, such as the recorder that renders the last reports."""
_LOOK_SECONDS = 0.1
_MOST_WAITING = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""Source: prctl(2), linux/prctl.h."""
_MEANS = {ssh.INTERRUPT: signal.SIGINT, ssh.TERMINATE: signal.SIGTERM}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program to run: its words, where, with which environment, and the folder that keeps what comes of it."""

    command: Sequence[str]
    directory: str | None
    environ: Mapping[str, str]
    folder: Path | None


def supervise(job: Job, *, silent_seconds: float = ssh.SILENT_SECONDS, grace_seconds: float = GRACE_SECONDS) -> int:
    """Run a job to its end, and say all that it says; return 0 when its end was told.

    Raises:
        EnvironmentBroken: it cannot be started.
        OSError: its folder cannot be made.
    """
    _adopt_orphans()
    folder = job.folder
    if folder is not None:
        if job.directory:
            folder = Path(job.directory) / folder
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / OUTPUT).open("ab", buffering=0)) if folder is not None else None
        # The signals of a connection's end come before anything is started, so that none ends this one alone.
        watch = _Watch(job, log, silent_seconds=silent_seconds, grace_seconds=grace_seconds)
        code = watch.run()
    if folder is not None:
        _leave(folder, code)
    watch.finish(code)
    return 0


def await_end(folder: Path, seconds: float) -> int | None:
    """Wait for the end of the job whose folder this is; return its exit code, or None if there is no end of it.

    Raises:
        EnvironmentBroken: there is no such folder.
    """
    if not folder.is_dir():
        raise EnvironmentBroken(f"{folder.absolute()}: not there, so nothing was started here")
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, ValueError):  # not there yet
            code = json.loads((folder / ENDED).read_bytes())["exit"]
            return code if isinstance(code, int) else None
        if time.monotonic() > until:
            return None
        time.sleep(_LOOK_SECONDS)


class _Watch:
    """A job under way."""

    def __init__(self, job: Job, log: IO[bytes] | None, *, silent_seconds: float, grace_seconds: float) -> None:
        self._silent, self._grace = silent_seconds, grace_seconds
        self._log = log
        self._asked: list[int] = []
        self._told: list[int] = []
        self._heard_at = time.monotonic()
        self._ending_since: float | None = None
        self._lost = False
        self._commands = b""
        self._waiting = bytearray()
        self._listens = True
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            self._child = subprocess.Popen(
                list(job.command),
                cwd=job.directory,
                env=dict(job.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=end_with_parent,  # no thread is running here that a fork could cut in two
            )
        except OSError as error:
            raise EnvironmentBroken(f"{job.command[0]} cannot be started: {error}") from None
        self._decoders = {}
        for kind, pipe in ((ssh.OUT, self._child.stdout), (ssh.ERR, self._child.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._decoders[kind] = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        os.set_blocking(1, False)

    def run(self) -> int | None:
        """Stay with it until nothing of it runs any more, and return its exit code; None where it was killed here."""
        over_at: float | None = None
        killed = False
        while True:
            self._turn()
            now = time.monotonic()
            if not self._lost and now - self._heard_at > self._silent:
                self._lose()
            self._pass_on()
            if self._child.poll() is not None and over_at is None:
                over_at = now
            if over_at is not None and not descendants():
                break
            overdue = self._ending_since is not None and now - self._ending_since > self._grace
            if overdue or (over_at is not None and now - over_at > _LEFT_SECONDS):
                killed = over_at is None
                if not killed:
                    text = f"what it had left running was killed: {len(descendants())} processes\n"
                    self._waiting += ssh.encode(ssh.ERR, text)
                kill_descendants()
                break
        self._child.wait()
        for kind in (ssh.OUT, ssh.ERR):
            self._read(kind, math.inf)  # what is in the pipes is all that is left
            self._put(kind, b"", final=True)
        return None if killed else self._child.returncode

    def finish(self, code: int | None) -> None:
        """Say how it ended, and that this is all; for as long as somebody takes it."""
        error = "" if code is not None else f"not over {self._grace:g} s after it was told to end, and killed"
        self._waiting += ssh.encode(ssh.END, {"exit": code, "error": error})
        until = time.monotonic() + self._silent
        while self._waiting and not self._lost and time.monotonic() < until:
            self._write()
            time.sleep(_LOOK_SECONDS / 10)

    # ---- one turn

    def _turn(self) -> None:
        """Wait until there is something to do, but not for long, and do it."""
        poll = select.poll()
        if self._listens:
            poll.register(0, select.POLLIN)
        if self._waiting:
            poll.register(1, select.POLLOUT)
        pipes = {ssh.OUT: self._child.stdout, ssh.ERR: self._child.stderr}
        # What nobody takes is left with the program, which then waits: until the connection is lost.
        may_read = len(self._waiting) <= _MOST_WAITING
        kinds = {pipe.fileno(): kind for kind, pipe in pipes.items() if pipe and not pipe.closed and may_read}
        for number in kinds:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(1000 * _LOOK_SECONDS):
            if number == 0:
                self._listen()
            elif number == 1:
                self._write()
            else:
                self._read(kinds[number])

    def _listen(self) -> None:
        try:
            heard = os.read(0, 4096)
        except OSError:
            heard = b""  # a connection that ends with an error has ended
        if not heard:
            self._listens = False
            self._lose()
            return
        self._heard_at = time.monotonic()
        *lines, self._commands = (self._commands + heard).split(b"\n")
        self._asked += [_MEANS[word] for line in lines if (word := line.decode("ascii", "replace")) in _MEANS]

    def _hear(self, number: int, frame: object) -> None:
        # A node that shuts down, or the end of the login session: as if the other side had hung up.
        self._asked.append(signal.SIGTERM)

    def _lose(self) -> None:
        self._lost = True
        self._waiting.clear()
        self._asked.append(signal.SIGTERM)

    def _pass_on(self) -> None:
        """Tell the job to end, each way once: a second signal of a kind would end it before its ranks."""
        while self._asked:
            number = self._asked.pop(0)
            self._ending_since = self._ending_since or time.monotonic()
            if number not in self._told and self._child.poll() is None:
                self._told.append(number)
                self._child.send_signal(number)

    def _read(self, kind: str, most: float = _MOST_WAITING) -> None:
        pipe = self._child.stdout if kind == ssh.OUT else self._child.stderr
        if pipe is None or pipe.closed:
            return
        while len(self._waiting) <= most:
            try:
                said = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not said:
                pipe.close()
                return
            self._put(kind, said)

    def _put(self, kind: str, said: bytes, *, final: bool = False) -> None:
        if self._log is not None and said:
            try:
                self._log.write(said)
            except OSError as error:
                self._log = None
                self._waiting += ssh.encode(ssh.ERR, f"{OUTPUT} on this node ends here: {error.strerror}\n")
        text = self._decoders[kind].decode(said, final)
        if text and not self._lost:
            self._waiting += ssh.encode(kind, text)

    def _write(self) -> None:
        while self._waiting and not self._lost:
            try:
                written = os.write(1, self._waiting[: 1 << 16])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EIO, errno.EBADF):
                    raise
                self._lose()
                return
            del self._waiting[:written]


def descendants(pid: int | None = None) -> list[int]:
    """Return the living processes that come of one, orphans that it has adopted included. Source: proc_pid_stat(5)."""
    children: dict[int, list[int]] = {}
    for child, parent in _processes():
        children.setdefault(parent, []).append(child)
    found, look = [], [os.getpid() if pid is None else pid]
    while look:
        for child in children.get(look.pop(), []):
            found.append(child)
            look.append(child)
    return found


def kill_descendants() -> None:
    """End them all at once, also those that are started meanwhile."""
    for _ in range(10):
        left = descendants()
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def _processes() -> Iterator[tuple[int, int]]:
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as stat:
                # The name of the program stands in parentheses and may hold anything.
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended in between
        if state not in (b"Z", b"X"):
            yield int(entry.name), int(parent)


def _adopt_orphans() -> None:
    """Let the kernel give us what our children leave behind, so that it can be found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Let the kernel send this process SIGTERM when the one ends that has started it. For ``preexec_fn``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _leave(folder: Path, code: int | None) -> None:
    beside = folder / f".{ENDED}"
    try:
        beside.write_text(json.dumps({"exit": code}), encoding="ascii")
        beside.replace(folder / ENDED)
    except OSError as error:
        print(f"{folder / ENDED}: {error.strerror or error}", file=sys.stderr)


_PIECE_BYTES = 96 * 1024
MOST_BYTES = 8 << 30
"""More than any run leaves; less than what fills a disk by mistake."""


class _Pieces(io.RawIOBase):
    """A file that hands on what is written to it."""

    def __init__(self) -> None:
        self.waiting = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]  # RawIOBase calls it a buffer, which bytes() takes
        self.waiting += piece
        return len(piece)

    def take(self, least: int) -> Iterator[bytes]:
        while len(self.waiting) >= max(1, least):
            yield bytes(self.waiting[:_PIECE_BYTES])
            del self.waiting[:_PIECE_BYTES]


def pack(folder: Path, beside: Path | None = None) -> Iterator[bytes]:
    """Return a folder as a compressed archive in pieces: files, folders, and links to what lies beside them.

    Args:
        folder: its content is that of the archive.
        beside: a folder that goes with it under its own name.
    """
    pieces = _Pieces()
    with tarfile.open(fileobj=pieces, mode="w|gz", format=tarfile.PAX_FORMAT) as archive:
        found = [(path, folder) for path in sorted(folder.rglob("*"))]
        found += [(path, beside.parent) for path in sorted(beside.rglob("*"))] if beside is not None else []
        for path, root in found:
            name = path.relative_to(root).as_posix()
            try:
                if path.is_symlink() or path.is_file() or path.is_dir():
                    archive.add(path, arcname=name, recursive=False)
            except FileNotFoundError:
                continue  # somebody still writes there, and has taken it away
            yield from pieces.take(_PIECE_BYTES)
    yield from pieces.take(1)


def unpack(archive: IO[bytes], folder: Path) -> int:
    """Unpack an archive into a folder, which must be there, and return how many files came.

    Raises:
        EnvironmentBroken: it is cut off or damaged, too large, or has something in it that is no part of a report: a
            way out of the folder, a device.
        OSError: a file cannot be written.
    """
    count = total = 0
    links: list[tuple[Path, str]] = []
    try:
        with tarfile.open(fileobj=archive, mode="r|gz") as packed:
            for member in packed:
                place = folder / _inside(member.name)
                total += member.size
                if total > MOST_BYTES:
                    raise EnvironmentBroken(f"more than {MOST_BYTES >> 30} GiB; they stay where they are")
                if member.isdir():
                    place.mkdir(parents=True, exist_ok=True)
                elif member.isfile():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    _write(packed, member, place)
                    count += 1
                elif member.issym() and "/" not in member.linkname and member.linkname not in ("", ".", ".."):
                    links.append((place, member.linkname))
                else:
                    raise EnvironmentBroken(f"{member.name!r} among them is neither a file nor a folder")
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise EnvironmentBroken(f"what came is no whole archive: {error}") from None
    # After all else, so that nothing is written through one.
    for place, target in links:
        if not os.path.lexists(place):
            place.symlink_to(target)
    return count


def _write(packed: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    source = packed.extractfile(member)
    assert source is not None  # it is a file
    with place.open("xb") as file:
        while piece := source.read(1 << 20):
            file.write(piece)
    os.utime(place, (member.mtime, member.mtime))


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise EnvironmentBroken(f"{name!r} among them would lie outside of their folder")
    return str(path)
