"""Keys, read one by one while something else is shown; the terminal is left as it was found.

Ctrl-Z is a key like any other meanwhile: the shell would be left with the display's screen.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

ENDS = b"qQ\x03\x04"
"""Keys that end the display: also Ctrl-C and Ctrl-D, where the terminal gives them as keys."""
_CONTROL_CHARACTERS = 6
"""Where they are in what termios returns."""
_NONE = b"\0"
"""No key: _POSIX_VDISABLE of Linux, termios(3)."""


class Keyboard:
    """The standard input, if it is a terminal."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_there(self) -> bool:
        """Tell whether keys can be read."""
        return self._descriptor is not None

    def wait(self, seconds: float) -> bool:
        """Wait so long for a key; return True if it ends the display."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
                return False
            if not select.select([self._descriptor], [], [], left)[0]:
                return False
            read = os.read(self._descriptor, 64)
            if not read:  # the terminal is gone
                return True
            if any(key in ENDS for key in read):
                return True
        return False


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Take keys as they are pressed, without showing them; where there is no terminal, there are none."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # no terminal, or no standard input at all
        yield Keyboard(None)
        return
    try:
        tty.setcbreak(descriptor)
        attributes = termios.tcgetattr(descriptor)
        attributes[_CONTROL_CHARACTERS][termios.VSUSP] = _NONE
        termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
