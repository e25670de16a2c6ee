"""The ports that a node reports to the others, and which of them NCCL may use.

Pure, but for :func:`read_ports` and :func:`network_cards`, which read sysfs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gpucluster.judge.limits import Thresholds
from pytest_gpucluster.node import infiniband, pci
from pytest_gpucluster.node.fabric import nccl_environment
from pytest_gpucluster.node.fabric.nccl_environment import Setting
from pytest_gpucluster.node.infiniband import ETHERNET, INFINIBAND, ROCE_V2, Adapters, Device, Gid, Port
from pytest_gpucluster.node.pci import PeerMemory
from pytest_gpucluster.node.sysfs import Tree


def leaf_of(environ: Mapping[str, str]) -> str:
    """Return the leaf switch of this node, from Slurm's variables of a job's tasks; "" where they are not set.

    ``SLURM_TOPOLOGY_ADDR`` has the switches from the top down and then the node, separated by dots, and
    ``SLURM_TOPOLOGY_ADDR_PATTERN`` what each part is. Names of nodes may hold dots themselves.
    Source: Slurm, sbatch(1) and srun(1), output environment variables.

    >>> leaf_of({"SLURM_TOPOLOGY_ADDR": "s0.s4.gpu-07", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"})
    's4'
    """
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    parts = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)
    switches = [part for kind, part in zip(kinds, parts, strict=False) if kind == "switch"]
    return switches[-1] if switches and len(parts) == len(kinds) else ""


BUSBW = "nccl.all_reduce.busbw"
NET_IB = "NET/IB"


@dataclass(frozen=True, kw_only=True)
class FabricSources:
    """Sources of the fabric's facts. Tests put their own here."""

    tree: Tree = field(default_factory=Tree)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    home: Callable[[], Path | None] = nccl_environment.home

    def settings(self) -> tuple[Setting, ...]:
        """Return the variables that change what NCCL does, from the environment and from NCCL's files."""
        file = self.tree.path(str(nccl_environment.SYSTEM_FILE))
        return nccl_environment.read_environment(self.environ, home_of_user=self.home, system_file=file)


@dataclass(frozen=True, kw_only=True)
class NodePorts:
    """One node's HCAs.

    Attributes:
        host: its name.
        leaf: its leaf switch, "" where it is not known.
        hcas: ``NCCL_IB_HCA`` of its ranks, each value once; "" where it is not set.
        gid_index: ``NCCL_IB_GID_INDEX``, None where it is not set.
    """

    host: str
    adapters: Adapters
    peer_memory: PeerMemory
    leaf: str = ""
    hcas: tuple[str, ...] = ("",)
    gid_index: int | None = None

    @property
    def used(self) -> tuple[Port, ...]:
        """The ports that NCCL may use, whether or not they are active."""
        return used_ports(self.adapters, self.hcas)

    @property
    def active(self) -> tuple[Port, ...]:
        """Those of them that are active."""
        return tuple(port for port in self.used if port.is_active)

    def slowest_rate(self, gpus: int) -> float:
        """Return the rate of the slowest of as many active ports as there are GPUs, the fastest ones first, in Gb/s.

        So a slower card for storage in a node with a RoCE fabric does not count, and a slow port of the fabric does:
        then there are not enough fast ones. 0 where no port is active.
        """
        fastest = sorted((port.rate_gbps or 0.0 for port in self.active), reverse=True)[:gpus]
        return min(fastest, default=0.0)

    def device_of(self, port: Port) -> Device:
        """Return the HCA of a port."""
        return next(device for device in self.adapters.devices if device.name == port.device)

    def summary(self) -> dict[str, Any]:
        """Return what to record of this node, in plain types."""
        used = {port.device for port in self.used}
        return {
            "ports": [str(port) for port in self.used],
            "cards": [
                f"{device.name}: {device.board or device.kind}, firmware {device.firmware or 'unknown'}, "
                f"PCI {device.pci}, NUMA node {device.numa_node}"
                for device in self.adapters.devices
                if device.name in used
            ],
            "adapters": [
                {
                    "name": device.name,
                    "board": device.board,
                    "guid": device.guid,
                    "firmware": device.firmware,
                    "pci_bus_id": device.pci or "",
                }
                for device in self.adapters.devices
            ],
            "peer_memory": str(self.peer_memory),
            "leaf_switch": self.leaf or "unknown",
        }


def read_ports(sources: FabricSources, *, host: str, hcas: Iterable[str], gid_index: int | None) -> NodePorts:
    """Read this node's ports. Arguments as the attributes of :class:`NodePorts`."""
    return NodePorts(
        host=host,
        adapters=infiniband.read(sources.tree.path("/sys")),
        peer_memory=pci.read_peer_memory(sources.tree),
        leaf=leaf_of(sources.environ),
        hcas=tuple(dict.fromkeys(hcas)),
        gid_index=gid_index,
    )


def selects(wanted: str, port: Port) -> bool:
    """Return whether ``NCCL_IB_HCA`` selects a port: a list of prefixes of devices, each with or without ``:port``.

    ``=`` before the list demands whole names, ``^`` for all others. Source: NCCL user guide, Environment Variables,
    NCCL_IB_HCA; NCCL, src/transport/net_ib.cc and src/misc/utils.cc, parseStringList and matchIfList.

    >>> port = Port(device="mlx5_1", number=1, state="", phys_state="", rate_gbps=None, rate="", link_layer="")
    >>> [selects(wanted, port) for wanted in ("mlx5", "=mlx5_1:1", "^mlx5_1", "mlx5_1:2", "=mlx5")]
    [True, True, False, False, False]
    """
    other_than = wanted.startswith("^")
    wanted = wanted.removeprefix("^")
    exact = wanted.startswith("=")
    listed = False
    for part in filter(None, wanted.removeprefix("=").split(",")):
        device, _, rest = part.partition(":")
        number = rest.partition(":")[0]  # a rail and a plane may follow
        named = port.device == device if exact else port.device.startswith(device)
        listed = listed or (named and number in ("", str(port.number)))
    return listed != other_than


def used_ports(adapters: Adapters, hcas: Sequence[str] = ("",)) -> tuple[Port, ...]:
    """Return the ports that NCCL may use.

    Where ``NCCL_IB_HCA`` is set, these are the ports that any rank selects. Else they are those of InfiniBand where one
    is active, or else those of RoCE: a node may have an Ethernet card for storage in addition to its fabric.
    """
    if any(hcas):
        return tuple(port for port in adapters.ports if any(not hca or selects(hca, port) for hca in hcas))
    for layer in (INFINIBAND, ETHERNET):
        of_layer = tuple(port for port in adapters.ports if port.link_layer == layer)
        if any(port.is_active for port in of_layer):
            return of_layer
    return adapters.ports


def network_cards(sources: FabricSources | None = None) -> int | None:
    """Count the network cards of this node that are for data between nodes; None where the kernel shows none.

    Cards are counted whatever the state of their ports: a node of eight cards that has lost the links of four must not
    be compared with the limit of four cards. So neither NCCL's log, which names the ports that work, nor
    ``NCCL_IB_HCA`` is considered. Of the ports that NCCL uses by itself the fastest active one shows which cards count:
    those of its kind (``hca_type``) and link layer, and those with another port as fast. A slower card of another kind,
    for storage, is not among them; one of the same kind is. Where the node has more cards of one kind, their number
    counts: the cards of the fabric may all be down. The two ports of one card are one card, by its address on the PCI
    bus: they share its lanes.
    """
    sources = sources or FabricSources()
    adapters = infiniband.read(sources.tree.path("/sys"), gids=False, only_bytes=True)
    fastest = max(used_ports(adapters), key=lambda port: (port.is_active, port.rate_gbps or 0.0), default=None)
    if fastest is None:
        return None
    kind = next(device.kind for device in adapters.devices if device.name == fastest.device)

    def is_meant(device: Device) -> bool:
        of_layer = [port for port in device.ports if port.link_layer in (fastest.link_layer, "")]
        if device.kind == kind:
            return bool(of_layer) or not device.ports  # a card without ports is broken, and still counts
        return any(port.is_active and port.rate_gbps == fastest.rate_gbps for port in of_layer)

    alike: dict[tuple[str, str], list[Device]] = {}
    for device in adapters.devices:
        for layer in {port.link_layer for port in device.ports} or {""}:
            alike.setdefault((device.kind, layer), []).append(device)
    return max(_cards(filter(is_meant, adapters.devices)), *map(_cards, alike.values()))


def _cards(devices: Iterable[Device]) -> int:
    return len({device.pci.rpartition(".")[0] if device.pci else device.name for device in devices})


def roce_gid(port: Port, index: int | None) -> Gid | None:
    """Return the GID that NCCL will use on a RoCE port, or None where there is none that can be routed.

    Without an index NCCL takes one of RoCE v2 with an IPv4 address, and of RoCE v2 where there is no such.
    Source: NCCL 2.21 and newer, src/transport/net_ib.cc, ncclIbGetGidIndex.
    """
    if index is not None:
        return next((gid for gid in port.gids if gid.index == index), None)
    second = [gid for gid in port.gids if gid.kind == ROCE_V2]
    return next((gid for gid in second if gid.is_ipv4), second[0] if second else None)


def expects_infiniband(
    limits: Thresholds, *, sku: str | None, world_size: int, nnodes: int, sizes: Iterable[str], on_cpu: bool
) -> tuple[bool, str]:
    """Return whether InfiniBand or RoCE is expected between the nodes, and why.

    It is, between two nodes or more, unless the limits of the all-reduce expect another transport there.

    Args:
        limits, sku, world_size, nnodes: as for a measurement.
        sizes: of the all-reduce, as they are written.
        on_cpu: a rehearsal, which does not use it.
    """
    if on_cpu:
        return False, "a rehearsal on cpu"
    if nnodes < 2:
        return False, "one node"
    for size in sizes:
        labels = {"size": size, "dtype": "bf16", "world_size": str(world_size), "nnodes": str(nnodes)}
        limit = limits.limit(BUSBW, sku=sku or "", world_size=world_size, nnodes=nnodes, labels=labels)
        if limit is not None and limit.expect_transport:
            wanted = " or ".join(limit.expect_transport)
            by_ib = any(name == NET_IB or name.startswith("COLLNET/") for name in limit.expect_transport)
            return by_ib, f"{limit.origin} expects {wanted}"
    return True, f"{nnodes} nodes, and no limit expects another transport between them"
