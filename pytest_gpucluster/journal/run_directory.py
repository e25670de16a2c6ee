"""Where a run leaves its evidence, and its result as a site's hook gets it.

There is one folder per run under the report directory, never overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.errors import LaunchError, OptionError
from pytest_gpucluster.isolation.finding import EXCLUDE_FILE as EXCLUDE
from pytest_gpucluster.isolation.finding import excluded_hosts
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.verdict import ACCEPTED

ARTIFACTS = "artifacts"
"""Folder of a run in which each test has a folder for its files."""

# More than a block, so that a full disk is noticed.
_PROBE_BYTES = 64 * 1024


def require_writable(directory: Path, what: str) -> None:
    """Create a directory where it is missing, and write a small file there as a probe.

    Raises:
        OptionError: it cannot be written. The message has the path, the system's reason and what to do.
    """
    probe = directory / f".gpucluster-probe.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            content = b"." * _PROBE_BYTES
            while content:
                content = content[os.write(descriptor, content) :]
            # Some file systems (NFS, quotas) report an error only when the data leave this machine.
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
    except OSError as error:
        raise _unwritable(what, directory, error) from error


def _unwritable(what: str, directory: Path, error: OSError) -> OptionError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "free some space there, or name another directory"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        advice = "a file is in the way: move it, or name another directory"
    else:
        advice = "make it writable for this user, or name another directory"
    return OptionError(f"{what} {directory}: cannot be written to ({error.strerror or error}); {advice}")


def new_run_directory(report_dir: Path) -> Path:
    """Make ``<report_dir>/<YYYYmmdd-HHMMSS>/`` (UTC) for a run and let ``<report_dir>/latest`` point to it.

    A second run within a second gets ``-2`` and so on: evidence is never overwritten.

    Raises:
        OptionError: the directory is unwritable or full.
    """
    what = "the report directory"
    require_writable(report_dir, what)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    attempt = 1
    while True:
        directory = report_dir / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            directory.mkdir()
            break
        except FileExistsError:
            attempt += 1
        except OSError as error:
            raise _unwritable(what, report_dir, error) from error
    _point_latest_to(directory)
    return directory


def _point_latest_to(directory: Path) -> None:
    # A convenience: a file system without symbolic links, or a real folder named `latest`, must not stop a run.
    link = directory.parent / f".latest.{os.getpid()}"
    with contextlib.suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(directory.name, target_is_directory=True)
        try:
            link.replace(directory.parent / "latest")
        except OSError:
            link.unlink()


def artifacts_name(nodeid: str) -> str:
    """Return the name of a test's folder among the artifacts.

    >>> artifacts_name("acceptance/test_nccl.py::test_all_reduce[node-bf16]")
    'acceptance_test_nccl.py_test_all_reduce_node-bf16'
    """
    return re.sub(r"[^\w.-]+", "_", nodeid).strip("_")


@dataclass(frozen=True, kw_only=True)
class VerdictRecord:
    """A finished run. A hook cannot change its verdict or its exit code."""

    verdict: str
    """ACCEPTED, SELECTION PASSED, PASSED WITH DEVIATIONS, REHEARSED, SIMULATED, REJECTED, INCOMPLETE or BROKEN."""
    exit: int
    """The exit code of pytest on this rank (``gpucluster verdict --help`` has the table)."""
    reason: str
    """Why, in one line. It quotes names and messages of any origin: treat it as text, never as a command."""
    kind: str
    """Empty for a run on GPUs. REHEARSAL on cpu, SIMULATED on a simulated cluster: the result states nothing about
    hardware, so no action on hardware is due."""
    selection: bool
    """True where only a part of the suite was selected."""
    directory: Path
    """Absolute, the run's folder: journal, report.html, results.json, metrics.prom, maybe the JUnit file."""
    journal: Journal
    """The whole journal (``pytest_gpucluster.journal.journal``), without samples."""
    hosts: tuple[str, ...] = ()
    """The hosts of the run in the order of their first rank; empty where no rank has reported."""
    excluded: tuple[str, ...] = ()
    """The hosts in exclude.txt, by their Slurm names: confirmed as bad by the isolation, or named by a failed test."""
    job_id: str = ""
    """The Slurm job's id, else the launcher's id of the run; may be empty."""
    problems: tuple[str, ...] = ()
    """Why a field of this record is unknown, such as an exclude.txt that cannot be read."""

    @property
    def is_accepted(self) -> bool:
        """Return whether the whole suite passed on GPUs: exit code 0 alone does not state that."""
        return self.verdict == ACCEPTED and self.exit == 0 and not self.kind

    @classmethod
    def of(cls, journal: Journal, directory: Path, *, verdict: str, exit: int, reason: str) -> VerdictRecord:
        """Return the record of a run.

        Args:
            journal: of the run.
            directory: of the run, with exclude.txt if there is one.
            verdict: the word that pytest ends with.
            exit: its exit code.
            reason: why, in one line.
        """
        variables = journal.environment.variables if journal.environment is not None else {}
        excluded, problems = _excluded(directory / EXCLUDE)
        return cls(
            verdict=verdict,
            exit=exit,
            reason=reason,
            kind=journal.run.kind,
            selection=journal.run.selection,
            directory=directory,
            journal=journal,
            hosts=journal.hosts,
            excluded=excluded,
            job_id=variables.get("SLURM_JOB_ID") or journal.run.run_id,
            problems=problems,
        )


def _excluded(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        return excluded_hosts(path.read_text(encoding="utf-8")), ()
    except FileNotFoundError:
        return (), ()
    except (OSError, UnicodeDecodeError, LaunchError) as error:
        return (), (f"{path}: cannot be read, so no host is excluded here: {error}",)
