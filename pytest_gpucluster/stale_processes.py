"""Processes that a rank has started and that outlive it, in whatever session: found and ended at the end of a run.

A rank that ends in order leaves its helpers alone, which end with it; of a rank that died nobody ends them. They are
known by the rank's file for faulthandler, whose random name no other process has: what was started anew has it
in its environment, and what was only forked holds it open.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator, MutableMapping
from pathlib import Path

VARIABLE = "_GPUCLUSTER_FAULT_FILE"


@contextlib.contextmanager
def marked(environ: MutableMapping[str, str], fault_file: str) -> Iterator[None]:
    """Let all that this rank starts inside be known by its file."""
    before = environ.get(VARIABLE)
    environ[VARIABLE] = fault_file
    try:
        yield
    finally:
        if before is None:
            environ.pop(VARIABLE, None)
        else:
            environ[VARIABLE] = before


def end(fault_files: Collection[str]) -> list[int]:
    """Kill every other process of this host that was started by one of these ranks; return their numbers.

    The ranks themselves must have ended, but for the one that calls and is about to. What is started meanwhile by what
    is killed is found as well.
    """
    ended: list[int] = []
    while fault_files and (found := [pid for pid in _processes() if pid not in ended and _kill(pid, fault_files)]):
        ended += found
    return ended


def _processes() -> Iterator[int]:
    own = os.getpid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != own:
            yield int(entry.name)


def _kill(pid: int, fault_files: Collection[str]) -> bool:
    try:
        if not _is_of(pid, fault_files):
            return False
        held = os.pidfd_open(pid)
    except (AttributeError, OSError):  # ended meanwhile, another user's, or a kernel without pidfds
        return False
    try:
        # Again: now that it is held, its number cannot become another process's.
        if not _is_of(pid, fault_files):
            return False
        signal.pidfd_send_signal(held, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(held)
    return True


def _is_of(pid: int, fault_files: Collection[str]) -> bool:
    """Raises: OSError where the process cannot be looked at."""
    process = Path(f"/proc/{pid}")
    marks = {f"{VARIABLE}={file}".encode() for file in fault_files}
    if not marks.isdisjoint((process / "environ").read_bytes().split(b"\0")):
        return True
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(descriptor).removesuffix(" (deleted)") in fault_files:
                return True
    return False
