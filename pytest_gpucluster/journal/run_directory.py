"""Where a run leaves its evidence: one folder per run under the report directory, never overwritten."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from pathlib import Path

from pytest_gpucluster.errors import OptionError

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
