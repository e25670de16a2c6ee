"""What the recorder has left on disk, for its tests."""

import contextlib
import time
import xml.etree.ElementTree as ET

from journal_lines import end
from junit_files import require_junit

DEADLINE = 60.0
"""Generous: nothing should take a tenth of it."""
END = end()


def verdicts(path):
    """Read a JUnit file, which must be valid, as {test: its failure, error or skip}."""
    document = path.read_text(encoding="utf-8")
    require_junit(document)
    found = {}
    for case in ET.fromstring(document).iter("testcase"):
        [verdict] = [child for child in case if child.tag in ("failure", "error", "skipped")] or [None]
        found[case.get("name")] = "passed" if verdict is None else f"{verdict.tag}: {verdict.get('message')}"
    return found


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE
    while True:
        with contextlib.suppress(FileNotFoundError):
            if found := condition():
                return found
        assert time.monotonic() < deadline, "nothing of the kind happened"
        time.sleep(0.01)
