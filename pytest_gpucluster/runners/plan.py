"""What a run or a sweep starts: the command of each node, pytest's arguments, and the environment of the nodes."""

from __future__ import annotations

import posixpath
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_gpucluster.agreement.preflight import Expectation
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.runners.hosts import Host
from pytest_gpucluster.runners.ssh import Access

LAUNCHER = "torch.distributed.run"
"""torchrun as a module: the interpreter in front of it selects the installation."""
_RESERVED = {
    "--junitxml": "each run writes a JUnit file of its own among its reports",
    "--junit-xml": "each run writes a JUnit file of its own among its reports",
    "--gpucluster-report-dir": "each run has a folder of its own; set --report-dir before the --",
    "--gpucluster-expect": "state before the -- what each node has: --expect 8xH100",
    "-n": "torchrun starts the ranks",
    "--numprocesses": "torchrun starts the ranks",
}
_FORWARDED_PREFIXES = ("GPUCLUSTER_", "PYTEST_ADDOPTS")
_HOSTNAME = "GPUCLUSTER_HOSTNAME"
_SET_HERE = ("GPUCLUSTER_EXIT_NOTES", "GPUCLUSTER_REPORT_DIR", "GPUCLUSTER_EXPECT")
"""Not forwarded: this command sets them for each node."""
_FABRIC_PREFIXES = ("NCCL_", "UCX_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_")


def parse_per_node(text: str) -> Expectation:
    """Read the value of ``--expect``, which describes one node: ``8xH100`` or ``8``.

    Raises:
        OptionError: anything else.
    """
    try:
        per_node = Expectation.parse(f"1x{text}")
    except OptionError:
        per_node = None
    if per_node is None or re.match(r"\d+[xX]", per_node.sku or ""):
        raise OptionError(
            f"--expect {text}: does not describe one node; write its GPUs and their model, such as 8xH100, or 8"
        )
    return per_node


def require_unreserved(arguments: Sequence[str]) -> None:
    """Refuse arguments of pytest that the runner itself sets.

    Raises:
        OptionError: one of them is given.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        name = "-n" if re.fullmatch(r"-n(\d+|auto|logical)", name) else name
        if name in _RESERVED:
            raise OptionError(f"{argument}: not allowed after --: {_RESERVED[name]}")


def report_arguments(report_dir: str, junit: str) -> list[str]:
    """Return pytest's arguments for the report directory and the JUnit file of a run."""
    return [f"--gpucluster-report-dir={report_dir}", f"--junitxml={junit}"]


def torchrun_options(nnodes: int, ranks: int | None, master: str, port: int) -> list[str]:
    """Return torchrun's options without ``--node-rank``. One node meets no other, so that it needs no address.

    Node rank 0 must be on the master: the static rendezvous keeps the first rank, and so the reports, there.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html.
    """
    address = [f"--nnodes={nnodes}", f"--master-addr={master}", f"--master-port={port}"]
    return [*(address if nnodes > 1 else ["--standalone"]), *([f"--nproc-per-node={ranks}"] if ranks else [])]


def random_port() -> int:
    """Return a port for a rendezvous, below Linux's ephemeral ports, that other runs are unlikely to have.

    Source: Linux, Documentation/networking/ip-sysctl.rst (ip_local_port_range: 32768 to 60999).
    """
    return random.SystemRandom().randrange(20000, 30000)


def forwarded_environment(environ: Mapping[str, str], requested: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables for the nodes, and the names of those that stay here although they could matter.

    ssh forwards no variables. The suite's own settings are forwarded, because other settings on the nodes would mean
    other acceptance rules; everything else only on request.

    Args:
        environ: of this process.
        requested: values of ``--env``: NAME or NAME=VALUE.

    Raises:
        OptionError: a malformed or reserved name, or a variable that is not set here.
    """
    forwarded = {
        name: value
        for name, value in environ.items()
        if name.startswith(_FORWARDED_PREFIXES) and name not in (_HOSTNAME, *_SET_HERE) and value
    }
    for text in requested:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise OptionError(f"--env {text}: {name!r} is not a variable name; write NAME or NAME=VALUE")
        if not equals and name not in environ:
            raise OptionError(f"--env {name}: not set here; write --env {name}=VALUE, or set it")
        if name in _SET_HERE:
            raise OptionError(f"--env {name}: set by this command; see --expect and --node-report-dir")
        if name == _HOSTNAME:
            raise OptionError(f"--env {name}: differs on each node; set it on the nodes")
        forwarded[name] = value if equals else environ[name]
    kept = sorted(name for name in environ if name.startswith(_FABRIC_PREFIXES) and name not in forwarded)
    return forwarded, kept


@dataclass(frozen=True, kw_only=True)
class SshPlan:
    """One run over some nodes, started by ssh."""

    hosts: tuple[Host, ...]
    """In node rank order: the first has rank 0, the rendezvous port and the reports."""
    access: Access
    per_node: Expectation | None
    """What each node has, as declared; ``nodes`` is 1."""
    ranks: int | None = None
    """Ranks on each node where ``per_node`` is None; None for one per GPU."""
    arguments: tuple[str, ...]
    run_id: str
    """Unique on these nodes."""
    master: str
    port: int

    def folder(self, host: Host) -> str:
        """Return the report folder of a node, on it. Each has its own, because nodes may share a file system."""
        return posixpath.join(self.access.report_dir, self.run_id, host.name)

    def node_command(self, node_rank: int) -> list[str]:
        """Return the arguments of ``gpucluster`` on a node."""
        host, nnodes = self.hosts[node_rank], len(self.hosts)
        ranks = self.per_node.gpus_per_node if self.per_node is not None else self.ranks
        return [
            *("run", *([f"--node-rank={node_rank}"] if nnodes > 1 else [])),
            *torchrun_options(nnodes, ranks, self.master, self.port),
            *("--", *self.arguments),
            *([f"--gpucluster-expect={replace(self.per_node, nodes=nnodes)}"] if self.per_node is not None else []),
            *report_arguments(self.folder(host), posixpath.join(self.folder(host), "report.xml")),
        ]


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep: every node on its own, then the survivors as one cluster."""

    nodes: tuple[str, ...]
    per_node: Expectation
    """What each node has; ``nodes`` is 1."""
    pytest_arguments: tuple[str, ...]
    node_seconds: float
    """Deadline of a node's own run, from its start."""
    joint_seconds: float
    """Deadline of the joint run."""
    at_once: int
    min_nodes: int
    """With fewer survivors there is no joint run."""
    python: str
    port: int
    """Rendezvous port of the joint run, on the first survivor."""

    def seconds(self, nnodes: int) -> float:
        """Return the deadline of a run on this number of nodes."""
        return self.node_seconds if nnodes == 1 else self.joint_seconds

    def arguments(self, nnodes: int, master: str) -> list[str]:
        """Return the launcher's arguments, without ``--node-rank`` and where the reports go, which may be appended."""
        start = torchrun_options(nnodes, self.per_node.gpus_per_node, master, self.port)
        declared = replace(self.per_node, nodes=nnodes)
        return [*start, "-m", "pytest", *self.pytest_arguments, f"--gpucluster-expect={declared}"]
