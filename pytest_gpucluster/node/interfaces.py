"""The network interface and address that NCCL or gloo will use on this host, and the nodes of a run.

Nodes exchange notices through a board, without a process group (:class:`Nodes`).
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pytest_gpucluster.errors import EnvironmentBroken

IF_INET6 = Path("/proc/net/if_inet6")
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_RUNNING = 0x40  # linux/if.h
_LINK_LOCAL = "20"  # scope in if_inet6, see include/net/ipv6.h
_BY_ITSELF = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""What NCCL tries in turn where nothing is set. Source: NCCL, src/misc/socket.cc, ncclFindInterfaces."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface. ``addresses``: IPv4 first; no IPv6 that means something on one link only."""

    name: str
    running: bool
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The address that a host will use, its interface, and why that one."""

    interface: str
    address: str
    why: str


def interfaces(if_inet6: Path = IF_INET6) -> tuple[Interface, ...]:
    """Return this host's interfaces that have an address, in the kernel's order."""
    sixth: dict[str, list[str]] = {}
    try:
        for line in if_inet6.read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != _LINK_LOCAL and digits != f"{1:032x}":
                sixth.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    except (OSError, ValueError):
        sixth = {}  # a kernel without IPv6
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            (flags,) = struct.unpack_from("H", _ask(probe, _SIOCGIFFLAGS, name) or bytes(40), 16)
            fourth = _ask(probe, _SIOCGIFADDR, name)
            addresses = ([socket.inet_ntoa(fourth[20:24])] if fourth else []) + sixth.get(name, [])
            if addresses:
                found.append(Interface(name=name, running=bool(flags & _IFF_RUNNING), addresses=tuple(addresses)))
    return tuple(found)


def _ask(probe: socket.socket, request: int, name: str) -> bytes | None:
    """Ask the kernel about an interface; None where it has no such thing, such as no IPv4 address."""
    try:
        return fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None


def matches(name: str, wanted: str) -> bool:
    """Tell whether an interface is one that ``NCCL_SOCKET_IFNAME`` asks for.

    A list of prefixes; ``=`` before it asks for whole names, ``^`` for all others. Source: NCCL, src/misc/socket.cc,
    findInterfaces; https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, NCCL_SOCKET_IFNAME.

    >>> matches("eth0", "eth,ib"), matches("eth0", "^eth"), matches("eth01", "=eth0"), matches("eth1", "^=eth0")
    (True, False, False, True)
    """
    other_than = wanted.startswith("^")
    wanted = wanted.removeprefix("^")
    exact = wanted.startswith("=")
    parts = [part.partition(":")[0] for part in wanted.removeprefix("=").split(",") if part]
    listed = any(name == part if exact else name.startswith(part) for part in parts)
    return listed != other_than


def by_itself(found: Sequence[Interface]) -> tuple[Interface, ...]:
    """Return the interfaces that NCCL takes where no variable chooses: the first for its own connections, and all of
    them where TCP carries the data."""
    running = [one for one in found if one.running and one.addresses]
    for wanted in _BY_ITSELF:
        chosen = tuple(one for one in running if matches(one.name, wanted))
        if chosen:
            return chosen
    return ()


def choose(backend: str, environ: Mapping[str, str]) -> Chosen:
    """Return the address that this process's backend will use.

    Args:
        backend: "nccl" or "gloo".
        environ: the environment.

    Raises: EnvironmentBroken where the backend would find none.
    """
    found = interfaces()
    if backend == "nccl":
        return of_nccl(found, environ)
    return of_gloo(found, environ, environ.get("MASTER_ADDR"))


def of_nccl(found: Sequence[Interface], environ: Mapping[str, str]) -> Chosen:
    """Choose as NCCL does for its bootstrap: by ``NCCL_SOCKET_IFNAME`` and ``NCCL_SOCKET_FAMILY``, else by its list.

    Raises: EnvironmentBroken where NCCL would find none; the message lists what there is.
    """
    asked = environ.get("NCCL_SOCKET_IFNAME", "")
    # NCCL takes a value of one character for none.
    tried = (asked,) if len(asked) > 1 else _BY_ITSELF
    family = {"AF_INET": ".", "AF_INET6": ":"}.get(environ.get("NCCL_SOCKET_FAMILY", ""), "")
    for wanted in tried:
        for one in found:
            addresses = [address for address in one.addresses if family in address]
            if one.running and addresses and matches(one.name, wanted):
                why = f"NCCL_SOCKET_IFNAME={asked}" if len(asked) > 1 else "NCCL's own choice"
                return Chosen(interface=one.name, address=addresses[0], why=why)
    there = ", ".join(f"{one.name} ({'up' if one.running else 'down'}: {' '.join(one.addresses)})" for one in found)
    said = f"NCCL_SOCKET_IFNAME={asked}" if len(asked) > 1 else "NCCL's own list of names"
    if family:
        said += f" with NCCL_SOCKET_FAMILY={environ['NCCL_SOCKET_FAMILY']}"
    raise EnvironmentBroken(
        f"NCCL finds no network interface: {said} fits none that is up. There are: {there or 'none'}. Correct the "
        "variable, or unset it; where nodes name their interfaces differently, give several names or an exclusion"
    )


def of_gloo(
    found: Sequence[Interface],
    environ: Mapping[str, str],
    toward: str | None,
    *,
    source: Callable[[str], str] | None = None,
) -> Chosen:
    """Choose for gloo: by ``GLOO_SOCKET_IFNAME``, else the interface on the way to another host.

    Args:
        found: the interfaces.
        environ: the environment.
        toward: the address of the rendezvous; None for a process alone.
        source: returns the address from which this host would send to another one; by default the kernel's answer.

    Raises: EnvironmentBroken where the variable names no interface, or there is none at all.
    """
    asked = environ.get("GLOO_SOCKET_IFNAME", "")
    names = [name for name in asked.split(",") if name]
    by_name = {one.name: one for one in found}
    for name in names:
        if name in by_name:
            return Chosen(interface=name, address=by_name[name].addresses[0], why=f"GLOO_SOCKET_IFNAME={asked}")
    if names:
        raise EnvironmentBroken(
            f"GLOO_SOCKET_IFNAME={asked} names no interface of this host. There are: {', '.join(by_name) or 'none'}"
        )
    if toward is not None:
        address = (source or _source)(toward)
        name = next((one.name for one in found if address in one.addresses), "?")
        return Chosen(interface=name, address=address, why=f"the way to {toward}")
    for one in sorted(found, key=lambda one: one.name == "lo"):
        return Chosen(interface=one.name, address=one.addresses[0], why="the first one there is")
    raise EnvironmentBroken("this host has no network interface with an address, not even the loopback")


def _source(toward: str) -> str:
    """Return the address from which this host would send to another one. Nothing is sent for that."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EnvironmentBroken(f"this host knows no way to {toward}: {error}") from error


