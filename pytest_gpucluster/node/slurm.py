"""What Slurm reports of its controllers and the job's nodes, and whether ranks are bound to what it allocated.

The check of an allocation also looks for stale processes and files on the node.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, LaunchError
from pytest_gpucluster.launch.hostlist import expand_hostlist
from pytest_gpucluster.launch.launchers import in_step
from pytest_gpucluster.metrics.finding import Finding, environment, note
from pytest_gpucluster.node import processes
from pytest_gpucluster.node.allocation import allocation, allocation_findings, place_of
from pytest_gpucluster.node.health.snapshot import Sources
from pytest_gpucluster.node.host import collect_node
from pytest_gpucluster.node.interfaces import Board, Nodes
from pytest_gpucluster.node.nvml import NotAvailable
from pytest_gpucluster.node.processes import Output, run_program
from pytest_gpucluster.text import first_line

ANSWER_SECONDS = 30.0
"""Longer than Slurm's own MessageTimeout of 10 s (slurm.conf(5)), to get its own message."""

_COMMANDS = ("scontrol", "sinfo")

_PING = re.compile(r"Slurmctld\((?P<role>\w+)\) at (?P<host>\S+) is (?P<state>UP|DOWN)")
"""Source: Slurm, src/scontrol/scontrol.c, _print_ping."""

_FORMAT = "%N|%P|%a|%T|%E"
"""Node, partition, whether that takes jobs, state, reason. Source: sinfo(1), --format."""

RUNNING = ("allocated", "allocated+", "mixed")
"""States of a healthy node that runs a job. Source: sinfo(1), NODE STATE CODES."""

_FLAGS = {
    "*": "Slurm's daemon on it does not answer",
    "~": "it is powered off",
    "#": "it is being powered up",
    "!": "it will be powered down",
    "%": "it is being powered down",
    "^": "a reboot was ordered",
}
"""Source: sinfo(1), NODE STATE CODES."""
_HARMLESS_FLAGS = "$@-"
"""In a maintenance reservation; to be rebooted when it is free; planned for a job."""


@dataclass(frozen=True, kw_only=True)
class Ping:
    """The controllers that answer and those that do not, as "role host", and the duration of the query."""

    up: tuple[str, ...]
    down: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """A line of sinfo."""

    node: str
    partition: str
    available: str
    state: str
    reason: str


def ping(*, answer_seconds: float = ANSWER_SECONDS) -> Ping:
    """Ping Slurm's controllers.

    Raises: EnvironmentBroken if none answers, or the command fails.
    """
    begin = time.monotonic()
    output = _run(["scontrol", "ping"], answer_seconds)
    seconds = time.monotonic() - begin
    found = [(f"{one['role']} {one['host']}", one["state"]) for one in _PING.finditer(output.text)]
    up = tuple(name for name, state in found if state == "UP")
    if not up:
        reason = first_line(output.text.strip() or output.errors.strip()) or f"exit code {output.code}, no message"
        raise EnvironmentBroken(
            f"no controller of Slurm answers (scontrol ping: {reason}). New jobs do not start, and this one may be "
            "killed: look at slurmctld on the controller's host, and at the network to it"
        )
    return Ping(up=up, down=tuple(name for name, state in found if state == "DOWN"), seconds=seconds)


