"""Rank 0's client of the recorder, the only process that writes the journal and the JUnit file.

The recorder lives on rank 0's node in a session of its own, without torch and without pytest, so that
whatever ends rank 0 (a signal, a crash, a hang with the GIL held) does not end the recording. Its side is
:mod:`pytest_gpucluster.reports.recorder.process`.

Lines travel over a socket pair in numbered packets. A packet is received whole or not at all, and a
duplicate is dropped, so an exception raised by a signal handler in the middle of a ``send`` neither cuts a line
nor repeats it.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.agreement.liveness import process_state, start_time
from pytest_gpucluster.journal.journal import JOURNAL_FILE, encode
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.reports import registry as reports

if TYPE_CHECKING:
    import subprocess

# number of the packet, whether the message ends with it
HEADER = struct.Struct("<QB")
# Below the default send buffer of a Unix socket (net.core.wmem_default, 208 KiB), with room for several.
CHUNK_BYTES = 48 * 1024
# The kind of a message, its first byte.
LINE, END, BEAT, FAULT_FILE, RETRY = b"L", b"E", b"B", b"F", b"A"
# After this time without progress the recorder is stuck, most likely on a disk; the tests go on without it.
_SEND_SECONDS = 2.0
_SEND_RETRY_SECONDS = 0.02


@dataclass(slots=True, eq=False)
class _Packet:
    """A part of a message, numbered when it is first sent."""

    content: bytes
    is_last: bool
    number: int = 0


def reports_seconds(run_dir: Path) -> float:
    """Return how long closing the journal and all reports may take: 7 s, and 1 s for each 100 kB of it, at most 15 s.

    Ranks and launchers wait 3 s more, and torchrun kills a rank 30 s after another one has failed.
    """
    try:
        return min(7.0 + (run_dir / JOURNAL_FILE).stat().st_size / 100_000, 15.0)
    except OSError:
        return 7.0


class Recorder:
    """Send lines to the recorder process. Every method may be called from any thread.

    No failure of the recorder is raised here: it is in :attr:`failure`, and :meth:`finish` returns it. In a
    process forked from rank 0 every method does nothing.
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
        """Its answer to the closing line."""
        self._knows_reports = False
        self._has_retried = False
        self.missing: str | None = None
        """After the end: the reports that are missing, and why; the JUnit file is reported by :meth:`finish`."""

    @classmethod
    def start(
        cls, run_dir: Path, junit_path: Path | None, *, stderr: int | None = None, quiet_seconds: float = 2.5
    ) -> Recorder:
        """Start the recorder of this process. Takes milliseconds, because it need not be ready yet.

        Args:
            run_dir: an existing folder for the journal.
            junit_path: the JUnit file to keep up to date, or None.
            stderr: a descriptor for its standard error, by default this process's standard error.
            quiet_seconds: after a test's deadline rank 0 is reported as not answering if it has sent nothing for this
                long.

        Raises:
            OSError: no process can be started.
        """
        import subprocess  # here, because ranks above 0 never need it

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options: dict[str, object] = {"channel": theirs.fileno(), "parent": os.getpid()}
        options |= {"run-dir": os.path.abspath(run_dir), "quiet-seconds": quiet_seconds}
        if junit_path is not None:
            options["junit"] = os.path.abspath(junit_path)
        command = [sys.executable, "-m", "pytest_gpucluster.reports.recorder.process"]
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        # The recorder inherits the mask, so none of these signals can ever end it.
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
        """Return why the recorder cannot record (a full disk, its death), or None."""
        if self._is_foreign():
            return None
        if self._lock.acquire(blocking=False):
            try:
                self._receive(0.0)
            finally:
                self._lock.release()
        return self._failure or self._stuck

    def failure_now(self, timeout: float) -> str | None:
        """Return the current :attr:`failure`, after the recorder has retried what it could not write.

        The disk may have space again. Waits up to ``timeout`` seconds, and only if there is a failure.
        """
        before = self.failure
        if before is None or self._is_foreign():
            return None
        deadline = time.monotonic() + timeout
        with self._lock:
            self._has_retried = False
            if not self._is_gone:
                self._waiting.extend(_packets(RETRY))
                self._flush(timeout)
            self._receive_until(lambda: self._has_retried or bool(self._stuck), deadline)
        # Without an answer the old failure stands, even if the recorder accepts lines again.
        return self.failure or (None if self._has_retried else before)

    def send(self, line: Mapping[str, object]) -> None:
        """Record a line of the journal. If the recorder accepts nothing for 2 s, it is sent with the next one."""
        self._post(LINE + encode(line))

    def fault_file(self, path: str | os.PathLike[str]) -> None:
        """Announce the file of this process's faulthandler, which is quoted if rank 0 dies or hangs."""
        self._post(FAULT_FILE + os.fsencode(os.path.abspath(path)))

    def beat(self) -> None:
        """Report that rank 0 is alive. Never waits."""
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
                self._mark_gone()
        finally:
            self._lock.release()

    def finish(self, end_line: Mapping[str, object], timeout: float) -> str | None:
        """Send the closing line and wait until journal, JUnit file and the other reports are on disk.

        Returns None then. Otherwise one line: what is not on disk, why, and where it was written instead. Other missing
        reports are in :attr:`missing`; they are no failure of the recording.
        """
        if self._is_foreign():
            return None
        deadline = time.monotonic() + timeout
        self._process.send_signal(signal.SIGCONT)  # it may have been stopped
        with self._lock:
            self._waiting.extend(_packets(END + encode(end_line)))
            self._flush(timeout)
            self._receive_until(lambda: self._knows_reports, deadline)
            if self._acknowledged:
                self._leave(deadline)
                return self._acknowledged[0]
            if self._is_gone:
                return self._failure or f"the recorder (pid {self.pid}) has exited"
            why = self._failure or self._stuck
            unconfirmed = f"the recorder (pid {self.pid}) has not confirmed the reports on disk within {timeout:g} s"
            return f"{unconfirmed}: {why}" if why else unconfirmed

    def _leave(self, deadline: float) -> None:
        """Leave a recorder that has closed the journal, whether or not all reports are written."""
        import subprocess

        self._channel.close()
        self._is_gone = True
        if not self._knows_reports:
            names = ", ".join(reports.FILES_OF_A_RUN)
            self.missing = f"{names}: unknown whether they were written; {reports.RENDER_HINT.format(self._run_dir)}"
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
            self._flush(_SEND_RETRY_SECONDS if self._stuck else _SEND_SECONDS)

    def _send_packet(self, packet: _Packet, timeout: float) -> None:
        # A signal handler that sends may interrupt between any two of these lines: then it has sent this packet too,
        # and the recorder drops the duplicate by its number.
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
                self._stuck = f"the recorder (pid {self.pid}) accepts no lines; {len(self._waiting)} packets wait"
            elif error.errno is None:
                raise  # a signal handler's
            else:
                self._mark_gone()

    def _receive_until(self, is_there: Callable[[], bool], deadline: float) -> None:
        while not (is_there() or self._is_gone) and (left := deadline - time.monotonic()) > 0:
            self._receive(left)

    def _receive(self, timeout: float) -> None:
        while not self._is_gone:
            try:
                self._channel.settimeout(timeout)
                packet = self._channel.recv(CHUNK_BYTES)
            except (BlockingIOError, TimeoutError):
                return
            except OSError:
                packet = b""
            if not packet:
                self._mark_gone()
                return
            self._process_answer(json.loads(packet))
            if self._acknowledged:
                return
            timeout = 0.0

    def _process_answer(self, answer: Mapping[str, str | None]) -> None:
        if "failure" in answer:
            self._failure = answer["failure"]
        if "again" in answer:
            self._has_retried = True
        if "done" in answer:
            self._acknowledged.append(answer["done"])
        if "missing" in answer:
            self.missing, self._knows_reports = answer["missing"], True

    def _mark_gone(self) -> None:
        """Mark the recorder as gone, after reading its last answers."""
        if self._is_gone:
            return
        if not self._knows_reports:
            # Its last answers are still to be read.
            with contextlib.suppress(OSError, ValueError):
                self._channel.settimeout(0.0)
                while packet := self._channel.recv(CHUNK_BYTES):
                    self._process_answer(json.loads(packet))
        self._is_gone = True
        self._channel.close()
        if self._acknowledged:
            return
        with contextlib.suppress(Exception):
            self._process.wait(timeout=0.5)
        status = self._process.returncode
        how = "" if status is None else f", status {status}" if status >= 0 else f", killed by signal {-status}"
        earlier = f"; before that: {self._failure}" if self._failure else ""
        self._failure = (
            f"the recorder (pid {self.pid}{how}) has exited: nothing more is recorded, and the report on disk "
            f"states that the run ended there{earlier}"
        )


def _packets(message: bytes) -> list[_Packet]:
    begins = range(0, len(message), CHUNK_BYTES)
    return [_Packet(message[i : i + CHUNK_BYTES], i + CHUNK_BYTES >= len(message)) for i in begins]


def wait_for_end(pid: int, timeout: float) -> bool:
    """Wait until a recorder of this node has exited, which it does when the reports are on disk.

    A zombie counts as exited. Return False if it still runs after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        # No pidfd here (an old kernel, a sandbox): poll.
        while start_time(pid) is not None and process_state(pid)[0] not in "ZX":
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
