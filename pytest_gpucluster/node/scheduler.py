"""Checks that a job can use what its scheduler has given it on a node, and what Slurm reports of itself and the nodes.

GPUs, CPUs and memory that Slurm allocated, and stale processes on the GPUs; the RDMA devices that ranks in a
pod of Kubernetes need; Slurm's controllers, and the states of the job's nodes.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, LaunchError
from pytest_gpucluster.launch.hostlist import expand_hostlist
from pytest_gpucluster.launch.launchers import in_step
from pytest_gpucluster.metrics.finding import Finding, Kind, environment, finding, note
from pytest_gpucluster.node.health.snapshot import Sources
from pytest_gpucluster.node.host import Cgroup, NodeSnapshot, collect_node
from pytest_gpucluster.node.interfaces import Board, Nodes
from pytest_gpucluster.node.nvml import NotAvailable
from pytest_gpucluster.node.processes import Output, run_program
from pytest_gpucluster.node.sysfs import format_ranges, parse_ranges
from pytest_gpucluster.text import first_line

GIB, MIB = 2**30, 2**20
_MORE_RATIO = 1.05
"""Tolerance of the memory limit. Slurm allows a job more with AllowedRAMSpace (cgroup.conf(5))."""

Problem = tuple[Kind, str, str, str, str]
"""Kind and code of a finding, what was found, what is allowed, and what to do."""


def _findings(host: str, *checks: Iterator[Problem]) -> list[Finding]:
    return [
        finding(kind, code, host, found, allowed=allowed, remedy=remedy)
        for check in checks
        for kind, code, found, allowed, remedy in check
    ]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What Slurm allocated to the job, or its step, on a node: numbers of GPUs and CPUs, and host memory; None where
    unknown."""

    gpus: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None


