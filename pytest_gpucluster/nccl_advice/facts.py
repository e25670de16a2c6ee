"""What advice about NCCL is made from: one node, as the kernel, NVML and the launcher tell of it. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pytest_gpucluster.infiniband import Adapters, Gid, Port
from pytest_gpucluster.nccl_environment import Setting
from pytest_gpucluster.peer_memory import PeerMemory
from pytest_gpucluster.surroundings.interfaces import Interface

Provider = Literal["AWS", "Azure", "Google Cloud"]

BESIDE = ("PIX", "PXB")
"""Ways between a card and a GPU over PCIe switches only, in the words of ``nvidia-smi topo -m``. Up to the latter NCCL
uses GPUDirect RDMA by itself. Source: NCCL user guide, Environment Variables, NCCL_NET_GDR_LEVEL."""
WAYS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""All of them, the nearest first."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU. ``name`` is NVML's, ``pci`` its address in any writing."""

    name: str
    pci: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """An active or inactive port of an RDMA device, with what is known of the device.

    Attributes:
        port: state, rate and addresses.
        board: the maker's id of the card, "" where it is not told.
        driver: such as mlx5_core or efa; "" where it is not told.
        pci: None for RDMA in software, which has no card.
        interface: the network interface of a RoCE port, "" where there is none.
        near: the way to the nearest GPU, one of ``WAYS``; "" where it is not known.
        is_default: its interface carries the default route.
    """

    port: Port
    board: str = ""
    driver: str = ""
    pci: str | None = None
    interface: str = ""
    near: str = ""
    is_default: bool = False

    @property
    def name(self) -> str:
        """Device and port as ``NCCL_IB_HCA`` has them, such as ``mlx5_0:1``."""
        return f"{self.port.device}:{self.port.number}"

    @property
    def gids(self) -> Sequence[Gid]:
        """The addresses of the port."""
        return self.port.gids


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network interface that is up and has an address.

    Attributes:
        interface: name and addresses.
        is_real: it is a card, or a bond or VLAN of cards; not a bridge, a tunnel or one end of a pair.
        driver: such as ena or gve; "" for none.
        speed_mbps: None where the driver does not tell, as in most virtual machines.
        is_default: it carries the default route.
    """

    interface: Interface
    is_real: bool
    driver: str = ""
    speed_mbps: int | None = None
    is_default: bool = False

    @property
    def name(self) -> str:
        """The interface's name."""
        return self.interface.name

    @property
    def stays_on_link(self) -> bool:
        """Tell whether its addresses are good for its own link only, as of the one to a server's BMC over USB."""
        return all(ipaddress.ip_address(address).is_link_local for address in self.interface.addresses)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One node.

    Attributes:
        host: its name.
        launcher: what has started this process, such as torchrun; "" for a shell.
        launcher_unknown: what is wrong with the launcher's variables; "" if nothing is.
        scheduler: slurm, kubernetes or None.
        nnodes: of this launch or job; None outside of one.
        container: the kind of container around this process; None for none that is known.
        provider: whose virtual machine this is; None for none of those known here.
        machine: the type of machine, as its firmware calls it.
        gpus: those seen; ``gpus_unknown`` is why they are not known, "" where they are.
        gpus_of_node: PCI addresses of all GPUs of the node, also of those that a job or container was not given.
        nvlink, nvls: the GPUs of a node reach each other over NVLink, and through a switch that can sum up.
        adapters: the RDMA devices; ``cards``: their ports, one by one.
        on_the_bus: addresses of PCI devices that can do RDMA, for a node that shows no RDMA device.
        verbs: device files of RDMA that this process sees, such as uverbs0.
        peer_memory: the way of network cards to GPU memory.
        networks: interfaces that are up and have an address, but the loopback, in the kernel's order.
        interfaces: names of all interfaces, also of those that are down.
        nccl: its version; None where it is not known.
        settings: variables that are set, and where.
        environ: the environment, for variables that are not NCCL's.
        files: what was looked for -> the paths at which it was found.
    """

    host: str
    launcher: str = ""
    launcher_unknown: str = ""
    scheduler: str | None = None
    nnodes: int | None = None
    container: str | None = None
    provider: Provider | None = None
    machine: str = ""
    gpus: tuple[Gpu, ...] = ()
    gpus_unknown: str = ""
    gpus_of_node: tuple[str, ...] = ()
    nvlink: bool = False
    nvls: bool = False
    adapters: Adapters = field(default_factory=Adapters)
    cards: tuple[Card, ...] = ()
    on_the_bus: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    peer_memory: PeerMemory
    networks: tuple[Network, ...] = ()
    interfaces: tuple[str, ...] = ()
    nccl: str | None = None
    settings: tuple[Setting, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def setting(self, name: str) -> Setting | None:
        """Return a variable of NCCL's that is set."""
        return next((one for one in self.settings if one.name == name), None)

    @property
    def nccl_number(self) -> tuple[int, int] | None:
        """Major and minor version of NCCL; None where it is not known.

        >>> from pytest_gpucluster.peer_memory import PeerMemory
        >>> none = PeerMemory(module="", why_no_dma_buf="no driver")
        >>> [Facts(host="a", peer_memory=none, nccl=nccl).nccl_number for nccl in ("2.27.5", None, "?")]
        [(2, 27), None, None]
        """
        parts = (self.nccl or "").split(".")
        if len(parts) < 2 or not all(part.isascii() and part.isdecimal() for part in parts[:2]):
            return None
        return int(parts[0]), int(parts[1])
