"""The node's side of a remote job, started there by ``gpucluster run --hosts``.

It reads one request from standard input and answers it: facts about the node, a run, or the reports of one. It needs
neither torch nor pytest, so that it can report that they are missing.

A run's program is ended on request, when the other side hangs up, and when no heartbeat has come for too long: then the
connection is broken, even if nothing on the node reports it. No process that it has started stays. Its folder is packed
on the node, and unpacked on our side without trust in its content.
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
from typing import IO, Any

from pytest_gpucluster import __version__
from pytest_gpucluster.errors import EnvironmentBroken, GpuClusterError
from pytest_gpucluster.files import atomic_write
from pytest_gpucluster.launch.detached_process import end_with_parent
from pytest_gpucluster.runners import ssh
from pytest_gpucluster.runners.preflight import collect_facts, hostname

OUTPUT_FILE, EXIT_FILE = "output.log", "ended.json"
"""In the folder of a run: its whole output, and its exit code."""
GRACE_SECONDS = 90.0
"""From the request to stop until everything is killed: torchrun gives its ranks 30 s, and reports are written."""
_ORPHAN_SECONDS = 30.0
"""How long processes may outlive the program, such as the recorder that renders the last reports."""
_POLL_SECONDS = 0.1
_MOST_PENDING_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
"""Source: prctl(2), linux/prctl.h."""
_SIGNALS = {ssh.INTERRUPT: signal.SIGINT, ssh.TERMINATE: signal.SIGTERM}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program to run: its command, working directory and environment, and the folder for its output."""

    command: Sequence[str]
    directory: str | None
    environ: Mapping[str, str]
    folder: Path | None


def supervise(
    job: Job, *, heartbeat_seconds: float = ssh.HEARTBEAT_TIMEOUT_SECONDS, grace_seconds: float = GRACE_SECONDS
) -> int:
    """Run a job to its end and forward its output; return 0 when its end was sent.

    Raises:
        EnvironmentBroken: it cannot be started.
        OSError: its folder cannot be made.
    """
    _become_subreaper()
    folder = job.folder
    if folder is not None:
        if job.directory:
            folder = Path(job.directory) / folder
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / OUTPUT_FILE).open("ab", buffering=0)) if folder is not None else None
        # Handlers for the signals of a lost connection are set before anything starts: none may end only this process.
        supervisor = _Supervisor(job, log, heartbeat_seconds=heartbeat_seconds, grace_seconds=grace_seconds)
        code = supervisor.run()
    if folder is not None:
        _write_exit(folder, code)
    supervisor.finish(code)
    return 0


def await_end(folder: Path, seconds: float) -> int | None:
    """Wait for the end of the job whose folder this is; return its exit code, or None if it has not ended.

    Raises:
        EnvironmentBroken: there is no such folder.
    """
    if not folder.is_dir():
        raise EnvironmentBroken(f"{folder.absolute()}: missing, so nothing was started here")
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, ValueError):  # not there yet
            code = json.loads((folder / EXIT_FILE).read_bytes())["exit"]
            return code if isinstance(code, int) else None
        if time.monotonic() > until:
            return None
        time.sleep(_POLL_SECONDS)


