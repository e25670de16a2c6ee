"""The software stack of a node, its network interfaces and HCAs.

The stack is driver, Fabric Manager, kernel modules, CUDA, NCCL, torch and OFED.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from pytest_gpucluster.node import infiniband, pci
from pytest_gpucluster.node.interfaces import Interface
from pytest_gpucluster.node.programs import Run
from pytest_gpucluster.node.sysfs import Tree, pci_address

_VERSION = "/proc/driver/nvidia/version"
_MODULES = ("nvidia", "nvidia_uvm", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "nvidia_fs", "mlx5_ib", "ib_uverbs")
"""Of the driver, of GPUDirect RDMA, of GDRCopy, of GPUDirect Storage, and of the RDMA stack."""
_LOADED = "/sys/module"
_LIBRARIES = ("usr/lib/*-linux-gnu", "usr/lib64")
_TOOLKIT = "/usr/local/cuda/version.json"
_FABRIC_MANAGER = ("systemctl", "is-active", "nvidia-fabricmanager")
_OFED = ("ofed_info", "-s")

Version = Callable[[str], "str | None"]


def version_of(distribution: str) -> str | None:
    """Return the version of an installed Python distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_nccl() -> str | None:
    """Return the version of the NCCL package installed for torch, such as nvidia-nccl-cu12."""
    names = {str(one.metadata["Name"]).lower(): one.version for one in metadata.distributions() if one.metadata["Name"]}
    return next((version for name, version in sorted(names.items()) if name.startswith("nvidia-nccl")), None)


def read_stack(
    tree: Tree, run: Run, *, version: Version = version_of, nccl: Callable[[], str | None] = installed_nccl
) -> dict[str, Any]:
    """Read the software stack.

    Returns:
        ``driver``, the loaded kernel driver's version; ``driver_kind``: "open" or "proprietary" kernel modules;
        ``toolkit``, of the CUDA toolkit in /usr/local/cuda; ``torch``, ``nccl``, ``pytest_gpucluster``: installed for
        this Python, or else the system's NCCL library; ``fabric_manager``, such as active; ``ofed``;
        ``modules``, relevant kernel modules, each with its version, "" where it has none;
        ``not_available``, why a key is null.

    Source: NVIDIA driver's README, "The /proc/driver/nvidia Interface"; systemctl(1), is-active.
    """
    missing: dict[str, str] = {}
    text = tree.text(_VERSION)
    if text is None:
        missing["driver"] = f"{_VERSION} cannot be read: no NVIDIA driver is loaded, or it is hidden here"
    found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)", text or "")
    stack = {
        "driver": found[1] if found else None,
        "driver_kind": None if text is None else "open" if "Open Kernel Module" in text else "proprietary",
        "toolkit": _toolkit(tree),
        "torch": version("torch"),
        "nccl": nccl() or installed_library(tree),
        "pytest_gpucluster": version("pytest-gpucluster"),
        "fabric_manager": _fabric_manager(run, missing),
        "ofed": _ofed(run, missing),
        "modules": _modules(tree, missing),
    }
    return {**stack, "not_available": missing}


def _modules(tree: Tree, missing: dict[str, str]) -> dict[str, str] | None:
    if not tree.has(_LOADED):
        missing["modules"] = f"{_LOADED} cannot be read"
        return None
    return {name: tree.text(f"{_LOADED}/{name}/version") or "" for name in _MODULES if tree.has(f"{_LOADED}/{name}")}


def installed_library(tree: Tree) -> str | None:
    """Return the version of the system's NCCL, as in NVIDIA's containers, by the name of its file."""
    names = (path.name for folder in _LIBRARIES for path in tree.path("/").glob(f"{folder}/libnccl.so.*"))
    versions = [found[1] for found in (re.fullmatch(r"libnccl\.so\.(\d+\.\d+\.\d+)", name) for name in names) if found]
    return max(versions, key=lambda version: [int(part) for part in version.split(".")], default=None)


