"""Release of a main thread that runs Python code: loops, sleeps, locks."""

from __future__ import annotations

import signal
import threading
import types

from _pytest.outcomes import Failed  # pytest.fail.Exception, under the name that type checkers know

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
