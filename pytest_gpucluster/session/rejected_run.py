"""The JUnit file of a run that is rejected at start: an earlier run's file must never pass for this one's.

If a run is rejected before the recorder runs (contradictory launcher variables, an unwritable report directory), no
other process writes the file.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gpucluster.agreement.exchange import AbortReason
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.files import atomic_write
from pytest_gpucluster.journal.journal import SCHEMA_VERSION, JournalBuilder
from pytest_gpucluster.journal.run_directory import require_writable
from pytest_gpucluster.journal.test_record import now
from pytest_gpucluster.journal.verdict import BROKEN
from pytest_gpucluster.reports import junit
from pytest_gpucluster.session.selection import LISTING

_BEGINNING_BYTES = 4096
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd", "/proc")


def require_file(path: Path) -> None:
    """Make sure that a JUnit file can be kept at a path.

    Raises:
        OptionError: it is a directory, another file than a JUnit report, a stream of this process, or in a directory
            that cannot be written to.
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
    if path.is_file() and path.stat().st_size and not _is_report(path):
        raise OptionError(f"{what}: is a file that is no JUnit report, and would be replaced; name another one")
    require_writable(path.parent, "the directory of --junitxml")


NAMES = {4: "usage", 11: "preflight"}
"""Exit code -> how reports call the problem by which a run does not start."""


def write_junit(path: Path, run_line: Mapping[str, Any], reason: AbortReason) -> str | None:
    """Put the reason why there is no run into the file. Return why that was impossible, or None."""
    end = {"type": "end", "at": now(), "verdict": BROKEN, "exit": reason.exit, "reason": reason.message, "by": "rank 0"}
    text = reason.text or reason.message
    problem = {"type": "problem", "name": reason.name, "outcome": "error", "message": reason.message, "text": text}
    builder = JournalBuilder()
    for line in (run_line, problem, end):
        builder.add(line)
    try:
        require_file(path)
        atomic_write(path, junit.render(builder.journal()))
    except (OptionError, OSError) as error:
        return f"{path} is not replaced, whatever it says is of an earlier run: {error}"
    return None


def claim(path: Path) -> socket.socket | None:
    """Take a JUnit file for a run of this host; None where another one that is alive has taken it.

    The name is bound to a socket without a file, which goes with the process however it ends. Source: unix(7), abstract
    sockets.
    """
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
    claimed = socket.socket(socket.AF_UNIX)
    try:
        claimed.bind(f"\0gpucluster-junit-{name}")
    except OSError as error:
        claimed.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return claimed


def replace_earlier(asked: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Let no JUnit file of an earlier run survive where pytest ends before this one begins, as by a broken conftest.

    Rank 0 only, before any conftest is loaded. Under torchrun there is a file from now on, also where there was none: a
    rank may be killed at any time. Arguments as of :func:`replace_report`.
    """
    # A run that torchrun starts again has its verdict, and its report stands.
    not_the_first = ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RESTART_COUNT"]
    if "RANK" not in environ:  # else torchrun has started this rank in the pod
        not_the_first.append("JOB_COMPLETION_INDEX")
    if any(environ.get(name, "0") != "0" for name in not_the_first):
        return
    text = "rank 0 ended before the run began, by a conftest, an option or a signal; its output says why"
    is_launched = "TORCHELASTIC_ERROR_FILE" in environ
    reason = AbortReason(name=NAMES[4], message=text, exit=4)
    replace_report(asked, reason, only_earlier=not is_launched, environ=environ)


def replace_report(
    asked: argparse.Namespace,
    reason: AbortReason,
    *,
    only_earlier: bool,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Put the reason why there is no run into the JUnit file that was asked for.

    One rank only. The file of a run that is alive stays. So does what is no report: the option may name, by mistake,
    what the run is to read.

    Args:
        asked: the options that are known before any conftest is loaded.
        reason: why there is no run.
        only_earlier: leave no file where there was none.
        environ: this process's variables.
    """
    path = getattr(asked, "xmlpath", None)
    no_run = any(getattr(asked, name, False) for name in (*LISTING, "help", "version"))
    if not path or no_run or "PYTEST_XDIST_WORKER" in environ:
        return
    file = asked_path(path)
    claimed = claim(file) if _is_report(file) or not (only_earlier or file.exists()) else None
    if claimed is None:
        return
    with claimed:
        line = {"type": "run", "schema_version": SCHEMA_VERSION, "started_at": now(), "hostname": socket.gethostname()}
        lost = write_junit(file, line, reason)
    if lost is not None:
        print(f"ERROR: {lost}", file=sys.stderr)


def _is_report(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"<testsuite" in file.read(_BEGINNING_BYTES)
    except OSError:
        return False


def asked_path(xmlpath: str) -> Path:
    """Return where ``--junitxml`` points to, read as pytest reads it."""
    return Path(os.path.abspath(os.path.expanduser(os.path.expandvars(xmlpath))))
