"""What is to run on which nodes, and the words of each of them. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.agreement.preflight import Expectation
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.remote.hosts import Host

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