def place_of(rank: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what this process is bound to: ``rank``, ``cpus``, ``visible_devices`` (null where it is not set)."""
    cpus = sorted(os.sched_getaffinity(0))
    return {"rank": rank, "cpus": cpus, "visible_devices": environ.get("CUDA_VISIBLE_DEVICES")}


def allocation(environ: Mapping[str, str]) -> Allocation:
    """Read what was allocated on this node.

    Source: srun(1) and sbatch(1), OUTPUT ENVIRONMENT VARIABLES: SLURM_STEP_GPUS, SLURM_JOB_GPUS, SLURM_GPUS_ON_NODE,
    SLURM_CPUS_ON_NODE; SLURM_MEM_PER_NODE, SLURM_MEM_PER_CPU and SLURM_MEM_PER_GPU in MiB.

    >>> allocation({"SLURM_STEP_GPUS": "0-3,6", "SLURM_CPUS_ON_NODE": "32", "SLURM_MEM_PER_CPU": "1024"})
    Allocation(gpus=5, cpus=32, memory_bytes=34359738368)
    """
    step, job = (_length(environ.get(name, "")) for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"))
    gpus = step or _number(environ, "SLURM_GPUS_ON_NODE") or job
    cpus = _number(environ, "SLURM_CPUS_ON_NODE")
    each = {"SLURM_MEM_PER_NODE": 1, "SLURM_MEM_PER_CPU": cpus, "SLURM_MEM_PER_GPU": gpus}
    sizes = (_number(environ, name) for name in each)
    # 0 stands for all memory of the node.
    memory = next((mib * times * MIB for mib, times in zip(sizes, each.values(), strict=True) if mib and times), None)
    return Allocation(gpus=gpus, cpus=cpus, memory_bytes=memory)


def allocation_findings(
    host: str,
    given: Allocation,
    places: Sequence[Mapping[str, Any]],
    who: Sequence[Mapping[str, Any]],
    cgroup: Cgroup,
    *,
    on_cpu: bool,
    cores: int | None = None,
) -> list[Finding]:
    """Compare what a node's ranks are bound to with the allocation.

    Less than was allocated is an error, and so is access to GPUs and CPUs beyond it, which other jobs may use. An
    unlimited or larger memory limit is a note.

    ``places`` are those of the ranks (:func:`place_of`), ``who`` is the inventory of the same ranks, ``cores`` the
    number of cores of their CPUs (None if unknown). A rehearsal ``on_cpu`` uses no GPU.
    """
    gpus = [] if on_cpu else [_gpus(given, places, who)]
    return _findings(host, *gpus, _cpus(given, places, cores), _memory(given, cgroup))


def _gpus(
    given: Allocation, places: Sequence[Mapping[str, Any]], who: Sequence[Mapping[str, Any]]
) -> Iterator[Problem]:
    if given.gpus is None:
        yield (
            "environment",
            "slurm.gpus",
            "Slurm reports no GPUs (SLURM_STEP_GPUS, SLURM_GPUS_ON_NODE and SLURM_JOB_GPUS are not set)",
            "GPUs are allocated to the job",
            "request them (--gpus-per-node, --gres=gpu:8); otherwise another job may get the same ones",
        )
        return
    used = len({one["gpu"]["uuid"] for one in who if one.get("gpu")})
    visible = max((int(one.get("visible_gpus") or 0) for one in who), default=0)
    values = [place["visible_devices"] for place in places]
    variables = dict.fromkeys("not set" if value is None else value for value in values)
    gpus = f"GPUs (CUDA_VISIBLE_DEVICES: {', '.join(variables)})"
    allowed = f"the {given.gpus} that were allocated"
    if visible > given.gpus:
        remedy = "set ConstrainDevices=yes in cgroup.conf, and do not set CUDA_VISIBLE_DEVICES in the job"
        yield "environment", "slurm.gpus", f"a rank sees {visible} {gpus}", allowed, remedy
    elif max(used, visible) < given.gpus:
        remedy = "start one rank for each GPU; if `nvidia-smi -L` in the job shows fewer too, a GPU is missing"
        yield "environment", "slurm.gpus", f"the ranks see {max(used, visible)} {gpus}", allowed, remedy
    elif used < given.gpus:
        allowed = "one rank for each GPU, for a node to be accepted as a whole"
        found, remedy = f"ranks use {used} of {given.gpus} allocated GPUs", f"start {given.gpus} ranks on this node"
        yield "note", "slurm.gpus", found, allowed, remedy


def _cpus(given: Allocation, places: Sequence[Mapping[str, Any]], cores: int | None) -> Iterator[Problem]:
    cpus = {cpu for place in places for cpu in place["cpus"]}
    found = f"the ranks may run on {len(cpus)} CPUs ({format_ranges(cpus)})"
    allowed = f"the {given.cpus} that were allocated"
    if len(cpus) < len(places):
        yield (
            "environment",
            "slurm.cpus",
            f"{len(places)} ranks share {len(cpus)} CPUs ({format_ranges(cpus)})",
            "at least one CPU for each rank",
            "give the step its CPUs: srun does not inherit --cpus-per-task from sbatch, so repeat it "
            "(srun --cpus-per-task=$SLURM_CPUS_PER_TASK), or request more",
        )
    if given.cpus is None:
        missing = "Slurm reports no CPUs (SLURM_CPUS_ON_NODE is not set)"
        remedy = "start the ranks by srun or in a batch script"
        yield "environment", "slurm.cpus", missing, "CPUs are allocated to the job", remedy
    elif len(cpus) > given.cpus and cores is not None and cores <= given.cpus:
        # With CPUs=<number of cores> in slurm.conf, a job gets all threads of its cores.
        remedy = "nothing, if Slurm counts cores here (`scontrol show node`: CPUTot); else set ConstrainCores=yes"
        yield "note", "slurm.cpus", f"{found}, which are {cores} cores", f"{allowed}, which may be cores", remedy
    elif len(cpus) > given.cpus:
        remedy = "set TaskPlugin=task/cgroup,task/affinity and ConstrainCores=yes: jobs disturb each other"
        yield "environment", "slurm.cpus", found, allowed, remedy
    elif len(cpus) < given.cpus:
        yield "note", "slurm.cpus", found, allowed, "look at --cpu-bind, if ranks wait for data"


def _memory(given: Allocation, cgroup: Cgroup) -> Iterator[Problem]:
    if given.memory_bytes is None:
        return
    limit, allowed = cgroup.memory_bytes, f"the {given.memory_bytes / GIB:.4g} GiB that were allocated"
    if limit is not None and limit < given.memory_bytes / _MORE_RATIO:
        remedy = "look at AllowedRAMSpace in cgroup.conf, and at the limits of the container that this runs in"
        yield "environment", "slurm.memory", f"the control group allows {limit / GIB:.4g} GiB", allowed, remedy
    elif limit is None or limit > given.memory_bytes * _MORE_RATIO:
        found = "no control group limits the memory" if cgroup.versions else "no control group can be read"
        found = found if limit is None else f"it is limited to {limit / GIB:.4g} GiB"
        remedy = "set ConstrainRAMSpace=yes in cgroup.conf: a job that uses more than its part gets others killed"
        yield "note", "slurm.memory", found, allowed, remedy


def _length(ranges: str) -> int | None:
    try:
        return len(parse_ranges(ranges)) or None
    except ValueError:
        return None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def pod_findings(pod: NodeSnapshot, *, nnodes: int) -> list[Finding]:
    """Return the findings on a pod, but for its CPUs, /dev/shm and locked memory, which the limits of a host are about.

    In a run of several nodes RDMA is required where the node has it.
    """
    findings = []
    if not pod.cgroup.versions:
        found = "no control group can be read, so the pod's limits are unknown"
        allowed, remedy = (
            "/sys/fs/cgroup is mounted in the pod",
            "mount it read only, as container runtimes do by default",
        )
        findings.append(environment("kubernetes.resources", pod.host, found, allowed=allowed, remedy=remedy))
    if pod.hcas and not pod.verbs and nnodes > 1:
        found = (
            f"the node has {len(pod.hcas)} RDMA devices ({', '.join(pod.hcas)}), and the pod has no access: there is "
        )
        found += "no /dev/infiniband/uverbs*"
        allowed = "the node's RDMA devices, in a run of several nodes"
        remedy = "request the device plugin's RDMA resource (resources.limits, such as rdma/hca_shared_devices_a: 1)"
        findings.append(environment("kubernetes.rdma", pod.host, found, allowed=allowed, remedy=remedy))
    return findings


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


def ping() -> Ping:
    """Ping Slurm's controllers.

    Raises: EnvironmentBroken if none answers, or the command fails.
    """
    begin = time.monotonic()
    output = _run(["scontrol", "ping"])
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


def node_states(nodes: Sequence[str], partition: str | None) -> tuple[NodeState, ...]:
    """Query the states of nodes and their partition.

    ``partition`` is the job's; None for all partitions of the nodes.

    Raises: EnvironmentBroken if Slurm does not answer, or its output is not valid.
    """
    listed = ",".join(nodes)
    command = ["sinfo", "--noheader", "--Node", "--nodes", listed, "--format", _FORMAT]
    # --all includes hidden partitions, as --partition does: sinfo rejects both together.
    command += ["--partition", partition] if partition else ["--all"]
    output = _run(command)
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

    ``controller`` is the host of findings about Slurm itself, such as this one.
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

    >>> [gpus_of_gres(text) for text in ("gpu:h100:8(S:0-1),nvme:4", "gpu:2,gpu:3090:4", "gpu:1g.10gb:7", "(null)")]
    [8, 6, 7, 0]
    """
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)(?=[,(]|$)", gres))


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


def _run(command: list[str]) -> Output:
    """Run a Slurm command.

    Raises: EnvironmentBroken if it cannot be run, or does not answer.
    """
    output = run_program(command, ANSWER_SECONDS)
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
    """Compare what the ranks of each node are bound to with the allocation, and look for stale processes.

    Collective: every rank must call this. The rank that represents its node examines it.

    ``sources`` are NVML and the process table; None in a rehearsal on cpu.

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
    if sources is not None:
        findings += _processes(host, here, sources)
    return findings


def _processes(host: str, here: Sequence[Mapping[str, Any]], sources: Sources) -> Iterator[Finding]:
    """Yield findings on the processes on the GPUs of this node's ranks that are not this job's."""
    on_gpus: dict[int, int | None] = {}
    for who in here:
        try:
            on_gpus |= dict(sources.nvml.read(str(who["gpu"]["uuid"]), "processes"))
        except NotAvailable as error:
            found = f"the processes on GPU {who['gpu']['index']} are unknown: {error}"
            allowed, remedy = "NVML lists the processes of a GPU", "look with `nvidia-smi` on this host"
            yield environment("leftovers.process", host, found, allowed=allowed, remedy=remedy)
    own = {int(who["pid"]) for who in here}
    for pid, used in on_gpus.items():
        if pid in own:
            continue
        process = sources.find_process(pid)
        size = "an unknown amount" if used is None else f"{used / 1e9:.4g} GB"
        # In a container NVML may report the host's pids, also for this job's own ranks.
        yield finding(
            "environment" if process.known else "note",
            "leftovers.process",
            host,
            f"{process} uses {size} of GPU memory",
            allowed="this job's ranks only",
            remedy="kill it, and let the epilog kill processes of ended jobs",
        )