class _Supervisor:
    """A running job."""

    def __init__(self, job: Job, log: IO[bytes] | None, *, heartbeat_seconds: float, grace_seconds: float) -> None:
        self._heartbeat_timeout, self._grace = heartbeat_seconds, grace_seconds
        self._log = log
        self._requested: list[int] = []
        self._sent: list[int] = []
        self._last_heartbeat = time.monotonic()
        self._stopping_since: float | None = None
        self._connection_lost = False
        self._commands = b""
        self._pending = bytearray()
        self._stdin_open = True
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
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
                preexec_fn=end_with_parent,  # safe: this process has no threads
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
        """Wait until none of its processes runs, and return its exit code; None if it was killed here."""
        ended_at: float | None = None
        killed = False
        while True:
            self._step()
            now = time.monotonic()
            if not self._connection_lost and now - self._last_heartbeat > self._heartbeat_timeout:
                self._lose_connection()
            self._send_signals()
            if self._child.poll() is not None and ended_at is None:
                ended_at = now
            if ended_at is not None and not descendants():
                break
            overdue = self._stopping_since is not None and now - self._stopping_since > self._grace
            if overdue or (ended_at is not None and now - ended_at > _ORPHAN_SECONDS):
                killed = ended_at is None
                if not killed:
                    text = f"{len(descendants())} processes that outlived the program were killed\n"
                    self._pending += ssh.encode(ssh.ERR, text)
                kill_descendants()
                break
        self._child.wait()
        for kind in (ssh.OUT, ssh.ERR):
            self._read(kind, math.inf)  # the rest of what is in the pipes
            self._forward(kind, b"", final=True)
        return None if killed else self._child.returncode

    def finish(self, code: int | None) -> None:
        """Send the exit code as the last line, for as long as the other side reads."""
        error = "" if code is not None else f"killed {self._grace:g} s after the request to stop"
        self._pending += ssh.encode(ssh.END, {"exit": code, "error": error})
        until = time.monotonic() + self._heartbeat_timeout
        while self._pending and not self._connection_lost and time.monotonic() < until:
            self._write()
            time.sleep(_POLL_SECONDS / 10)

    # ---- one step

    def _step(self) -> None:
        """Wait a short time for something to do, and do it."""
        poll = select.poll()
        if self._stdin_open:
            poll.register(0, select.POLLIN)
        if self._pending:
            poll.register(1, select.POLLOUT)
        pipes = {ssh.OUT: self._child.stdout, ssh.ERR: self._child.stderr}
        # Backpressure: the program blocks on its pipe until the other side reads, or the connection is lost.
        may_read = len(self._pending) <= _MOST_PENDING_BYTES
        kinds = {pipe.fileno(): kind for kind, pipe in pipes.items() if pipe and not pipe.closed and may_read}
        for number in kinds:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(1000 * _POLL_SECONDS):
            if number == 0:
                self._read_commands()
            elif number == 1:
                self._write()
            else:
                self._read(kinds[number])

    def _read_commands(self) -> None:
        try:
            data = os.read(0, 4096)
        except OSError:
            data = b""  # an error ends the connection too
        if not data:
            self._stdin_open = False
            self._lose_connection()
            return
        self._last_heartbeat = time.monotonic()
        *lines, self._commands = (self._commands + data).split(b"\n")
        self._requested += [_SIGNALS[word] for line in lines if (word := line.decode("ascii", "replace")) in _SIGNALS]

    def _on_signal(self, number: int, frame: object) -> None:
        # The node shuts down or the login session ends: as if the other side had hung up.
        self._requested.append(signal.SIGTERM)

    def _lose_connection(self) -> None:
        self._connection_lost = True
        self._pending.clear()
        self._requested.append(signal.SIGTERM)

    def _send_signals(self) -> None:
        """Send each requested signal once: a second one of a kind would end the job before its ranks."""
        while self._requested:
            number = self._requested.pop(0)
            self._stopping_since = self._stopping_since or time.monotonic()
            if number not in self._sent and self._child.poll() is None:
                self._sent.append(number)
                self._child.send_signal(number)

    def _read(self, kind: str, most: float = _MOST_PENDING_BYTES) -> None:
        pipe = self._child.stdout if kind == ssh.OUT else self._child.stderr
        if pipe is None or pipe.closed:
            return
        while len(self._pending) <= most:
            try:
                data = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                pipe.close()
                return
            self._forward(kind, data)

    def _forward(self, kind: str, data: bytes, *, final: bool = False) -> None:
        if self._log is not None and data:
            try:
                self._log.write(data)
            except OSError as error:
                self._log = None
                self._pending += ssh.encode(ssh.ERR, f"{OUTPUT_FILE} on this node ends here: {error.strerror}\n")
        text = self._decoders[kind].decode(data, final)
        if text and not self._connection_lost:
            self._pending += ssh.encode(kind, text)

    def _write(self) -> None:
        while self._pending and not self._connection_lost:
            try:
                written = os.write(1, self._pending[: 1 << 16])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EIO, errno.EBADF):
                    raise
                self._lose_connection()
                return
            del self._pending[:written]


def descendants(pid: int | None = None) -> list[int]:
    """Return all living descendants of a process, with orphans that it has adopted. Source: proc_pid_stat(5)."""
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
    """Kill all descendants, also those that are started during that."""
    for _ in range(10):
        left = descendants()
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _processes() -> Iterator[tuple[int, int]]:
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as stat:
                # The program's name is in parentheses and may contain anything.
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has just ended
        if state not in (b"Z", b"X"):
            yield int(entry.name), int(parent)


