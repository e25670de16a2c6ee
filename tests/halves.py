"""All tests as two pytest processes at once: much of a session is waiting, and one process leaves a core idle.

    python tests/halves.py -m "not extended"      # options are pytest's

One process takes the folders of FIRST, the other all else, whose output comes when both have ended. FIRST is chosen so
that both take about as long.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
FIRST = ("acceptance", "config", "deploy", "faults", "journal", "perf", "session")


def main(options):
    """Run both; return the worse exit code."""
    paths = [path for path in TESTS.iterdir() if path.match("test_*.py") or any(path.rglob("test_*.py"))]
    first = {path for path in paths if path.name in FIRST}
    halves = [sorted(f"{path.relative_to(TESTS.parent)}" for path in half) for half in (first, {*paths} - first)]
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