def why_unavailable() -> str | None:
    """Return why Slurm cannot be queried here, or None if it can: its commands may be missing in a container."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if not missing:
        return None
    return (
        f"{' and '.join(missing)} not found, so Slurm was not queried. In a container, mount Slurm's commands and "
        "libraries, slurm.conf and munge's socket into it, such as (pyxis) srun --container-mounts=/usr/bin/scontrol,"
        "/usr/bin/sinfo,/usr/lib64/slurm,/etc/slurm,/run/munge"
    )


def nodes_of_job(environ: Mapping[str, str]) -> list[str]:
    """Return Slurm's names of the nodes of this step, which may exclude bad nodes; without a step, of the job.

    Raises: EnvironmentBroken if Slurm's variables are missing or invalid.
    """
    name = "SLURM_STEP_NODELIST" if in_step(environ) and environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    listed = environ.get(name) or environ.get("SLURM_NODELIST") or ""
    try:
        return expand_hostlist(listed)
    except LaunchError as error:
        raise EnvironmentBroken(f"{name} does not name the nodes of the job: {error}") from error


def node_states(
    nodes: Sequence[str], partition: str | None, *, answer_seconds: float = ANSWER_SECONDS
) -> tuple[NodeState, ...]:
    """Query the states of nodes and their partition.

    Args:
        nodes: their names.
        partition: of the job; None for all partitions of the nodes.
        answer_seconds: the timeout.

    Raises: EnvironmentBroken if Slurm does not answer, or its output is not valid.
    """
    listed = ",".join(nodes)
    command = ["sinfo", "--noheader", "--Node", "--nodes", listed, "--format", _FORMAT]
    # --all includes hidden partitions, as --partition does: sinfo rejects both together.
    command += ["--partition", partition] if partition else ["--all"]
    output = _run(command, answer_seconds)
    found = []
    for line in filter(str.strip, output.text.splitlines()):
        fields = [field.strip() for field in line.split("|", 4)]
        if output.code or len(fields) != 5:
            reason = first_line(output.errors.strip() or line)
            raise EnvironmentBroken(f"sinfo does not report the state of {listed} (exit code {output.code}): {reason}")
        node, of, available, state, reason = fields
        reason = "" if reason.lower() == "none" else reason
        found.append(
            NodeState(node=node, partition=of.rstrip("*"), available=available, state=state.lower(), reason=reason)
        )
    if not found:
        reason = f": {first_line(output.errors)}" if output.errors.strip() else ""
        raise EnvironmentBroken(f"sinfo lists none of {listed} (exit code {output.code}){reason}")
    return tuple(found)


def examine_slurm(pinged: Ping, found: Iterable[NodeState], nodes: Sequence[str], controller: str) -> list[Finding]:
    """Return the findings on controllers, partitions and nodes.

    Args:
        pinged: the result of ``scontrol ping``.
        found: the lines of sinfo.
        nodes: the job's.
        controller: the host of findings about Slurm itself, such as this one.
    """
    findings = [
        note(
            "slurm.controller",
            controller,
            f"Slurm's {name} does not answer",
            allowed="every controller answers",
            remedy="restart slurmctld there: no backup controller is available now",
        )
        for name in pinged.down
    ]
    lines = list(found)
    wrong = {node: _wrong(next((line for line in lines if line.node == node), None)) for node in nodes}
    findings += [
        environment(
            "slurm.node",
            node,
            why,
            allowed=" or ".join(RUNNING),
            remedy=f"run `scontrol show node {node}`; it was taken out of service, or is going to be",
        )
        for node, why in wrong.items()
        if why
    ]
    closed = {line.partition: line.available for line in lines if line.available != "up"}
    findings += [
        environment(
            "slurm.partition",
            controller,
            f"the partition {partition} is {available}",
            allowed="up",
            remedy=f"run `scontrol show partition {partition}`; `scontrol update PartitionName={partition} State=UP`",
        )
        for partition, available in closed.items()
    ]
    return findings


def gpus_of_gres(gres: str) -> int:
    """Return the number of GPUs in a node's GRES, as sinfo prints it (%G).

    >>> gpus_of_gres("gpu:h100:8(S:0-1),nvme:4"), gpus_of_gres("(null)")
    (8, 0)
    """
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[A-Za-z][\w.-]*)?:(\d+)", gres))


def healthy_count(found: Iterable[NodeState], nodes: Sequence[str]) -> int:
    """Return the number of these nodes that are in a state to run jobs."""
    states = {line.node: line for line in found}
    return sum(node in states and not _wrong(states[node]) for node in nodes)


def _wrong(line: NodeState | None) -> str:
    """Return why a node is in no state to run jobs, or an empty text. "allocated+" is a state, "mixed*" has a flag."""
    if line is None:
        return "sinfo does not list this node of the job in the job's partition"
    state = line.state.rstrip("".join(_FLAGS) + _HARMLESS_FLAGS)
    wrong = [] if state in RUNNING else [f"it is {state}"]
    wrong += [words for flag, words in _FLAGS.items() if flag in line.state[len(state) :]]
    because = f" ({line.reason})" if line.reason else ""
    return f"Slurm calls this node {line.state}{because}: {', and '.join(wrong)}" if wrong else ""


def _run(command: list[str], seconds: float) -> Output:
    """Run a Slurm command.

    Raises: EnvironmentBroken if it cannot be run, or does not answer.
    """
    output = run_program(command, seconds)
    if output.code is None:
        raise EnvironmentBroken(
            f"{output.why_not} (`{' '.join(command[:2])}`): Slurm cannot be queried. Look at slurmctld on the "
            "controller's host; in a container, mount Slurm's commands, slurm.conf and munge's socket into it"
        )
    return output


_WITHIN_SECONDS = 60.0


def examine_allocation(
    board: Board,
    nodes: Nodes,
    inventory: Sequence[Mapping[str, Any]],
    environ: Mapping[str, str],
    *,
    rank: int,
    sources: Sources | None,
) -> list[Finding] | None:
    """Compare what the ranks of each node are bound to with the allocation, and look for stale processes and files.

    Collective: every rank must call this. The rank that represents its node examines it.

    Args:
        board: for the exchange of places.
        nodes: of the run.
        inventory: of every rank.
        environ: the environment, with Slurm's variables.
        rank: this one.
        sources: NVML and the process table; None in a rehearsal on cpu.

    Returns: the findings; None on the other ranks.

    Raises: EnvironmentBroken if a rank of this node did not answer in time.
    """
    board.post("place", place_of(rank, environ))
    if nodes.representative != rank:
        return None
    here = [who for who in inventory if who["node_rank"] == nodes.me]
    host = nodes.hosts[nodes.me]
    answers = board.read("place", [int(who["rank"]) for who in here], within_seconds=_WITHIN_SECONDS)
    missing = [int(who["rank"]) for who in here if who["rank"] not in answers]
    if missing:
        raise EnvironmentBroken(f"{host}: rank {missing[0]} did not report its CPUs and GPUs in time")
    given, places = allocation(environ), list(answers.values())
    node = collect_node(inventory, rank=rank, environ=environ)
    cores = node.processors.cores(cpu for place in places for cpu in place["cpus"])
    findings = allocation_findings(host, given, places, here, node.cgroup, on_cpu=sources is None, cores=cores)
    online = node.processors.online
    alone = given.cpus is not None and online is not None and given.cpus >= len(online)
    began = environ.get("SLURM_JOB_START_TIME", "")  # since Slurm 22.05
    before = float(began) if began.isdecimal() else None
    findings += processes.stale_file_findings(host, uid=os.getuid(), before=before, alone=alone)
    if sources is not None:
        findings += _processes(host, here, sources)
    return findings


def _processes(host: str, here: Sequence[Mapping[str, Any]], sources: Sources) -> list[Finding]:
    """Return findings on the processes on the GPUs of this node's ranks."""
    on_gpus: dict[int, int | None] = {}
    findings = []
    for who in here:
        try:
            on_gpus |= dict(sources.nvml.read(str(who["gpu"]["uuid"]), "processes"))
        except NotAvailable as error:
            found = f"the processes on GPU {who['gpu']['index']} are unknown: {error}"
            allowed, remedy = "NVML lists the processes of a GPU", "look with `nvidia-smi` on this host"
            findings.append(environment("leftovers.process", host, found, allowed=allowed, remedy=remedy))
    own = {int(who["pid"]) for who in here}
    return [*findings, *processes.stale_process_findings(host, on_gpus, own=own, find_process=sources.find_process)]
