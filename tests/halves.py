"""All tests as two pytest processes at once: much of a session is waiting, and one process leaves a core idle.

    python tests/halves.py -m "not extended"      # options are pytest's

One process takes the folders of tests/, the other the modules beside them, whose output comes when both have ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def main(options: list[str]) -> int:
    """Run both; return the worse exit code."""
    folders = [folder for folder in TESTS.iterdir() if any(folder.rglob("test_*.py"))]
    halves = [
        sorted(f"{path.relative_to(TESTS.parent)}" for path in half) for half in (folders, TESTS.glob("test_*.py"))
    ]
    begin = time.monotonic()
    with tempfile.TemporaryFile() as kept:
        running = [
            subprocess.Popen([sys.executable, "-m", "pytest", *half, *options], cwd=TESTS.parent, stdout=to, stderr=to)
            for half, to in zip(halves, (None, kept), strict=True)
        ]
        try:
            codes = [process.wait() for process in running]
        except KeyboardInterrupt:  # both have it from the terminal, and say how far they have come
            codes = [process.wait() for process in running]
        kept.seek(0)
        sys.stdout.buffer.write(kept.read())
    times = os.times()
    print(f"both: {time.monotonic() - begin:.0f} s, CPU: {times.children_user + times.children_system:.0f} s")
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