def _become_subreaper() -> None:
    """Adopt orphans of our children, so that they can be found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _write_exit(folder: Path, code: int | None) -> None:
    try:
        atomic_write(folder / EXIT_FILE, json.dumps({"exit": code}))
    except OSError as error:
        print(f"{folder / EXIT_FILE}: {error.strerror or error}", file=sys.stderr)


_PIECE_BYTES = 96 * 1024
MOST_BYTES = 8 << 30
"""More than any run leaves; less than what fills a disk by mistake."""


class _PieceBuffer(io.RawIOBase):
    """A file whose content is taken out in pieces."""

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


def pack(folder: Path, extra: Path | None = None) -> Iterator[bytes]:
    """Return a folder as a compressed archive in pieces: files, folders and symbolic links.

    Args:
        folder: its content is that of the archive.
        extra: a folder to add under its own name.
    """
    pieces = _PieceBuffer()
    with tarfile.open(fileobj=pieces, mode="w|gz", format=tarfile.PAX_FORMAT) as archive:
        found = [(path, folder) for path in sorted(folder.rglob("*"))]
        found += [(path, extra.parent) for path in sorted(extra.rglob("*"))] if extra is not None else []
        for path, root in found:
            name = path.relative_to(root).as_posix()
            try:
                if path.is_symlink() or path.is_file() or path.is_dir():
                    archive.add(path, arcname=name, recursive=False)
            except FileNotFoundError:
                continue  # removed by a process that still writes there
            yield from pieces.take(_PIECE_BYTES)
    yield from pieces.take(1)


def unpack(archive: IO[bytes], folder: Path) -> int:
    """Unpack an archive into an existing folder and return the number of files.

    Raises:
        EnvironmentBroken: truncated, damaged, too large, or with an entry that is not part of a report: a path out of
            the folder, a device.
        OSError: a file cannot be written.
    """
    count = total = 0
    links: list[tuple[Path, str]] = []
    try:
        with tarfile.open(fileobj=archive, mode="r|gz") as packed:
            for member in packed:
                path = folder / _safe_path(member.name)
                total += member.size
                if total > MOST_BYTES:
                    raise EnvironmentBroken(f"more than {MOST_BYTES >> 30} GiB, not copied")
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                elif member.isfile():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _write(packed, member, path)
                    count += 1
                elif member.issym() and "/" not in member.linkname and member.linkname not in ("", ".", ".."):
                    links.append((path, member.linkname))
                else:
                    raise EnvironmentBroken(f"the archive has {member.name!r}, which is neither a file nor a folder")
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise EnvironmentBroken(f"the archive is truncated or damaged: {error}") from None
    # After all else, so that nothing is written through one.
    for path, target in links:
        if not os.path.lexists(path):
            path.symlink_to(target)
    return count


def _write(packed: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = packed.extractfile(member)
    assert source is not None  # it is a file
    with path.open("xb") as file:
        while piece := source.read(1 << 20):
            file.write(piece)
    os.utime(path, (member.mtime, member.mtime))


def _safe_path(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise EnvironmentBroken(f"the archive has {name!r}, which would be outside of its folder")
    return str(path)


# ---- requests

_LONGEST_REQUEST = 1 << 22
_FAILED = 1


def main() -> int:
    """Answer the request. Standard output belongs to the protocol."""
    # Byte by byte: what follows the first line is read by the function that answers the request.
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _LONGEST_REQUEST:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    _send(ssh.HELLO, {"protocol": ssh.PROTOCOL, "version": __version__, "host": hostname()})
    try:
        request = ssh.read_request(bytes(line))
        do = _DO.get(request["do"])
        return do(request) if do is not None else _fail(f"this version has no request {request['do']!r}")
    except GpuClusterError as error:
        return _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")


def _probe(request: Mapping[str, Any]) -> int:
    _send(ssh.FACTS, collect_facts(request))
    _send(ssh.END, {"exit": 0})
    return 0


def _run(request: Mapping[str, Any]) -> int:
    folder = request.get("folder")
    return supervise(
        Job(
            command=(sys.executable, "-m", "pytest_gpucluster", *map(str, request["words"])),
            directory=request.get("directory"),
            environ={**os.environ, **{str(name): str(value) for name, value in request.get("env", {}).items()}},
            folder=Path(folder) if folder else None,
        )
    )


def _collect(request: Mapping[str, Any]) -> int:
    os.chdir(request.get("directory") or ".")
    folder = Path(request["folder"])
    code = await_end(folder, float(request.get("wait_seconds", 0)))
    # Ranks of all nodes write their artifacts to the path of rank 0's node. Its log shows whether that is its own disk.
    first = Path(request.get("first_folder") or folder)
    has_artifacts = first != folder and first.is_dir() and not (first / OUTPUT_FILE).exists()
    for piece in pack(folder, first if has_artifacts else None):
        _send(ssh.PART, piece)
    _send(ssh.END, {"exit": code})
    return 0


_DO = {"probe": _probe, "run": _run, "collect": _collect}


def _send(kind: str, value: object) -> None:
    sys.stdout.buffer.write(ssh.encode(kind, value))
    sys.stdout.buffer.flush()


def _fail(problem: str) -> int:
    _send(ssh.END, {"exit": None, "error": problem})
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
