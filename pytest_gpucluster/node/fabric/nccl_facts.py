"""The facts of one node that matter to NCCL: from sysfs, procfs, the firmware's tables, NVML and the environment.

Nothing here needs root, and nothing is changed. What is unreadable is left out and never guessed.

Source: Linux kernel, Documentation/ABI/testing/sysfs-class-net, sysfs-class-dmi-id and sysfs-bus-pci; proc_net(5),
/proc/net/route.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.launchers import allocation, detect
from pytest_gpucluster.metrics.datasheets import SKUS, Promise, promise_of
from pytest_gpucluster.node import infiniband, info, info_gpus, pci
from pytest_gpucluster.node.fabric.nccl_environment import Setting
from pytest_gpucluster.node.fabric.ports import FabricSources
from pytest_gpucluster.node.infiniband import ETHERNET, Device, Port
from pytest_gpucluster.node.interfaces import Interface, Network, read_networks
from pytest_gpucluster.node.interfaces import interfaces as own_interfaces
from pytest_gpucluster.node.pci import PeerMemory
from pytest_gpucluster.node.processes import Output
from pytest_gpucluster.node.sysfs import PCI_DEVICES, Tree, pci_address

Provider = Literal["AWS", "Azure", "Google Cloud"]
SEVERAL_NODES = 2
"""The assumed number of nodes of a job where it is unknown: the advice is for jobs over several."""
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Between a card and a GPU, as in ``nvidia-smi topo -m``, the nearest first."""

_GOOGLE_PLUGINS = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_")
"""Prefixes of the variables of GPUDirect-TCPXO and -TCPX."""
_INFINIBAND_CLASS, _ETHERNET_CLASS, _MELLANOX = "0x0207", "0x0200", "0x15b3"
"""PCI class of an InfiniBand controller; of an Ethernet controller of NVIDIA's (Mellanox), which can do RoCE. Source:
linux/pci_ids.h, PCI_CLASS_NETWORK_INFINIBAND, PCI_CLASS_NETWORK_ETHERNET and PCI_VENDOR_ID_MELLANOX."""
_AMAZON, _EFA_DEVICES = "0x1d0f", "0xefa"
"""Amazon's PCI vendor, and the prefix of the numbers of its EFA devices. Source: Linux kernel,
drivers/infiniband/hw/efa/efa_main.c."""
_CLOUDS: Mapping[tuple[str, str], Provider] = {
    ("sys_vendor", "Amazon EC2"): "AWS",
    ("product_name", "Google Compute Engine"): "Google Cloud",
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"): "Azure",  # and of no other Hyper-V
}
"""Entry of the firmware's tables, which any user may read -> the cloud. Source: cloud-init, tools/ds-identify."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU. ``name`` is NVML's, ``pci`` its address in any notation."""

    name: str
    pci: str


@dataclass(frozen=True, kw_only=True)
class VisibleGpus:
    """The GPUs that this process or job was given.

    Attributes:
        gpus: each of them.
        why_not: why some facts are unknown; "" where none is.
        nvlink, nvls: the GPUs of a node reach each other over NVLink, and through a switch that can reduce.
    """

    gpus: tuple[Gpu, ...] = ()
    why_not: str = ""
    nvlink: bool = False
    nvls: bool = False


