"""Rank facts of this process, read strictly from the environment variables of its launcher.

All problems with the variables are reported in one error.

The first source that applies wins, and only its own variables can contradict each other:

1. torchrun: ``TORCHELASTIC_RUN_ID``. It may itself run under srun, mpirun or in a pod.
2. Open MPI's mpirun: ``OMPI_COMM_WORLD_SIZE``. It comes before Slurm, because inside an allocation mpirun
   starts its daemons with srun: there every rank inherits the ``SLURM_PROCID`` of the daemon that started it.
   srun itself never sets these variables.
3. A Slurm step of several tasks: ``SLURM_STEP_ID`` with ``SLURM_STEP_NUM_TASKS``. A batch script, the shell
   of ``salloc`` and a step of one task are a single process.
4. A Kubernetes Indexed Job, one rank a pod: ``JOB_COMPLETION_INDEX``, with ``WORLD_SIZE``, ``MASTER_ADDR``
   and ``MASTER_PORT`` from the pod template. With ``WORLD_SIZE=1`` every pod is tested on its own. Without
   ``WORLD_SIZE`` it is an error: pods that do not know of each other would each be accepted alone.
   A pod of Kubeflow (TrainJob, PyTorchJob) has ``PET_NODE_RANK`` and ``PET_NNODES`` instead, and with
   ``PET_NPROC_PER_NODE`` above 1 it needs torchrun.
5. A single process. Variables of any other launcher (``WORLD_SIZE=8`` from a script, MPICH, ...) are an error,
   because each of N processes would be accepted as if it were alone.

Without torchrun no agent holds a store, so rank 0 must host one at ``master_addr:master_port``.
``MASTER_ADDR`` and ``MASTER_PORT`` override what is derived below.

Ranks that are all on one node use its loopback address instead of ``MASTER_ADDR``: no name has to resolve there. A
store listens on all interfaces, torchrun's own too (torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp).
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.hostlist import expand_hostlist

_LOOPBACK_PATTERN = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|\[::1\]", re.IGNORECASE)


Launcher = Literal["torchrun", "slurm", "openmpi", "kubernetes", "single"]

_LOOPBACK_ADDRESS = "127.0.0.1"
# Below Linux' default ephemeral range (32768-60999) and Kubernetes' NodePorts (30000-32767).
_FIRST_PORT, _PORTS = 20000, 10000
# Slurm numbers its own steps (batch script, interactive shell, extern) from the top of 32 bits downwards.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Process counts of launchers whose ranks this module cannot read.
_FOREIGN_LAUNCHERS = {
    "PMI_SIZE": "MPICH or Intel MPI",
    "MV2_COMM_WORLD_SIZE": "MVAPICH",
    "FLUX_JOB_SIZE": "Flux",
    "JSM_NAMESPACE_SIZE": "jsrun",
}


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What the scheduler has allocated; None for unknown."""

    name: Literal["slurm", "kubernetes"] | None = None
    nnodes: int | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One process among those that were launched together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nnodes: int
    hostname: str
    launcher: Launcher
    run_id: str
    """Equal on all ranks of one launch, and another one for the next launch if the launcher has such a value."""
    restart_count: int = 0
    """How often torchrun has restarted these ranks."""
    master_addr: str | None = None
    """Of the store: the loopback address if all ranks are on one node, None for a single process."""
    master_addr_from: str = "MASTER_ADDR"
    """Origin of that address: a variable, or what it was derived from."""
    master_port: int | None = None
    agent_store: bool = False
    """Whether torchrun's agent hosts the store at master_addr:master_port. Otherwise rank 0 must host one."""
    scheduler: Allocation = Allocation()

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.hostname}"


