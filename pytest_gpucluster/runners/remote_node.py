"""The side of the protocol that runs on a node: reads one request from standard input, answers it, and ends.

Started by ``gpucluster run --hosts``. It needs neither torch nor pytest, so that it can report that they are missing.
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
from pytest_gpucluster.runners.preflight import collect_facts, hostname

_LONGEST_REQUEST = 1 << 22
_FAILED = 1


def main() -> int:
    """Answer the request. Standard output belongs to the protocol."""
    # Byte by byte: what follows the first line is read by the function that answers the request.
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _LONGEST_REQUEST:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    _send(ssh.HELLO, {"protocol": ssh.PROTOCOL, "version": __version__, "host": hostname()})
    try:
        request = ssh.read_request(bytes(line))
        do = _DO.get(request["do"])
        return do(request) if do is not None else _fail(f"this version has no request {request['do']!r}")
    except GpuClusterError as error:
        return _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")


def _probe(request: Mapping[str, Any]) -> int:
    _send(ssh.FACTS, collect_facts(request))
    _send(ssh.END, {"exit": 0})
    return 0


def _run(request: Mapping[str, Any]) -> int:
    from pytest_gpucluster.runners.node_agent import Job, supervise

    folder = request.get("folder")
    return supervise(
        Job(
            command=(sys.executable, "-m", "pytest_gpucluster", *map(str, request["words"])),
            directory=request.get("directory"),
            environ={**os.environ, **{str(name): str(value) for name, value in request.get("env", {}).items()}},
            folder=Path(folder) if folder else None,
        )
    )


def _collect(request: Mapping[str, Any]) -> int:
    from pytest_gpucluster.runners.node_agent import OUTPUT_FILE, await_end, pack

    os.chdir(request.get("directory") or ".")
    folder = Path(request["folder"])
    code = await_end(folder, float(request.get("wait_seconds", 0)))
    # Ranks of all nodes write their artifacts to the path of rank 0's node. Its log shows whether that is its own disk.
    first = Path(request.get("first_folder") or folder)
    has_artifacts = first != folder and first.is_dir() and not (first / OUTPUT_FILE).exists()
    for piece in pack(folder, first if has_artifacts else None):
        _send(ssh.PART, piece)
    _send(ssh.END, {"exit": code})
    return 0


_DO = {"probe": _probe, "run": _run, "collect": _collect}


def _send(kind: str, value: object) -> None:
    sys.stdout.buffer.write(ssh.encode(kind, value))
    sys.stdout.buffer.flush()


def _fail(problem: str) -> int:
    _send(ssh.END, {"exit": None, "error": problem})
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
