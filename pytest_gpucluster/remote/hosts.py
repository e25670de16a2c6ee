"""The hosts file: one node a line, or several in brackets, with what ssh has to know of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.errors import LaunchError, OptionError
from pytest_gpucluster.isolation.finding import excluded_hosts
from pytest_gpucluster.launch.hostlist import compress_hostlist, expand_hostlist

_MOST_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?", re.ASCII)
_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9:._%-]*", re.ASCII)
_FORM = "NAME [user=USER] [port=PORT] [address=ADDRESS] [slots=RANKS], NAME also as gpu-[001-016]"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node. ``user``, ``port`` and ``slots`` are None where the file leaves them to ssh, or to the run."""

    name: str
    address: str
    """Where ssh finds it, and where the others find it if it is the first: its name, if the file says nothing else."""
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    """So many ranks."""


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a hosts file.

    Raises:
        OptionError: it cannot be read, names nobody, or has lines that are wrong: all of them, each with its number.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}; name the file with the nodes, one a line") from None
    except UnicodeDecodeError:
        raise OptionError(f"{path}: no text; it has one node a line: {_FORM}") from None
    if len(content) > _MOST_BYTES:
        raise OptionError(f"{path}: larger than 1 MiB, so no hosts file; it has one node a line: {_FORM}")
    return parse_hosts(text, str(path))


def parse_hosts(text: str, where: str) -> tuple[Host, ...]:
    """Read the lines of a hosts file; ``where`` is its name in messages.

    Raises:
        OptionError: as :func:`read_hosts`.
    """
    found: dict[str, Host] = {}
    lines: dict[str, int] = {}
    wrong = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts = _line(words)
        except OptionError as error:
            wrong.append(f"{where}:{number}: {error}")
            continue
        for host in hosts:
            if host.name in found:
                wrong.append(
                    f"{where}:{number}: {host.name} stands in line {lines[host.name]} already; a node counts once"
                )
            found.setdefault(host.name, host)
            lines.setdefault(host.name, number)
    if wrong:
        raise OptionError("\n".join(wrong))
    if not found:
        raise OptionError(f"{where}: names no node; write one a line: {_FORM}")
    return tuple(found.values())


def chosen(hosts: Sequence[Host], nodes: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Return the hosts that are meant, in the order of the file.

    Args:
        hosts: of the file.
        nodes: only these, as a host list; None for all.
        exclude: not these, as a host list or as the path of an ``exclude.txt``.

    Raises:
        OptionError: a list cannot be read or has a name that the file has not, or nobody is left.
    """
    known = [host.name for host in hosts]
    wanted = set(known) if nodes is None else set(_listed("--nodes", nodes, known))
    if exclude is not None:
        wanted -= set(_listed("--exclude", _exclude_list(exclude), known))
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


def _listed(option: str, text: str, known: Sequence[str]) -> list[str]:
    try:
        names = expand_hostlist(text)
    except LaunchError as error:
        raise OptionError(f"{option}: {error}") from None
    strange = [name for name in names if name not in known]
    if strange:
        raise OptionError(f"{option}: {compress_hostlist(strange)} not in the hosts file")
    return names


def _line(words: Sequence[str]) -> list[Host]:
    user, _, listed = words[0].rpartition("@")
    try:
        names = expand_hostlist(listed)
    except LaunchError as error:
        raise OptionError(f"{error}; a line is {_FORM}") from None
    for name in names:
        if not _NAME.fullmatch(name):
            raise OptionError(f"{name!r} is no name of a node: letters, digits, dots, dashes and underscores only")
    said = {"user": user} if user else {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in ("user", "port", "address", "slots") or not equals or not value:
            raise OptionError(f"{word!r} is not understood; a line is {_FORM}")
        if key in said:
            raise OptionError(f"{key} is said twice")
        said[key] = value
    if "user" in said and not _USER.fullmatch(said["user"]):
        raise OptionError(f"user={said['user']} is no name of a user")
    if "address" in said and len(names) > 1:
        raise OptionError(f"one address cannot be that of {len(names)} nodes; give each a line")
    if "address" in said and not _ADDRESS.fullmatch(said["address"]):
        raise OptionError(f"address={said['address']} is no name or address of a host")
    port, slots = _number(said, "port", 65535), _number(said, "slots", 1024)
    return [
        Host(name=name, address=said.get("address", name), user=said.get("user"), port=port, slots=slots)
        for name in names
    ]


def _number(said: dict[str, str], key: str, most: int) -> int | None:
    text = said.get(key)
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0
    if not 1 <= number <= most:
        raise OptionError(f"{key}={text} is no whole number from 1 to {most}")
    return number