class _Variables:
    """Reads one source's variables and collects every problem for one error."""

    def __init__(self, environ: Mapping[str, str], hostname: str, source: _Source) -> None:
        self.environ, self._hostname, self._source = environ, hostname, source
        self._seen: list[str] = []
        self._numbers: dict[str, int] = {}
        self._problems: list[str] = []

    def text(self, name: str, default: str | None = None) -> str:
        """Read a text. An empty variable counts as missing."""
        if name not in self._seen:
            self._seen.append(name)
        value = self.environ.get(name, "")
        if not value and default is None:
            self.complain(f"{name} is {'empty' if name in self.environ else 'missing'}")
        return value or default or ""

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int | None = None) -> int:
        """Read a whole number. A bad one is recorded as a problem, and `least` is returned."""
        value = self.text(name, None if default is None else str(default))
        if value and not re.fullmatch(r"\d{1,18}", value, re.ASCII):
            self.complain(f"{name}={value!r} is not a whole number of at least {least}")
        elif value and (int(value) < least or (most is not None and int(value) > most)):
            allowed = f"at least {least}" if most is None else f"between {least} and {most}"
            self.complain(f"{name}={value} is not {allowed}")
        elif value:
            self._numbers[name] = int(value)
        return self._numbers.get(name, least)

    def below(self, part: str, whole: str, *, or_equal: bool = False) -> None:
        """Require a number to be below another one. Unreadable values are recorded already."""
        numbers = self._numbers
        if part in numbers and whole in numbers and numbers[part] >= numbers[whole] + or_equal:
            is_wrong = "above" if or_equal else "not below"
            self.complain(f"{part}={numbers[part]} is {is_wrong} {whole}={numbers[whole]}")

    def equal(self, name: str, expected: int, problem: str) -> None:
        """Require a variable, where it is set, to have this value."""
        if self.environ.get(name, str(expected)) != str(expected):
            self.complain(f"{name}={self.text(name)} {problem}")

    def address(self, default: str | None, *, nnodes: int, name: str = "MASTER_ADDR") -> str:
        """Read the address of rank 0, which must not be a loopback address for several nodes."""
        address = self.text(name, default)
        if nnodes > 1 and _LOOPBACK_PATTERN.fullmatch(address):
            self.complain(f"{name}={address} is this node itself, but the ranks are on {nnodes} nodes")
        return address

    def port(self, default: int | None, *, name: str = "MASTER_PORT") -> int:
        """Read the port of rank 0's store."""
        return self.number(name, default, least=1, most=65535)

    def complain(self, text: str) -> None:
        """Record a problem."""
        if text not in self._problems:
            self._problems.append(text)

    def facts(self, **fields: Any) -> RankFacts:
        """Return the facts, if there is no problem.

        Raises:
            LaunchError: all recorded problems.
        """
        if self._problems:
            found = " ".join(f"{name}={self.environ[name]}" for name in self._seen if name in self.environ)
            raise LaunchError(
                f"{self._hostname}: the variables of {self._source.name} do not define a rank: "
                + "; ".join(self._problems)
                + f"\nfound: {found or 'none of them'}\nwhat to do: {self._source.remedy}"
            )
        return RankFacts(hostname=self._hostname, scheduler=allocation(self.environ), **fields)

    def alone(self) -> RankFacts:
        """Return the facts of a single process."""
        return self.facts(**_place(0, 1, 0, 1, 0, 1), launcher="single", run_id="single")


def _place(*numbers: int) -> dict[str, int]:
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "nnodes")
    return dict(zip(names, numbers, strict=True))


