"""Reads the facts for advice about NCCL: from sysfs, procfs, the firmware's tables, the environment.

Nothing here needs root, and nothing is changed. What is unreadable is left out and never guessed.

Source: Linux kernel, Documentation/ABI/testing/sysfs-class-net, sysfs-class-dmi-id and sysfs-bus-pci; proc_net(5),
/proc/net/route.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.launchers import allocation, detect
from pytest_gpucluster.metrics.datasheets import SKUS, Promise, promise_of
from pytest_gpucluster.node import infiniband, info, info_gpus, pci
from pytest_gpucluster.node.fabric.nccl_facts import DISTANCES, Card, Facts, Gpu, Network, Provider
from pytest_gpucluster.node.fabric.ports import FabricSources
from pytest_gpucluster.node.infiniband import ETHERNET, Adapters, Device, Port
from pytest_gpucluster.node.interfaces import Interface
from pytest_gpucluster.node.interfaces import interfaces as own_interfaces
from pytest_gpucluster.node.pci import PeerMemory
from pytest_gpucluster.node.processes import Output
from pytest_gpucluster.node.sysfs import PCI_DEVICES, Tree, pci_address

_NET, _DMI = "/sys/class/net", "/sys/class/dmi/id"
_VERBS = "/dev/infiniband"
_ROUTES, _ROUTES_6 = "/proc/net/route", "/proc/net/ipv6_route"
_RTF_UP = 0x1  # linux/route.h
_ANY, _ANY_6 = "0" * 8, "0" * 32
_INFINIBAND_CLASS = "0x0207"
"""PCI class of an InfiniBand controller. Source: linux/pci_ids.h, PCI_CLASS_NETWORK_INFINIBAND."""
_ETHERNET_CLASS, _MELLANOX = "0x0200", "0x15b3"
"""An Ethernet controller of NVIDIA's (Mellanox), which can do RoCE. Source: linux/pci_ids.h, PCI_CLASS_NETWORK_ETHERNET
and PCI_VENDOR_ID_MELLANOX."""
_GPU_CLASS, _NVIDIA = "0x0302", "0x10de"
"""A GPU without display output. Source: linux/pci_ids.h, PCI_CLASS_DISPLAY_3D and PCI_VENDOR_ID_NVIDIA."""
_AMAZON, _EFA_DEVICES = "0x1d0f", "0xefa"
"""Amazon's PCI vendor, and the prefix of the numbers of its EFA devices. Source: Linux kernel,
drivers/infiniband/hw/efa/efa_main.c."""
_EFA_MODULE = "efa_nv_peermem"
"""Amazon's own module for GPU memory; an older EFA driver shows by an attribute ``gdr`` that it can access it. Source:
openucx/ucx issue 10966; awslabs/libfabric-ci-scripts pull request 176."""
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Asset tag of every Azure machine, and of no other Hyper-V. Source: cloud-init, tools/ds-identify."""


@dataclass(frozen=True, kw_only=True)
class FabricTree(Tree):
    """The kernel's files, with sysfs and procfs of the fabric's sources."""

    sources: FabricSources

    def path(self, absolute: str) -> Path:
        """Return the path of a file of ``/proc``, ``/sys`` or the root."""
        for mount, place in (("/sys", self.sources.sysfs), ("/proc", self.sources.proc)):
            if absolute == mount or absolute.startswith(f"{mount}/"):
                return place / absolute[len(mount) :].lstrip("/")
        return super().path(absolute)


@dataclass(frozen=True, kw_only=True)
class VisibleGpus:
    """The GPUs of a node. ``why_not``: why some facts are unknown; "" where none is."""

    gpus: tuple[Gpu, ...] = ()
    why_not: str = ""
    nvlink: bool = False
    nvls: bool = False


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Sources of a node's facts. Tests put their own here."""

    fabric: FabricSources = field(default_factory=FabricSources)
    root: Path = Path("/")
    hostname: Callable[[], str] = socket.gethostname
    interfaces: Callable[[], Sequence[Interface]] = own_interfaces
    names: Callable[[], Sequence[str]] = lambda: [name for _, name in socket.if_nameindex()]
    gpus: Callable[[], VisibleGpus] = lambda: gpus_by_nvml(info_gpus.run_child)
    nccl: Callable[[Tree], str | None] = lambda tree: info.installed_nccl() or info.installed_library(tree)


