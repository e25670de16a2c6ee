"""What the recorder has left on disk, for its tests."""

import contextlib
import time

from journal_lines import end
from junit_files import JunitFile

DEADLINE = 60.0
"""Generous: nothing should take a tenth of it."""
END = end()


def verdicts(path):
    """Read a JUnit file, which must be valid, as {test: its failure, error or skip}."""
    return JunitFile(path).verdicts


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE
    while True:
        with contextlib.suppress(FileNotFoundError):
            if found := condition():
                return found
        assert time.monotonic() < deadline, "nothing of the kind happened"
        time.sleep(0.01)
