"""The node's side of a remote job, started there by ``gpucluster run --hosts``.

It reads one request from standard input and answers it: facts about the node, a run, or the reports of one.
It needs neither torch nor pytest, so that it can report that they are missing.

A run's program is ended on request, when the other side hangs up, and when no heartbeat has come for too long: then the
connection is broken, even if nothing on the node reports it. No process that it has started stays. Its folder is packed
on the node, and unpacked on our side without trust in its content.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pytest_gpucluster.errors import EnvironmentBroken, GpuClusterError
from pytest_gpucluster.files import atomic_write
from pytest_gpucluster.launch.detached_process import end_with_parent
from pytest_gpucluster.runners import ssh
from pytest_gpucluster.runners.preflight import collect_facts

OUTPUT_FILE, EXIT_FILE = "output.log", "ended.json"
"""In the folder of a run: its whole output, and its exit code."""
GRACE_SECONDS = 90.0
"""From the request to stop until everything is killed: torchrun gives its ranks 30 s, and reports are written."""
_ORPHAN_SECONDS = 30.0
"""How long processes may outlive the program, such as the recorder that renders the last reports."""
_LEFT_SECONDS = 5.0
"""For output that is left, once the other side no longer reads."""
_POLL_SECONDS = 0.1
_PR_SET_CHILD_SUBREAPER = 36
"""Source: prctl(2), linux/prctl.h."""
_SIGNALS = {ssh.INTERRUPT: signal.SIGINT, ssh.TERMINATE: signal.SIGTERM}


class Supervisor:
    """A running program. Its output is forwarded, and written to its folder with its exit code."""

    def __init__(self) -> None:
        self._requested: list[int] = []
        self._sent: set[int] = set()
        self._last_heartbeat = time.monotonic()
        self._stopping_since: float | None = None
        self._lost = False
        self._commands = b""
        self._log: IO[bytes] | None = None

    def run(self, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> int:
        """Run a program to its end; return its exit code as a shell does, or ``ssh.FAILED`` if it was killed here.

        Raises:
            EnvironmentBroken: it cannot be started.
            OSError: its folder cannot be made.
        """
        # Orphans of our children are adopted, so that they can be found and ended.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        folder.mkdir(parents=True, exist_ok=True)
        # Handlers for the signals of a lost connection are set before anything starts: none may end only this process.
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            # The node shuts down or the login session ends: as if the other side had hung up.
            signal.signal(number, lambda *_: self._requested.append(signal.SIGTERM))
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.set_blocking(1, False)
        self._log = (folder / OUTPUT_FILE).open("ab", buffering=0)  # a thread that is left behind may still write
        try:
            child = subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,  # safe: this process has no other threads yet
            )
        except OSError as error:
            raise EnvironmentBroken(f"{command[0]} cannot be started: {error}") from None
        code = self._follow(child)
        try:
            atomic_write(folder / EXIT_FILE, json.dumps({"exit": code}))
        except OSError as error:
            print(f"{folder / EXIT_FILE}: {error.strerror or error}", file=sys.stderr)
        if code is None:
            print(f"killed {GRACE_SECONDS:g} s after the request to stop", file=sys.stderr)
            return ssh.FAILED
        return code

    def _follow(self, child: subprocess.Popen[bytes]) -> int | None:
        output = threading.Thread(target=self._forward_output, args=(child.stdout,), daemon=True)
        output.start()
        ended_at: float | None = None
        killed, note = False, ""
        while True:
            self._read_commands()
            now = time.monotonic()
            if not self._lost and now - self._last_heartbeat > ssh.HEARTBEAT_TIMEOUT_SECONDS:
                self._lose_connection()
            # Each requested signal once: a second one of a kind would end the job before its ranks.
            for number in dict.fromkeys(self._requested):
                self._stopping_since = self._stopping_since or now
                if number not in self._sent and child.poll() is None:
                    self._sent.add(number)
                    child.send_signal(number)
            if child.poll() is not None and ended_at is None:
                ended_at = now
            if ended_at is not None and not descendants():
                break
            overdue = self._stopping_since is not None and now - self._stopping_since > GRACE_SECONDS
            if overdue or (ended_at is not None and now - ended_at > _ORPHAN_SECONDS):
                killed = ended_at is None
                note = "" if killed else f"{len(descendants())} processes that outlived the program were killed\n"
                kill_descendants()
                break
        # No wait without a limit: a process that hangs in the kernel cannot be killed, and holds its output open.
        output.join(ssh.HEARTBEAT_TIMEOUT_SECONDS)  # as long as the other side reads
        if output.is_alive():
            self._lost = True
            output.join(_LEFT_SECONDS)
        self._forward(note.encode())
        code = child.poll()
        return None if killed or code is None else code if code >= 0 else 128 - code

    def _read_commands(self) -> None:
        if self._lost:
            time.sleep(_POLL_SECONDS)
            return
        if not select.select([0], [], [], _POLL_SECONDS)[0]:
            return
        try:
            data = os.read(0, 4096)
        except OSError:
            data = b""  # an error ends the connection too
        if not data:
            self._lose_connection()
            return
        self._last_heartbeat = time.monotonic()
        *lines, self._commands = (self._commands + data).split(b"\n")
        self._requested += [_SIGNALS[word] for line in lines if (word := line.decode("ascii", "replace")) in _SIGNALS]

    def _lose_connection(self) -> None:
        self._lost = True
        self._requested.append(signal.SIGTERM)

    def _forward_output(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                self._forward(data)

    def _forward(self, data: bytes) -> None:
        """Write output to the log and the other side; the program waits until that reads or the connection is lost."""
        try:
            if self._log is not None:
                self._log.write(data)
        except OSError as error:
            self._log = None
            data += f"{OUTPUT_FILE} on this node ends here: {error.strerror}\n".encode()
        while data and not self._lost:
            if select.select([], [1], [], _POLL_SECONDS)[1]:
                try:
                    data = data[os.write(1, data) :]
                except BlockingIOError:
                    continue
                except OSError:
                    self._lose_connection()


def exit_of(folder: Path) -> int | None:
    """Return the exit code of the run whose folder this is; None if it has not ended."""
    try:
        code = json.loads((folder / EXIT_FILE).read_bytes())["exit"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return code if isinstance(code, int) else None


def descendants(pid: int | None = None) -> list[int]:
    """Return all living descendants of a process, with orphans that it has adopted. Source: proc_pid_stat(5)."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{entry.name}/stat", "rb") as stat:  # just ended
                # The program's name is in parentheses and may contain anything.
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(entry.name))
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


