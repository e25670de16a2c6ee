"""What a job can use of its allocation, what Slurm's commands report, and what a pod lacks."""

import os
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest
from complaints import in_order
from each import of_each
from fake_nvml import FakeNvml
from torch.distributed import HashStore

from pytest_gpucluster.agreement.store import Board
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node import scheduler, sysfs
from pytest_gpucluster.node.host import Cgroup, Memory, NodeSnapshot, Processors, read_node
from pytest_gpucluster.node.interfaces import Nodes
from pytest_gpucluster.node.processes import Process
from pytest_gpucluster.node.scheduler import (
    Allocation,
    NodeState,
    Ping,
    allocation,
    allocation_findings,
    examine_allocation,
    examine_slurm,
    healthy_count,
    node_states,
    nodes_of_job,
    ping,
    place_of,
    pod_findings,
)
from pytest_gpucluster.node.sysfs import Tree

GIB = 2**30
GIVEN = Allocation(gpus=4, cpus=16, memory_bytes=64 * GIB)


@of_each(
    "case",
    [
        ({}, Allocation()),
        ({"SLURM_STEP_GPUS": "0,1,5-7", "SLURM_GPUS_ON_NODE": "2"}, Allocation(gpus=5)),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_GPUS": "0"}, Allocation(gpus=8)),
        ({"SLURM_JOB_GPUS": "0-3"}, Allocation(gpus=4)),
        ({"SLURM_JOB_GPUS": "gpu:4"}, Allocation()),
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_MEM_PER_NODE": "65536"}, Allocation(cpus=16, memory_bytes=64 * GIB)),
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_MEM_PER_CPU": "4096"}, Allocation(cpus=16, memory_bytes=64 * GIB)),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_MEM_PER_GPU": "1024"}, Allocation(gpus=2, memory_bytes=2 * GIB)),
        ({"SLURM_MEM_PER_NODE": "0"}, Allocation()),
        ({"SLURM_CPUS_ON_NODE": "many"}, Allocation()),
    ],
)
def test_what_slurm_s_variables_give(case):
    environ, given = case
    assert allocation(environ) == given


def test_a_rank_reports_its_cpus_and_visible_devices():
    place = place_of(3, {"CUDA_VISIBLE_DEVICES": "1"})
    assert place == {"rank": 3, "cpus": sorted(os.sched_getaffinity(0)), "visible_devices": "1"}
    assert place_of(3, {})["visible_devices"] is None


def ranks(count=4, *, visible=4, uuids=4):
    return [
        {"rank": rank, "gpu": {"uuid": f"GPU-{rank % uuids}", "index": rank}, "visible_gpus": visible}
        for rank in range(count)
    ]


