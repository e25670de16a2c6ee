"""Slurm's host lists: expanded to host names, and compressed from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from pytest_gpucluster.errors import LaunchError

# More hosts than any cluster has: a typing error.
_MOST_HOSTS = 65536


def expand_hostlist(text: str) -> list[str]:
    """Expand a Slurm host list such as ``gpu-[003,007-009],login1`` into its host names, in order.

    Raises:
        LaunchError: unbalanced brackets, a malformed range, or too many hosts.

    Source: https://slurm.schedmd.com/scontrol.html (``show hostnames``).
    """
    hosts: list[str] = []
    for part in map(str.strip, re.split(r",(?![^\[]*\])", text)):  # outside of brackets
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


def compress_hostlist(hosts: Iterable[str]) -> str:
    """Return Slurm's short form of host names, sorted, each once: the inverse of ``expand_hostlist``.

    Only a number at the end of a name goes into brackets, as Slurm requires: it refuses "unit[0-31]rack". Other names
    are kept as they are.

    >>> compress_hostlist(["gpu-007", "gpu-003", "gpu-008", "login1"])
    'gpu-[003,007-008],login1'

    Raises:
        LaunchError: no names, or one that is empty or has a comma, a bracket or white space.

    Source: https://slurm.schedmd.com/slurm.conf.html (``NodeName``).
    """
    names = sorted(set(hosts))
    for name in names:
        if not name or re.search(r"[\s,\[\]]", name):
            raise LaunchError(
                f"host name {name!r} cannot be in a Slurm host list: commas, brackets and white space are not allowed"
            )
    if not names:
        raise LaunchError("no host names to write as a Slurm host list")
    numbers: dict[str, list[str]] = {}
    for name in names:
        prefix = name.rstrip("0123456789")
        numbers.setdefault(prefix, []).append(name[len(prefix) :])
    return ",".join(part for prefix in sorted(numbers) for part in _short(prefix, numbers[prefix]))


def _short(prefix: str, numbers: Sequence[str]) -> Iterator[str]:
    """Yield the host list of names with a common prefix, each followed by one of these numbers or by nothing."""
    if "" in numbers:
        yield prefix
    runs: list[list[str]] = []
    for number in sorted((number for number in numbers if number), key=lambda number: (len(number), number)):
        last = runs[-1][-1] if runs else ""
        if last and number == f"{int(last) + 1:0{len(last)}d}" and len(runs[-1]) < _MOST_HOSTS:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(runs) == 1 and len(runs[0]) == 1:
        yield prefix + ranges[0]
    elif runs:
        yield f"{prefix}[{','.join(ranges)}]"


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
        # Leading zeros are part of the name: 007-009 is three digits wide.
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _bad(text: str, why: str) -> LaunchError:
    return LaunchError(f"host list {text!r}: {why}; expected a list such as 'gpu-[003,007-009],login1'")