def _torchrun(read: _Variables) -> RankFacts:
    environ = read.environ
    places, sizes = ("RANK", "LOCAL_RANK", "GROUP_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    numbers = [(read.number(place), read.number(size, least=1)) for place, size in zip(places, sizes, strict=True)]
    fields = {
        **_place(*itertools.chain(*numbers)),
        "restart_count": read.number("TORCHELASTIC_RESTART_COUNT", 0),
        # Loopback is allowed: two agents on one host may use it, and their rendezvous has succeeded.
        "master_addr": read.text("MASTER_ADDR"),
        "master_port": read.port(None),
    }
    given = read.text("TORCHELASTIC_RUN_ID")
    if given == "none" and environ.get("SLURM_JOB_ID"):  # without --rdzv-id
        given = f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_RESTART_COUNT') or 0}"
    for place, size in zip(places, sizes, strict=True):
        read.below(place, size)
    read.below("LOCAL_WORLD_SIZE", "WORLD_SIZE", or_equal=True)
    read.below("GROUP_WORLD_SIZE", "WORLD_SIZE", or_equal=True)
    read.below("LOCAL_RANK", "RANK", or_equal=True)
    agent_store = read.text("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    facts = read.facts(**fields, launcher="torchrun", run_id=given, agent_store=agent_store)
    return replace(facts, local_rank=_position_on_node(environ, facts))


def _position_on_node(environ: Mapping[str, str], facts: RankFacts) -> int:
    """Undo ``torchrun --virtual-local-rank``, which gives each rank one GPU and LOCAL_RANK 0."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    even = facts.world_size == facts.nnodes * facts.local_world_size
    position = facts.rank - facts.node_rank * facts.local_world_size
    if facts.local_rank == 0 and visible and "," not in visible and even:
        return position if 0 <= position < facts.local_world_size else 0
    return facts.local_rank


def _openmpi(read: _Variables) -> RankFacts:
    """Read mpirun's process. Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html"""
    environ = read.environ
    world_size = read.number("OMPI_COMM_WORLD_SIZE", least=1)
    local_world_size = read.number("OMPI_COMM_WORLD_LOCAL_SIZE", least=1)
    rank, local_rank = read.number("OMPI_COMM_WORLD_RANK"), read.number("OMPI_COMM_WORLD_LOCAL_RANK")
    read.below("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    read.below("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    # Open MPI sets no node rank. It is derived, and the assumptions of the derivation are checked.
    if world_size % local_world_size:
        read.complain(f"{world_size} ranks do not divide into {local_world_size} on every node")
    elif rank % local_world_size != local_rank:
        read.complain(
            f"rank {rank} is number {local_rank} of {local_world_size} on its node:"
            " the ranks are not numbered node after node"
        )
    nnodes = max(1, world_size // local_world_size)
    # The namespace is equal on all ranks of one mpirun, and another one for the next.
    run_id = f"openmpi-{environ.get('PMIX_NAMESPACE') or environ.get('OMPI_MCA_ess_base_jobid') or 'run'}"
    port = _FIRST_PORT + zlib.crc32(run_id.encode("utf-8", "replace")) % _PORTS
    address, port = read.address(_LOOPBACK_ADDRESS if nnodes == 1 else None, nnodes=nnodes), read.port(port)
    place = _place(rank, world_size, local_rank, local_world_size, rank // local_world_size, nnodes)
    return read.facts(**place, launcher="openmpi", run_id=run_id, master_addr=address, master_port=port)


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether this is a step of srun, not a batch script or Slurm's own interactive step."""
    step = environ.get("SLURM_STEP_ID", "")
    special = step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP
    return bool(step) and not special and "SLURM_STEP_NUM_TASKS" in environ


def _slurm(read: _Variables) -> RankFacts:
    """Read a step's task.

    The port is ``20000 + (16 * job id + step id) % 10000``: other steps of a job, and other jobs on a shared node, get
    other ports. The store's host is the first of the step's node list, where task 0 is.

    Source: https://slurm.schedmd.com/srun.html (OUTPUT ENVIRONMENT VARIABLES).
    """
    world_size = read.number("SLURM_STEP_NUM_TASKS", least=1)
    nnodes = read.number("SLURM_STEP_NUM_NODES", least=1)
    rank, local_rank = read.number("SLURM_PROCID"), read.number("SLURM_LOCALID")
    node_rank = read.number("SLURM_NODEID")
    job, step = read.number("SLURM_JOB_ID"), read.number("SLURM_STEP_ID")
    read.below("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    read.below("SLURM_NODEID", "SLURM_STEP_NUM_NODES")
    tasks = _tasks_per_node(read, world_size, nnodes)
    local_world_size = tasks[node_rank] if node_rank < len(tasks) else 1
    if node_rank < len(tasks) and local_rank >= local_world_size:
        read.complain(f"SLURM_LOCALID={local_rank} is not below the {local_world_size} tasks of node {node_rank}")
    first_host, origin = _LOOPBACK_ADDRESS, "MASTER_ADDR"
    if nnodes > 1 and not read.environ.get("MASTER_ADDR"):
        first_host, origin = _first_host(read)
        if rank == 0 and node_rank != 0:
            read.complain(f"task 0 is on node {node_rank}, not on the first of the list: export MASTER_ADDR")
    # A requeued job keeps its id.
    run_id = f"slurm-{job}.{step}-{read.number('SLURM_RESTART_COUNT', 0)}"
    address = read.address(first_host, nnodes=nnodes)
    port = read.port(_FIRST_PORT + (16 * job + step) % _PORTS)
    return read.facts(
        **_place(rank, world_size, local_rank, local_world_size, node_rank, nnodes),
        launcher="slurm",
        run_id=run_id,
        master_addr=address,
        master_addr_from=origin,
        master_port=port,
    )


def _first_host(read: _Variables) -> tuple[str, str]:
    # Some sites' wrappers drop the step's list; for a step on all nodes the job's has the same first node.
    name = "SLURM_STEP_NODELIST" if read.text("SLURM_STEP_NODELIST", "") else "SLURM_JOB_NODELIST"
    nodelist = read.text(name)
    try:
        return expand_hostlist(nodelist)[0] if nodelist else "unknown", f"the first of {name}"
    except LaunchError as error:
        read.complain(str(error))
        return "unknown", name


def _tasks_per_node(read: _Variables, world_size: int, nnodes: int) -> list[int]:
    text = read.text("SLURM_STEP_TASKS_PER_NODE")
    tasks: list[int] = []
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item, re.ASCII)
        if not match:
            read.complain(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list such as 8(x2),4")
            return []
        tasks += [int(match[1])] * int(match[2] or 1)
    if tasks and (len(tasks) != nnodes or sum(tasks) != world_size):
        read.complain(
            f"SLURM_STEP_TASKS_PER_NODE={text} means {sum(tasks)} tasks on {len(tasks)} nodes, not the"
            f" {world_size} of SLURM_STEP_NUM_TASKS on the {nnodes} of SLURM_STEP_NUM_NODES"
        )
    return tasks


def _kubernetes(read: _Variables) -> RankFacts:
    """Read an Indexed Job's pod. A pod counts as a node: with several GPUs in a pod, run torchrun in it.

    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
    """
    rank, world_size = read.number("JOB_COMPLETION_INDEX"), read.number("WORLD_SIZE", least=1)
    if read.environ.get("WORLD_SIZE") == "1":
        return read.alone()
    read.below("JOB_COMPLETION_INDEX", "WORLD_SIZE")
    read.equal("RANK", rank, f"is not JOB_COMPLETION_INDEX={rank}")
    return _meet(read, rank, world_size, "MASTER_ADDR", "MASTER_PORT")


def _kubeflow(read: _Variables) -> RankFacts:
    """Read a pod of a TrainJob (Kubeflow Trainer v2) or PyTorchJob (Training Operator v1) with one rank.

    Both set torchrun's variables PET_*, but no rank for a process that torchrun has not started. PyTorchJob adds
    the pod's ``RANK``, and ``WORLD_SIZE``.

    Source: https://github.com/kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go of v2 and
    pkg/controller.v1/pytorch/envvar.go of v1.9.
    """
    rank, world_size = read.number("PET_NODE_RANK"), read.number("PET_NNODES", least=1)
    read.below("PET_NODE_RANK", "PET_NNODES")
    ranks = read.text("PET_NPROC_PER_NODE", "1")
    if ranks != "1":
        read.complain(f"PET_NPROC_PER_NODE={ranks} is not 1, and no torchrun has started this process")
    for name, expected in (("RANK", rank), ("WORLD_SIZE", world_size), ("JOB_COMPLETION_INDEX", rank)):
        read.equal(name, expected, f"does not fit: this pod is {rank} of {world_size}")
    if world_size == 1:
        return read.alone()
    names = (f"{'' if read.environ.get(name) else 'PET_'}{name}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    return _meet(read, rank, world_size, *names)


def _meet(read: _Variables, rank: int, world_size: int, address_name: str, port_name: str) -> RankFacts:
    address = read.address(None, nnodes=world_size, name=address_name)
    port = read.port(None, name=port_name)
    return read.facts(
        **_place(rank, world_size, 0, 1, rank, world_size),
        launcher="kubernetes",
        run_id=f"kubernetes-{address}-{port}",
        master_addr=address,
        master_addr_from=address_name,
        master_port=port,
    )


def _in_pod(environ: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in environ or "JOB_COMPLETION_INDEX" in environ


def _single(read: _Variables) -> RankFacts:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if number := read.number(name, 0):
            read.complain(f"{name}={number} means that there are other processes, but no variable has their address")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", *_FOREIGN_LAUNCHERS):
        if (number := read.number(name, 1, least=1)) > 1:
            by = _FOREIGN_LAUNCHERS.get(name, "an unknown launcher")
            read.complain(f"{name}={number} means several processes, started by {by}")
    return read.alone()


@dataclass(frozen=True)
class _Source:
    """A source of rank facts: whether it applies, its reader, and for its errors a name and what to do."""

    applies: Callable[[Mapping[str, str]], bool]
    read: Callable[[_Variables], RankFacts]
    name: str
    remedy: str


_SOURCES = (
    _Source(
        lambda environ: "TORCHELASTIC_RUN_ID" in environ,
        _torchrun,
        "torchrun (TORCHELASTIC_RUN_ID is set)",
        "start with `torchrun --nnodes=... --nproc-per-node=... -m pytest ...`, which sets all of them;"
        " in a shell where they are left over, unset them",
    ),
    _Source(
        lambda environ: "OMPI_COMM_WORLD_SIZE" in environ,
        _openmpi,
        "Open MPI (OMPI_COMM_WORLD_SIZE is set)",
        "start with `mpirun -n RANKS --map-by ppr:RANKS_PER_NODE:node --rank-by slot"
        " -x MASTER_ADDR=HOST_OF_RANK_0 python -m pytest ...`: equally many ranks on every node, numbered"
        " node after node; or use torchrun",
    ),
    _Source(
        lambda environ: in_step(environ) and environ["SLURM_STEP_NUM_TASKS"] != "1",
        _slurm,
        "a Slurm step (SLURM_STEP_ID and SLURM_STEP_NUM_TASKS are set)",
        "start with `srun --ntasks-per-node=GPUS_PER_NODE python -m pytest ...`, or with torchrun under"
        " `srun --ntasks-per-node=1`; do not filter Slurm's variables (srun --export)",
    ),
    _Source(
        lambda environ: "PET_NODE_RANK" in environ and _in_pod(environ),
        _kubeflow,
        "a pod of Kubeflow (PET_NODE_RANK is set)",
        "start with `gpucluster run -- acceptance/`, whose torchrun reads all of them; without torchrun a pod has one"
        " rank: set numProcPerNode or nprocPerNode to 1",
    ),
    _Source(
        lambda environ: "JOB_COMPLETION_INDEX" in environ,
        _kubernetes,
        "a Kubernetes Indexed Job (JOB_COMPLETION_INDEX is set)",
        "in the pod template set WORLD_SIZE to the Job's completions, MASTER_ADDR to the headless service's"
        " name of pod 0 and MASTER_PORT to a free port; set WORLD_SIZE to 1 to test every pod on its own; or"
        " start torchrun in the pods",
    ),
    _Source(
        lambda environ: True,
        _single,
        "a single process (no torchrun, mpirun, Slurm step or Indexed Job)",
        "start with `torchrun --nnodes=... --nproc-per-node=... -m pytest ...`;"
        " for one process alone, unset these variables",
    ),
)
"""The first that applies is the one."""


def detect(environ: Mapping[str, str], hostname: str) -> RankFacts:
    """Read the rank facts from the first source that applies (see the module's description).

    Raises:
        LaunchError: variables of that source are missing, malformed or contradictory; one error for all.
    """
    source = next(source for source in _SOURCES if source.applies(environ))
    facts = source.read(_Variables(environ, hostname, source))
    if facts.nnodes == 1 and facts.master_addr is not None:
        return replace(facts, master_addr=_LOOPBACK_ADDRESS, master_addr_from="all ranks are on one node")
    return facts


def allocation(environ: Mapping[str, str]) -> Allocation:
    """Return the scheduler's allocation: the step's nodes inside a step, because srun -N is deliberate; else the job's.

    A malformed variable of the scheduler counts as unknown: it is no reason to refuse another launcher's ranks.
    """
    if "SLURM_JOB_ID" in environ:
        if "SLURM_HET_SIZE" in environ:
            return Allocation(name="slurm")
        nnodes = "SLURM_STEP_NUM_NODES" if in_step(environ) else "SLURM_JOB_NUM_NODES"
        gpus_per_node = _count(environ.get("SLURM_GPUS_PER_NODE", ""))
        gpus, nodes = _count(environ.get("SLURM_GPUS", "")), _count(environ.get("SLURM_JOB_NUM_NODES", ""))
        if gpus_per_node is None and gpus and nodes and gpus % nodes == 0:
            gpus_per_node = gpus // nodes
        if gpus_per_node is None:
            gpus_per_node = _count(environ.get("SLURM_GPUS_ON_NODE", ""))
        return Allocation(name="slurm", nnodes=_count(environ.get(nnodes, "")), gpus_per_node=gpus_per_node)
    if _in_pod(environ):
        return Allocation(name="kubernetes")
    return Allocation()


def _count(text: str) -> int | None:
    """Read Slurm's ``8``, ``h100:8`` or ``h100:4,l40s:4``."""
    counts = [item.rpartition(":")[2] for item in text.split(",")]
    if not all(re.fullmatch(r"\d{1,6}", count, re.ASCII) for count in counts):
        return None
    return sum(map(int, counts)) or None
