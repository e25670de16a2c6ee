"""What NCCL writes to its log when it makes a communicator, as the described cluster would let it.

Source of the lines: NCCL 2.28, src/init.cc, src/plugin/net.cc, src/transport/p2p.cc, net.cc and nvls.cc.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_gpucluster.node.fabric.nccl_log import NcclLog
from pytest_gpucluster.simulation.cluster import Cluster

_RACK = "P2P"
"""The transport between nodes that NVLink connects."""


def write(cluster: Cluster, places: Sequence[tuple[str, int]], mine: int) -> None:
    """Append the lines of one rank to its process's log, where NCCL would write one.

    Args:
        cluster: its description.
        places: host and GPU of each rank of the communicator.
        mine: this rank's number in it.
    """
    path = NcclLog.of(os.environ, pid=os.getpid()).path
    if path is None or not path.parent.is_dir():
        return
    host, gpu = places[mine]
    with Path(path).open("a", encoding="utf-8") as log:
        for line in _lines(cluster, places, mine):
            log.write(f"{host}:{os.getpid()}:{os.getpid()} [{gpu}] NCCL INFO {line}\n")


def _lines(cluster: Cluster, places: Sequence[tuple[str, int]], mine: int) -> Iterator[str]:
    has, count, (host, gpu) = cluster.faults.amount, len(places), places[mine]
    yield f"NCCL version {cluster.nccl.version}+cuda{cluster.node.cuda}"
    if has("net-socket"):
        yield "NET/IB : No device found."
        yield f"NET/Socket : Using [0]{socket.gethostname()}:10.0.0.1<0>"
    if has("no-gdr", host):
        yield f"GPU Direct RDMA Disabled for HCA 0 '{cluster.port_of(gpu)}'"
    yield f"Using network {_network(cluster)}"
    several = len({place for place, _ in places}) > 1
    with_nvls = not has("nvls-off") and len({place for place in places if place[0] == host}) > 1
    yield f"NVLS multicast support is {'' if with_nvls else 'not '}available on dev {gpu}"
    for other, kind in (((mine + 1) % count, "send"), ((mine - 1) % count, "receive")):
        if other != mine:
            ends = (mine, other) if kind == "send" else (other, mine)
            via = _via(cluster, host, gpu, places[other][0])
            hop = " -> ".join(f"{end}[{places[end][1]}]" for end in ends)
            yield f"Channel 00/0 : {hop} [{kind}] via {via}"
    if with_nvls and not (several and cluster.nccl.transport == _RACK):
        yield f"NVLS comm 0x5581 headRank {gpu} nHeads {cluster.gpus_per_node} memSize 2097152"
    yield f"comm 0x5581 rank {mine} nranks {count} cudaDev {gpu} nvmlDev {gpu} busId {gpu}0 commId 0x1 - Init COMPLETE"


def _network(cluster: Cluster) -> str:
    name = "IB" if cluster.nccl.transport == _RACK else cluster.nccl.transport.partition("/")[2]
    return "Socket" if cluster.faults.amount("net-socket") else name


def _via(cluster: Cluster, host: str, gpu: int, other: str) -> str:
    if host == other:
        return "P2P/CUMEM"
    if cluster.nccl.transport == _RACK:
        return "P2P/MNNVL"
    direct = "" if cluster.faults.amount("no-gdr", host) or cluster.faults.amount("net-socket") else "/GDRDMA"
    return f"NET/{_network(cluster)}/{gpu}{direct}"
