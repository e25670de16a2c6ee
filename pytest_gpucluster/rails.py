"""Faults of ports, grouped by what ports share: the rail, which has a port of each node, and the leaf switch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class PortFault:
    """A fault of one port. ``leaf`` is the switch of its node, "" where it is not known."""

    host: str
    rail: str
    leaf: str = ""


def leaf_of(environ: Mapping[str, str]) -> str:
    """Return the leaf switch of this node, from what Slurm tells a job's tasks; "" where it does not.

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


def shared(faults: Iterable[PortFault], *, hosts: Sequence[str], leaves: Mapping[str, str]) -> list[str]:
    """Return a line for each rail and leaf switch that several faulty nodes share, the most faults first.

    Args:
        faults: what was found.
        hosts: all nodes of the run.
        leaves: node -> its leaf switch, where it is known.
    """
    known = list(faults)
    lines = list(_lines("rail", known, lambda fault: fault.rail, hosts_of=lambda _: hosts))
    of_leaf = [fault for fault in known if fault.leaf]
    lines += _lines(
        "leaf switch",
        of_leaf,
        lambda fault: fault.leaf,
        hosts_of=lambda leaf: [host for host in hosts if leaves.get(host) == leaf],
    )
    return lines


def _lines(
    what: str,
    faults: Sequence[PortFault],
    key: Callable[[PortFault], str],
    *,
    hosts_of: Callable[[str], Sequence[str]],
) -> Iterator[str]:
    groups: dict[str, dict[str, None]] = {}
    for fault in faults:
        groups.setdefault(key(fault), {})[fault.host] = None
    for name, found in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        if len(found) < 2:
            continue
        named = ", ".join(list(found)[:_MOST_NAMED]) + (
            f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        )
        yield f"{what} {name}: faults on {len(found)} of its {len(hosts_of(name))} nodes ({named})"
