"""The hosts file of ``gpucluster run --hosts`` and ``sweep ssh``: one node a line, or several in brackets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.errors import LaunchError, OptionError
from pytest_gpucluster.isolation.finding import excluded_hosts
from pytest_gpucluster.launch.hostlist import compress_hostlist, expand_hostlist

NODE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
"""A name that files, shells and schedulers take without quotes."""
NODE_NAME_RULE = "letters, digits, dots, dashes and underscores only"
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?", re.ASCII)
_SETTINGS = {"port": r"[1-9]\d{0,4}", "address": r"[A-Za-z0-9:][A-Za-z0-9:._%-]*"}
_FORM = "[USER@]NAME [port=PORT] [address=ADDRESS], NAME also as gpu-[001-016]"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node. ``user`` and ``port`` are None where the file does not set them."""

    name: str
    address: str
    """For ssh, and for the other nodes if this is the first one; by default its name."""
    user: str | None = None
    port: int | None = None


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a hosts file.

    Raises:
        OptionError: it cannot be read, names no node, or has wrong lines: all of them, each with its number.
    """
    try:
        return parse_hosts(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}; name the file with the nodes, one a line") from None
    except UnicodeDecodeError:
        raise OptionError(f"{path}: not a text file; it has one node a line: {_FORM}") from None


def parse_hosts(text: str, where: str) -> tuple[Host, ...]:
    """Read the lines of a hosts file; ``where`` is its name in messages.

    Raises:
        OptionError: as :func:`read_hosts`.
    """
    found: dict[str, tuple[Host, int]] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        try:
            hosts = _parse_line(words) if words else []
        except OptionError as error:
            problems.append(f"{where}:{number}: {error}")
            continue
        for host in hosts:
            first, line_of_first = found.setdefault(host.name, (host, number))
            if first is not host:
                problems.append(f"{where}:{number}: {host.name} is in line {line_of_first} already; name it once")
    if problems:
        raise OptionError("\n".join(problems))
    if not found:
        raise OptionError(f"{where}: names no node; write one a line: {_FORM}")
    return tuple(host for host, _ in found.values())


def select_hosts(hosts: Sequence[Host], nodes: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Return the selected hosts, in the order of the file.

    Args:
        hosts: of the file.
        nodes: only these, as a host list; None for all.
        exclude: not these, as a host list or as the path of an ``exclude.txt``.

    Raises:
        OptionError: a malformed list, a name that is not in the file, or no host is left.
    """
    known = [host.name for host in hosts]
    wanted = set(known) if nodes is None else set(expand_nodes("--nodes", nodes, known))
    if exclude is not None:
        wanted -= set(expand_nodes("--exclude", _exclude_list(exclude), known))
    if not wanted:
        raise OptionError(f"--nodes and --exclude leave none of the {len(known)} nodes of the hosts file")
    return tuple(host for host in hosts if host.name in wanted)


def _exclude_list(exclude: str) -> str:
    path = Path(exclude)
    if not path.is_file():
        if "/" in exclude or exclude.endswith(".txt"):
            raise OptionError(
                f"--exclude {exclude}: no such file; name an exclude.txt, or nodes such as 'gpu-[003,007]'"
            )
        return exclude
    try:
        return ",".join(excluded_hosts(path.read_text(encoding="utf-8", errors="backslashreplace")))
    except (OSError, LaunchError) as error:
        raise OptionError(f"--exclude {exclude}: {error}") from None


def expand_nodes(
    option: str, text: str, known: Sequence[str] | None = None, where: str = "the hosts file"
) -> list[str]:
    """Return the nodes that an option names as a host list, which must be among the ``known`` ones of a place.

    Raises:
        OptionError: a malformed list, or an unknown node.
    """
    try:
        names = expand_hostlist(text)
    except LaunchError as error:
        raise OptionError(f"{option}: {error}") from None
    if unknown := [name for name in names if known is not None and name not in known]:
        raise OptionError(f"{option}: {compress_hostlist(unknown)} not in {where}")
    return names


def _parse_line(words: Sequence[str]) -> list[Host]:
    user, _, hostlist = words[0].rpartition("@")
    names = expand_nodes("NAME", hostlist)
    for name in names:
        if not NODE_NAME.fullmatch(name):
            raise OptionError(f"{name!r} is not a node name: {NODE_NAME_RULE}")
    settings: dict[str, str] = {}
    for word in words[1:]:
        key, _, value = word.partition("=")
        is_right = key in _SETTINGS and re.fullmatch(_SETTINGS[key], value, re.ASCII)
        if not is_right or key in settings or (key == "port" and int(value) > 65535):
            raise OptionError(f"{word!r} is wrong or given twice; a line is {_FORM}")
        settings[key] = value
    if user and not _USER.fullmatch(user):
        raise OptionError(f"{user!r} is not a user name")
    if "address" in settings and len(names) > 1:
        raise OptionError(f"one address for {len(names)} nodes; give each a line")
    port = int(settings["port"]) if "port" in settings else None
    return [Host(name=name, address=settings.get("address", name), user=user or None, port=port) for name in names]
