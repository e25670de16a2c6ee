"""The hosts file of ``gpucluster run --hosts``, and the plan of a run over its nodes: what runs where, and how.

The file has one node a line, or several in brackets, with what ssh needs to reach it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.agreement.preflight import Expectation
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


_OURS = {
    "--junitxml": "it is report.xml among the reports of the first node",
    "--junit-xml": "it is report.xml among the reports of the first node",
    "--gpucluster-report-dir": "say before the --: --report-dir for here, --node-report-dir for the nodes",
    "--gpucluster-expect": "say before the -- what each node has: --expect 8xH100",
    "-n": "torchrun starts the ranks",
    "--numprocesses": "torchrun starts the ranks",
}
_SETTINGS = ("GPUCLUSTER_", "PYTEST_ADDOPTS")
_OF_ONE_PROCESS = ("GPUCLUSTER_HOSTNAME", "GPUCLUSTER_EXIT_NOTES", "GPUCLUSTER_REPORT_DIR", "GPUCLUSTER_EXPECT")
"""Not handed on: names of this machine only, and what this command itself says to each node."""
_OF_THE_FABRIC = ("NCCL_", "UCX_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_")
JUNIT = "report.xml"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run over some nodes. All paths but those of this machine are of the nodes."""

    hosts: tuple[Host, ...]
    """In the order of their ranks: the first has rank 0, the port where all meet, and the reports."""
    each: Expectation | None
    """What each node has, as declared; ``nodes`` is 1."""
    ranks: int | None
    """On each node, where the hosts file does not say it; None for as many as there are GPUs."""
    arguments: tuple[str, ...]
    directory: str
    node_report_dir: str
    run_id: str
    environ: Mapping[str, str]
    master: str
    port: int

    def folder(self, host: Host) -> str:
        """Return where a node keeps its reports of this run. Nodes may share a file system: each has its own."""
        return posixpath.join(self.node_report_dir, self.run_id, host.name)

    def words(self, node_rank: int) -> list[str]:
        """Return what ``gpucluster`` is told on a node."""
        host, nnodes = self.hosts[node_rank], len(self.hosts)
        ranks = ranks_of(host, self.each, self.ranks)
        words = ["run", f"--nnodes={nnodes}", f"--node-rank={node_rank}", f"--master-addr={self.master}"]
        words += [f"--master-port={self.port}", *([f"--nproc-per-node={ranks}"] if ranks else []), "--"]
        if self.each is not None:
            sku = f"x{self.each.sku}" if self.each.sku else ""
            expect = [f"--gpucluster-expect={nnodes}x{self.each.gpus_per_node}{sku}"]
        else:
            expect = []
        return [*words, *self.arguments, *expect, *reporting(self.folder(host))]


def reporting(folder: str) -> list[str]:
    """Return pytest's arguments that say where a run leaves its reports on its node."""
    return [f"--gpucluster-report-dir={folder}", f"--junitxml={posixpath.join(folder, JUNIT)}"]


def ranks_of(host: Host, each: Expectation | None, ranks: int | None) -> int | None:
    """Return how many ranks a node gets; None for one on each GPU that it shows."""
    return each.gpus_per_node if each is not None else host.slots or ranks


def require_agreement(hosts: Sequence[Host], each: Expectation | None) -> None:
    """Make sure that the hosts file and ``--expect`` do not contradict each other.

    Raises:
        OptionError: they do.
    """
    for host in hosts:
        if each is not None and host.slots is not None and host.slots != each.gpus_per_node:
            raise OptionError(
                f"{host.name} has slots={host.slots} in the hosts file, but --expect says {each.gpus_per_node} GPUs "
                "on each node; correct one of them"
            )


def require_free(arguments: Sequence[str]) -> None:
    """Make sure that pytest's arguments leave alone what this command itself says.

    Raises:
        OptionError: they do not.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        name = "-n" if re.fullmatch(r"-n(\d+|auto|logical)", name) else name
        if name in _OURS:
            raise OptionError(f"{argument}: not after --: {_OURS[name]}")


def handed_on(environ: Mapping[str, str], asked: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that the nodes get, and the names of some that they do not get, though they would matter.

    ssh hands no variables on. The settings of this suite are handed on, since a run with others than the operator has
    set would accept by other rules; all else only where it is asked for.

    Args:
        environ: of this process.
        asked: of ``--env``: NAME or NAME=VALUE.

    Raises:
        OptionError: a name is no name of a variable, or is not set here.
    """
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(_SETTINGS) and name not in _OF_ONE_PROCESS and value
    }
    for text in asked:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise OptionError(f"--env {text}: {name!r} is no name of a variable; write NAME or NAME=VALUE")
        if not equals and name not in environ:
            raise OptionError(f"--env {name}: not set here; write --env {name}=VALUE, or set it")
        if name in _OF_ONE_PROCESS[1:]:
            raise OptionError(
                f"--env {name}: this command says it to each node itself; see --expect and --node-report-dir"
            )
        if name == _OF_ONE_PROCESS[0]:
            raise OptionError(f"--env {name}: every node has another name; set it on the nodes")
        found[name] = value if equals else environ[name]
    left = sorted(name for name in environ if name.startswith(_OF_THE_FABRIC) and name not in found)
    return found, left
