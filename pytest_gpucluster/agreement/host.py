"""A store in a process of its own, for launchers that bring none (srun, mpirun, a bare Kubernetes Job).

Rank 0 starts it before anybody connects. It lives in its own session, so that it survives rank 0, and it ends by itself
some time after rank 0 has ended: the other ranks may still have to read why.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys

from pytest_gpucluster.errors import StoreError

_LINGER_SECONDS = 20.0


def start(port: int, *, timeout_seconds: float = 120.0) -> subprocess.Popen[bytes]:
    """Start the store's process on this host and return once it listens.

    Raises:
        StoreError: the port is taken, or the process did not come up in time.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, "--port", str(port), "--pid", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_seconds)
    line = process.stdout.readline() if ready else b""
    process.stdout.close()
    if line.strip() != b"listening":
        process.kill()
        process.wait()
        raise StoreError(
            f"no store could be started on port {port} of this host. Another job may use the port: "
            "set MASTER_PORT to a free one on every rank"
        )
    return process


def main(argv: list[str] | None = None) -> int:
    """Host the store until rank 0 has been gone for a while."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True, help="the process of rank 0")
    arguments = parser.parse_args(argv)
    pidfd = os.pidfd_open(arguments.pid)

    import torch.distributed

    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # re-exported without a declaration
        "0.0.0.0", arguments.port, is_master=True, wait_for_workers=False)
    print("listening", flush=True)
    sys.stdout.close()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # replaces the closed stream until the process ends
    select.select([pidfd], [], [])
    select.select([], [], [], _LINGER_SECONDS)
    del store
    return 0


if __name__ == "__main__":
    sys.exit(main())
