"""One node of a fleet: its newest run, and the earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.journal import FILE_NAME, Journal
from pytest_gpucluster.reports.outline import Row, outline


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One run of one node."""

    path: Path
    journal: Journal


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node, and what it has answered."""

    name: str
    answer: Answer
    """The newest."""
    earlier: tuple[Answer, ...] = ()

    @property
    def verdict(self) -> str:
        return self.answer.journal.verdict

    @property
    def exit(self) -> int:
        return self.answer.journal.exit

    @property
    def rejected(self) -> bool:
        """Tell whether a limit was missed, or a GPU found bad."""
        return self.exit == 1

    @property
    def rows(self) -> tuple[Row, ...]:
        return outline(self.answer.journal).rows

    @property
    def failure(self) -> str:
        """Return what failed first, or why the verdict is what it is."""
        bad = outline(self.answer.journal).bad
        return f"{bad[0].name}: {bad[0].why}" if bad and bad[0].why else self.answer.journal.reason


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All nodes, by name, and what is no node's own run."""

    nodes: tuple[Node, ...]
    silent: tuple[str, ...] = ()
    """Nodes that should have answered, and did not."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Which node's journal, or which one, cannot be read, and why: the node died while it began, as a rule."""
    joint: tuple[Answer, ...] = ()
    """Runs over several nodes: nobody can tell from them which node a value is of."""


def hosts_of(journal: Journal) -> tuple[str, ...]:
    """Return the hosts that a run was on."""
    places = journal.cluster.ranks if journal.cluster is not None else ()
    return tuple(dict.fromkeys(place.host for place in places if place.host)) or (
        (journal.run.hostname,) if journal.run.hostname and journal.run.nnodes == 1 else ()
    )


def fleet(
    answers: Iterable[Answer], *, expected: Sequence[str] = (), unreadable: Sequence[tuple[str, str]] = ()
) -> Fleet:
    """Return the fleet that these runs make. Of a node that ran several times the newest run counts.

    Args:
        answers: of runs, in any order.
        expected: the nodes that should have answered; any others are told of, too.
        unreadable: journals that cannot be read, and why.
    """
    runs: dict[str, list[Answer]] = {}
    joint = []
    for answer in answers:
        hosts = hosts_of(answer.journal)
        if len(hosts) == 1 and answer.journal.run.nnodes == 1:
            runs.setdefault(hosts[0], []).append(answer)
        else:
            joint.append(answer)
    nodes = []
    for name, own in sorted(runs.items()):
        *earlier, newest = sorted(own, key=lambda answer: answer.journal.run.started_at)
        nodes.append(Node(name=name, answer=newest, earlier=tuple(earlier)))
    silent = [name for name in dict.fromkeys(expected) if name not in runs]
    lost = {}
    for path, why in unreadable:
        # A sweep leaves each node's run in a folder of its name. Else nobody can tell whose journal it is.
        node = next((part for part in reversed(Path(path).parts) if part in silent), None)
        lost[path] = (path, why.removeprefix(f"{path}: ")) if node is None else (node, why)
    return Fleet(
        nodes=tuple(nodes),
        silent=tuple(name for name in silent if name not in {node for node, _ in lost.values()}),
        unreadable=tuple(lost.values()),
        joint=tuple(joint),
    )


def journals_below(place: Path) -> list[Path]:
    """Return every journal in a folder and below it, each once; links such as ``latest`` are not followed."""
    found = []
    for path in place.rglob(FILE_NAME):
        inside = path.relative_to(place).parts[:-1]
        if not any(place.joinpath(*inside[: depth + 1]).is_symlink() for depth in range(len(inside))):
            found.append(path)
    return sorted(found)