class Board(Protocol):
    """Where nodes leave notices for each other: ``agreement.store.Board``."""

    def post(self, name: str, value: Any) -> None: ...
    def read(self, name: str, ranks: Sequence[int], *, within_seconds: float) -> Mapping[int, Any]: ...
    def gather(self, name: str, value: Any, ranks: Sequence[int], *, within_seconds: float) -> Mapping[int, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a run, each spoken for by one of its ranks.

    Attributes:
        speakers: node -> the rank that speaks for it.
        hosts: node -> its name.
        me: the node of this rank.
    """

    speakers: Mapping[int, int]
    hosts: Mapping[int, str]
    me: int

    @classmethod
    def of(cls, inventory: Iterable[Mapping[str, Any]], node_rank: int) -> Nodes:
        """Take them from what every rank has said of itself: the rank that is first on its node speaks for it."""
        first: dict[int, Mapping[str, Any]] = {}
        for who in sorted(inventory, key=lambda who: (who["node_rank"], who["local_rank"])):
            first.setdefault(int(who["node_rank"]), who)
        return cls(
            speakers={node: int(who["rank"]) for node, who in first.items()},
            hosts={node: str(who["host"]) for node, who in first.items()},
            me=node_rank,
        )

    @property
    def speaks(self) -> int:
        """The rank that speaks for this rank's node."""
        return self.speakers[self.me]

    def gather(self, board: Board, name: str, value: Any, *, within_seconds: float) -> dict[int, Any]:
        """Return node -> notice, of those that came within the time. Every speaker must call this."""
        came = board.gather(name, value, list(self.speakers.values()), within_seconds=within_seconds)
        return {node: came[rank] for node, rank in self.speakers.items() if rank in came}
