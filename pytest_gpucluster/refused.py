"""The JUnit file of a run that is refused: an earlier run's file must never pass for this one's.

A refusal before the recorder runs (contradictory launcher variables, an unwritable report directory) has nobody else to
write it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.journal import JournalBuilder
from pytest_gpucluster.record import now
from pytest_gpucluster.reports import junit
from pytest_gpucluster.run_directory import require_writable
from pytest_gpucluster.verdict import BROKEN
from pytest_gpucluster.whole_file import write

_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd", "/proc")


def require_file(path: Path) -> None:
    """Make sure that a JUnit file can be kept at a path.

    Raises:
        OptionError: it is a directory, a stream of this process, or in a directory that cannot be written to.
    """
    what = f"--junitxml {path}"
    if any(str(path) == stream or str(path).startswith(f"{stream}/") for stream in _STREAMS):
        raise OptionError(
            f"{what}: the report is replaced while the run goes on, so that one is there however the run ends, and a "
            "stream cannot be replaced. Name a file, and print it afterwards: gpucluster report "
            "gpucluster-report/latest --junitxml -"
        )
    if path.is_dir():
        raise OptionError(f"{what}: is a directory; name a file in it")
    require_writable(path.parent, "the directory of --junitxml")


def problem_line(*, message: str, text: str, exit: int) -> dict[str, Any]:
    """Return the journal's line on why the run does not start."""
    name = "usage" if exit == 4 else "preflight"
    return {"type": "problem", "name": name, "outcome": "error", "message": message, "text": text}


def write_junit(path: Path, run_line: Mapping[str, Any], problem: Mapping[str, Any], exit: int) -> str | None:
    """Put the refusal in place of whatever the file says. Return why that was impossible, or None."""
    builder = JournalBuilder()
    builder.add(run_line)
    builder.add(problem)
    end = {"type": "end", "at": now(), "verdict": BROKEN, "exit": exit, "reason": problem["message"], "by": "rank 0"}
    builder.add(end)
    try:
        require_file(path)
        write(path, junit.render(builder.journal()))
    except (OptionError, OSError) as error:
        return f"{path} is not replaced, whatever it says is of an earlier run: {error}"
    return None


def asked_path(xmlpath: str) -> Path:
    """Return where ``--junitxml`` points to, read as pytest reads it."""
    return Path(os.path.abspath(os.path.expanduser(os.path.expandvars(xmlpath))))