def collect_facts(sources: Sources) -> Facts:
    """Return the facts of this node."""
    tree = FabricTree(root=sources.root, sources=sources.fabric)
    environ, host = sources.fabric.environ, sources.hostname()
    launcher, nnodes = _launched(environ, host)
    visible = sources.gpus()
    adapters = infiniband.read(sources.fabric.sysfs)
    of_node = _gpus_of_node(tree, visible.gpus)
    default = _default_interfaces(tree)
    return Facts(
        host=host,
        launcher=launcher,
        scheduler=allocation(environ).name,
        nnodes=nnodes,
        local_ranks=max(1, len(visible.gpus)),
        container=info.container(tree, environ),
        provider=_provider(tree),
        gpus=visible.gpus,
        gpus_unknown=visible.why_not,
        gpus_of_node=of_node,
        nvlink=visible.nvlink,
        nvls=visible.nvls,
        adapters=adapters,
        cards=tuple(_cards(tree, adapters, of_node)),
        rdma_on_bus=tuple(_rdma_on_bus(tree)) if adapters.why_not else (),
        verbs=tuple(name for name in tree.entries(_VERBS) if name.startswith("uverbs")),
        peer_memory=_peer_memory(tree, adapters),
        networks=tuple(_networks(tree, sources.interfaces(), default)),
        interfaces=tuple(sources.names()),
        nccl=sources.nccl(tree),
        settings=sources.fabric.settings(),
    )


def gpus_by_nvml(query: Callable[[], Output]) -> VisibleGpus:
    """Query NVML for the GPUs of this node, in a process of its own."""
    found = info_gpus.read_gpus(query())
    gpus = tuple(Gpu(name=str(gpu["name"]), pci=str(gpu["pci"])) for gpu in found["gpus"])
    ends = [kind for gpu in found["gpus"] for kind, _ in (gpu["nvlink_ends"] or {}).values()]
    why_not = found["why_not"] or ("" if gpus else "NVML shows none to this process")
    promise = _promise(gpus)
    return VisibleGpus(
        gpus=gpus,
        why_not=why_not,
        nvlink=bool(ends),
        nvls="switch" in ends and promise is not None and promise.fabric_state,
    )


def gpus_of_ranks(inventory: Sequence[Mapping[str, Any]], node_rank: int) -> VisibleGpus:
    """Return the GPUs of a node's ranks; a rank on cpu has none."""
    own = [entry["gpu"] for entry in inventory if entry["node_rank"] == node_rank and entry["gpu"]]
    gpus = tuple(Gpu(name=str(gpu["name"]), pci=str(gpu["pci_bus_id"])) for gpu in own)
    promise = _promise(gpus)
    return VisibleGpus(
        gpus=gpus,
        nvlink=promise is not None and bool(promise.nvlinks),
        nvls=promise is not None and promise.nvswitch and promise.fabric_state,
    )


def _promise(gpus: Sequence[Gpu]) -> Promise | None:
    names = {gpu.name for gpu in gpus}
    skus = [sku.name for sku in SKUS.values() if len(names) == 1 and sku.matches(next(iter(names)))]
    return promise_of(skus[0]) if len(skus) == 1 else None


def _launched(environ: Mapping[str, str], host: str) -> tuple[str, int | None]:
    """Return the launcher and the number of nodes; variables that contradict each other are for the preflight."""
    try:
        facts = detect(environ, host)
    except LaunchError:
        return "", allocation(environ).nnodes
    return ("", allocation(environ).nnodes) if facts.launcher == "single" else (facts.launcher, facts.nnodes)


def _provider(tree: Tree) -> Provider | None:
    """Return the cloud by the firmware's tables, which any user may read.

    Source: cloud-init, tools/ds-identify: sys_vendor "Amazon EC2", product_name "Google Compute Engine", and the asset
    tag of Azure.
    """
    dmi = {name: tree.text(f"{_DMI}/{name}") or "" for name in ("sys_vendor", "product_name", "chassis_asset_tag")}
    if dmi["sys_vendor"] == "Amazon EC2":
        return "AWS"
    if dmi["product_name"] == "Google Compute Engine":
        return "Google Cloud"
    if dmi["chassis_asset_tag"] == _AZURE_TAG:
        return "Azure"
    return None


def _gpus_of_node(tree: Tree, visible: Sequence[Gpu]) -> tuple[str, ...]:
    """Return the addresses of all GPUs, for a job or a container may have some of them only, and cards close to the
    others belong to the fabric, too. A virtual function is not counted."""
    known = {address for gpu in visible if (address := pci_address(gpu.pci)) is not None}
    for address in tree.entries(PCI_DEVICES):
        kind, vendor, _ = _identity(tree, address)
        if kind.startswith(_GPU_CLASS) and vendor == _NVIDIA and not tree.has(f"{PCI_DEVICES}/{address}/physfn"):
            known.add(address)
    return tuple(sorted(known))


