"""Whether nodes are ready for one run: the facts that each node collects, and their comparison across all nodes."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pytest_gpucluster import __version__
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.journal.run_directory import require_writable
from pytest_gpucluster.launch.suite import find_suite
from pytest_gpucluster.runners.hosts import Host
from pytest_gpucluster.runners.ssh import Reply
from pytest_gpucluster.text import Column, fitted_table, one_line, some_of

READY, NOT_READY, NO_ANSWER = "ready", "not ready", "no answer"
_COMPARED = {
    "version": "pytest-gpucluster",
    "package": "the files of pytest-gpucluster (with the limits)",
    "suite": "the files of the suite",
    "torch": "torch",
}
"""Facts that must be equal on all nodes -> their names. Ranks compare the rest themselves."""
_CHARACTERS, _WIDTH = 300, 1000


@dataclass(frozen=True, kw_only=True)
class NodeCheck:
    """One node before the run."""

    host: Host
    state: str
    facts: Mapping[str, Any]
    problems: tuple[str, ...]


def check_nodes(hosts: Sequence[Host], replies: Mapping[str, Reply]) -> tuple[NodeCheck, ...]:
    """Return the check of every host, in their order.

    Facts must equal those of most nodes, or of the first one in a tie; and the version must be that of this machine,
    which reads the reports. Nodes without an answer are left out of the comparison.

    Args:
        hosts: all of them.
        replies: name -> reply. A host without one has not answered.
    """
    facts = {name: reply for name, reply in replies.items() if reply and not isinstance(reply, str)}
    # Counter keeps the order of the first seen among equals.
    counts = {key: Counter(str(node.get(key, "")) for node in facts.values()) for key in _COMPARED}
    common = {key: next((value for value, _ in count.most_common(1)), "") for key, count in counts.items()}
    named = Counter(str(node.get("host", "")) for node in facts.values())
    found = []
    for host in hosts:
        mine = facts.get(host.name)
        if mine is None:
            why = str(replies.get(host.name) or "it sent no facts")
            # A node that reports an error is reachable, but missing all the same.
            found.append(NodeCheck(host=host, state=NO_ANSWER, facts={}, problems=(one_line(why, _CHARACTERS),)))
            continue
        named_problems = mine.get("problems")
        listed = named_problems if isinstance(named_problems, list) else []
        problems = [one_line(str(each), _CHARACTERS) for each in listed]
        for key, called in _COMPARED.items():
            has = str(mine.get(key, ""))
            if has != common[key]:
                problems.append(f"{called}: {_value(has)}, but most have {_value(common[key])}")
        if mine.get("version") == common["version"] != __version__:
            problems.append(f"pytest-gpucluster: {_value(common['version'])}, but this machine has {__version__}")
        if named[str(mine.get("host", ""))] > 1:
            problems.append(
                f"reports the host name {_value(str(mine.get('host', '')))} like another node: one machine twice, or "
                "two with one name (set GPUCLUSTER_HOSTNAME on the nodes)"
            )
        found.append(NodeCheck(host=host, state=NOT_READY if problems else READY, facts=mine, problems=tuple(problems)))
    return tuple(found)


def preflight_table(nodes: Sequence[NodeCheck]) -> str:
    """Return the table of nodes, each problem on a line of its own below its node."""
    titles, keys = ("node", "state", "host", "suite", "torch"), ("host", "version", "torch")
    rows = [
        [node.host.name, node.state, *(one_line(str(node.facts.get(key) or "-"), 40) for key in keys)] for node in nodes
    ]
    head, found = fitted_table([Column(title=title) for title in titles], rows, _WIDTH)
    for lines, node in zip(found, nodes, strict=True):
        lines += [f"  {problem}" for problem in node.problems]
    return "\n".join([head, *(line for lines in found for line in lines)])


def readiness_text(nodes: Sequence[NodeCheck]) -> str:
    """Return how many nodes are ready, and the names of the others.

    >>> readiness_text([])
    'none of 0 nodes is ready'
    """
    ready = sum(node.state == READY for node in nodes)
    texts = [f"{ready or 'none'} of {len(nodes)} nodes {'is' if ready < 2 else 'are'} ready"]
    for state in (NOT_READY, NO_ANSWER):
        names = [node.host.name for node in nodes if node.state == state]
        if names:
            texts.append(f"{state}: {some_of(names, 8)}")
    return "; ".join(texts)


def _value(value: str) -> str:
    return one_line(value, 60) or "none"


_SUITE_SUFFIXES = (".py", ".yaml", ".yml", ".ini", ".toml")


def collect_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of this node; ``problems`` has what would stop a run here, each in one line.

    Args:
        request: the working ``directory``, ``report_dir``, pytest's ``arguments``, the ``master`` whose name must
            resolve, and ``port``: must be free; None if this is not the first node.
    """
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
    package = Path(__file__).resolve().parent.parent
    named = [Path(word.partition("::")[0]) for word in request["arguments"] if word and not word.startswith("-")]
    facts: dict[str, Any] = {
        "host": os.environ.get("GPUCLUSTER_HOSTNAME") or socket.gethostname(),
        "version": __version__,
        "torch": _installed_version("torch"),
        "pytest": _installed_version("pytest"),
        "package": _digest([package, package.with_name("thresholds.yaml")]),  # in a checkout the limits are next to it
        "suite": _digest([path for path in named if path.exists()] or [find_suite()]),
        "problems": problems,
    }
    problems += [f"{name} is not installed for {sys.executable}" for name in ("torch", "pytest") if not facts[name]]
    if request["port"] is not None:
        try:
            with socket.socket() as candidate:
                # As torch does: the port of a run that has just ended is free.
                candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                candidate.bind(("", request["port"]))
        except OSError as error:
            problems.append(f"cannot listen on port {request['port']}: {error.strerror or error} (--port)")
    elif request["master"]:
        try:
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(request["master"], None, type=socket.SOCK_STREAM)}
            words = os.environ.get("SSH_CONNECTION", "").split()  # the third is this node's address. Source: ssh(1)
            ours = words[2] if len(words) == 4 else ""
            if all(map(_is_loopback, found)) and not _is_loopback(ours):
                problems.append(
                    f"resolves {request['master']}, the rendezvous host, to {', '.join(sorted(found))}: that is this "
                    "node itself (address= of the first node, or --master-addr)"
                )
        except OSError as error:
            problems.append(
                f"does not resolve {request['master']}, the rendezvous host: {error.strerror or error}"
                " (address= of the first node, or --master-addr)"
            )
    return facts


def _is_loopback(address: str) -> bool:
    """Return whether other nodes cannot reach this address; also for no address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return True


def _installed_version(name: str) -> str:
    """Return an installed version without importing the package, which for torch takes seconds."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _digest(places: Iterable[Path]) -> str:
    found = hashlib.sha256()
    count = 0
    for place in places:
        files = (
            sorted(path for path in place.rglob("*") if path.suffix in _SUITE_SUFFIXES) if place.is_dir() else [place]
        )
        for path in files:
            if not path.is_file():
                continue
            name = path.relative_to(place).as_posix() if place.is_dir() else path.name
            found.update(f"{name}\0".encode("utf-8", "backslashreplace"))
            found.update(hashlib.sha256(path.read_bytes()).digest())
            count += 1
    return found.hexdigest()[:12] if count else ""
