"""One simulated GPU, as the processes of its node share it: its time, its load, its memory.

The rank moves it on; the node's sampler and NVML of any process read it. It is a file of numbers that all of them map.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

_FIELDS = ("now", "busy", "worked_at", "load", "held", "groups", "pid")
_LOADED_SECONDS = 1.0
"""How long a GPU counts as loaded after its last work, in real time: the host works in between."""


class Machine:
    """The numbers of one GPU.

    Args:
        folder: of the simulated run.
        host: name of its node.
        index: of the GPU there.

    Attributes:
        host, index: where it is.
    """

    def __init__(self, folder: Path, host: str, index: int) -> None:
        self.host, self.index = host, index
        path = folder / host / f"gpu-{index}"
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(number, 8 * len(_FIELDS))
        self._numbers = memoryview(mmap.mmap(number, 8 * len(_FIELDS))).cast("d")
        os.close(number)

    def _get(self, name: str) -> float:
        return self._numbers[_FIELDS.index(name)]

    def _set(self, name: str, value: float) -> None:
        self._numbers[_FIELDS.index(name)] = value

    @property
    def state(self) -> bytes:
        """All numbers, and whether it works: what depends on no more is the same while these are."""
        return self._numbers.tobytes() + bytes([self.is_loaded])

    @property
    def now(self) -> float:
        """Simulated seconds since the run began, as this GPU's rank sees them."""
        return self._get("now")

    @property
    def busy_seconds(self) -> float:
        """For how many simulated seconds it has worked."""
        return self._get("busy")

    @property
    def is_loaded(self) -> bool:
        """Whether it works, or has until a moment ago."""
        return 0 < time.monotonic() - self._get("worked_at") < _LOADED_SECONDS

    @property
    def held_bytes(self) -> int:
        """Memory that its rank has allocated, by the declared sizes."""
        return int(self._get("held"))

    @property
    def group_bytes(self) -> int:
        """Memory of NCCL's communicators."""
        return int(self._get("groups"))

    @property
    def pid(self) -> int:
        """The process of its rank; 0 before there is one."""
        return int(self._get("pid"))

    @property
    def load(self) -> float:
        """How much of its full power the last work took, from 0 to 1."""
        return self._get("load")

    def work(self, seconds: float, load: float = 1.0) -> None:
        """Let it work for simulated seconds, at this part of its full power."""
        self._set("load", load)
        self._set("busy", self._get("busy") + seconds)
        self._set("worked_at", time.monotonic())
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Let simulated seconds go by."""
        self._set("now", self._get("now") + seconds)

    def take(self, pid: int) -> None:
        """Make it the GPU of a rank, from a new beginning."""
        for name in _FIELDS:
            self._set(name, 0.0)
        self._set("pid", float(pid))

    def hold(self, amount_bytes: int) -> None:
        """Set the memory that its rank has allocated."""
        self._set("held", float(amount_bytes))

    def hold_groups(self, amount_bytes: int) -> None:
        """Set the memory that its communicators take."""
        self._set("groups", float(amount_bytes))