@dataclass(frozen=True, kw_only=True)
class Card:
    """An active or inactive port of an RDMA device, with what is known of the device.

    Attributes:
        port: state, rate and addresses.
        board: the maker's id of the card, "" where it is unknown.
        driver: such as mlx5_core or efa; "" where it is unknown.
        pci: None for RDMA in software, which has no card.
        interface: the network interface of a RoCE port, "" where there is none.
        distance: to the nearest GPU, one of ``DISTANCES``; "" where it is unknown.
    """

    port: Port
    board: str = ""
    driver: str = ""
    pci: str | None = None
    interface: str = ""
    distance: str = ""

    @property
    def name(self) -> str:
        """Device and port as in ``NCCL_IB_HCA``, such as ``mlx5_0:1``."""
        return f"{self.port.device}:{self.port.number}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One node.

    Attributes:
        host: its name.
        launcher: of this process, such as torchrun; "" for a shell.
        scheduler: slurm, kubernetes or None.
        nnodes: of this launch or job; None outside of one.
        local_ranks: of this node.
        container: kind of the container of this process; None for none that is known.
        provider: of this virtual machine; None for an unknown one.
        visible: the GPUs that this process or job was given.
        gpus_of_node: PCI addresses of all GPUs of the node, also of those that a job or container was not given.
        cards: the ports of the RDMA devices, one by one.
        rdma_on_bus: addresses of PCI devices that can do RDMA, for a node that shows no RDMA device.
        has_verbs: this process can access a device file of RDMA, such as uverbs0.
        peer_memory: how network cards access GPU memory.
        networks: interfaces that are up and have an address, without the loopback, in the kernel's order.
        interfaces: names of all interfaces, also of those that are down; empty where they are unknown.
        nccl: its version; None where it is unknown.
        settings: variables that are set, and where.
    """

    host: str
    launcher: str = ""
    scheduler: str | None = None
    nnodes: int | None = None
    local_ranks: int = 1
    container: str | None = None
    provider: Provider | None = None
    visible: VisibleGpus = field(default_factory=VisibleGpus)
    gpus_of_node: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()
    rdma_on_bus: tuple[str, ...] = ()
    has_verbs: bool = False
    peer_memory: PeerMemory
    networks: tuple[Network, ...] = ()
    interfaces: tuple[str, ...] = ()
    nccl: str | None = None
    settings: tuple[Setting, ...] = ()

    def setting(self, name: str) -> Setting | None:
        """Return a variable of NCCL's that is set."""
        return next((setting for setting in self.settings if setting.name == name), None)

    @property
    def has_peers(self) -> bool:
        """Whether other ranks of this job are on the node."""
        return self.local_ranks > 1

    @property
    def has_other_nodes(self) -> bool:
        """Whether the job has several nodes; also where their number is unknown."""
        return self.nnodes is None or self.nnodes > 1

    @property
    def active(self) -> tuple[Port, ...]:
        """The active ports."""
        return tuple(card.port for card in self.cards if card.port.is_active)

    @property
    def has_fabric(self) -> bool:
        """Whether there are other nodes, and active ports to reach them."""
        return self.has_other_nodes and bool(self.active)

    @property
    def required_by_plugin(self) -> frozenset[str]:
        """Variables that Google's plugins need at a value that hurts elsewhere, where such a plugin is in use.

        They check it, or disable NVLS. Source: the script nccl-env-profile.sh and the checker's
        a3plus_guest_config.textproto, which belong to the plugin.
        """
        in_use = any(setting.name.startswith(_GOOGLE_PLUGINS) for setting in self.settings)
        return frozenset(("NCCL_ALGO", "NCCL_NVLS_ENABLE") if self.provider == "Google Cloud" and in_use else ())


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Sources of a node's facts. Tests put their own here."""

    fabric: FabricSources = field(default_factory=FabricSources)
    hostname: Callable[[], str] = socket.gethostname
    interfaces: Callable[[], Sequence[Interface]] = own_interfaces
    gpus: Callable[[], VisibleGpus] = lambda: gpus_by_nvml(info_gpus.run_child)
    nccl: Callable[[Tree], str | None] = lambda tree: info.installed_nccl() or info.installed_library(tree)


