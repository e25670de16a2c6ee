"""Nodes with eight ports for tests, made of the product's own types, with anything changed."""

import dataclasses

from pytest_gpucluster.node.fabric.ports import NodePorts
from pytest_gpucluster.node.infiniband import Adapters, Device, Gid, Port
from pytest_gpucluster.node.pci import PeerMemory

PEERMEM = PeerMemory(module="nvidia_peermem", why_no_dma_buf="the driver's kernel modules are not the open ones")


def port(index, **changes):
    """Return an active InfiniBand port."""
    settings = {
        "device": f"mlx5_{index}",
        "number": 1,
        "state": "ACTIVE",
        "phys_state": "LinkUp",
        "rate_gbps": 400.0,
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
        "lid": index + 1,
        "sm_lid": 1,
        "counters": {"link_downed": 0, "symbol_error": 0},
    }
    return Port(**{**settings, **changes})


def roce(index, **changes):
    """Return an active RoCE port with an IPv4 address."""
    gids = (
        Gid(index=2, address="0000:0000:0000:0000:0000:ffff:0a00:0004", kind="IB/RoCE v1", interface="eth2"),
        Gid(index=3, address="0000:0000:0000:0000:0000:ffff:0a00:0004", kind="RoCE v2", interface="eth2"),
    )
    return port(index, **{"link_layer": "Ethernet", "gids": gids, **changes})


def node(host="gpu-00", *, ports=8, changed=None, cards=None, without=(), make=port, **changes):
    """Return a node. ``changed`` and ``cards``: number of a port -> what is different of it, or of its card."""
    devices = tuple(
        Device(
            **{
                "name": f"mlx5_{index}",
                "kind": "MT4129",
                "firmware": "28.39.2048",
                "board": "MT_0000000838",
                "pci": f"0000:{index + 16:02x}:00.0",
                "numa_node": index // 4,
                "ports": (make(index, **(changed or {}).get(index, {})),),
                **(cards or {}).get(index, {}),
            }
        )
        for index in range(ports)
        if index not in without
    )
    found = NodePorts(host=host, adapters=Adapters(devices=devices), peer_memory=PEERMEM)
    return dataclasses.replace(found, **changes)


DOWN = {"state": "DOWN", "phys_state": "Disabled"}
