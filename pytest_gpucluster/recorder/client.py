"""Rank 0's handle on the recorder, the one process that writes the journal and the JUnit file.

The recorder lives on rank 0's node in a session of its own, without torch and without pytest, so that what
ends rank 0 (a signal, a crash, a hang with the GIL held) does not end the record. What it does is in
:mod:`pytest_gpucluster.recorder.process`.

Lines travel over a socket pair in numbered packets. A packet is taken whole or not at all, and one that comes
twice is dropped: so an exception raised by a signal handler in the middle of a ``send`` neither tears a line
nor doubles it.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.journal.journal import encode
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.reports import registry as reports

if TYPE_CHECKING:
    import subprocess

# number of the packet, whether the message ends with it
HEADER = struct.Struct("<QB")
# Below the default send buffer of a Unix socket (net.core.wmem_default, 208 KiB), with room for several.
CHUNK_BYTES = 48 * 1024
# The first byte of a message says what it is.
LINE, END, BEAT, FAULT_FILE, AGAIN = b"L", b"E", b"B", b"F", b"A"
# A recorder that takes nothing for so long is stuck, on a disk most likely; the tests go on without it.
_SEND_SECONDS = 2.0
_SEND_AGAIN_SECONDS = 0.02


class _Packet:
    """A part of a message, numbered when it is first sent."""

    __slots__ = ("content", "is_last", "number")

    def __init__(self, content: bytes, is_last: bool) -> None:
        self.content = content
        self.is_last = is_last
        self.number = 0


class Recorder:
    """Send lines to the recorder process. Every method may be called from any thread.

    Nothing here raises because of the recorder: what went wrong is in :attr:`failure`, and :meth:`finish`
    returns it. In a process forked from rank 0 every method does nothing.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, run_dir: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._channel = channel
        self._owner = os.getpid()
        # Re-entrant: a signal handler may send while the main thread is sending.
        self._lock = threading.RLock()
        self._number = 0
        self._waiting: collections.deque[_Packet] = collections.deque()
        self._failure: str | None = None
        self._stuck: str | None = None
        self._is_gone = False
        self._run_dir = run_dir
        self._acknowledged: list[str | None] = []
        """What it said when the record was closed."""
        self._knows_reports = False
        self._has_tried_again = False
        self.missing: str | None = None
        """After the end: which reports are not beside the journal, and why. Of the JUnit file :meth:`finish` tells."""

    @classmethod
    def start(
        cls,
        run_dir: Path,
        junit_path: Path | None,
        *,
        stderr: int | None = None,
        grace_seconds: float = 1.0,
        quiet_seconds: float = 2.5,
    ) -> Recorder:
        """Start the recorder of this process. That takes milliseconds: it need not be ready for lines.

        Args:
            run_dir: an existing folder for the journal.
            junit_path: the JUnit file to keep up to date, or None.
            stderr: a descriptor for its last words, by default this process's standard error.
            grace_seconds: rank 0 is reported as not answering so long after a test's deadline ...
            quiet_seconds: ... if it has not been heard for so long.

        Raises:
            OSError: no process can be started.
        """
        import subprocess  # here, because a rank above 0 never needs it

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "pytest_gpucluster.recorder.process"]
        command += [
            "--channel",
            str(theirs.fileno()),
            "--parent",
            str(os.getpid()),
            "--run-dir",
            os.path.abspath(run_dir),
        ]
        command += ["--grace-seconds", str(grace_seconds), "--quiet-seconds", str(quiet_seconds)]
        if junit_path is not None:
            command += ["--junit", os.path.abspath(junit_path)]
        # The recorder inherits the mask, so there is no moment in which one of these could end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, detached_process.SHIELDED)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=detached_process.child_environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return cls(process, ours, Path(os.path.abspath(run_dir)))

    @property
    def failure(self) -> str | None:
        """Return what keeps the recorder from recording (a full disk, its death), or None."""
        if self._is_foreign():
            return None
        if self._lock.acquire(blocking=False):
            try:
                self._hear(0.0)
            finally:
                self._lock.release()
        return self._failure or self._stuck

    def failure_now(self, timeout: float) -> str | None:
        """Return :attr:`failure` as it is now: the recorder first tries again what it could not write.

        A disk may have had room again since it was last written to. Waits for ``timeout`` seconds at most, and only if
        there is a failure.
        """
        before = self.failure
        if before is None or self._is_foreign():
            return None
        deadline = time.monotonic() + timeout
        with self._lock:
            self._has_tried_again = False
            if not self._is_gone:
                self._waiting.extend(_packets(AGAIN))
                self._flush(timeout)
            while not (self._has_tried_again or self._is_gone or self._stuck):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._hear(left)
        # Without an answer nothing is known to be better, also where it has begun to take lines again.
        return self.failure or (None if self._has_tried_again else before)

    def send(self, line: Mapping[str, object]) -> None:
        """Record a line of the journal. If the recorder takes none for 2 s, it goes with the next one."""
        self._post(LINE + encode(line))

    def fault_file(self, path: str | os.PathLike[str]) -> None:
        """Name the file that this process's faulthandler writes to: it is quoted if rank 0 dies or hangs."""
        self._post(FAULT_FILE + os.fsencode(os.path.abspath(path)))

    def beat(self) -> None:
        """Say that rank 0 is alive. It never waits."""
        if self._is_foreign() or self._is_gone or not self._lock.acquire(blocking=False):
            return
        try:
            if self._waiting:
                self._flush(0.0)
            else:
                self._send_packet(_Packet(BEAT, True), 0.0)
        except OSError as error:
            if error.errno is None:
                raise  # a signal handler's
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM):
                self._note_end()
        finally:
            self._lock.release()

    def finish(self, end_line: Mapping[str, object], timeout: float) -> str | None:
        """Send the closing line and wait until journal and JUnit are on disk, and the other reports are, too.

        Returns None then. Otherwise one line: what is not on disk, why, and where it was put instead. Of the other
        reports :attr:`missing` tells: whatever happens to them is no failure of the record.
        """
        if self._is_foreign():
            return None
        deadline = time.monotonic() + timeout
        self._process.send_signal(signal.SIGCONT)  # somebody may have stopped it
        with self._lock:
            self._waiting.extend(_packets(END + encode(end_line)))
            self._flush(timeout)
            while not self._knows_reports and not self._is_gone:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._hear(left)
            if self._acknowledged:
                self._leave(deadline)
                return self._acknowledged[0]
            if self._is_gone:
                return self._failure or f"the recorder (pid {self.pid}) has ended"
            why = self._failure or self._stuck
            unconfirmed = f"the recorder (pid {self.pid}) has not confirmed the reports on disk within {timeout:g} s"
            return f"{unconfirmed}: {why}" if why else unconfirmed

    def _leave(self, deadline: float) -> None:
        """Let go of a recorder that has closed the record, whether or not it has come to the end of the reports."""
        import subprocess

        self._channel.close()
        self._is_gone = True
        if not self._knows_reports:
            names = ", ".join(reports.FILES_OF_A_RUN)
            self.missing = f"{names}: not known whether they are there; {reports.AGAIN.format(self._run_dir)}"
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(1.0, deadline - time.monotonic()))

    def _is_foreign(self) -> bool:
        return os.getpid() != self._owner

    def _post(self, message: bytes) -> None:
        if self._is_foreign():
            return
        with self._lock:
            if self._is_gone:
                return
            self._waiting.extend(_packets(message))
            self._flush(_SEND_AGAIN_SECONDS if self._stuck else _SEND_SECONDS)

    def _send_packet(self, packet: _Packet, timeout: float) -> None:
        # A signal handler that sends may come between any two of these: then it has sent this packet too, and
        # this one goes out again with a number that the recorder has seen.
        if not packet.number:
            self._number += 1
            packet.number = self._number
        self._channel.settimeout(timeout)
        self._channel.send(HEADER.pack(packet.number, packet.is_last) + packet.content, socket.MSG_NOSIGNAL)

    def _flush(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        try:
            while self._waiting:
                packet = self._waiting[0]
                self._send_packet(packet, max(0.0, deadline - time.monotonic()))
                if self._waiting and self._waiting[0] is packet:
                    self._waiting.popleft()
            self._stuck = None
        except OSError as error:
            if isinstance(error, TimeoutError) or error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM):
                self._stuck = f"the recorder (pid {self.pid}) takes no lines; {len(self._waiting)} packets wait"
            elif error.errno is None:
                raise  # a signal handler's
            else:
                self._note_end()

    def _hear(self, timeout: float) -> None:
        """Take what the recorder says, waiting for the first of it."""
        while not self._is_gone:
            try:
                self._channel.settimeout(timeout)
                packet = self._channel.recv(CHUNK_BYTES)
            except (BlockingIOError, TimeoutError):
                return
            except OSError:
                packet = b""
            if not packet:
                self._note_end()
                return
            self._take(json.loads(packet))
            if self._acknowledged:
                return
            timeout = 0.0

    def _take(self, said: Mapping[str, str | None]) -> None:
        if "failure" in said:
            self._failure = said["failure"]
        if "again" in said:
            self._has_tried_again = True
        if "done" in said:
            self._acknowledged.append(said["done"])
        if "missing" in said:
            self.missing, self._knows_reports = said["missing"], True

    def _note_end(self) -> None:
        """Remember that the recorder is gone, with the last that it said."""
        if self._is_gone:
            return
        if not self._knows_reports:
            # What it said before it ended is still to be read.
            with contextlib.suppress(OSError, ValueError):
                self._channel.settimeout(0.0)
                while packet := self._channel.recv(CHUNK_BYTES):
                    self._take(json.loads(packet))
        self._is_gone = True
        self._channel.close()
        if self._acknowledged:
            return
        with contextlib.suppress(Exception):
            self._process.wait(timeout=0.5)
        status = self._process.returncode
        how = "" if status is None else f", status {status}" if status >= 0 else f", killed by signal {-status}"
        before = f"; before that: {self._failure}" if self._failure else ""
        self._failure = (
            f"the recorder (pid {self.pid}{how}) has ended: nothing more is recorded, and the report on disk "
            f"says that the run ended there{before}"
        )


def _packets(message: bytes) -> list[_Packet]:
    begins = range(0, len(message), CHUNK_BYTES)
    return [_Packet(message[i : i + CHUNK_BYTES], i + CHUNK_BYTES >= len(message)) for i in begins]


def wait_for_end(pid: int, timeout: float) -> bool:
    """Wait until a recorder of this node has ended, which it does as soon as the reports are on disk.

    A process that has ended but was not reaped counts as ended. Return False if it still runs after
    ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        # No pidfd here (an old kernel, a sandbox): look at it now and then.
        while not _has_ended(pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(max(0.0, timeout) * 1000))
    finally:
        os.close(descriptor)


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in (b"Z", b"X")