def collect_facts(sources: Sources) -> Facts:
    """Return the facts of this node."""
    tree, environ, host = sources.fabric.tree, sources.fabric.environ, sources.hostname()
    job = allocation(environ)
    launcher, nnodes = "", job.nnodes
    try:
        rank = detect(environ, host)
    except LaunchError:
        pass  # variables that contradict each other are for the preflight
    else:
        if rank.launcher != "single":
            launcher, nnodes = rank.launcher, rank.nnodes
    visible = sources.gpus()
    # A job or a container may have some GPUs only, and cards close to the others belong to the fabric, too.
    gpus = {address for gpu in visible.gpus if (address := pci_address(gpu.pci)) is not None}
    gpus.update(pci.gpus_on_bus(tree))
    rdma_on_bus = []
    for address in tree.entries(PCI_DEVICES):
        kind, vendor, device = (
            tree.text(f"{PCI_DEVICES}/{address}/{name}") or "" for name in ("class", "vendor", "device")
        )
        can_roce = kind.startswith(_ETHERNET_CLASS) and vendor == _MELLANOX
        is_efa = vendor == _AMAZON and device.startswith(_EFA_DEVICES)
        if kind.startswith(_INFINIBAND_CLASS) or can_roce or is_efa:
            rdma_on_bus.append(address)
    adapters = infiniband.read(tree.path("/sys"))
    networks = read_networks(tree, sources.interfaces())
    provider = (name for (file, text), name in _CLOUDS.items() if tree.text(f"/sys/class/dmi/id/{file}") == text)
    return Facts(
        host=host,
        launcher=launcher,
        scheduler=job.name,
        nnodes=nnodes,
        local_ranks=max(1, len(visible.gpus)),
        container=info.container(tree, environ),
        provider=next(provider, None),
        visible=visible,
        gpus_of_node=tuple(sorted(gpus)),
        cards=tuple(card for device in adapters.devices for card in _cards(tree, device, gpus)),
        rdma_on_bus=tuple(rdma_on_bus) if adapters.why_not else (),
        has_verbs=any(name.startswith("uverbs") for name in tree.entries("/dev/infiniband")),
        peer_memory=pci.read_peer_memory(tree),
        networks=tuple(one for one in networks if one.running),
        interfaces=("lo", *(one.name for one in networks)),
        nccl=sources.nccl(tree),
        settings=sources.fabric.settings(),
    )


def gpus_by_nvml(query: Callable[[], Output]) -> VisibleGpus:
    """Query NVML for the GPUs of this node, in a process of its own."""
    found = info_gpus.read_gpus(query())
    gpus = tuple(Gpu(name=str(gpu["name"]), pci=str(gpu["pci"])) for gpu in found["gpus"])
    ends = [kind for gpu in found["gpus"] for kind, _ in (gpu["nvlink_ends"] or {}).values()]
    names = {gpu.name for gpu in gpus}
    skus = [sku.name for sku in SKUS.values() if len(names) == 1 and sku.matches(next(iter(names)))]
    promise = promise_of(skus[0]) if len(skus) == 1 else None
    return VisibleGpus(
        gpus=gpus,
        why_not=found["why_not"] or ("" if gpus else "NVML shows none to this process"),
        nvlink=bool(ends),
        nvls="switch" in ends and promise is not None and promise.fabric_state,
    )


def gpus_of_ranks(inventory: Sequence[Mapping[str, Any]], node_rank: int, promise: Promise | None) -> VisibleGpus:
    """Return the GPUs of a node's ranks, of a SKU with this promise; a rank on cpu has none."""
    own = [entry["gpu"] for entry in inventory if entry["node_rank"] == node_rank and entry["gpu"]]
    return VisibleGpus(
        gpus=tuple(Gpu(name=str(gpu["name"]), pci=str(gpu["pci_bus_id"])) for gpu in own),
        nvlink=promise is not None and bool(promise.nvlinks),
        nvls=promise is not None and promise.nvswitch and promise.fabric_state,
    )


def _cards(tree: Tree, device: Device, gpus: set[str]) -> Iterator[Card]:
    folder = f"/sys/class/infiniband/{device.name}"
    distances = {info_gpus.by_kernel(tree, device.pci, gpu) for gpu in gpus}
    networks = tree.entries(f"{folder}/device/net")
    for port in device.ports:
        interface = ""
        if port.link_layer == ETHERNET:  # that of its first address, or the only one of its card
            interface = tree.text(f"{folder}/ports/{port.number}/gid_attrs/ndevs/0") or ""
            interface = interface or (networks[0] if len(networks) == 1 else "")
        yield Card(
            port=port,
            board=device.board,
            driver=tree.target(f"{folder}/device/driver") or "",
            pci=device.pci,
            interface=interface,
            distance=next((distance for distance in DISTANCES if distance in distances), ""),
        )
