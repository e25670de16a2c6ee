"""What nodes have in common and in what they differ: as text, and as one JSON object."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterator, Sequence

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.hostlist import compress_hostlist
from pytest_gpucluster.node_differences.answers import Answers
from pytest_gpucluster.node_differences.groups import Compared, Group
from pytest_gpucluster.text import one_line

SCHEMA_VERSION = 1
_CHARACTERS = 400
_NAME_COLUMNS = 30


def table(answers: Answers, compared: Sequence[Compared], *, width: int) -> str:
    """Return the comparison as text, what is wrong first. Every line but a long name's is at most ``width`` wide."""
    return "".join(f"{line.rstrip()}\n" for line in _lines(answers, compared, width))


def document(answers: Answers, compared: Sequence[Compared], *, exit_code: int) -> str:
    """Return the comparison as one JSON object, whose keys are in docs/slurm.md."""
    plain = {
        "schema_version": SCHEMA_VERSION,
        "exit": exit_code,
        "nodes": sorted(answers.told),
        "without_answer": dict(answers.without),
        "uninvited": list(answers.uninvited),
        "facts": [
            {
                "name": fact.name,
                "alike": fact.alike,
                "groups": [
                    {"shown": group.shown, "value": group.value, "nodes": list(group.nodes)} for group in fact.groups
                ],
            }
            for fact in compared
        ],
    }
    return json.dumps(plain, indent=2) + "\n"


def _lines(answers: Answers, compared: Sequence[Compared], width: int) -> Iterator[str]:
    different = [fact for fact in compared if not fact.alike]
    if answers.without:
        yield "without an answer:"
        for node, why in answers.without.items():
            yield from _wrapped(f"{one_line(node, 80)}: {why}", "  ", width)
        yield ""
    if answers.uninvited:
        yield from _wrapped(f"not expected, and compared all the same: {_named(answers.uninvited)}", "", width)
        yield ""
    if different:
        yield "they differ in:"
        for fact in different:
            yield f"  {fact.name}"
            for group in fact.groups:
                yield from _group(group, is_first=group is fact.groups[0], width=width)
        yield ""
    alike = [fact for fact in compared if fact.alike and fact.known]
    if alike:
        yield "alike:" if len(answers.told) > 1 else "it is:"
        for fact in alike:
            yield from _wrapped(f"{fact.name:<{_NAME_COLUMNS}}  {_shown(fact.groups[0])}", "  ", width, deeper=34)
        yield ""
    count = len(answers.told)
    ending = f"differ in {len(different)} of {sum(fact.known for fact in compared)} facts" if different else "are alike"
    told = f"{count} nodes told what they are: they {ending}"
    if count < 2:
        told = "1 node told what it is: nothing is there to compare it with" if count else "no node told what it is"
    if answers.without:
        told += f"; {len(answers.without)} gave no answer: {_named(answers.without)}"
    yield from _wrapped(told, "", width)


def _group(group: Group, *, is_first: bool, width: int) -> Iterator[str]:
    yield from _wrapped(f"{len(group.nodes):>5}  {_shown(group)}", "  ", width, deeper=9)
    # Of the largest group all that is to be said is that the others are not in it.
    if not is_first or len(group.nodes) == 1:
        yield from _wrapped(_named(group.nodes), " " * 9, width)


def _shown(group: Group) -> str:
    return one_line(group.shown, _CHARACTERS)


def _named(nodes: Collection[str]) -> str:
    try:
        return one_line(compress_hostlist(nodes), _CHARACTERS)
    except LaunchError:  # a file's name that no node has: it stands as it is
        return one_line(", ".join(nodes), _CHARACTERS)


def _wrapped(text: str, indent: str, width: int, *, deeper: int = 2) -> list[str]:
    inner = textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * (deeper if deeper > 2 else 2),
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    return inner or [""]
