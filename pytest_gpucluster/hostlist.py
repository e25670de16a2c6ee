"""Slurm's short form of many host names, and the names it stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_gpucluster.errors import LaunchError

# A hostlist that expands to more than any cluster has is a typing error, not a cluster.
_MOST_HOSTS = 65536


def expand_hostlist(text: str) -> list[str]:
    """Expand a Slurm host list such as ``gpu-[003,007-009],login1`` into its host names, in order.

    Raises:
        LaunchError: the brackets do not match, a range is malformed, or the list is absurdly long.

    Source: https://slurm.schedmd.com/scontrol.html (``show hostnames``).
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text):
        names = [""]
        for piece in re.split(r"(\[[^\[\]]*\])", part):
            choices = list(_bracket(piece[1:-1], text)) if piece.startswith("[") else [piece]
            if any(mark in choice for choice in choices for mark in "[]"):
                raise _bad(text, f"unbalanced brackets in {part!r}")
            if len(names) * len(choices) > _MOST_HOSTS:
                raise _bad(text, f"more than {_MOST_HOSTS} hosts")
            names = [name + choice for name in names for choice in choices]
        hosts += names
        if len(hosts) > _MOST_HOSTS:
            raise _bad(text, f"more than {_MOST_HOSTS} hosts")
    if not hosts or not all(hosts):
        raise _bad(text, "an empty host name")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text)]


def _bracket(ranges: str, text: str) -> Iterator[str]:
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip(), re.ASCII)
        if not match:
            raise _bad(text, f"{item!r} is neither a number nor a range such as 007-009")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _bad(text, f"the range {item!r} runs backwards")
        if int(last) - int(first) >= _MOST_HOSTS:
            raise _bad(text, f"more than {_MOST_HOSTS} hosts")
        # Leading zeros belong to the name: 007-009 is three digits wide.
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _bad(text: str, why: str) -> LaunchError:
    return LaunchError(f"host list {text!r}: {why}; expected a list such as 'gpu-[003,007-009],login1'")
