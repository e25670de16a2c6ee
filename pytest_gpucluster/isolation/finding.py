"""Results of probes, the conclusion of an isolation, and the list of nodes to exclude, as plain values.

The journal and the reports store and show these values; exclude.txt has the forms that schedulers accept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.hostlist import compress_hostlist, expand_hostlist
from pytest_gpucluster.text import plural, some_of


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One group of units that was probed at once with other, disjoint groups.

    ``members`` are the units (nodes, or the GPUs of one node), ascending, each once. ``busbw`` is the GB/s of the
    group's slowest rank; None where it did not finish, or where there is none to measure because the group is a
    single GPU. ``wrong`` names the rank that saw wrong data, and where. ``failure`` is why it did not finish: a
    timeout, an exception, a crashed rank.

    Raises:
        ValueError: the members are none, not ascending or one of them twice.
    """

    members: tuple[int, ...]
    busbw: float | None
    wrong: str = ""
    failure: str = ""

    def __post_init__(self) -> None:
        if not self.members or list(self.members) != sorted(set(self.members)):
            raise ValueError(f"a group has units in ascending order, each once, not {self.members!r}")

    @property
    def broken(self) -> bool:
        """Whether it failed whatever its speed: wrong data, not finished, or no value that can be judged."""
        if self.wrong or self.failure:
            return True
        if self.busbw is None:
            return len(self.members) > 1  # no value and no reason for it: never a pass
        return not math.isfinite(self.busbw) or self.busbw < 0


_LISTED = 16


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A unit, or the link between two units, that fails with every partner.

    ``failed`` of ``probes`` probes with it have failed; those that another culprit explains are not counted.
    ``evidence`` has a line for each that failed, and one with the partners that passed without it.
    """

    units: tuple[int, ...]
    kind: Literal["unit", "link"]
    failed: int
    probes: int
    evidence: tuple[str, ...]

    @property
    def intermittent(self) -> bool:
        """Whether some probe with it has passed."""
        return self.failed < self.probes

    def summary(self, name: Callable[[int], str] = str) -> str:
        """Return one line, such as "gpu-003: failed 3 of 3 probes, with every partner"."""
        units = " and ".join(name(unit) for unit in self.units)
        culprit = f"the link between {units}" if self.kind == "link" else units
        failed = f"{culprit}: failed {self.failed} of {self.probes} probes"
        if self.intermittent:
            return f"{failed}: intermittent"
        return failed + (", with every partner" if self.kind == "unit" else "; each of the two passes with others")


@dataclass(frozen=True, kw_only=True)
class IsolationResult:
    """The result of an isolation.

    ``culprits`` are confirmed by further probes with known-good partners. ``cleared`` have passed with others, and
    every failed group that they were in has a culprit. ``undecided`` are the rest; ``why_undecided`` gives the reason,
    and is not empty where there are any, or where the fault did not occur again. ``rounds`` has the outcomes of each.
    ``unjudged``: how many had a rate that nothing could be compared with.
    """

    culprits: tuple[Culprit, ...]
    cleared: tuple[int, ...]
    undecided: tuple[int, ...]
    rounds: tuple[tuple[Outcome, ...], ...]
    why_undecided: str
    reproduced: bool
    unjudged: int = 0

    @property
    def probes(self) -> int:
        """Number of probed groups."""
        return sum(len(outcomes) for outcomes in self.rounds)

    def summary(self, name: Callable[[int], str] = str) -> tuple[str, ...]:
        """Return a few lines for an operator; ``name`` is unit -> its name."""
        effort = f"{len(self.rounds)} rounds, {self.probes} probes"
        if self.culprits:
            headline = f"{plural(len(self.culprits), 'culprit')} found in {effort}"
        elif self.reproduced:
            headline = f"no culprit confirmed in {effort}"
        else:
            headline = f"not reproduced in {effort}"
        lines = [headline]
        for culprit in self.culprits:
            lines.append(culprit.summary(name))
            lines += (f"  {line}" for line in culprit.evidence)
        if self.undecided:
            lines.append(f"undecided: {some_of([*map(name, self.undecided)], _LISTED)}")
        if self.why_undecided:
            lines.append(self.why_undecided)
        if self.cleared:
            lines.append(f"cleared: {some_of([*map(name, self.cleared)], _LISTED)}")
        return tuple(lines)


EXCLUDE_FILE = "exclude.txt"
"""In a run's folder."""
_SLURM = "[slurm]"


def exclude_text(
    result: IsolationResult | None,
    *,
    host: Callable[[int], str],
    name: Callable[[int], str] | None = None,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return exclude.txt, or an empty text where there is no culprit: a suspicion excludes no host.

    It has two sections: after ``[slurm]`` one line with Slurm's host list, after ``[kubernetes]`` a node's name on each
    line. All else begins with ``#``.

    Args:
        result: of an isolation; None where there was none.
        host: unit -> its host, as Slurm calls the node.
        name: unit -> its name in the comments; by default the host.
        failed: host -> why: what failed there, and nowhere else or on few others.

    Raises:
        LaunchError: a host has no name that a host list can hold.

    Source: https://slurm.schedmd.com/sbatch.html (``--exclude``);
    https://kubernetes.io/docs/reference/kubectl/generated/kubectl_cordon/.
    """
    culprits = () if result is None else result.culprits
    if not culprits and not failed:
        return ""
    # Of a bad link the first end is excluded: without it the link is not used.
    hosts = [*failed, *(host(culprit.units[0]) for culprit in culprits)]
    each = "Each failed again with partners that pass without it." if culprits else ""
    lines = [f"# Nodes to leave out of the next jobs. {each}".rstrip()]
    lines += [f"# {its}: {' '.join(why.split())}" for its, why in failed.items()]
    for culprit in culprits:
        lines.append(f"# {' '.join(culprit.summary(name or host).split())}")
        if culprit.kind == "link":
            lines.append(f"#   of its two ends {host(culprit.units[0])} is left out; the other one would do as well")
    return "\n".join([*lines, *node_sections(hosts)]) + "\n"


def node_sections(hosts: Iterable[str], *, file: str = EXCLUDE_FILE) -> list[str]:
    """Return the lines of exclude.txt's two sections, and how to use them; there must be a host.

    Raises:
        LaunchError: a host has no name that a host list can hold, or there is none.
    """
    names = sorted(set(hosts))
    return [
        "#",
        f"# sbatch --exclude=\"$(sed -n '/^\\[slurm\\]/{{n;p}}' {file})\" ...",
        _SLURM,
        compress_hostlist(names),
        "",
        *(f"# kubectl cordon {node}" for node in names),
        "[kubernetes]",
        *names,
    ]


def excluded_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of an exclude.txt, as Slurm calls them.

    Raises:
        LaunchError: it has no section ``[slurm]``, or no host list in it.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if _SLURM not in lines[:-1]:
        raise LaunchError(f"{EXCLUDE_FILE} has no line after {_SLURM}")
    return tuple(expand_hostlist(lines[lines.index(_SLURM) + 1]))
