"""The network interface and address that NCCL or gloo will use on this host, and the nodes of a run.

Nodes exchange values through the store, without a process group (:class:`Nodes`).
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node.sysfs import Tree, pci_address

IF_INET6 = Path("/proc/net/if_inet6")
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_RUNNING = 0x40  # linux/if.h
_LINK_LOCAL = "20"  # scope in if_inet6, see include/net/ipv6.h
_NCCL_DEFAULT = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""The prefixes that NCCL tries in turn without a variable. Source: NCCL, src/misc/socket.cc, ncclFindInterfaces."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface. ``addresses``: IPv4 first; no link-local IPv6."""

    name: str
    running: bool
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Network(Interface):
    """An interface with what sysfs has of it; None where that does not report it.

    Attributes:
        state: such as up.
        speed_mbps: None also for a bridge, and in most virtual machines.
        driver: such as ena or gve.
        is_real: it is a card, or a bond or VLAN of cards; not a bridge, a tunnel or one end of a pair.
        is_default: it carries the default route.
    """

    state: str | None = None
    speed_mbps: int | None = None
    mtu: int | None = None
    mac: str | None = None
    driver: str | None = None
    pci: str | None = None
    is_real: bool
    is_default: bool = False

    @property
    def is_link_local(self) -> bool:
        """Whether it has link-local addresses only, as the one to a server's BMC over USB."""
        return all(ipaddress.ip_address(address).is_link_local for address in self.addresses)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The address that a host will use, its interface, and the reason."""

    interface: str
    address: str
    why: str


def interfaces(if_inet6: Path = IF_INET6) -> tuple[Interface, ...]:
    """Return this host's interfaces that have an address, in the kernel's order."""
    ipv6: dict[str, list[str]] = {}
    try:
        for line in if_inet6.read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != _LINK_LOCAL and digits != f"{1:032x}":
                ipv6.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    except (OSError, ValueError):
        ipv6 = {}  # a kernel without IPv6
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            (flags,) = struct.unpack_from("H", _ioctl(probe, _SIOCGIFFLAGS, name) or bytes(40), 16)
            ipv4 = _ioctl(probe, _SIOCGIFADDR, name)
            addresses = ([socket.inet_ntoa(ipv4[20:24])] if ipv4 else []) + ipv6.get(name, [])
            if addresses:
                found.append(Interface(name=name, running=bool(flags & _IFF_RUNNING), addresses=tuple(addresses)))
    return tuple(found)


def _ioctl(probe: socket.socket, request: int, name: str) -> bytes | None:
    """Query the kernel about an interface; None where it has no value, such as no IPv4 address."""
    try:
        return fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None


_NET = "/sys/class/net"
_ROUTE_IS_UP = 0x1  # RTF_UP in linux/route.h


def read_networks(tree: Tree, found: Sequence[Interface]) -> tuple[Network, ...]:
    """Read all interfaces but the loopback: those with an address, ``found``, in their order, then the others.

    Source: Linux kernel, Documentation/ABI/testing/sysfs-class-net; proc_net(5), /proc/net/route.
    """
    default = _default_interfaces(tree)
    names = {one.name: one for one in found}
    others = [name for name in tree.entries(_NET) if name not in names and name != "bonding_masters"]
    all_of_them = (*found, *(Interface(name=name, running=False, addresses=()) for name in others))
    return tuple(_network(tree, one, one.name in default) for one in all_of_them if one.name != "lo")


def _network(tree: Tree, one: Interface, is_default: bool) -> Network:
    folder = f"{_NET}/{one.name}"
    speed = tree.number(f"{folder}/speed")  # -1, or no answer at all, where there is no link
    is_made_of_cards = any(tree.has(f"{_NET}/{name}/device") for name in _with_lower(tree, one.name))
    return Network(
        name=one.name,
        running=one.running,
        addresses=one.addresses,
        state=tree.text(f"{folder}/operstate"),
        speed_mbps=speed if speed is not None and speed > 0 else None,
        mtu=tree.number(f"{folder}/mtu"),
        mac=tree.text(f"{folder}/address") or None,
        driver=tree.target(f"{folder}/device/driver"),
        pci=pci_address(tree.target(f"{folder}/device") or ""),
        is_real=is_made_of_cards and not tree.has(f"{folder}/bridge"),
        is_default=is_default,
    )


def _with_lower(tree: Tree, name: str) -> set[str]:
    """Return an interface and its lower ones: a VLAN's, a bond's, a bridge's."""
    lower = (entry for entry in tree.entries(f"{_NET}/{name}") if entry.startswith("lower_"))
    return {name}.union(*(_with_lower(tree, entry.removeprefix("lower_")) for entry in lower))


