"""A folder that all ranks share, on whatever hosts they are."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from pytest_gpucluster.errors import EnvironmentBroken

PREFIX = "gpucluster-checkpoint-"

SEEN_SECONDS = 90.0
"""So long a network file system may take to show one host what another one has made. An NFS client that has once
looked for a name in vain may keep that for as long as what it knows of the folder, by default up to 60 s (Source:
nfs(5), acdirmax and lookupcache)."""


def make_own(folder: Path) -> Path:
    """Make a folder in another one, under a name that no other run has: nobody's files are in anybody's way.

    Raises: OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))


def wait_for(path: Path) -> None:
    """Wait until a file or folder that another rank has made is there.

    Raises: EnvironmentBroken if it does not come.
    """
    until = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            raise EnvironmentBroken(
                f"{path}, which another rank has made, is not there on this host after {SEEN_SECONDS:g} s. Choose a "
                "folder on a file system that all hosts share (--gpucluster-scratch)"
            )
        time.sleep(0.02)
