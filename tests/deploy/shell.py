"""A command that is run to its end by a test, which looks at its exit code itself."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def finished(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing to read, and return how it has ended, with what it has written."""
    return subprocess.run(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
