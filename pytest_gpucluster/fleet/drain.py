"""The nodes of a fleet to leave out of the next jobs, in the forms that schedulers take."""

from __future__ import annotations

from pytest_gpucluster.fleet.matrix import Matrix
from pytest_gpucluster.isolation.finding import EXCLUDE_FILE, node_sections
from pytest_gpucluster.text import one_line, printable


def drain_text(found: Matrix, *, file: str = EXCLUDE_FILE) -> str:
    """Return the file, which is going to be called ``file``: sections as in exclude.txt, and why each node is in them.

    A fleet without such nodes has no sections.

    Raises:
        LaunchError: a host has no name that a host list can hold.
    """
    unknown = [
        f"# no answer, and not in the lists: {printable(one_line(each.node, 200))}" for each in found.without_answer
    ]
    if not found.drained:
        return "\n".join(["# No node of this fleet is to be drained.", *unknown]) + "\n"
    lines = ["# Nodes to leave out of the next jobs: rejected when run alone, or behind the fleet."]
    lines += [printable(one_line(f"# {each.node}: {each.why}", 240)) for each in found.drained]
    return "\n".join([*lines, *unknown, *node_sections((each.node for each in found.drained), file=file)]) + "\n"
