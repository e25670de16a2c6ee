"""The info of made-up nodes, in the form of `gpucluster node info all --json`."""

import copy
import json

from pytest_gpucluster.node.info import Sources, collect_info

_HERE = json.loads(json.dumps(collect_info("all", Sources())))
"""This host itself: so that a key which info renames is missed here, too."""
_GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory_total_bytes": 85520809984,
    "vbios": "96.00.5E",
    "mig": False,
    "ecc": True,
    "pcie_width": 16,
    "pcie_generation_max": 5,
    "power_limit_watts": 700.0,
    "nvlink_up": {str(link): True for link in range(18)},
}


def node_info(**more):
    """Return the info of a node of two GPUs and one HCA; ``more`` are "part.key" -> value."""
    node = copy.deepcopy(_HERE)
    node["gpus"] = {"why_not": "", "driver": "570.1", "count": 2, "gpus": [dict(_GPU), dict(_GPU)]}
    node["topology"] |= {"between_gpus": [["X", "NV18"], ["NV18", "X"]], "to_gpus": [["PIX", "SYS"]]}
    port = {"number": 1, "state": "active", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    device = {"name": "mlx5_0", "kind": "MT4129", "firmware": "28.39", "board": "MT_1", "ports": [port]}
    node["infiniband"] = {"why_not": "", "devices": [device]}
    node["mounts"] = [{"point": "/shared", "kind": "nfs4", "source": "s:/x", "network": True, "read_only": False}]
    for name, value in more.items():
        part, _, key = name.partition("__")
        node[part][key] = value
    return node


def write(folder, **nodes):
    """Write nodes' files; "_" in a name is "-"."""
    for name, node in nodes.items():
        text = node if isinstance(node, str) else json.dumps(node)
        (folder / f"{name.replace('_', '-')}.json").write_text(text)
