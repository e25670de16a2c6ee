"""A store in a process of its own, for launchers that bring none (srun, mpirun, a bare Kubernetes Job).

Rank 0 starts it before any rank connects. It lives in its own session, so that it survives rank 0: the other ranks may
still have to read why the run ended. It notifies them at once when rank 0 exits without a message, and it exits by
itself when every rank has left, or some time after rank 0.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import time
from typing import Any

from pytest_gpucluster.agreement import exchange
from pytest_gpucluster.agreement.store import Store, prefix_of
from pytest_gpucluster.errors import StoreError
from pytest_gpucluster.launch.launchers import RankFacts

_LINGER_SECONDS = 20.0
_LAST_WORDS_SECONDS = 0.2
"""A rank says goodbye before its last look at the store."""
_POLL_SECONDS = 0.1
_NO_LOOKUPS = "attempts:0"
"""For RES_OPTIONS: DNS is not asked at all. The store's only thread looks up the name of each address that connects,
for torch's logs, one after the other, and answers no rank during the look-up. This process looks up nothing else.

Source: resolv.conf(5), which RES_OPTIONS amends; torch/csrc/distributed/c10d/socket.cpp, formatSockAddr.
"""


def start(facts: RankFacts, *, timeout_seconds: float = 120.0) -> None:
    """Start the store's process on this host and return once it listens. Rank 0 only.

    Raises:
        StoreError: the port is taken, or the process did not come up in time.
    """
    command = [sys.executable, "-m", __name__, "--port", str(facts.master_port), "--pid", str(os.getpid())]
    command += ["--prefix", prefix_of(facts), "--world-size", str(facts.world_size)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "RES_OPTIONS": f"{os.environ.get('RES_OPTIONS', '')} {_NO_LOOKUPS}".strip()},
    )
    assert process.stdout is not None
    import torch.distributed  # noqa: F401  # needed next in any case, and the new process is busy with the same

    ready, _, _ = select.select([process.stdout], [], [], timeout_seconds)
    line = process.stdout.readline().decode("utf-8", "backslashreplace").strip() if ready else ""
    process.stdout.close()
    if line != "listening":
        process.kill()
        process.wait()
        raise StoreError(
            f"no store could be started on port {facts.master_port} of {facts.hostname} "
            f"({line or f'no answer within {timeout_seconds:g} s'}). Another job may use the port: "
            "set MASTER_PORT to a free one on every rank"
        )
    process.returncode = 0  # it outlives this process on purpose, which is no reason for a warning


def main(argv: list[str] | None = None) -> int:
    """Host the store for as long as a rank may need it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True, help="the process of rank 0")
    parser.add_argument("--prefix", required=True, help="what the run's keys begin with")
    parser.add_argument("--world-size", type=int, required=True)
    arguments = parser.parse_args(argv)
    pidfd = os.pidfd_open(arguments.pid)

    import torch.distributed

    dist: Any = torch.distributed  # re-exports its C++ classes without declaring them

    try:
        tcp = dist.TCPStore("0.0.0.0", arguments.port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        print(next(iter(str(error).splitlines()), "no reason given"), flush=True)
        return 1
    print("listening", flush=True)
    sys.stdout.close()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # replaces the closed stream until the process ends
    select.select([pidfd], [], [])
    _outlive_rank_0(dist.PrefixStore(arguments.prefix, tcp), arguments.world_size)
    return 0


def _outlive_rank_0(store: Store, world_size: int) -> None:
    if not store.check(["bye/0"]):
        exchange.post_event(
            store, "lost", rank=0, message="its process has exited without a message (killed, or ended by os._exit)"
        )
    others = [f"bye/{rank}" for rank in range(1, world_size)]
    until = time.monotonic() + _LINGER_SECONDS
    while not store.check(others) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    time.sleep(_LAST_WORDS_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
