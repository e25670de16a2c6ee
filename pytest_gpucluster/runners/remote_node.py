"""Our side on a node: takes one request from the standard input, answers it, and ends.

Started by ``gpucluster run --hosts``.

It needs neither torch nor pytest, so that it can say that they are missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gpucluster import __version__
from pytest_gpucluster.errors import GpuClusterError
from pytest_gpucluster.runners import ssh
from pytest_gpucluster.runners.preflight import hostname, probe

_LONGEST_REQUEST = 1 << 22
_UNABLE = 1


def main() -> int:
    """Answer the request. What is said to the standard output is for the other side alone."""
    # Read byte by byte, as it were: what follows the first line is for whoever answers the request.
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _LONGEST_REQUEST:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    _say(ssh.HELLO, {"protocol": ssh.PROTOCOL, "version": __version__, "host": hostname()})
    try:
        request = ssh.read_request(bytes(line))
        do = _DO.get(request["do"])
        return do(request) if do is not None else _unable(f"{request['do']!r} is nothing that this version can do")
    except GpuClusterError as error:
        return _unable(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _unable(f"{where}{error.strerror or error}")


def _probe(request: Mapping[str, Any]) -> int:
    _say(ssh.ANSWER, probe(request))
    _say(ssh.END, {"exit": 0})
    return 0


def _run(request: Mapping[str, Any]) -> int:
    from pytest_gpucluster.runners.node_agent import GRACE_SECONDS, Job, supervise

    folder = request.get("folder")
    return supervise(
        Job(
            command=(sys.executable, "-m", "pytest_gpucluster", *map(str, request["words"])),
            directory=request.get("directory"),
            environ={**os.environ, **{str(name): str(value) for name, value in request.get("env", {}).items()}},
            folder=Path(folder) if folder else None,
        ),
        silent_seconds=float(request.get("silent_seconds", ssh.SILENT_SECONDS)),
        grace_seconds=float(request.get("grace_seconds", GRACE_SECONDS)),
    )


def _collect(request: Mapping[str, Any]) -> int:
    from pytest_gpucluster.runners.node_agent import OUTPUT, await_end, pack

    os.chdir(request.get("directory") or ".")
    folder = Path(request["folder"])
    ended = await_end(folder, float(request.get("wait_seconds", 0)))
    # Ranks of all nodes write their artifacts to one path, that of rank 0's node. Its log tells that this is its disk.
    beside = Path(request.get("beside") or folder)
    own = beside != folder and beside.is_dir() and not (beside / OUTPUT).exists()
    for piece in pack(folder, beside if own else None):
        _say(ssh.PART, piece)
    _say(ssh.END, {"exit": ended})
    return 0


_DO = {"probe": _probe, "run": _run, "collect": _collect}


def _say(kind: str, value: object) -> None:
    sys.stdout.buffer.write(ssh.encode(kind, value))
    sys.stdout.buffer.flush()


def _unable(why: str) -> int:
    _say(ssh.END, {"exit": None, "error": why})
    return _UNABLE


if __name__ == "__main__":
    sys.exit(main())