def _peer_memory(tree: FabricTree, adapters: Adapters) -> PeerMemory:
    """Return how cards access GPU memory. EFA has ways of its own."""
    found = pci.read_peer_memory(tree.sources.sysfs, tree.sources.proc, tree.text("/proc/sys/kernel/osrelease"))
    if found.module:
        return found
    if tree.has(f"/sys/module/{_EFA_MODULE}"):
        return replace(found, module=_EFA_MODULE)
    if any(tree.text(f"/sys/class/infiniband/{device.name}/gdr") == "1" for device in adapters.devices):
        return replace(found, module="efa, with gdr")
    return found


def _cards(tree: Tree, adapters: Adapters, gpus: Sequence[str]) -> Iterator[Card]:
    for device in adapters.devices:
        folder = f"/sys/class/infiniband/{device.name}/device"
        distance = _distance(tree, device, gpus)
        for port in device.ports:
            yield Card(
                port=port,
                board=device.board,
                driver=tree.target(f"{folder}/driver") or "",
                pci=device.pci,
                interface=_interface(tree, folder, port),
                distance=distance,
            )


def _interface(tree: Tree, folder: str, port: Port) -> str:
    """Return the network interface of a RoCE port: that of its first address, or the only one of its card."""
    if port.link_layer != ETHERNET:
        return ""
    interface = tree.text(f"/sys/class/infiniband/{port.device}/ports/{port.number}/gid_attrs/ndevs/0")
    names = tree.entries(f"{folder}/net")
    return interface or (names[0] if len(names) == 1 else "")


def _distance(tree: Tree, device: Device, gpus: Sequence[str]) -> str:
    distances = [info_gpus.by_kernel(tree, device.pci, gpu) for gpu in gpus]
    return next((distance for distance in DISTANCES if distance in distances), "")


def _rdma_on_bus(tree: Tree) -> Iterator[str]:
    for address in tree.entries(PCI_DEVICES):
        kind, vendor, device = _identity(tree, address)
        can_roce = kind.startswith(_ETHERNET_CLASS) and vendor == _MELLANOX
        is_efa = vendor == _AMAZON and device.startswith(_EFA_DEVICES)
        if kind.startswith(_INFINIBAND_CLASS) or can_roce or is_efa:
            yield address


def _identity(tree: Tree, address: str) -> tuple[str, str, str]:
    """Return class, vendor and device of a PCI device, each "" where it is unknown."""
    kind, vendor, device = (
        tree.text(f"{PCI_DEVICES}/{address}/{name}") or "" for name in ("class", "vendor", "device")
    )
    return kind, vendor, device


def _networks(tree: Tree, found: Sequence[Interface], default: frozenset[str]) -> Iterator[Network]:
    for one in found:
        if one.name == "lo" or not one.running or not one.addresses:
            continue
        speed = tree.number(f"{_NET}/{one.name}/speed")  # -1, or unreadable, where it is unknown
        yield Network(
            interface=one,
            is_real=_is_real(tree, one.name),
            driver=tree.target(f"{_NET}/{one.name}/device/driver") or "",
            speed_mbps=speed if speed is not None and speed > 0 else None,
            is_default=one.name in default,
        )


def _is_real(tree: Tree, name: str) -> bool:
    """Whether it is a card or made of cards, and not a bridge, a tunnel or one end of a pair."""
    if tree.has(f"{_NET}/{name}/bridge"):
        return False
    return any(tree.has(f"{_NET}/{one}/device") for one in _with_lower(tree, name))


def _with_lower(tree: Tree, name: str) -> frozenset[str]:
    """Return an interface and its lower ones: a VLAN's, a bond's, a bridge's."""
    known: set[str] = set()
    left = [name]
    while left:
        one = left.pop()
        if one not in known:
            known.add(one)
            lower = (entry for entry in tree.entries(f"{_NET}/{one}") if entry.startswith("lower_"))
            left += [entry.removeprefix("lower_") for entry in lower]
    return frozenset(known)


def _default_interfaces(tree: Tree) -> frozenset[str]:
    """Return the interface of the preferred default route, and its lower ones; none where there is no such route."""
    routes: list[tuple[int, str]] = []
    for line in (tree.text(_ROUTES) or "").splitlines()[1:]:
        parts = line.split()
        if len(parts) > 7 and parts[1] == _ANY and parts[7] == _ANY and int(parts[3], 16) & _RTF_UP:
            routes.append((int(parts[6]), parts[0]))
    for line in (tree.text(_ROUTES_6) or "").splitlines() if not routes else ():
        parts = line.split()
        if len(parts) == 10 and parts[0] == _ANY_6 and parts[1] == "00" and parts[9] != "lo":
            routes.append((int(parts[5], 16), parts[9]))
    return _with_lower(tree, min(routes)[1]) if routes else frozenset()
