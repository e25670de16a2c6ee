"""The recorder process: receive lines from rank 0, record them, outlive rank 0.

If rank 0 ends without a closing line, the recorder closes the journal itself. It exits when the reports are on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn

from pytest_gpucluster.agreement import hang_diagnosis
from pytest_gpucluster.agreement.liveness import process_state
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.reports import registry as reports
from pytest_gpucluster.reports.recorder import client
from pytest_gpucluster.reports.recorder.writer import OWN_PROBLEM, RunWriter
from pytest_gpucluster.text import MESSAGE_CHARACTERS, one_line

_TICK_SECONDS = 0.5
_GRACE_SECONDS = 1.0  # after a test's deadline
_LEAST_SECONDS = 0.5
_FAULT_BYTES = 64 * 1024


class Session:
    """The connection to rank 0 and the watch over it.

    Args:
        channel: to rank 0.
        parent: rank 0's pid.
        writer: of the run's files.
        quiet_seconds: after a test's deadline rank 0 counts as silent if its last message is this old. It beats every
            second. The other ranks give it up, and may kill it, after 4 s (``agreement.watchdog``): its state must be
            recorded before that.
    """

    def __init__(self, channel: socket.socket, parent: int, writer: RunWriter, quiet_seconds: float) -> None:
        self._channel = channel
        self._parent = parent
        self._writer = writer
        self._quiet_seconds = quiet_seconds
        self._message = bytearray()
        self._last_packet = 0
        self._is_connected = True
        self._is_closed = False
        self._is_prepared = False
        self._heard_at = time.monotonic()
        self._started_at = time.monotonic()
        self._silence = ""
        self._reported_failure: str | None = None
        self._fault_file: Path | None = None
        self._fault_offset = 0

    def serve(self) -> None:
        """Record until the closing line was received or rank 0 has exited, and everything is on disk."""
        self._channel.setblocking(False)
        # A child that renders must not keep it open: rank 0 would not notice the death of this process.
        os.register_at_fork(after_in_child=self._channel.close)
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        end = detached_process.end_descriptor(self._parent)
        if end is not None:
            poller.register(end, select.POLLIN)
        while True:
            wait = min(_TICK_SECONDS, max(0.0, self._writer.due_at() - time.monotonic()))
            ready = {descriptor for descriptor, _ in poller.poll(wait * 1000)}
            # Received after this check, so that rank 0's last lines are not lost.
            has_exited = (end in ready) if end is not None else os.getppid() != self._parent
            was_connected = self._is_connected
            self._receive()
            if was_connected and not self._is_connected:
                poller.unregister(self._channel)
            if self._is_closed or has_exited:
                break
            self._watch_rank_0()
            self._prepare()
            if time.monotonic() >= self._writer.due_at():
                self._writer.render()
            self._report_failure()
        if not self._is_closed:
            self._record_death()
        begin = time.monotonic()
        self._send_result("done", self._writer.close())
        left = max(_LEAST_SECONDS, client.reports_seconds(self._writer.run_dir) - (time.monotonic() - begin))
        self._send_result("missing", self._writer.render_reports(left))
        if not self._is_closed and self._fault_file is not None:
            detached_process.end_stale_processes([str(self._fault_file)])
            with contextlib.suppress(OSError):  # rank 0 is dead, and its output is recorded
                self._fault_file.unlink(missing_ok=True)

    def _send_result(self, what: str, problem: str | None) -> None:
        """Send a result to rank 0; if it is gone, print a problem to standard error."""
        if not self._send({what: problem}) and problem:
            print(f"gpucluster recorder: {problem}", file=sys.stderr, flush=True)

    def _prepare(self) -> None:
        """Import what the reports need, once, while rank 0 starts the run and measures nothing yet."""
        if not self._is_prepared and self._writer.journal() is not None:
            self._is_prepared = True
            reports.prepare()

    def _receive(self) -> None:
        while self._is_connected and not self._is_closed:
            try:
                packet = self._channel.recv(client.HEADER.size + client.CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                # It closed the socket. Its exit is detected separately: a forked child may keep the socket open.
                self._is_connected = False
                return
            number, is_last = client.HEADER.unpack_from(packet)
            if number <= self._last_packet:
                continue
            self._last_packet = number
            self._message += packet[client.HEADER.size :]
            if is_last:
                message, self._message = bytes(self._message), bytearray()
                self._heard_at = time.monotonic()
                self._handle(message[:1], message[1:])

    def _handle(self, kind: bytes, content: bytes) -> None:
        if kind == client.BEAT:
            if self._silence:
                self._silence = ""
                self._writer.add({"type": "silence", "at": _now(), "message": "", "text": ""})
        elif kind == client.FAULT_FILE:
            self._fault_file, self._fault_offset = Path(os.fsdecode(content)), 0
            self._skip_fault_text()
        elif kind == client.RETRY:
            self._writer.retry()
            if self._send({"failure": self._writer.failure, "again": None}):
                self._reported_failure = self._writer.failure
        elif kind in (client.LINE, client.END):
            self._silence = ""
            before = self._writer.builder.running
            self._writer.add_encoded(content)
            if self._writer.builder.running is not before:
                self._started_at = time.monotonic()
                self._skip_fault_text()
            if kind == client.END:
                self._is_closed = True
                journal = self._writer.journal()
                if journal is not None and journal.end is None:
                    self._close_for_rank_0(journal, "rank 0's closing line was rejected")

    def _watch_rank_0(self) -> None:
        """Record when rank 0 is silent after the deadline of its test."""
        running = self._writer.builder.running
        if running is None or self._silence:
            return
        now = time.monotonic()
        overdue = now - self._started_at - running.deadline_seconds
        if overdue <= _GRACE_SECONDS or now - self._heard_at <= self._quiet_seconds:
            return
        journal = self._writer.builder.journal()
        place = hang_diagnosis.stack_location(self._fault_text())
        gil = f", holding the GIL at {place}" if place else ""
        self._silence = (
            f"{self._rank_0(journal)} does not answer, process state {process_state(self._parent)}{gil}, "
            f"{overdue:.0f} s past the deadline of {running.nodeid}"
        )
        text = f"Its last message was {now - self._heard_at:.0f} s before.\n{_process_facts(self._parent)}"
        self._writer.add({"type": "silence", "at": _now(), "message": self._silence, "text": text + self._fault_text()})

    def _record_death(self) -> None:
        journal = self._writer.journal()
        if journal is None:
            return
        problem = journal.recent_problem
        if problem is None or problem.name == OWN_PROBLEM:
            fatal = hang_diagnosis.fatal_error(self._fault_text())
            message = f"{self._rank_0(journal)} exited without a message {journal.where}"
            message += f" ({fatal})" if fatal else ""
            if self._silence:
                message = f"{self._silence}; then its process ended"
            text = (
                "The process ended before it had closed the journal. Whether by a signal or by exit is unknown "
                "here: only its parent, the launcher, has its status."
            )
            if self._silence:
                text += f"\nBefore that: {self._silence}"
            text += self._fault_text()
            self._writer.add(
                {"type": "problem", "name": "rank lost", "outcome": "error", "message": message, "text": text}
            )
        else:
            message = problem.message
        self._close_for_rank_0(self._writer.journal() or journal, message)

    def _close_for_rank_0(self, journal: Journal, reason: str) -> None:
        counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
        for result in journal.results:
            counts[result.outcome] += 1
        if journal.running is not None:
            counts["error"] += 1
        self._writer.add(
            {
                "type": "end",
                "at": _now(),
                "verdict": journal.verdict,
                "exit": journal.exit,
                "reason": one_line(reason, MESSAGE_CHARACTERS),
                "counts": counts,
                "not_run": [test.nodeid for test in journal.not_run],
                "by": "recorder",
            }
        )

    def _rank_0(self, journal: Journal) -> str:
        place = journal.place(0)
        parts = [(place.host if place else "") or journal.run.hostname or socket.gethostname()]
        if place is not None and place.gpu:
            parts.append(f"GPU {place.gpu.get('index', '?')} {place.gpu.get('uuid', '')[:12]}".rstrip())
        return f"rank 0 ({', '.join(parts)}, pid {self._parent})"

    def _skip_fault_text(self) -> None:
        """Leave out what was written before the test that begins, but for a fatal error: lines may be received only
        after rank 0 has died."""
        size = 0
        with contextlib.suppress(OSError):
            size = self._fault_file.stat().st_size if self._fault_file is not None else 0
        if not hang_diagnosis.fatal_error(self._fault_text()):
            self._fault_offset = size

    def _fault_text(self) -> str:
        if self._fault_file is None:
            return ""
        try:
            with self._fault_file.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = self._fault_offset if self._fault_offset <= size else 0
                file.seek(max(begin, size - _FAULT_BYTES))
                text = file.read(_FAULT_BYTES).decode("utf-8", "backslashreplace")
        except OSError:
            return ""
        return f"\n\nIts faulthandler wrote:\n{text}" if text.strip() else ""

    def _report_failure(self) -> None:
        failure = self._writer.failure
        if failure != self._reported_failure and self._send({"failure": failure}):
            self._reported_failure = failure

    def _send(self, message: Mapping[str, str | None]) -> bool:
        text = json.dumps({key: one_line(value, 4000) if value else None for key, value in message.items()})
        try:
            self._channel.send(text.encode(), socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True


def _process_facts(pid: int) -> str:
    lines = [f"Process {pid}: state {process_state(pid)}."]
    with contextlib.suppress(OSError):
        waits = Path(f"/proc/{pid}/wchan").read_text(errors="replace").strip()
        if waits not in ("", "0"):
            lines.append(f"Its main thread waits in the kernel function {waits}.")
    with contextlib.suppress(OSError):
        stack = Path(f"/proc/{pid}/stack").read_text(errors="replace").strip()
        if stack:
            lines.append(f"Its kernel stack:\n{stack}")
    return "\n".join(lines)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def main() -> NoReturn:
    """Run as the recorder process."""
    detached_process.shield()
    parser = argparse.ArgumentParser(description="The recorder of a run. Rank 0 starts it; not for manual use.")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--junit", type=Path)
    parser.add_argument("--quiet-seconds", type=float, required=True)
    options = parser.parse_args()
    writer = RunWriter(options.run_dir, options.junit)
    Session(socket.socket(fileno=options.channel), options.parent, writer, options.quiet_seconds).serve()
    # Immediately: ranks wait for the exit of this process.
    os._exit(0)


if __name__ == "__main__":
    main()
