"""What the value of a variable means at the place where it is set. Pure.

Each judge returns of what kind a finding about it is, or None where there is nothing to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpucluster.fabric_ports import selects
from pytest_gpucluster.infiniband import ETHERNET, INFINIBAND, Adapters
from pytest_gpucluster.metrics.finding import Kind
from pytest_gpucluster.surroundings.interfaces import matches


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the variables are set, as far as it matters to what they do.

    Attributes:
        nnodes, local_ranks: nodes of the run, and ranks of this one.
        nvlink, nvls: the GPUs of a node reach each other over NVLink, and through a switch that can sum up.
        adapters: the node's InfiniBand and RoCE ports.
        peermem: the module that lets network cards reach GPU memory is loaded.
        interfaces: names of the network interfaces; empty where they are not known.
        demanded: variables that the provider's own plugin wants set here.
    """

    nnodes: int = 1
    local_ranks: int = 1
    nvlink: bool = False
    nvls: bool = False
    adapters: Adapters = field(default_factory=Adapters)
    peermem: bool = False
    interfaces: tuple[str, ...] = ()
    demanded: frozenset[str] = frozenset()

    @property
    def link_layers(self) -> set[str]:
        """The kinds of ports that carry data."""
        return {port.link_layer for port in self.adapters.ports if port.is_active}

    @property
    def has_fabric(self) -> bool:
        """Tell whether there are nodes to reach, and ports to reach them by."""
        return self.nnodes > 1 and bool(self.link_layers)


Judge = Callable[[str, Place], Kind | None]


def number(value: str) -> int:
    """Read a number as NCCL does: what begins with none is 0, so that ``true`` means 0.

    Source: NCCL, src/misc/param.cc, ncclLoadParam, which calls strtoll.

    >>> number("1"), number("0x10"), number("true"), number("-2 ")
    (1, 16, 0, -2)
    """
    found = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+)", value)
    if found is None:
        return 0
    digits = found[2]
    if digits.startswith(("0x", "0X")):
        amount = int(digits, 16)
    elif digits.startswith("0"):
        amount = int(re.split("[89]", digits)[0], 8)
    else:
        amount = int(digits)
    return -amount if found[1] == "-" else amount


def excludes(value: str, word: str) -> bool:
    """Tell whether a list of algorithms or protocols leaves one out, for all-reduce.

    >>> [excludes(value, "nvls") for value in ("Ring", "^Tree", "^NVLS", "Ring,NVLS", "ring;allreduce:nvls")]
    [True, False, True, False, False]
    """
    lists = {}
    for part in value.lower().split(";"):
        function, colon, names = part.partition(":")
        lists[function.strip() if colon else ""] = names if colon else function
    chosen = lists.get("allreduce", lists.get("", "^"))
    listed = word.lower() in [name.strip() for name in chosen.removeprefix("^").split(",")]
    return listed == chosen.startswith("^")


def when_on(kind: Kind, where: Callable[[Place], bool] = lambda place: True) -> Judge:
    """A flag that is on: of this kind where it matters, a note elsewhere."""
    return lambda value, place: None if number(value) == 0 else (kind if where(place) else "note")


def when_off(kind: Kind, where: Callable[[Place], bool] = lambda place: True) -> Judge:
    """A flag that is on by default, and set to 0."""
    return lambda value, place: ("note" if number(value) else kind) if where(place) else "note"


def _level(value: str, place: Place) -> Kind | None:
    return "environment" if value.strip().upper() == "LOC" or value.strip() == "0" else "note"


def p2p_level(value: str, place: Place) -> Kind | None:
    """Judge a level that keeps the GPUs of a node from reaching each other."""
    never = _level(value, place) == "environment" or (value.strip().upper() == "NVL" and not place.nvlink)
    return "environment" if never and place.local_ranks > 1 else "note"


def gdr_level(value: str, place: Place) -> Kind | None:
    """Judge a level that keeps network cards from GPU memory."""
    return _level(value, place) if place.has_fabric else "note"


def algorithms(value: str, place: Place) -> Kind | None:
    """Judge a choice that leaves NVLS out where there is it, or trees where there are several nodes."""
    without_nvls = excludes(value, "nvls") and place.nvls and place.local_ranks > 1
    across = excludes(value, "tree") and excludes(value, "nvlstree") and place.nnodes > 1
    return "environment" if without_nvls or across else "note"


def protocols(value: str, place: Place) -> Kind | None:
    """Judge a choice that forces LL128 where NCCL would hardly take it, or leaves Simple out."""
    # Without NVLink NCCL takes LL128 nowhere; with it, it mostly does by itself (GCP has Simple,LL128 set on H100).
    forced = not value.strip().startswith("^") and not excludes(value, "ll128") and not place.nvlink
    return "environment" if forced or excludes(value, "simple") else "note"


def network(value: str, place: Place) -> Kind | None:
    """Judge sockets where there is a fabric."""
    return "environment" if value.strip().lower() == "socket" and place.has_fabric else None


def gid_index(value: str, place: Place) -> Kind | None:
    """Judge an entry that InfiniBand does not have, or a RoCE port."""
    if number(value) < 0 or not place.link_layers:
        return None
    if ETHERNET not in place.link_layers:
        return "environment" if number(value) > 0 else "note"
    if INFINIBAND in place.link_layers:
        return "note"
    ports = [port for port in place.adapters.ports if port.is_active and port.link_layer == ETHERNET]
    missing = [port for port in ports if all(gid.index != number(value) for gid in port.gids)]
    return "environment" if missing else "note"


def cards(value: str, place: Place) -> Kind | None:
    """Judge a choice of cards of which none is active."""
    active = [port for port in place.adapters.ports if port.is_active]
    if not value.strip() or not place.adapters.ports:
        return None
    return None if any(selects(value, port) for port in active) else "environment"


def interface(value: str, place: Place) -> Kind | None:
    """Judge a choice of interfaces that are not there, or do not leave the host."""
    # NCCL takes a value of one character for none.
    if len(value) < 2 or not place.interfaces:
        return None
    chosen = [name for name in place.interfaces if matches(name, value)]
    return "environment" if not chosen or (place.nnodes > 1 and chosen == ["lo"]) else None


def ucx_devices(value: str, place: Place) -> Kind | None:
    """Judge a choice of which nothing is there."""
    if value.strip().lower() in ("", "all") or not place.adapters.ports:
        return None
    known = {f"{port.device}:{port.number}" for port in place.adapters.ports} | set(place.interfaces)
    named = [part.strip() for part in value.lstrip("^").split(",") if part.strip()]
    return "environment" if not any(part in known for part in named) else None


def topology(value: str, place: Place) -> Kind | None:
    """Judge a file that is not there."""
    return "note" if Path(value).is_file() else "environment"


def channels(value: str, place: Place) -> Kind | None:
    """Judge a number of blocks that cannot fill the links."""
    # This suite's rule: 4 blocks are a quarter of the 16 that NVLS takes on Hopper (NVLS_NCHANNELS in NCCL's log).
    return "environment" if 0 < number(value) <= 4 and place.local_ranks > 1 else "note"


def beside_others(place: Place) -> bool:
    """Tell whether there are other GPUs on the node."""
    return place.local_ranks > 1


def over_fabric(place: Place) -> bool:
    """Tell whether there is a fabric to other nodes."""
    return place.has_fabric


def through_switch(place: Place) -> bool:
    """Tell whether a switch could sum up what the GPUs of this node send."""
    return place.nvls and place.local_ranks > 1
