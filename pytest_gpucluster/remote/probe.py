"""What a node says of itself before a run: whether it could take part. On the node."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import platform
import random
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pytest_gpucluster import __version__
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.journal.run_directory import require_writable

_OF_A_SUITE = (".py", ".yaml", ".yml", ".ini", ".toml")
_FIRST_PORT, _PORTS, _TRIES = 20000, 10000, 50
"""Below the ports that Linux gives away. Source: Linux, Documentation/networking/ip-sysctl.rst
(ip_local_port_range: 32768 to 60999)."""


def probe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of this node, and under ``problems`` what would stop a run here, each in one line.

    Args:
        request: ``directory`` to work in, ``report_dir``, pytest's ``arguments``, the ``master`` that is to be found
            by its name, and ``port``: a number that must be free, 0 for any, None where this is not the first node.
    """
    from pytest_gpucluster.judge.loader import shipped_path  # which loads yaml

    problems: list[str] = []
    directory = Path(request["directory"])
    try:
        os.chdir(directory)
    except OSError as error:
        problems.append(f"the working directory {directory}: {error.strerror or error} (--directory)")
    else:
        try:
            require_writable(Path(request["report_dir"]), "the report directory")
        except OptionError as error:
            problems.append(f"{error} (--node-report-dir)")
    facts: dict[str, Any] = {
        "host": hostname(),
        "version": __version__,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "pytest": _version("pytest"),
        "package": _digest([Path(__file__).resolve().parent.parent]),
        "limits": _digest([shipped_path()]),
        "suite": _digest(_paths(request["arguments"])),
        "interpreter": sys.executable,
        "problems": problems,
    }
    problems += [f"{name} is not installed for {sys.executable}" for name in ("torch", "pytest") if not facts[name]]
    if request["port"] is not None:
        facts["port"] = _port(int(request["port"]), problems)
    elif request["master"]:
        try:
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(request["master"], None, type=socket.SOCK_STREAM)}
            if all(map(_is_loopback, found)) and not _is_loopback(_reached_at()):
                problems.append(
                    f"finds {', '.join(sorted(found))} for {request['master']}, where all are to meet: that is this "
                    "node itself (address= of the first node, or --master-addr)"
                )
        except OSError as error:
            problems.append(
                f"finds no address for {request['master']}, where all are to meet: {error.strerror or error}"
                " (address= of the first node, or --master-addr)"
            )
    return facts


def hostname() -> str:
    """Return what this node calls itself in reports."""
    return os.environ.get("GPUCLUSTER_HOSTNAME") or socket.gethostname()


def _reached_at() -> str:
    """Return the address of this node to which the connection came; empty where nobody says. Source: ssh(1)."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


def _is_loopback(address: str) -> bool:
    """Tell whether nobody else reaches this address; also where it is none."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return True


def _version(name: str) -> str:
    """Return an installed version without importing the package, which for torch takes seconds."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _paths(arguments: Sequence[str]) -> list[Path]:
    """Return the files and folders among pytest's arguments."""
    named = [Path(word.partition("::")[0]) for word in arguments if word and not word.startswith("-")]
    return [path for path in named if path.exists()]


def _digest(places: Iterable[Path]) -> str:
    """Return a short digest of code and settings in these places; empty where there are none."""
    found = hashlib.sha256()
    count = 0
    for place in places:
        files = sorted(path for path in place.rglob("*") if path.suffix in _OF_A_SUITE) if place.is_dir() else [place]
        for path in files:
            if not path.is_file():
                continue
            name = path.relative_to(place).as_posix() if place.is_dir() else path.name
            found.update(f"{name}\0".encode("utf-8", "backslashreplace"))
            found.update(hashlib.sha256(path.read_bytes()).digest())
            count += 1
    return found.hexdigest()[:12] if count else ""


def _port(wanted: int, problems: list[str]) -> int:
    """Return a port on which this node can listen: the wanted one, or any where that is 0."""
    # Not by name of the run: two operators at the same second must not get the same one.
    tries = [wanted] if wanted else random.SystemRandom().sample(range(_FIRST_PORT, _FIRST_PORT + _PORTS), _TRIES)
    why = ""
    for port in tries:
        try:
            with socket.socket() as probed:
                # As torch does: a port on which a run has just ended is free.
                probed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probed.bind(("", port))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            return port
    told = f"port {wanted}" if wanted else f"{_TRIES} ports of {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1}"
    problems.append(f"cannot listen on {told}: {why} (--port)")
    return wanted
