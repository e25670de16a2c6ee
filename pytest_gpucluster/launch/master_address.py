"""The name of the store's host, looked up before anything connects to it.

torch repeats the lookup of a name that is unknown, and gives up after minutes. A lookup of the resolver itself may
block, so it is made in a thread of its own. Nothing here imports torch.
"""

from __future__ import annotations

import queue
import socket
import threading
import time

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.launchers import RankFacts

LOOKUP_SECONDS = 5.0
"""Source: this suite's rule; a resolver asks again after 5 s (resolv.conf(5), timeout)."""
_AGAIN_SECONDS = 0.5
_REPORT_SECONDS = 3.0
"""How much later the other ranks end than rank 0, which has to write the report: mpirun, torchrun's agent and
`srun --kill-on-bad-exit` end all ranks when the first one fails."""
_WHERE = "<address of the first node as the other nodes reach it>"
_WHAT_TO_DO = {
    "torchrun": f"start torchrun with --master-addr={_WHERE}, the same on every node. With --rdzv-endpoint the agents "
    "choose the address: give each its own by --local-addr=<address of this node>",
    "slurm": f"`export MASTER_ADDR={_WHERE}` before srun, which passes it on; with --export name it there as well",
    "openmpi": f"`export MASTER_ADDR={_WHERE}` and pass it on: mpirun -x MASTER_ADDR",
    "kubernetes": f"`export MASTER_ADDR={_WHERE}`, or set it in the pod template: pod 0's name behind the headless "
    "service. It is known only once pod 0 is up: let each pod wait for it before pytest starts, "
    "`until getent hosts $MASTER_ADDR; do sleep 1; done`",
}


def require_known(facts: RankFacts) -> None:
    """Look up the name of the store's host. Every rank does that by itself; a single process has no store.

    Raises:
        LaunchError: it does not resolve on this host, or the resolver gives no answer in time.
    """
    if facts.master_addr is None:
        return
    # A pod's name is unknown at first: DNS learns it some time after its address.
    why = why_unknown(facts.master_addr, may_come=facts.launcher == "kubernetes")
    if why is None:
        return
    if facts.rank != 0:
        time.sleep(_REPORT_SECONDS)
    raise LaunchError(
        f"{facts}: {facts.master_addr}, where the ranks are to meet ({facts.master_addr_from}), does not resolve: {why}"
        f"\nfound: {facts.launcher} started {facts.world_size} ranks on {facts.nnodes} nodes; "
        f"`getent ahosts {facts.master_addr}` asks the same on this host"
        f"\nwhat to do: {_WHAT_TO_DO[facts.launcher]}"
    )


def why_unknown(host: str, *, may_come: bool = False) -> str | None:
    """Look up a name for at most :data:`LOOKUP_SECONDS`, and again where the resolver says that it may know it later.

    Args:
        host: a name or an address.
        may_come: ask again as well where the name is not known.

    Returns:
        The resolver's last answer, or None once it knows the name.
    """
    end = time.monotonic() + LOOKUP_SECONDS
    why = f"no answer within {LOOKUP_SECONDS:g} s"
    again = (socket.EAI_AGAIN, socket.EAI_NONAME) if may_come else (socket.EAI_AGAIN,)
    answers: queue.SimpleQueue[OSError | UnicodeError | None] = queue.SimpleQueue()
    while (left := end - time.monotonic()) > 0:
        threading.Thread(target=_ask, args=(host, answers), name="gpucluster-lookup", daemon=True).start()
        try:
            error = answers.get(timeout=left)
        except queue.Empty:
            break
        if error is None:
            return None
        why = str(error)
        if not isinstance(error, socket.gaierror) or error.errno not in again:
            break
        time.sleep(min(_AGAIN_SECONDS, max(0.0, end - time.monotonic())))
    return why


def _ask(host: str, answers: queue.SimpleQueue[OSError | UnicodeError | None]) -> None:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # what is no host name at all is a UnicodeError
        answers.put(error)
    else:
        answers.put(None)
