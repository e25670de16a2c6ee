"""One simulated GPU, as the processes of its node share it: its time, its load, its memory.

The rank moves it on; the node's sampler and NVML of any process read it. It is a file of numbers that all of them map.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

_LOADED_SECONDS = 1.0
"""How long a GPU counts as loaded after its last work, in real time: the host works in between."""


class Machine(ctypes.Structure):
    """The numbers of one GPU. :meth:`of` maps them.

    Attributes:
        host, index: where it is.
        now: simulated seconds since the run began, as this GPU's rank sees them.
        busy_seconds: for how many of them it has worked.
        worked_at: when it last did, by this machine's monotonic clock.
        load: how much of its full power that took, from 0 to 1.
        group_bytes: memory of NCCL's communicators.
        pid: the process of its rank; 0 before there is one.
    """

    _fields_ = (
        *((name, ctypes.c_double) for name in ("now", "busy_seconds", "worked_at", "load")),
        *((name, ctypes.c_int64) for name in ("group_bytes", "pid")),
    )
    host: str
    index: int
    now: float
    busy_seconds: float
    worked_at: float
    load: float
    group_bytes: int
    pid: int

    @classmethod
    def of(cls, folder: Path, host: str, index: int) -> Machine:
        """Return a GPU of a host, whose numbers are in the folder of the simulated run."""
        path = folder / host / f"gpu-{index}"
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(number, ctypes.sizeof(cls))
        found = cls.from_buffer(mmap.mmap(number, ctypes.sizeof(cls)))
        os.close(number)
        found.host, found.index = host, index
        return found

    @property
    def state(self) -> bytes:
        """All numbers, and whether it works: what depends on no more is the same while these are."""
        return bytes(self) + bytes([self.is_loaded])

    @property
    def is_loaded(self) -> bool:
        """Whether it works, or has until a moment ago."""
        return 0 < time.monotonic() - self.worked_at < _LOADED_SECONDS

    def work(self, seconds: float, load: float = 1.0) -> None:
        """Let it work for simulated seconds, at this part of its full power."""
        self.load, self.worked_at = load, time.monotonic()
        self.busy_seconds += seconds
        self.now += seconds

    def take(self, pid: int) -> None:
        """Make it the GPU of a rank, from a new beginning."""
        ctypes.memset(ctypes.addressof(self), 0, ctypes.sizeof(self))
        self.pid = pid
