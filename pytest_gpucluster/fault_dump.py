"""What faulthandler wrote about a process that died or holds the GIL. Pure: from its text to a few words."""

from __future__ import annotations

import re


def fatal_error(text: str) -> str:
    """Return the line that names the signal, such as "Fatal Python error: Segmentation fault", or ""."""
    found = re.findall(r"^Fatal Python error: .*", text, re.MULTILINE)
    return found[-1].strip() if found else ""


def place(text: str) -> str:
    """Return "file:line in function" of the main thread in the last dump of stacks, or "".

    faulthandler lists the main thread last, and each thread with its innermost frame first.
    """
    last = text.rpartition("most recent call first):")[2]
    frame = re.search(r'File "([^"]*)", line (\d+) in (.*)', last)
    return f"{frame[1].rpartition('/')[2]}:{frame[2]} in {frame[3]}" if frame else ""