def _toolkit(tree: Tree) -> str | None:
    try:
        version = json.loads(tree.text(_TOOLKIT) or "")["cuda"]["version"]
    except (ValueError, KeyError, TypeError):
        return None  # no toolkit, or a much older one
    return version if isinstance(version, str) else None


def _fabric_manager(run: Run, missing: dict[str, str]) -> str | None:
    answer = run(_FABRIC_MANAGER)
    # The exit code is 3 where the service does not run, with its state as output.
    words = answer.text.strip().splitlines()
    if len(words) == 1 and re.fullmatch(r"[a-z-]+", words[0]):
        return words[0]
    missing["fabric_manager"] = answer.why_not or "systemctl printed nothing"
    return None


def _ofed(run: Run, missing: dict[str, str]) -> str | None:
    answer = run(_OFED)
    if answer.why_not:
        missing["ofed"] = answer.why_not
        return None
    return answer.text.strip().rstrip(":") or None


_NET = "/sys/class/net"


def network_interfaces(tree: Tree, interfaces: Callable[[], Sequence[Interface]]) -> list[dict[str, Any]]:
    """Read each network interface but the loopback.

    Returns:
        ``name``; ``state``, such as up; ``speed_mbps``, null where there is none, as of a bridge; ``mtu``; ``mac``;
        ``driver``; ``pci``; ``addresses``.

    Source: Linux kernel, Documentation/ABI/testing/sysfs-class-net.
    """
    addresses = {one.name: list(one.addresses) for one in interfaces()}
    names = tree.entries(_NET) or sorted(addresses)
    return [{**_interface(tree, name), "addresses": addresses.get(name, [])} for name in names if name != "lo"]


def _interface(tree: Tree, name: str) -> dict[str, Any]:
    device = f"{_NET}/{name}/device"
    speed = tree.number(f"{_NET}/{name}/speed")  # -1, or no answer at all, where there is no link
    return {
        "name": name,
        "state": tree.text(f"{_NET}/{name}/operstate"),
        "speed_mbps": speed if speed is not None and speed > 0 else None,
        "mtu": tree.number(f"{_NET}/{name}/mtu"),
        "mac": tree.text(f"{_NET}/{name}/address") or None,
        "driver": tree.target(f"{device}/driver"),
        "pci": pci_address(tree.target(device) or ""),
    }


def network_adapters(tree: Tree) -> dict[str, Any]:
    """Read each HCA and its ports.

    Returns:
        ``why_not``, why there is none, "" where there are some; ``devices``: ``name``, ``kind``, ``firmware``,
        ``board``, ``guid``, ``pci``, ``numa_node`` and ``ports``, each with ``number``, ``state``, ``phys_state``,
        ``rate``, ``rate_gbps``, ``link_layer``, ``lid``, ``sm_lid`` and ``errors``, the error counters that are not
        zero; ``peer_memory``: ``module`` and ``why_no_dma_buf``.
    """
    known = infiniband.read(tree.path("/sys"), gids=False)
    peer = pci.read_peer_memory(tree.path("/sys"), tree.path("/proc"), tree.text("/proc/sys/kernel/osrelease"))
    wanted = ("number", "state", "phys_state", "rate", "rate_gbps", "link_layer", "lid", "sm_lid")
    bad = (*infiniband.ERRORS, *infiniband.HARDWARE_ERRORS, infiniband.CARRIER_DOWN)
    devices = []
    for device in known.devices:
        ports = [
            {
                **{name: getattr(port, name) for name in wanted},
                "errors": {name: count for name, count in port.counters.items() if name in bad and count},
            }
            for port in device.ports
        ]
        values = {
            name: getattr(device, name) for name in ("name", "kind", "firmware", "board", "guid", "pci", "numa_node")
        }
        devices.append({**values, "ports": ports})
    return {
        "why_not": known.why_not,
        "devices": devices,
        "peer_memory": {"module": peer.module, "why_no_dma_buf": peer.why_no_dma_buf},
    }
