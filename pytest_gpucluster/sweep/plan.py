"""What a sweep is to do, and the command of each of its runs. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpucluster.agreement.preflight import Expectation
from pytest_gpucluster.errors import OptionError

LAUNCHER = "torch.distributed.run"
"""torchrun as a module: the python in front of it says which installation is meant."""
_OURS = {
    "--junitxml": "each run has its own file",
    "--junit-xml": "each run has its own file",
    "--gpucluster-report-dir": "each run has its own folder; name the sweep's with --report-dir",
    "--gpucluster-expect": "say before the -- what each node has: --expect 8xH100",
    "-n": "torchrun starts the ranks",
    "--numprocesses": "torchrun starts the ranks",
}
_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run on which nodes. Deadlines are in seconds, counted from the start of a node's run."""

    nodes: tuple[str, ...]
    each: Expectation
    """What one node has: ``nodes`` is 1."""
    pytest_arguments: tuple[str, ...]
    alone_within: float
    together_within: float
    at_once: int
    min_nodes: int
    """With fewer survivors they do not run together."""
    python: str
    port: int
    """Where the ranks of all survivors meet, on the first of them."""

    def world_size(self, nnodes: int) -> int:
        """Return the ranks on so many nodes."""
        return nnodes * self.each.gpus_per_node

    def command_alone(self) -> list[str]:
        """Return what runs on one node for itself. It ends with pytest's arguments, so that more may follow."""
        start = [self.python, "-m", LAUNCHER, "--standalone"]
        return [*start, f"--nproc-per-node={self.each.gpus_per_node}", *self._pytest(1)]

    def command_together(self, nnodes: int, master: str) -> list[str]:
        """Return what runs on each of so many nodes, but for ``--node-rank``, which comes first after ``LAUNCHER``.

        Node rank 0 must be on the master: the static rendezvous keeps the first rank, and so the reports, there.

        Source: https://docs.pytorch.org/docs/stable/elastic/run.html.
        """
        start = [self.python, "-m", LAUNCHER, f"--nnodes={nnodes}"]
        start += [f"--nproc-per-node={self.each.gpus_per_node}", f"--master-addr={master}"]
        return [*start, f"--master-port={self.port}", *self._pytest(nnodes)]

    def _pytest(self, nnodes: int) -> list[str]:
        sku = f"x{self.each.sku}" if self.each.sku else ""
        expect = f"--gpucluster-expect={nnodes}x{self.each.gpus_per_node}{sku}"
        return ["-m", "pytest", *self.pytest_arguments, expect]


def reporting(report_dir: str, junit: str) -> list[str]:
    """Return pytest's arguments that say where a run leaves its reports."""
    return [f"--gpucluster-report-dir={report_dir}", f"--junitxml={junit}"]


def each_node(text: str) -> Expectation:
    """Read what one node has: ``8xH100`` or ``8``.

    Raises:
        OptionError: anything else.
    """
    try:
        each = Expectation.parse(f"1x{text}")
    except OptionError:
        each = None
    if each is None or re.match(r"\d+[xX]", each.sku or ""):
        raise OptionError(
            f"--expect {text}: not what one node has; write its GPUs and their model, such as 8xH100, or 8"
        )
    return each


def require_free(arguments: Sequence[str]) -> None:
    """Make sure that pytest's arguments leave alone what the sweep itself sets.

    Raises:
        OptionError: they do not.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        name = "-n" if re.fullmatch(r"-n\d+|-nauto", name) else name
        if name in _OURS:
            raise OptionError(f"{argument}: not after --: {_OURS[name]}")


def require_nodes(nodes: Sequence[str]) -> None:
    """Make sure that there are nodes, each once and with a name that a file can have.

    Raises:
        OptionError: there are not.
    """
    if not nodes:
        raise OptionError("there are no nodes to sweep")
    odd = [node for node in nodes if not _NODE.fullmatch(node)]
    twice = sorted({node for node in nodes if nodes.count(node) > 1})
    if odd:
        raise OptionError(f"{odd[0]!r} is no name of a node: letters, digits, dots, dashes and underscores only")
    if twice:
        raise OptionError(f"{twice[0]} is named twice; a node counts once")
