"""The nodes to leave out of the next jobs, in the forms that schedulers take."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.hostlist import compress_hostlist, expand_hostlist
from pytest_gpucluster.isolation.finding import Isolated

FILE_NAME = "exclude.txt"
"""In a run's folder."""
_SLURM = "[slurm]"


def excluded(found: Isolated, *, host: Callable[[int], str]) -> tuple[str, ...]:
    """Return the hosts to leave out so that no culprit is left, sorted, each once.

    Of a bad link the first end is left out: without it the link is not used. ``host`` tells the host of a unit.
    """
    return tuple(sorted({host(culprit.units[0]) for culprit in found.culprits}))


def exclude_text(
    found: Isolated,
    *,
    host: Callable[[int], str],
    name: Callable[[int], str] | None = None,
    node_name: Callable[[str], str] = lambda host: host,
) -> str:
    """Return exclude.txt, or an empty text where there is no culprit: nobody is left out on a suspicion.

    It has two sections: after ``[slurm]`` one line with Slurm's host list, after ``[kubernetes]`` a node's name on each
    line. All else begins with ``#``.

    Args:
        found: what an isolation has found.
        host: unit -> its host, as Slurm calls the node.
        name: unit -> what it is called in the comments; the host, where it is not given.
        node_name: host -> the Kubernetes node. In a pod the host is the pod's name: then pass the node's.

    Raises:
        LaunchError: a host has no name that a host list can hold.

    Source: https://slurm.schedmd.com/sbatch.html (``--exclude``);
    https://kubernetes.io/docs/reference/kubectl/generated/kubectl_cordon/.
    """
    hosts = excluded(found, host=host)
    if not hosts:
        return ""
    lines = [
        "# Nodes to leave out of the next jobs. Each failed again with partners that pass without it.",
    ]
    for culprit in found.culprits:
        lines.append(f"# {' '.join(culprit.summary(name or host).split())}")
        if culprit.kind == "link":
            lines.append(f"#   of its two ends {host(culprit.units[0])} is left out; the other one would do as well")
    return "\n".join([*lines, *node_sections(hosts, node_name=node_name)]) + "\n"


def node_sections(
    hosts: Iterable[str], *, node_name: Callable[[str], str] = lambda host: host, file: str = FILE_NAME
) -> list[str]:
    """Return the lines of exclude.txt's two sections, and how to use them; there must be a host.

    Raises:
        LaunchError: a host has no name that a host list can hold, or there is none.
    """
    known = sorted(set(hosts))
    nodes = sorted({node_name(host) for host in known})
    return [
        "#",
        f"# sbatch --exclude=\"$(sed -n '/^\\[slurm\\]/{{n;p}}' {file})\" ...",
        _SLURM,
        compress_hostlist(known),
        "",
        *(f"# kubectl cordon {node}" for node in nodes),
        "[kubernetes]",
        *nodes,
    ]


def excluded_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of an exclude.txt, as Slurm calls them.

    Raises:
        LaunchError: it has no section ``[slurm]``, or what stands there is no host list.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if _SLURM not in lines[:-1]:
        raise LaunchError(f"{FILE_NAME} has no line after {_SLURM}")
    return tuple(expand_hostlist(lines[lines.index(_SLURM) + 1]))
