"""The reports of a finished run, rendered in a process of their own.

The recorder starts it when journal and JUnit file are on disk. A report that takes too long, that needs more memory
than there is, or that trips over something, costs neither the record nor the end of the run: it is named, and can be
rendered again from the journal at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pytest_gpucluster.files import draft_of
from pytest_gpucluster.journal import Journal
from pytest_gpucluster.reports import folder as reports
from pytest_gpucluster.text import first_line

_CHUNK_BYTES = 64 * 1024
_SPARE_SECONDS = 1.0

Write = Callable[[Journal, Path, tuple[str, ...]], Mapping[str, str]]


def render_apart(journal: Journal, folder: Path, seconds: float, *, write: Write = reports.write) -> str | None:
    """Write the reports of a run into its folder; return what is missing of them and why, in one line, or None.

    It takes at most so many seconds: then the process that renders is killed.

    Args:
        journal: of the run.
        folder: of the run.
        seconds: how long to wait for all of them together.
        write: renders and writes kinds of reports; returns file name -> why it is not there.
    """
    deadline = time.monotonic() + seconds
    try:
        reader, pid = _start(journal, folder, seconds, write)
    except OSError as error:
        why = f"no process can be started for it: {error.strerror or error}"
        return _told(dict.fromkeys(reports.FILES_OF_A_RUN, why), folder)
    said, in_time = _read(reader, deadline)
    missing: dict[str, str] = {}
    if not in_time:
        _kill(pid, folder)
        why = f"not rendered within {seconds:.3g} s"
    else:
        why = "the process that rendered it has died"
    missing.update(dict.fromkeys(reports.FILES_OF_A_RUN, why))
    for line in said.splitlines():
        try:
            name, problem = json.loads(line)
        except ValueError:  # cut off
            continue
        missing.pop(name, None)
        if problem:
            missing[name] = str(problem)
    _reap(pid, blocking=in_time)
    return _told(missing, folder)


def _start(journal: Journal, folder: Path, seconds: float, write: Write) -> tuple[int, int]:
    """Return where the answers are read, and the process."""
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if pid == 0:
        # Whatever happens, the child must not come back as a second recorder.
        try:
            os.close(reader)
            _end_after(seconds)
            for kind in reports.OF_A_RUN:
                missing = write(journal, folder, (kind,))
                name = reports.FILES[kind]
                os.write(writer, json.dumps([name, first_line(missing.get(name, ""))]).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(writer)
    return reader, pid


def _end_after(seconds: float) -> None:
    """End this process then, also where nobody is left to kill it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])  # blocked since its start
    signal.setitimer(signal.ITIMER_REAL, seconds + _SPARE_SECONDS)


def _read(reader: int, deadline: float) -> tuple[bytes, bool]:
    """Return what the process said, and whether it ended in time."""
    said = b""
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                return said, False
            chunk = os.read(reader, _CHUNK_BYTES)
            if not chunk:
                return said, True
            said += chunk
    finally:
        os.close(reader)


def _kill(pid: int, folder: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for name in reports.FILES_OF_A_RUN:
        with contextlib.suppress(OSError):  # there is none, or the folder's disk is what hangs
            draft_of(folder / name, pid).unlink()


def _reap(pid: int, *, blocking: bool) -> None:
    # A killed process that a dead file system holds cannot be waited for: init reaps it later.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0 if blocking else os.WNOHANG)


def _told(missing: Mapping[str, str], folder: Path) -> str | None:
    if not missing:
        return None
    each = "; ".join(f"{name}: {why}" for name, why in missing.items())
    return f"{each}; {reports.AGAIN.format(folder)}"
