"""The name of the store's host, resolved before anything connects to it.

torch retries an unknown name for minutes. The resolver may block, so each lookup has a thread of its own.
"""

from __future__ import annotations

import queue
import socket
import threading
import time

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.launchers import RankFacts

LOOKUP_SECONDS = 5.0
"""Source: this suite's rule; a resolver retries after 5 s (resolv.conf(5), timeout)."""
_RETRY_SECONDS = 0.5
_REPORT_SECONDS = 3.0
"""Delay of the other ranks' end: mpirun, torchrun's agent and `srun --kill-on-bad-exit` end all ranks when one fails,
and rank 0 has to write the report."""
_ADDRESS = "<address at which the other nodes reach the first one>"
_WHAT_TO_DO = {
    "torchrun": f"start torchrun with --master-addr={_ADDRESS}, the same on every node. With --rdzv-endpoint the "
    "agents choose the address: set each one's by --local-addr=<address of this node>",
    "slurm": f"`export MASTER_ADDR={_ADDRESS}` before srun, which forwards it; with --export name it there too",
    "openmpi": f"`export MASTER_ADDR={_ADDRESS}` and forward it: mpirun -x MASTER_ADDR",
    "kubernetes": f"`export MASTER_ADDR={_ADDRESS}`, or set it in the pod template: pod 0's name behind the headless "
    "service. It resolves only once pod 0 is up: let each pod wait for it before pytest starts, "
    "`until getent hosts $MASTER_ADDR; do sleep 1; done`",
}


def require_known(facts: RankFacts) -> None:
    """Resolve the name of the store's host. Not collective; a single process has no store.

    Raises:
        LaunchError: it does not resolve on this host, or not in time.
    """
    if facts.master_addr is None:
        return
    # DNS knows a pod's name only some time after its address.
    why = why_unknown(facts.master_addr, may_come=facts.launcher == "kubernetes")
    if why is None:
        return
    if facts.rank != 0:
        time.sleep(_REPORT_SECONDS)
    raise LaunchError(
        f"{facts}: {facts.master_addr}, the host of the store ({facts.master_addr_from}), does not resolve: {why}"
        f"\nfound: {facts.launcher} started {facts.world_size} ranks on {facts.nnodes} nodes; "
        f"`getent ahosts {facts.master_addr}` shows the same on this host"
        f"\nwhat to do: {_WHAT_TO_DO[facts.launcher]}"
    )


def why_unknown(host: str, *, may_come: bool = False) -> str | None:
    """Resolve a name within :data:`LOOKUP_SECONDS`, with retries after temporary failures.

    Args:
        host: a name or an address.
        may_come: retry also while the name is unknown.

    Returns:
        The resolver's last error; None once the name resolves.
    """
    end = time.monotonic() + LOOKUP_SECONDS
    why = f"no answer within {LOOKUP_SECONDS:g} s"
    retried = (socket.EAI_AGAIN, socket.EAI_NONAME) if may_come else (socket.EAI_AGAIN,)
    answers: queue.SimpleQueue[OSError | UnicodeError | None] = queue.SimpleQueue()
    while (left := end - time.monotonic()) > 0:
        threading.Thread(target=_resolve, args=(host, answers), name="gpucluster-lookup", daemon=True).start()
        try:
            error = answers.get(timeout=left)
        except queue.Empty:
            break
        if error is None:
            return None
        why = str(error)
        if not isinstance(error, socket.gaierror) or error.errno not in retried:
            break
        time.sleep(min(_RETRY_SECONDS, max(0.0, end - time.monotonic())))
    return why


def _resolve(host: str, answers: queue.SimpleQueue[OSError | UnicodeError | None]) -> None:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name at all
        answers.put(error)
    else:
        answers.put(None)