def _default_interfaces(tree: Tree) -> set[str]:
    """Return the interface of the preferred default route, and its lower ones; none where there is no such route."""
    anywhere, anywhere_6 = "0" * 8, "0" * 32
    routes: list[tuple[int, str]] = []
    for line in (tree.text("/proc/net/route") or "").splitlines()[1:]:
        parts = line.split()
        if len(parts) > 7 and parts[1] == parts[7] == anywhere and int(parts[3], 16) & _ROUTE_IS_UP:
            routes.append((int(parts[6]), parts[0]))
    for line in (tree.text("/proc/net/ipv6_route") or "").splitlines() if not routes else ():
        parts = line.split()
        if len(parts) == 10 and parts[0] == anywhere_6 and parts[1] == "00" and parts[9] != "lo":
            routes.append((int(parts[5], 16), parts[9]))
    return _with_lower(tree, min(routes)[1]) if routes else set()


def matches(name: str, wanted: str, port: int | None = None) -> bool:
    """Whether an interface matches a value of ``NCCL_SOCKET_IFNAME``, or the ``port`` of a device ``NCCL_IB_HCA``.

    A list of prefixes, of devices each with or without ``:port``; a leading ``=`` means whole names, ``^`` all others.
    Source: NCCL user guide, Environment Variables, NCCL_SOCKET_IFNAME and NCCL_IB_HCA,
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; NCCL, src/misc/socket.cc, findInterfaces,
    src/transport/net_ib.cc and src/misc/utils.cc, parseStringList and matchIfList.

    >>> matches("eth0", "eth,ib"), matches("eth0", "^eth"), matches("eth01", "=eth0"), matches("eth1", "^=eth0")
    (True, False, False, True)
    >>> [matches("mlx5_1", wanted, 1) for wanted in ("mlx5", "=mlx5_1:1", "^mlx5_1", "mlx5_1:2", "=mlx5")]
    [True, True, False, False, False]
    """
    other_than = wanted.startswith("^")
    wanted = wanted.removeprefix("^")
    exact = wanted.startswith("=")
    parts = (part.split(":") for part in wanted.removeprefix("=").split(",") if part)  # a rail and a plane may follow
    listed = any(
        (name == first if exact else name.startswith(first)) and (port is None or rest[:1] in ([], [""], [str(port)]))
        for first, *rest in parts
    )
    return listed != other_than


def nccl_default_interfaces(found: Sequence[Interface]) -> tuple[Interface, ...]:
    """Return the interfaces that NCCL uses where no variable is set: the first for its bootstrap, all of them for data
    over TCP."""
    running = [one for one in found if one.running and one.addresses]
    for wanted in _NCCL_DEFAULT:
        chosen = tuple(one for one in running if matches(one.name, wanted))
        if chosen:
            return chosen
    return ()


def choose(backend: str, environ: Mapping[str, str]) -> Chosen:
    """Return the address that this process's backend will use.

    Raises: EnvironmentBroken where the backend would find none.
    """
    found = interfaces()
    if backend == "nccl":
        return choose_for_nccl(found, environ)
    return choose_for_gloo(found, environ, environ.get("MASTER_ADDR"))


