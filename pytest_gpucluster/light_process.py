"""What the light processes beside a rank have in common: the recorder, and the node's sampler.

Each is a fresh interpreter without torch and pytest, in a session of its own. It ends with the process that started it,
however that ends, and no signal that a launcher sends to everything it can reach ends it before.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from pytest_gpucluster import stale_processes

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
"""Signals that launchers, schedulers and terminals send to everything they can reach."""


def environment() -> dict[str, str]:
    """Return an environment in which a new interpreter finds this package, wherever it is started."""
    found = dict(os.environ)
    found.pop(stale_processes.VARIABLE, None)  # it ends by itself, and may have to outlive its rank
    root = Path(__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        inherited = found.get("PYTHONPATH")
        found["PYTHONPATH"] = os.pathsep.join([str(root), *([inherited] if inherited else [])])
    found["PYTHONSAFEPATH"] = "1"
    return found


def shield() -> None:
    """Ignore those signals. In the light process, before anything else."""
    for number in SHIELDED:
        signal.signal(number, signal.SIG_IGN)


def end_descriptor(parent: int) -> int | None:
    """Return a descriptor that becomes readable when the parent ends, or None where there are none."""
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):
        return None
    # If it ended before, the number may be another process's by now.
    if os.getppid() != parent:
        os.close(descriptor)
        return None
    return descriptor
