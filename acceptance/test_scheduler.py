"""Does this job have what the scheduler has allocated?"""

import os

import pytest

from pytest_gpucluster.metrics.finding import decisive, require_nothing
from pytest_gpucluster.node import scheduler
from pytest_gpucluster.node.host import collect_node
from pytest_gpucluster.node.interfaces import Nodes
from pytest_gpucluster.node.scheduler import examine_allocation, pod_findings

WITHIN_SECONDS = 60.0


@pytest.mark.needs_scheduler("slurm")
@pytest.mark.criterion("slurm")
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.last)])
def test_slurm(when, board, cluster, measure):
    """Accepted: before all other tests and after them, Slurm's controller answers in time, the job's partition is up,
    and each of the job's nodes is in a state in which jobs run: not draining, down, or without an answer.

    Why: a node that somebody has set to drain is suspected already, and a controller that does not answer ends jobs and
    starts none. Ranks live on where slurmd has died during the run, but the node takes no further job. Slurm notices it
    within SlurmdTimeout (slurm.conf; 300 s by default).

    When it fails: the message has Slurm's state and reason for each node. Not under Slurm: not run. In a container
    without Slurm's commands nothing can be asked: the test is skipped, and the run is incomplete.
    """
    if cluster.rank == 0:
        board.post("why not", scheduler.why_unavailable())
    why_not = board.read("why not", [0], within_seconds=WITHIN_SECONDS).get(0)
    if why_not is not None:
        pytest.skip(why_not)
    if cluster.rank != 0:
        return
    pinged = scheduler.ping()
    measure("slurm.controller", pinged.seconds, unit="s", when=when)
    nodes = scheduler.nodes_of_job(os.environ)
    states = scheduler.node_states(nodes, os.environ.get("SLURM_JOB_PARTITION"))
    measure(
        "slurm.nodes", scheduler.healthy_count(states, nodes), unit="nodes", record_only=True, of=len(nodes), when=when
    )
    require_nothing(scheduler.examine_slurm(pinged, states, nodes, cluster.hostname))


@pytest.mark.needs_scheduler("slurm")
@pytest.mark.criterion("slurm.allocation")
def test_slurm_allocation(board, cluster, inventory, measure, request):
    """Accepted: on each node the ranks see the GPUs that Slurm has given them, and no others; they may run on the CPUs
    that were given, and the control group allows the memory. No other process uses these GPUs, and where the node is
    this job's alone, no other files take memory in /dev/shm.

    Why: a job that sees the GPUs of another one disturbs it and is disturbed. Ranks that all run on one CPU are slow
    without a message. What an earlier job leaves behind takes memory from every later one.

    When it fails: each finding names the node, what was found there and what was allocated. Not under Slurm: not run.

    On cpu there are no GPUs to look at.
    """
    nodes = Nodes.of(inventory, cluster.node_rank)
    sources = request.getfixturevalue("gpu_sources") if cluster.has_gpus else None
    findings = examine_allocation(board, nodes, inventory, os.environ, rank=cluster.rank, sources=sources)
    if findings is None:
        return
    measure("scheduler.findings", len(decisive(findings)), unit="findings", record_only=True, scheduler="slurm")
    require_nothing(findings)


@pytest.mark.needs_scheduler("kubernetes")
@pytest.mark.criterion("kubernetes")
def test_kubernetes(cluster, inventory, measure):
    """Accepted: each pod shows its control group, and has the RDMA devices of its node where ranks are on several.

    Why: a pod gets no RDMA device by itself, and without one NCCL silently takes sockets. Its CPU time, /dev/shm and
    locked memory are those that ``test_host_limits`` compares with limits.

    When it fails: each finding says what to add to the pod's template. Not in Kubernetes: not run.
    """
    if Nodes.of(inventory, cluster.node_rank).representative != cluster.rank:
        return
    findings = pod_findings(collect_node(inventory, rank=cluster.rank), nnodes=cluster.nnodes)
    measure("scheduler.findings", len(decisive(findings)), unit="findings", record_only=True, scheduler="kubernetes")
    require_nothing(findings)