def choose_for_nccl(found: Sequence[Interface], environ: Mapping[str, str]) -> Chosen:
    """Choose as NCCL does for its bootstrap: by ``NCCL_SOCKET_IFNAME`` and ``NCCL_SOCKET_FAMILY``, else by its list.

    Raises: EnvironmentBroken where NCCL would find none; the message lists what there is.
    """
    variable = environ.get("NCCL_SOCKET_IFNAME", "")
    # NCCL ignores a value of one character.
    tried = (variable,) if len(variable) > 1 else _NCCL_DEFAULT
    family = {"AF_INET": ".", "AF_INET6": ":"}.get(environ.get("NCCL_SOCKET_FAMILY", ""), "")
    for wanted in tried:
        for one in found:
            addresses = [address for address in one.addresses if family in address]
            if one.running and addresses and matches(one.name, wanted):
                why = f"NCCL_SOCKET_IFNAME={variable}" if len(variable) > 1 else "NCCL's own choice"
                return Chosen(interface=one.name, address=addresses[0], why=why)
    available = ", ".join(f"{one.name} ({'up' if one.running else 'down'}: {' '.join(one.addresses)})" for one in found)
    rule = f"NCCL_SOCKET_IFNAME={variable}" if len(variable) > 1 else "NCCL's own list of names"
    if family:
        rule += f" with NCCL_SOCKET_FAMILY={environ['NCCL_SOCKET_FAMILY']}"
    raise EnvironmentBroken(
        f"NCCL finds no network interface: {rule} matches none that is up. Available: {available or 'none'}. Correct "
        "the variable, or unset it; where nodes name their interfaces differently, give several names or an exclusion"
    )


def choose_for_gloo(found: Sequence[Interface], environ: Mapping[str, str], toward: str | None) -> Chosen:
    """Choose for gloo: by ``GLOO_SOCKET_IFNAME``, else the interface on the way to another host.

    ``toward`` is the address of the rendezvous, None for a process alone.

    Raises: EnvironmentBroken where the variable names no interface, or there is none at all.
    """
    variable = environ.get("GLOO_SOCKET_IFNAME", "")
    names = [name for name in variable.split(",") if name]
    by_name = {one.name: one for one in found}
    for name in names:
        if name in by_name:
            return Chosen(interface=name, address=by_name[name].addresses[0], why=f"GLOO_SOCKET_IFNAME={variable}")
    if names:
        raise EnvironmentBroken(
            f"GLOO_SOCKET_IFNAME={variable} names no interface of this host. Available: {', '.join(by_name) or 'none'}"
        )
    if toward is not None:
        address = _source(toward)
        name = next((one.name for one in found if address in one.addresses), "?")
        return Chosen(interface=name, address=address, why=f"the route to {toward}")
    for one in sorted(found, key=lambda one: one.name == "lo"):
        return Chosen(interface=one.name, address=one.addresses[0], why="the first one")
    raise EnvironmentBroken("this host has no network interface with an address, not even the loopback")


def _source(toward: str) -> str:
    """Return this host's source address towards another one, without sending anything."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EnvironmentBroken(f"this host has no route to {toward}: {error}") from error


class Board(Protocol):
    """Exchange of values between ranks: ``agreement.store.Board``."""

    def post(self, name: str, value: Any) -> None: ...
    def read(self, name: str, ranks: Sequence[int], *, within_seconds: float) -> Mapping[int, Any]: ...
    def gather(self, name: str, value: Any, ranks: Sequence[int], *, within_seconds: float) -> Mapping[int, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a run, each represented by one of its ranks.

    Attributes:
        representatives: node -> the rank that represents it.
        hosts: node -> its name.
        me: the node of this rank.
    """

    representatives: Mapping[int, int]
    hosts: Mapping[int, str]
    me: int

    @classmethod
    def of(cls, inventory: Iterable[Mapping[str, Any]], node_rank: int) -> Nodes:
        """Make them from the inventory of every rank: the first rank of a node represents it."""
        first: dict[int, Mapping[str, Any]] = {}
        for who in sorted(inventory, key=lambda who: (who["node_rank"], who["local_rank"])):
            first.setdefault(int(who["node_rank"]), who)
        return cls(
            representatives={node: int(who["rank"]) for node, who in first.items()},
            hosts={node: str(who["host"]) for node, who in first.items()},
            me=node_rank,
        )

    @property
    def representative(self) -> int:
        """The rank that represents this rank's node."""
        return self.representatives[self.me]

    def gather(self, board: Board, name: str, value: Any, *, within_seconds: float) -> dict[int, Any]:
        """Return node -> value, of those that came in time. Collective: every representing rank must call this."""
        values = board.gather(name, value, list(self.representatives.values()), within_seconds=within_seconds)
        return {node: values[rank] for node, rank in self.representatives.items() if rank in values}
