"""Release of a main thread that is blocked in an NCCL kernel, a gloo collective or Python code (loop, sleep, lock).

NCCL: aborting the communicators ends their kernels; destroy and shutdown would wait for them. After an abort a waiting
call returns *without* an exception, so the Python release must follow in any case.
All groups are aborted at once, each in a thread of its own: torch aborts one after the other, each for up to the
group's own timeout, and its ncclGroupStart around them holds for the calling thread, while each abort runs in another.
Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, ``ProcessGroupNCCL::abort``; NCCL, src/group.cc, thread-local
``ncclGroupDepth``; threads may abort at the same time since NCCL 2.19 (https://github.com/NVIDIA/nccl/issues/992).
Source: torch/distributed/distributed_c10d.py, ``_abort_process_group`` ("with TORCH_NCCL_ASYNC_ERROR_HANDLING turned
off"). The environment for it is set in :data:`ENVIRONMENT`, before torch is imported.

gloo: neither abort, shutdown nor destroy of a group frees a rank before the group's own timeout. Shutting down the
group's connections does, within milliseconds: every pending operation fails with "Connection closed by peer". gloo does
not report which sockets are a group's, so they are found as the difference of the process's open files around the
group's creation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from _pytest.outcomes import Failed  # pytest.fail.Exception, under the name that type checkers know

from pytest_gpucluster.errors import EnvironmentBroken

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ABORT_SECONDS = 10.0
"""All groups of a process together are aborted by then. Source: this suite's rule, equal to the timeout ``stuck``: the
run ends where a rank has not come back this long after its release."""

ENVIRONMENT = {
    # torchrun exports 1: at the first timeout the watchdog would then kill the process, and its report with it.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # By default (1) the watchdog throws a CUDA error again in its own thread, which ends the process by SIGABRT: a GPU
    # that died would leave no failure of its test, and no verdict about the hardware. With 0 the watchdog of that group
    # ends in silence: this plugin's own watcher holds the deadlines.
    # Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, TORCH_NCCL_RETHROW_CUDA_ERRORS.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Left over in an operator's shell, these would change what a wait and a release mean.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    # The flight recorder: which collectives each rank has entered and left.
    "TORCH_FR_BUFFER_SIZE": "2000",
}


class NcclReleaser:
    """Aborts every process group of this process, once.

    Args:
        seconds: how long the aborts of all groups may take together.
    """

    making_group = False

    def __init__(self, seconds: float = ABORT_SECONDS) -> None:
        self._seconds = seconds
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
        if not self._lock.acquire(timeout=2 * self._seconds):
            raise EnvironmentBroken(f"an abort of NCCL's groups has not ended within {2 * self._seconds:g} s")
        try:
            self._abort_all()
        finally:
            self._lock.release()

    def _abort_all(self) -> None:
        from torch.distributed import distributed_c10d

        if self._aborted or not distributed_c10d.is_initialized():
            return
        end = time.monotonic() + self._seconds
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
                f"{len(left)} of {len(groups)} NCCL groups could not be aborted within {self._seconds:g} s: {left[0]}"
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


_FDS = "/proc/self/fd"


def open_sockets() -> dict[int, str]:
    """Return this process's open sockets: file descriptor -> "socket:[inode]"."""
    found: dict[int, str] = {}
    for name in os.listdir(_FDS):
        try:
            target = os.readlink(f"{_FDS}/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


class SocketReleaser:
    """Shuts down the connections of gloo groups, and of the store through which any group is being made."""

    def __init__(self) -> None:
        self._sockets: dict[int, str] = {}
        self._making: dict[int, str] | None = None

    @property
    def making_group(self) -> bool:
        """Return whether a block of :meth:`taking` is open."""
        return self._making is not None

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Take every socket opened inside the block, also when it is released in the middle of it."""
        self._making = open_sockets()
        try:
            yield
            self._take(self._making)
        finally:
            self._making = None

    def release(self) -> None:
        """Shut the connections down; a listening socket stays, because gloo aborts the process without it."""
        making = self._making  # the main thread may leave the block, and take sockets, at any moment
        if making is not None:
            self._take(making)
        for fd, inode in list(self._sockets.items()):
            try:
                # The number may have been given to another file since: the inode shows it.
                if os.readlink(f"{_FDS}/{fd}") != inode:
                    continue
                connection = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue  # closed in the meantime: no thread waits on it any more
            with connection, contextlib.suppress(OSError):  # the peer was faster
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)

    def _take(self, before: dict[int, str]) -> None:
        self._sockets.update((fd, inode) for fd, inode in open_sockets().items() if before.get(fd) != inode)


RELEASE_SIGNAL = signal.SIGUSR2


class Released(Failed):
    """Raised in the main thread to end a phase of a test that cannot end by itself.

    It is one of pytest's outcome exceptions, hence no ``Exception``: a test's ``except Exception`` lets it through.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason, pytrace=False)


class PythonReleaser:
    """Raises :class:`Released` in the main thread, but only while that is armed.

    The handler itself looks at the armed reason, so a signal that arrives late, when the phase is over, does nothing.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._main = threading.main_thread()

    def install(self) -> None:
        """Install the handler. Must be called in the main thread, and again when a test may have replaced it."""
        signal.signal(RELEASE_SIGNAL, self._raise)

    def arm(self, reason: str) -> None:
        """Say why the main thread is about to be released."""
        self._reason = reason

    def disarm(self) -> None:
        """Forget a release that has not happened: the main thread has come back."""
        self._reason = None

    def release(self) -> None:
        """Interrupt the main thread."""
        if self._reason is not None and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, RELEASE_SIGNAL)

    def _raise(self, signum: int, frame: types.FrameType | None) -> None:
        reason, self._reason = self._reason, None
        if reason is not None:
            raise Released(reason)


class Releaser(Protocol):
    """Ends whatever blocks the main thread, from another thread of the same process."""

    @property
    def making_group(self) -> bool:
        """Return whether the main thread is inside the making of a process group, where no flight recorder looks."""

    def release(self) -> None:
        """Make the blocked call return or raise. Safe to call again, and after the call has ended by itself."""
