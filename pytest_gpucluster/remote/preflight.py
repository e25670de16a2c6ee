"""Whether the nodes are fit for one run: what each has answered, held against the others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.remote.asking import Reply
from pytest_gpucluster.remote.hosts import Host
from pytest_gpucluster.text import one_line

READY, NOT_READY, NO_ANSWER = "ready", "not ready", "no answer"
_COMPARED = {
    "version": "pytest-gpucluster",
    "package": "the files of pytest-gpucluster",
    "limits": "the limits (thresholds.yaml)",
    "suite": "the files of the suite",
    "python": "python",
    "torch": "torch",
    "pytest": "pytest",
}
"""What must be the same on all nodes -> what it is called."""
_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node before the run."""

    host: Host
    state: str
    facts: Mapping[str, Any]
    problems: tuple[str, ...]

    @property
    def port(self) -> int | None:
        """On which it can be met."""
        port = self.facts.get("port")
        return port if isinstance(port, int) else None


def examine(hosts: Sequence[Host], replies: Mapping[str, Reply], version: str) -> tuple[Node, ...]:
    """Return what is known of every host, in their order.

    Nodes must be like most of them, and among equally many like the first; and have the version that asks, for that one
    will read their reports. What did not answer is left out of the comparison.

    Args:
        hosts: all of them.
        replies: name -> what it has answered. Without a reply a host has not answered.
        version: of this package, here.
    """
    facts = {host.name: answer for host in hosts if (answer := _answer(replies.get(host.name))) is not None}
    usual = {key: _usual([str(each.get(key, "")) for each in facts.values()]) for key in _COMPARED}
    named = Counter(str(each.get("host", "")) for each in facts.values())
    found = []
    for host in hosts:
        reply = replies.get(host.name)
        mine = facts.get(host.name)
        if mine is None:
            why = reply.why if reply is not None and reply.why else "it has said nothing of itself"
            # A node that says why it cannot is there, and somebody should mend it; it is no less missing.
            found.append(Node(host=host, state=NO_ANSWER, facts={}, problems=(one_line(why, _CHARACTERS),)))
            continue
        problems = [one_line(str(problem), _CHARACTERS) for problem in _texts(mine.get("problems"))]
        for key, called in _COMPARED.items():
            has = str(mine.get(key, ""))
            if has != usual[key]:
                problems.append(f"{called}: {_shown(has)}, where most have {_shown(usual[key])}")
        if mine.get("version") == usual["version"] != version:
            problems.append(f"pytest-gpucluster: {_shown(usual['version'])}, where this machine has {version}")
        if named[str(mine.get("host", ""))] > 1:
            problems.append(
                f"calls itself {_shown(str(mine.get('host', '')))} like another node: one machine twice, or "
                "two of one name (GPUCLUSTER_HOSTNAME on the nodes gives them names)"
            )
        found.append(Node(host=host, state=NOT_READY if problems else READY, facts=mine, problems=tuple(problems)))
    return tuple(found)


def table(nodes: Sequence[Node]) -> str:
    """Return the table of nodes, each problem on a line of its own below its node."""
    rows = [["node", "state", "host", "suite", "python", "torch"]]
    for node in nodes:
        rows.append([node.host.name, node.state])
        rows[-1] += [_cell(node.facts.get(key)) for key in ("host", "version", "python", "torch")]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += [f"  {problem}" for problem in (nodes[number - 1].problems if number else ())]
    return "\n".join(lines)


def counted(nodes: Sequence[Node]) -> str:
    """Return how many are in which state, and who is not ready.

    >>> counted([])
    'none of 0 nodes is ready'
    """
    ready = sum(node.state == READY for node in nodes)
    texts = [f"{ready or 'none'} of {len(nodes)} nodes {'is' if ready < 2 else 'are'} ready"]
    for state in (NOT_READY, NO_ANSWER):
        names = [node.host.name for node in nodes if node.state == state]
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            texts.append(f"{state}: {', '.join(names[:8])}{more}")
    return "; ".join(texts)


def _answer(reply: Reply | None) -> Mapping[str, Any] | None:
    # Nothing in it is no answer: whoever has no facts is left out of a run, and must not count as ready.
    return (reply.answer or None) if reply is not None and not reply.why else None


def _usual(values: Sequence[str]) -> str:
    # Counter keeps the order of the first seen among equals.
    return Counter(values).most_common(1)[0][0] if values else ""


def _shown(value: str) -> str:
    return one_line(value, 60) or "none"


def _cell(value: object) -> str:
    return one_line(str(value), 40) if value else "-"


def _texts(value: object) -> list[object]:
    return value if isinstance(value, list) else []
