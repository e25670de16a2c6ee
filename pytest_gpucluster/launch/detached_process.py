"""Detached processes that outlive a rank: their environment and signals, and killing stale ones at the end of a run.

The recorder and the node's sampler are such processes: each is a fresh interpreter without torch and pytest, in a
session of its own. It ends with its parent, however that ends, but not from a signal that a launcher sends to every
process it can reach.

Child processes of a rank that exits in order end with it; those of a rank that died are killed. They are recognised by
the rank's file for faulthandler, whose random name is unique: a new interpreter has it in its environment, a fork has
it open.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path

VARIABLE = "_GPUCLUSTER_FAULT_FILE"
"""It marks all processes that a rank starts with the rank's file."""
_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), linux/prctl.h."""


def end_stale_processes(fault_files: Collection[str]) -> list[int]:
    """Kill every process of this host that one of these ranks has started; return their PIDs.

    The ranks must have ended, except the calling one, which is about to. Processes that are started during that are
    found too.
    """
    ended: list[int] = []
    while fault_files:
        left = {int(name) for name in filter(str.isdecimal, os.listdir("/proc"))} - {os.getpid(), *ended}
        if not (found := [pid for pid in left if _kill(pid, fault_files)]):
            break
        ended += found
    return ended


def _kill(pid: int, fault_files: Collection[str]) -> bool:
    try:
        if not _is_of(pid, fault_files):
            return False
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # it has ended, is another user's, or the kernel has no pidfds
        return False
    try:
        # Again: now that it is open, its PID cannot become another process's.
        if not _is_of(pid, fault_files):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_of(pid: int, fault_files: Collection[str]) -> bool:
    """Raises: OSError if the process cannot be read."""
    process = Path(f"/proc/{pid}")
    marks = {f"{VARIABLE}={file}".encode() for file in fault_files}
    if not marks.isdisjoint((process / "environ").read_bytes().split(b"\0")):
        return True
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # it was just closed
            if os.readlink(descriptor).removesuffix(" (deleted)") in fault_files:
                return True
    return False


SHIELDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXCPU,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
"""Signals that launchers, schedulers and terminals send to every process they can reach."""


def child_environment() -> dict[str, str]:
    """Return an environment in which a new interpreter finds this package in any working directory."""
    found = dict(os.environ)
    found.pop(VARIABLE, None)  # it ends by itself, and may outlive its rank
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        inherited = found.get("PYTHONPATH")
        found["PYTHONPATH"] = os.pathsep.join([str(root), *([inherited] if inherited else [])])
    found["PYTHONSAFEPATH"] = "1"
    return found


def shield() -> None:
    """Ignore those signals. Called first in the detached process."""
    for number in SHIELDED:
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Let the kernel send this process SIGTERM when its parent ends for any reason. Also for ``preexec_fn``."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has just ended
        os.kill(os.getpid(), signal.SIGTERM)


def end_descriptor(parent: int) -> int | None:
    """Return a descriptor that becomes readable when the parent ends; None if the kernel has no pidfds."""
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):
        return None
    # If it has ended already, the PID may be another process's.
    if os.getppid() != parent:
        os.close(descriptor)
        return None
    return descriptor