MOST_BYTES = 8 << 30
"""More than any run leaves; less than what fills a disk by mistake."""


def pack(out: IO[bytes], folder: Path, extra: Path | None = None) -> None:
    """Write a folder as a compressed archive: files, folders and symbolic links.

    Args:
        out: where to.
        folder: its content is that of the archive.
        extra: a folder to add under its own name.
    """
    with tarfile.open(fileobj=out, mode="w|gz", format=tarfile.PAX_FORMAT) as archive:
        found = [(path, folder) for path in sorted(folder.rglob("*"))]
        found += [(path, extra.parent) for path in sorted(extra.rglob("*"))] if extra is not None else []
        for path, root in found:
            with contextlib.suppress(FileNotFoundError):  # removed by a process that still writes there
                if path.is_symlink() or path.is_file() or path.is_dir():
                    archive.add(path, arcname=path.relative_to(root).as_posix(), recursive=False)


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
                name = PurePosixPath(member.name)
                if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in member.name:
                    raise EnvironmentBroken(f"the archive has {member.name!r}, which would be outside of its folder")
                path = folder / name
                total += member.size
                if total > MOST_BYTES:
                    raise EnvironmentBroken(f"more than {MOST_BYTES >> 30} GiB, not copied")
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                elif member.isfile():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    source = packed.extractfile(member)
                    assert source is not None  # it is a file
                    with path.open("xb") as file:
                        shutil.copyfileobj(source, file, 1 << 20)
                    os.utime(path, (member.mtime, member.mtime))
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


# ---- requests

_LONGEST_REQUEST = 1 << 22


def main() -> int:
    """Answer the request on standard output, and return an exit code: ``ssh.FAILED``, with why on standard error, if it
    cannot be met."""
    # Byte by byte: what follows the first line is read by the function that answers the request.
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _LONGEST_REQUEST and (byte := os.read(0, 1)):
        line += byte
    sys.stdout.buffer.write(ssh.MARK)
    sys.stdout.buffer.flush()
    try:
        request = ssh.read_request(bytes(line))
        do = REQUESTS.get(request["do"])
        if do is None:
            raise EnvironmentBroken(f"this version has no request {request['do']!r}")
        return do(request)
    except GpuClusterError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")
    except Exception as error:  # Python's own exit code 1 would be read as a rejection
        traceback.print_exc()
        problem = repr(error)
    with contextlib.suppress(OSError):  # the other side may be gone
        print(" ".join(problem.split()), file=sys.stderr)
    return ssh.FAILED


def _probe(request: Mapping[str, Any]) -> int:
    print(json.dumps(collect_facts(request)), flush=True)
    return 0


def _run(request: Mapping[str, Any]) -> int:
    os.chdir(request["directory"])
    environ = {**os.environ, **{str(name): str(value) for name, value in request["env"].items()}}
    command = (sys.executable, "-m", "pytest_gpucluster", *map(str, request["words"]))
    return Supervisor().run(command, environ, Path(request["folder"]))


def _collect(request: Mapping[str, Any]) -> int:
    os.chdir(request["directory"])
    folder = Path(request["folder"])
    if not folder.is_dir():
        raise EnvironmentBroken(f"{folder.absolute()}: missing, so nothing was started here")
    until = time.monotonic() + float(request["wait_seconds"])
    while not (folder / EXIT_FILE).exists() and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    # Ranks of all nodes write their artifacts to the path of rank 0's node. Its log shows whether that is its own disk.
    first = Path(request["first_folder"])
    has_artifacts = first != folder and first.is_dir() and not (first / OUTPUT_FILE).exists()
    pack(sys.stdout.buffer, folder, first if has_artifacts else None)
    sys.stdout.flush()
    return 0


REQUESTS = {"probe": _probe, "run": _run, "collect": _collect}

if __name__ == "__main__":
    sys.exit(main())