def places(count=4, cpus=16, *, devices="0,1,2,3"):
    each = max(1, cpus // count)
    return [
        {"rank": rank, "cpus": [(rank * each + i) % cpus for i in range(each)], "visible_devices": devices}
        for rank in range(count)
    ]


def found(given=GIVEN, places_=None, who=None, limit=64 * GIB, *, versions=(2,), on_cpu=False):
    return allocation_findings(
        "node-a",
        given,
        places() if places_ is None else places_,
        ranks() if who is None else who,
        Cgroup(versions=versions, memory_bytes=limit),
        on_cpu=on_cpu,
    )


def test_a_job_that_is_bound_as_it_was_given_has_no_findings():
    assert found() == []
    assert found(who=ranks(visible=1)) == [], "each rank sees its own GPU only"
    assert found(limit=62 * GIB) == found(limit=66 * GIB) == [], "nearly the same"
    assert found(Allocation(cpus=16), who=[{"rank": 0, "gpu": None, "visible_gpus": 0}], on_cpu=True) == []


THREE = {"who": ranks(visible=3, uuids=3), "places_": places(devices=None)}


@of_each(
    "case",
    [
        ({"who": ranks(visible=8)}, "environment", "slurm.gpus 8 GPUs (CUDA_VISIBLE_DEVICES: 0,1,2,3); 4"),
        (THREE, "environment", "slurm.gpus 3 GPUs CUDA_VISIBLE_DEVICES: 4"),
        ({"who": ranks(2), "places_": places(2)}, "note", "2 of 4 GPUs"),
        ({"given": Allocation(cpus=16)}, "environment", "Slurm GPUs"),
        ({"places_": places(cpus=32)}, "environment", "slurm.cpus 32 CPUs (0-31); 16"),
        ({"places_": places(cpus=12)}, "note", "12 CPUs (0-11) 16"),
        ({"given": Allocation(gpus=4)}, "environment", "Slurm CPUs"),
        ({"limit": 32 * GIB}, "environment", "32 GiB"),
        ({"limit": None}, "note", "memory"),
        ({"limit": 96 * GIB}, "note", "96 GiB"),
        ({"limit": None, "versions": ()}, "note", "control group"),
    ],
)
def test_what_is_bound_otherwise_is_named(case):
    arguments, kind, words = case
    [finding] = found(**arguments)
    assert finding.kind == kind
    assert in_order(str(finding), words)


def test_ranks_that_share_one_cpu_are_an_error_that_points_to_srun():
    one_cpu = [{"rank": rank, "cpus": [0], "visible_devices": None} for rank in range(4)]
    shared, fewer = found(places_=one_cpu)
    assert shared.kind == "environment"
    assert "4 ranks share 1 CPUs (0)" in str(shared)
    assert "srun --cpus-per-task" in shared.remedy
    assert fewer.kind == "note"


POD = NodeSnapshot(
    host="node-a",
    ranks=8,
    machine="x86_64",
    own_cpus=frozenset({0}),
    cgroup=Cgroup(versions=(2,), memory_bytes=512 * GIB, cpus=64.0),
    memory=Memory(total_bytes=None, shm=None, transparent=None),
    processors=Processors(online=None),
    limits=None,
    hcas=("mlx5_0", "mlx5_1"),
    verbs=("uverbs0", "uverbs1"),
)


def test_a_pod_with_everything_has_no_findings():
    assert pod_findings(POD, nnodes=2) == pod_findings(replace(POD, cgroup=Cgroup(versions=(2,))), nnodes=2) == []


def test_what_is_not_needed_is_not_demanded():
    for pod, nnodes in ((replace(POD, verbs=()), 1), (replace(POD, hcas=(), verbs=()), 2)):
        assert pod_findings(pod, nnodes=nnodes) == []


@of_each(
    "case",
    [
        (replace(POD, cgroup=Cgroup()), "resources", "control group"),
        (replace(POD, verbs=()), "rdma", "2 (mlx5_0, mlx5_1)"),
    ],
)
def test_what_is_missing_is_an_error_that_says_what_to_add(case):
    pod, code, words = case
    findings = pod_findings(pod, nnodes=2)
    assert [(one.code, one.kind) for one in findings] == [(f"kubernetes.{code}", "environment")]
    assert in_order(findings[0].found, words)
    assert findings[0].remedy


def test_the_rdma_devices_of_a_pod_are_read(tmp_path):
    names = ("sys/class/infiniband/mlx5_0", "dev/infiniband/uverbs0", "dev/infiniband/rdma_cm")
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    pod = read_node(Tree(root=tmp_path))
    assert (pod.hcas, pod.verbs) == (("mlx5_0",), ("uverbs0",))


def test_where_the_kernel_shows_nothing_nothing_is_known(tmp_path):
    pod = read_node(Tree(root=tmp_path), host="node-a")
    assert (pod.cgroup, pod.memory.shm, pod.limits, pod.hcas, pod.verbs) == (Cgroup(), None, None, (), ())
    assert [one.code for one in pod_findings(pod, nnodes=2)] == ["kubernetes.resources"]


PING = Ping(up=("primary head",), down=(), seconds=0.1)


class Commands:
    """Executables in a folder that is first on PATH."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def say(self, name, output, code=0, before="", stderr=""):
        path = self.folder / name
        begin = f'#!/bin/sh\necho "$@" > {path}.asked\n{before}\necho "{stderr}" >&2\n'
        path.write_text(f'{begin}cat <<"END"\n{output}\nEND\nexit {code}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def asked(self, name):
        return (self.folder / f"{name}.asked").read_text().split()


@pytest.fixture
def commands(tmp_path, monkeypatch):
    return Commands(tmp_path, monkeypatch)


def test_a_controller_that_answers_is_timed(commands):
    commands.say("scontrol", "Slurmctld(primary) at head1 is UP\nSlurmctld(backup) at head2 is DOWN")
    found = ping()
    assert (found.up, found.down) == (("primary head1",), ("backup head2",))
    assert 0 < found.seconds < scheduler.ANSWER_SECONDS
    assert commands.asked("scontrol") == ["ping"]


@of_each("case", [("Slurmctld(primary) at head1 is DOWN", 1), ("slurm_load_ctl_conf error", 1), ("", 0)])
def test_no_controller_that_answers_is_an_error(commands, case):
    output, code = case
    commands.say("scontrol", output, code)
    with pytest.raises(EnvironmentBroken, match="controller") as raised:
        ping()
    assert (output or "exit code 0") in str(raised.value)


def test_a_command_that_does_not_end_or_is_not_there_is_an_error(commands, monkeypatch):
    commands.say("scontrol", "Slurmctld(primary) at head1 is UP", before="exec sleep 30")
    monkeypatch.setattr(scheduler, "ANSWER_SECONDS", 0.2)
    with pytest.raises(EnvironmentBroken, match=r"scontrol: no answer within 0\.2 s"):
        ping()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EnvironmentBroken, match=r"scontrol .* container"):
        ping()


def test_the_states_of_the_job_s_nodes_are_asked_for(commands):
    commands.say("sinfo", "gpu-001|train*|up|allocated|none\ngpu-002|train*|up|Draining@|bad cable|x")
    assert node_states(["gpu-001", "gpu-002"], "train") == (
        NodeState(node="gpu-001", partition="train", available="up", state="allocated", reason=""),
        NodeState(node="gpu-002", partition="train", available="up", state="draining@", reason="bad cable|x"),
    )
    asked = commands.asked("sinfo")
    assert asked[asked.index("--nodes") + 1] == "gpu-001,gpu-002"
    assert asked[asked.index("--partition") + 1] == "train"


@of_each("case", [("slurm_load_partitions: Unable to contact", 1), ("gpu-001 allocated", 0), ("", 0)])
def test_what_is_no_list_of_states_is_an_error(commands, case):
    commands.say("sinfo", *case)
    with pytest.raises(EnvironmentBroken, match="gpu-001"):
        node_states(["gpu-001"], None)


def test_a_warning_is_not_part_of_the_answer(commands):
    warning = "sinfo: error: If munged is up, restart with --num-threads=10"
    commands.say("sinfo", "gpu-001|train*|up|mixed|none", stderr=warning)
    assert [one.state for one in node_states(["gpu-001"], "train")] == ["mixed"]
    commands.say("sinfo", "", 1, stderr=warning)
    with pytest.raises(EnvironmentBroken, match=r"gpu-001 \(exit code 1\): sinfo: error: "):
        node_states(["gpu-001"], "train")


def test_what_is_missing_in_a_container_is_reported_with_the_way_to_bring_it_in(commands, monkeypatch):
    commands.say("scontrol", "")
    monkeypatch.setenv("PATH", str(commands.folder))
    assert in_order(str(scheduler.why_unavailable()), "sinfo container")
    commands.say("sinfo", "")
    assert scheduler.why_unavailable() is None


def of(state, *, available="up", reason=""):
    return [NodeState(node="gpu-001", partition="train", available=available, state=state, reason=reason)]


@of_each("state", ["allocated", "mixed", "allocated+", "mixed-", "allocated$", "mixed@"])
def test_a_node_that_runs_jobs_is_well(state):
    assert examine_slurm(PING, of(state), ["gpu-001"], "head") == []
    assert healthy_count(of(state), ["gpu-001"]) == 1


@of_each("state", ["draining", "drained*", "down", "mixed*", "allocated^", "allocated#", "idle", "something new"])
def test_a_node_in_another_state_is_named_with_slurm_s_reason(state):
    [finding] = examine_slurm(PING, of(state, reason="ECC errors"), ["gpu-001"], "head")
    assert (finding.code, finding.kind, str(finding.gpu)) == ("slurm.node", "environment", "gpu-001")
    assert in_order(finding.found, f"{state} (ECC errors)")
    assert healthy_count(of(state), ["gpu-001"]) == 0


def test_a_node_that_sinfo_does_not_list_and_a_partition_that_is_not_up_are_named():
    found = examine_slurm(PING, of("mixed", available="drain"), ["gpu-001", "gpu-002"], "head")
    assert [(one.code, one.kind, str(one.gpu)) for one in found] == [
        ("slurm.node", "environment", "gpu-002"),
        ("slurm.partition", "environment", "head"),
    ]
    assert in_order(found[1].found, "train is drain")
    [backup] = examine_slurm(Ping(up=("primary a",), down=("backup b",), seconds=1.0), of("mixed"), ["gpu-001"], "head")
    assert (backup.kind, in_order(backup.found, "backup b")) == ("note", True)


def test_the_nodes_of_the_job_are_slurm_s():
    assert nodes_of_job({"SLURM_JOB_NODELIST": "gpu-[001-002,7]"}) == ["gpu-001", "gpu-002", "gpu-7"]
    assert nodes_of_job({"SLURM_NODELIST": "a"}) == ["a"]
    for environ in ({}, {"SLURM_JOB_NODELIST": "gpu-[1"}):
        with pytest.raises(EnvironmentBroken, match="SLURM_JOB_NODELIST"):
            nodes_of_job(environ)
    # Of a step its own nodes count, and not those that srun has left out; one that is interactive has none of its own.
    environ = {"SLURM_JOB_NODELIST": "gpu-[001-004]", "SLURM_STEP_NODELIST": "gpu-[001,003]"}
    assert nodes_of_job({**environ, "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "2"}) == ["gpu-001", "gpu-003"]
    interactive = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "gpu-001"}
    assert len(nodes_of_job({**environ, **interactive})) == len(nodes_of_job(environ)) == 4


@pytest.mark.parametrize(("partition", "asked"), [("train", "--partition"), (None, "--all")])
def test_sinfo_is_never_asked_for_all_partitions_and_for_one(commands, partition, asked):
    # Slurm 22.05: "Conflicting options, -a and -p, specified. Please choose one or the other."
    commands.say("sinfo", "n1|train*|up|mixed|none")
    assert [state.node for state in node_states(["n1"], partition)] == ["n1"]
    assert {"--all", "--partition"} & set(commands.asked("sinfo")) == {asked}


ENVIRON = {"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_ON_NODE": "2"}


def nvml(*processes):
    """GPUs with the processes on each; None: not supported."""
    return FakeNvml({f"GPU-{n}": {} if of is None else {"processes": of} for n, of in enumerate(processes)})


def inventory(ranks=2):
    return [
        {
            "rank": rank,
            "node_rank": 0,
            "local_rank": rank,
            "host": "node-a",
            "pid": 100 + rank,
            "visible_gpus": 2,
            "gpu": {"uuid": f"GPU-{rank}", "index": rank},
        }
        for rank in range(ranks)
    ]


@pytest.fixture(autouse=True)
def clean_node(tmp_path, monkeypatch):
    """A node with two CPUs, of which each rank has one."""
    cpu = tmp_path / "sys/devices/system/cpu"
    cpu.mkdir(parents=True)
    (cpu / "online").write_text("0-1\n")
    monkeypatch.setattr(sysfs, "ROOT", tmp_path)
    monkeypatch.setattr(
        scheduler, "place_of", lambda rank, environ: {"rank": rank, "cpus": [rank], "visible_devices": None}
    )


def examined(asked, *, silent=False, environ=ENVIRON):
    store = HashStore()
    sources = (
        None if asked is None else SimpleNamespace(nvml=asked, find_process=lambda pid: Process(pid=pid, user="ann"))
    )
    found = None
    for rank in (0,) if silent else (1, 0):
        who = inventory()
        nodes = Nodes.of(who, 0)
        board = Board(store, rank, lambda: 1)
        found = examine_allocation(board, nodes, who, environ, rank=rank, sources=sources)
        assert (found is None) == (rank != 0)
    assert found is not None
    return found


def test_a_node_that_is_this_job_s_alone_has_no_findings():
    assert examined(nvml(((100, 10),), ((101, None),))) == []
    assert examined(None, environ={"SLURM_CPUS_ON_NODE": "2"}) == [], "a rehearsal asks no GPU"


def test_other_processes_on_the_gpus_are_named():
    [finding] = examined(nvml(((100, 10), (7, 10**9)), ((101, 10),)))
    assert (finding.code, finding.kind) == ("leftovers.process", "environment")
    assert finding.found.startswith("pid 7 of user ann")
    [unknown] = examined(nvml(((100, 10),), None))
    assert unknown.kind == "environment"
    assert in_order(unknown.found, "GPU 1 unknown processes")


@pytest.mark.parametrize(
    ("siblings", "kind"), [("0-1", "note"), (None, "environment")], ids=["one core", "cores are not known"]
)
def test_all_threads_of_the_allocated_cores_are_no_error(tmp_path, siblings, kind):
    for cpu in range(2) if siblings else ():
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    [finding] = examined(None, environ={"SLURM_CPUS_ON_NODE": "1"})
    assert (finding.code, finding.kind) == ("slurm.cpus", kind)
    assert ("which are 1 cores" in finding.found) == (siblings is not None)


def test_a_rank_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(scheduler, "_WITHIN_SECONDS", 0.05)
    with pytest.raises(EnvironmentBroken, match="node-a: rank 1 "):
        examined(None, silent=True)


def test_processes_of_others_on_the_gpus_are_errors_and_this_job_s_are_not():
    people = {7: Process(pid=7, user="ann", command="python train.py"), 8: Process(pid=8, known=False)}
    nvml = SimpleNamespace(read=lambda uuid, query: ((5, 100), (7, 2 * 10**9), (8, None)))
    sources = SimpleNamespace(nvml=nvml, find_process=people.__getitem__)
    found = list(scheduler._processes("node-a", [{"pid": 5, "gpu": {"uuid": "GPU-1", "index": 0}}], sources))
    assert [one.kind for one in found] == ["environment", "note"]
    assert found[0].found == "pid 7 of user ann (python train.py) uses 2 GB of GPU memory"
    assert in_order(found[1].found, "pid 8, unknown amount")
