"""Process groups: their making, their abort from another thread, and what torch's flight recorders know of them.

NCCL: aborting the communicators ends their kernels; destroy and shutdown would wait for them. After an abort a waiting
call returns *without* an exception, so the Python release must follow in any case.
All groups are aborted at once, each in a thread of its own: torch aborts one after the other, each for up to the
group's own timeout, and its ncclGroupStart around them holds for the calling thread, while each abort runs in another.
Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, ``ProcessGroupNCCL::abort``; NCCL, src/group.cc, thread-local
``ncclGroupDepth``; threads may abort at the same time since NCCL 2.19 (https://github.com/NVIDIA/nccl/issues/992).
Source: torch/distributed/distributed_c10d.py, ``_abort_process_group`` ("with TORCH_NCCL_ASYNC_ERROR_HANDLING turned
off"). The variables for it are in ``environment``. Importing this module does not import torch.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import EnvironmentBroken

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

GROUP_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
"""Type of device -> torch's backend of its groups."""

ABORT_SECONDS = 10.0
"""All groups of a process together are aborted by then. Source: this suite's rule, equal to the timeout ``stuck``: the
run ends where a rank has not come back this long after its release."""


def init_group(device: torch.device, **options: Any) -> ProcessGroup:
    """Make the default group of this process, with ``options`` of torch's ``init_process_group``.

    NCCL connects at once, within the caller's deadline: without a device it would at the first collective, under no
    timeout at all. Collective: every rank must call this.

    Raises: RuntimeError, ValueError, as torch does.
    """
    import torch.distributed as dist

    if device.type == "cuda":
        options["device_id"] = device
    dist.init_process_group(GROUP_BACKENDS[device.type], **options)
    group = dist.group.WORLD
    assert group is not None
    return group


def changes_algorithms() -> bool:
    """Return whether making a group of NCCL now would change its choice of algorithms for the rest of this process.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, the constructor: with deterministic algorithms it sets
    ``NCCL_ALGO=^NVLS`` where that is not set, for this process and for all groups that come later.
    """
    import torch

    return torch.are_deterministic_algorithms_enabled()


def forget_abort(store: Any) -> None:
    """Take back what an abort has left on torch's store, below all prefixes, before groups are made anew.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, kStoreDumpKey.
    """
    store.delete_key("exception_dump")


class NcclReleaser:
    """Aborts every process group of this process, once."""

    making_group = False

    def __init__(self) -> None:
        self._aborted = False
        self._lock = threading.Lock()
        self._aborts: dict[ProcessGroup, _Abort] = {}

    def release(self) -> None:
        """Abort the default group and all groups made from it at once: torch keeps all of them in one register.

        A group that is still in the making is in no register yet; its sockets must be shut down as well.

        A second call while the first is under way returns at once; one that failed may be tried again.

        Raises:
            EnvironmentBroken: not all groups could be aborted in time; the message says how many, and why.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._abort_all()
        finally:
            self._lock.release()

    def finish(self) -> None:
        """Abort as :meth:`release` does, and wait for an abort that is under way.

        Raises:
            EnvironmentBroken: as :meth:`release`, or the abort that is under way has not ended in time.
        """
        if not self._lock.acquire(timeout=2 * ABORT_SECONDS):
            raise EnvironmentBroken(f"an abort of NCCL's groups has not ended within {2 * ABORT_SECONDS:g} s")
        try:
            self._abort_all()
        finally:
            self._lock.release()

    def _abort_all(self) -> None:
        from torch.distributed import distributed_c10d

        if self._aborted or not distributed_c10d.is_initialized():
            return
        end = time.monotonic() + ABORT_SECONDS
        groups = list(distributed_c10d._world.pg_names)
        # One that hangs is waited for again, and not called a second time.
        self._aborts = {
            group: before if (before := self._aborts.get(group)) and before.is_alive() else _Abort(group)
            for group in groups
        }
        for abort in self._aborts.values():
            abort.begin()
        for abort in self._aborts.values():
            abort.join(max(0.0, end - time.monotonic()))
        left = [abort.why or "no answer" for abort in self._aborts.values() if abort.is_alive() or abort.why]
        if left:
            raise EnvironmentBroken(
                f"{len(left)} of {len(groups)} NCCL groups could not be aborted within {ABORT_SECONDS:g} s: {left[0]}"
            )
        # Nothing is left to abort: it takes the groups out of torch's register.
        distributed_c10d._abort_process_group()
        self._aborts.clear()
        self._aborted = True


class _Abort(threading.Thread):
    """The abort of one group. ``why``: why it failed."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(name="gpucluster-abort", daemon=True)
        self._group = group
        self.why = ""

    def begin(self) -> None:
        """Start, unless it has been started before."""
        if self.ident is None:
            self.start()

    def run(self) -> None:
        """Abort the group."""
        try:
            self._group.abort()
        except Exception as error:  # reported by the thread that waits for this one
            self.why = f"{type(error).__name__}: {error}"


def flight_records() -> list[dict[str, Any]]:
    """Return the last entries of torch's flight recorders; of one that cannot be read, an entry that says so.

    Without torch there are none. Source: torch/csrc/distributed/c10d/FlightRecorder.hpp and ProcessGroupNCCL.hpp: NCCL
    has a recorder of its own, and an entry is "retired" once its work has ended.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        torch_c = getattr(sys.modules.get("torch"), "_C", None)
        c10d = getattr(torch_c, "_distributed_c10d", None)
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo and others; NCCL, where torch has it
        entries += _entries(getattr(c10d, name, None))
    return entries


def _entries(dump: Callable[[], str | bytes] | None) -> list[dict[str, Any]]:
    """Return the last entries of one recorder. If it cannot be read, it must not hide the other or stop the watcher."""
    if dump is None:
        return []
    try:
        found: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    except Exception as error:  # whatever torch raises here: the report then says that this recorder is unreadable
        return [
            {
                "process_group": ["?", "unreadable"],
                "collective_seq_id": 0,
                "profiling_name": f"flight recorder ({type(error).__name__})",
                "retired": True,
                "state": "completed",
                "time_created_ns": sys.maxsize,
            }
        ]
    return found[-50:]
