"""Signals that are heard even while the main thread is blocked.

A Python signal handler runs in the main thread, which may be inside ``store.get`` or a collective. The wakeup file
descriptor is written by the C-level handler, so a thread that polls it knows at once.
"""

from __future__ import annotations

import os
import signal
import types

_HEARD = (signal.SIGTERM, signal.SIGINT)


class WakeupPipe:
    """Brings SIGTERM and SIGINT to the watcher's poll loop.

    SIGINT keeps its handler (pytest's KeyboardInterrupt); SIGTERM's becomes harmless, because the watcher acts on it.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._installed = False
        self._before: object = None

    def install(self) -> None:
        """Take the wakeup descriptor and SIGTERM. Main thread; again at each phase, since asyncio resets both."""
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        before = signal.signal(signal.SIGTERM, _heard)
        if not self._installed:
            self._before = before
            self._installed = True
            # A forked child shares the pipe: its SIGTERM would be read as ours, and it would survive terminate().
            os.register_at_fork(after_in_child=self._forget_in_child)

    def ignore_sigterm(self) -> None:
        """From now on SIGTERM changes nothing: all reports are written and the process is about to end."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def restore(self) -> None:
        """Give SIGTERM and the wakeup descriptor back, for a session inside another program."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)  # type: ignore[arg-type]  # what signal.signal returned
        self._installed = False

    def close(self) -> None:
        """Close both ends, once neither signals nor the watcher use them."""
        for descriptor in (self.read_fd, self._write_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.read_fd = self._write_fd = -1

    def heard(self) -> set[int]:
        """Return the signals that have arrived since the last call."""
        try:
            return {number for number in os.read(self.read_fd, 512) if number in _HEARD}
        except BlockingIOError:
            return set()

    def _forget_in_child(self) -> None:
        if self._installed:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _heard(signum: int, frame: types.FrameType | None) -> None:
    """Let the interpreter go on: the watcher has read the signal's number from the pipe."""
