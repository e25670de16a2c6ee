import dataclasses

import pytest
from each import of_each
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.launchers import Allocation, RankFacts, detect

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "a1",
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu-06",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu-[06-07]",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
}
STEP = BATCH | {
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu-[06-07]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-gpu-06-99@1",
    "MASTER_ADDR": "gpu-06",
}
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "accept-0.accept",
    "MASTER_PORT": "29500",
}
# What the operators set, besides JOB_COMPLETION_INDEX where the pods are of an Indexed Job.
TRAINJOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "accept-node-0-0.accept",
    "PET_MASTER_PORT": "29400",
}
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "accept-master-0",
    "MASTER_PORT": "23456",
}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def facts(environ):
    return detect(environ, "gpu-07")


def error_of(environ):
    with pytest.raises(LaunchError) as caught:
        facts(environ)
    return str(caught.value)


def test_torchrun_sets_everything():
    assert facts(TORCHRUN) == RankFacts(
        **dict(zip(PLACE, NINTH, strict=True)),
        hostname="gpu-07",
        launcher="torchrun",
        run_id="a1",
        restart_count=1,
        master_addr="gpu-06",
        master_port=29500,
        agent_store=True,
        scheduler=Allocation(),
    )


PLACE = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "nnodes")
NINTH, ALONE, SECOND_POD = (9, 16, 1, 8, 1, 2), (0, 1, 0, 1, 0, 1), (1, 2, 0, 1, 1, 2)
ONE_POD = without(TRAINJOB, "PET_MASTER_ADDR") | {"PET_NNODES": "1", "PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"}
UNEVEN = STEP | {"SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "8,4"}
A_TASK_A_NODE = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
SOURCES = {
    "slurm step": (STEP, "slurm", NINTH),
    "mpirun": (OPENMPI, "openmpi", NINTH),
    "torchrun, a rank a node": (
        TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        "torchrun",
        SECOND_POD,
    ),
    "indexed job": (KUBERNETES, "kubernetes", SECOND_POD),
    "trainjob of one rank a pod": (TRAINJOB, "kubernetes", SECOND_POD),
    "pytorchjob of one rank a pod": (PYTORCHJOB, "kubernetes", SECOND_POD),
    "torchrun in a trainjob": (TORCHRUN | TRAINJOB, "torchrun", NINTH),
    "torchrun in a pytorchjob": (TORCHRUN | without(PYTORCHJOB, *TORCHRUN), "torchrun", NINTH),
    "trainjob of one pod": (ONE_POD, "single", ALONE),
    "torchrun's defaults in a shell": ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "single", ALONE),
    "nothing": ({}, "single", ALONE),
    "batch script without a step": (BATCH, "single", ALONE),
    "step of one task": (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "single", ALONE),
    "interactive shell of salloc": (
        BATCH | {"SLURM_STEP_ID": "4294967280", "SLURM_STEP_NUM_TASKS": "2"},
        "single",
        ALONE,
    ),
    "every pod on its own": (KUBERNETES | {"WORLD_SIZE": "1"}, "single", ALONE),
    "a world of one": ({"RANK": "0", "WORLD_SIZE": "1"}, "single", ALONE),
    "torchrun under srun": (TORCHRUN | STEP, "torchrun", NINTH),
    "torchrun under srun with one task a node": (
        TORCHRUN | STEP | A_TASK_A_NODE | {"SLURM_LOCALID": "0"},
        "torchrun",
        NINTH,
    ),
    "torchrun in a pod": (TORCHRUN | {"JOB_COMPLETION_INDEX": "1"}, "torchrun", NINTH),
    "mpirun whose daemon is a slurm task": (OPENMPI | STEP | A_TASK_A_NODE, "openmpi", NINTH),
    "foreign variables": (STEP | {"RANK": "5", "WORLD_SIZE": "99"}, "slurm", NINTH),
    "uneven slurm step": (UNEVEN, "slurm", (9, 12, 1, 4, 1, 2)),
}


@pytest.mark.parametrize(("environ", "launcher", "expected"), SOURCES.values(), ids=SOURCES)
def test_the_first_source_that_applies_wins(environ, launcher, expected):
    found = facts(environ)
    assert (found.launcher, tuple(getattr(found, name) for name in PLACE)) == (launcher, expected)


def test_where_the_store_is_and_what_has_given_its_address():
    port = 20000 + (16 * 4711 + 3) % 10000
    of_mpirun = facts(OPENMPI).master_port
    for environ, address, at, agent_store, origin in (
        (TORCHRUN, "gpu-06", 29500, True, "MASTER_ADDR"),
        (TORCHRUN | {"MASTER_ADDR": "localhost"}, "localhost", 29500, True, "MASTER_ADDR"),  # two agents on one host
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, "gpu-06", 29500, False, "MASTER_ADDR"),
        (STEP, "gpu-06", port, False, "the first of SLURM_STEP_NODELIST"),
        (without(STEP, "SLURM_STEP_NODELIST"), "gpu-06", port, False, "the first of SLURM_JOB_NODELIST"),
        (STEP | {"MASTER_ADDR": "ib-06", "MASTER_PORT": "1234"}, "ib-06", 1234, False, "MASTER_ADDR"),
        (OPENMPI, "gpu-06", of_mpirun, False, "MASTER_ADDR"),
        (KUBERNETES, "accept-0.accept", 29500, False, "MASTER_ADDR"),
        (TRAINJOB, "accept-node-0-0.accept", 29400, False, "PET_MASTER_ADDR"),
        (TRAINJOB | {"MASTER_ADDR": "pod-0"}, "pod-0", 29400, False, "MASTER_ADDR"),
        (PYTORCHJOB, "accept-master-0", 23456, False, "MASTER_ADDR"),
        ({}, None, None, False, "MASTER_ADDR"),
    ):
        found = facts(environ)
        assert (found.master_addr, found.master_port, found.agent_store) == (address, at, agent_store)
        assert found.master_addr_from == origin


def test_one_node_of_mpirun_needs_no_address_and_every_mpirun_gets_its_port():
    local = without(OPENMPI, "MASTER_ADDR") | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "1"}
    first, second = facts(local), facts(local | {"PMIX_NAMESPACE": "prterun-gpu-06-100@1"})
    assert first.master_addr == "127.0.0.1"
    assert first.master_port != second.master_port
    assert first.run_id != second.run_id


ONE_NODE = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "16", "SLURM_LOCALID": "9", "SLURM_NODEID": "0"}


def test_ranks_on_one_node_meet_on_its_loopback():
    of_torchrun = TORCHRUN | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    for environ in (
        of_torchrun,
        of_torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        STEP | ONE_NODE,
        STEP | ONE_NODE | {"MASTER_ADDR": "gpu-06"},
        without(STEP | ONE_NODE, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        OPENMPI | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "1"},
    ):
        found = facts(environ)
        assert (found.nnodes, found.master_addr) == (1, "127.0.0.1")
        assert found.world_size > 1


def test_all_ranks_of_a_launch_agree_on_what_is_common():
    slurm = [
        facts(STEP | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 8), "SLURM_NODEID": str(r // 8)})
        for r in range(16)
    ]
    mpi = [
        facts(OPENMPI | {"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_LOCAL_RANK": str(r % 8)}) for r in range(16)
    ]
    for launch in (slurm, mpi):
        assert [found.rank for found in launch] == list(range(16))
        assert [(found.node_rank, found.local_rank) for found in launch] == [divmod(r, 8) for r in range(16)]
        assert len({(found.run_id, found.master_addr, found.master_port) for found in launch}) == 1
        assert 20000 <= launch[0].master_port < 30000  # below what Linux gives away itself


def test_virtual_local_ranks_of_torchrun_are_undone():
    virtual = TORCHRUN | {"RANK": "11", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}
    assert facts(virtual).local_rank == 3
    assert facts(virtual | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}).local_rank == 0


def test_what_the_scheduler_gave():
    no_gpus, two_nodes = without(BATCH, "SLURM_GPUS_ON_NODE"), Allocation(name="slurm", nnodes=2)
    of_8, of_4 = (dataclasses.replace(two_nodes, gpus_per_node=gpus) for gpus in (8, 4))
    for environ, expected in (
        ({}, Allocation()),
        (BATCH, of_8),
        (STEP | {"SLURM_JOB_NUM_NODES": "4"}, of_8),  # in a step: the step's nodes
        (no_gpus | {"SLURM_GPUS_PER_NODE": "h100:4"}, of_4),
        (no_gpus | {"SLURM_GPUS": "h100:16"}, of_8),
        (no_gpus, two_nodes),
        (BATCH | {"SLURM_GPUS_ON_NODE": "many"}, two_nodes),
        (BATCH | {"SLURM_HET_SIZE": "2"}, Allocation(name="slurm")),  # a heterogeneous job has no one shape
        (TORCHRUN | {"KUBERNETES_SERVICE_HOST": "x"}, Allocation(name="kubernetes")),
    ):
        assert facts(environ).scheduler == expected
        assert repr(facts(environ).scheduler) == repr(expected)  # 8, and not 8.0


COMPLAINTS = [
    (without(TORCHRUN, "RANK", "MASTER_PORT"), ["RANK is missing", "MASTER_PORT is missing"]),
    (TORCHRUN | {"RANK": ""}, ["RANK is empty"]),
    (TORCHRUN | {"RANK": "16"}, ["RANK=16 is not below WORLD_SIZE=16"]),
    (TORCHRUN | {"LOCAL_RANK": "8"}, ["LOCAL_RANK=8 is not below LOCAL_WORLD_SIZE=8"]),
    (TORCHRUN | {"GROUP_RANK": "2"}, ["GROUP_RANK=2 is not below GROUP_WORLD_SIZE=2"]),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "32"}, ["LOCAL_WORLD_SIZE=32 is above WORLD_SIZE=16"]),
    (TORCHRUN | {"WORLD_SIZE": "two"}, ["WORLD_SIZE='two' is not a whole number"]),
    (TORCHRUN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE=0 is not at least 1"]),
    *(
        (TORCHRUN | {"WORLD_SIZE": value}, ["WORLD_SIZE", "whole"])
        for value in ("\u0661", "1.0", "1e3", " 1", "1" * 19)
    ),
    (TORCHRUN | {"MASTER_PORT": "65536"}, ["MASTER_PORT=65536 is not between 1 and 65535"]),
    (
        TORCHRUN | {"RANK": "x", "LOCAL_RANK": "9", "GROUP_RANK": "7"},
        ["RANK='x'", "LOCAL_RANK=9 is not below", "GROUP_RANK=7 is not below"],
    ),
    (STEP | {"SLURM_PROCID": "16"}, ["SLURM_PROCID=16 is not below SLURM_STEP_NUM_TASKS=16"]),
    (STEP | {"SLURM_LOCALID": "8"}, ["SLURM_LOCALID=8 is not below"]),
    (STEP | {"SLURM_STEP_NUM_TASKS": "0"}, ["SLURM_STEP_NUM_TASKS=0 is not at least 1"]),
    (STEP | {"SLURM_NODEID": "2"}, ["SLURM_NODEID=2 is not below SLURM_STEP_NUM_NODES=2"]),
    (without(STEP, "SLURM_PROCID"), ["SLURM_PROCID is missing"]),
    (STEP | {"SLURM_STEP_TASKS_PER_NODE": "8"}, ["8 tasks on 1 nodes"]),
    (STEP | {"SLURM_STEP_TASKS_PER_NODE": "16(x2)"}, ["32 tasks on 2 nodes"]),
    (STEP | {"SLURM_STEP_TASKS_PER_NODE": "8*2"}, ["8(x2),4"]),
    (STEP | {"SLURM_STEP_NODELIST": "gpu-[06"}, ["unbalanced brackets"]),
    (without(STEP, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), ["NODELIST is missing"]),
    *(
        (STEP | {"MASTER_ADDR": address}, [f"MASTER_ADDR={address} "])
        for address in ("localhost", "LocalHost", "127.1.2.3", "::1", "[::1]")
    ),
    (STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, ["task 0 is on node 1", "export MASTER_ADDR"]),
    (without(OPENMPI, "MASTER_ADDR"), ["MASTER_ADDR is missing", "-x MASTER_ADDR="]),
    (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "12"}, ["12 ranks "]),
    (OPENMPI | {"OMPI_COMM_WORLD_RANK": "3"}, ["rank 3 is number 1 of 8", "not numbered"]),
    (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, ["LOCAL_SIZE=0 is not at least 1"]),
    (without(OPENMPI, "OMPI_COMM_WORLD_RANK"), ["OMPI_COMM_WORLD_RANK is missing"]),
    ({"JOB_COMPLETION_INDEX": "0"}, ["WORLD_SIZE is missing", "MASTER_ADDR is missing"]),
    (KUBERNETES | {"JOB_COMPLETION_INDEX": "2"}, ["JOB_COMPLETION_INDEX=2 is not below"]),
    (KUBERNETES | {"RANK": "0"}, ["RANK=0 is not JOB_COMPLETION_INDEX=1"]),
    (KUBERNETES | {"MASTER_ADDR": "127.0.0.1"}, ["MASTER_ADDR=127.0.0.1 "]),
    (TRAINJOB | {"PET_NPROC_PER_NODE": "8"}, ["PET_NPROC_PER_NODE=8 is not 1", "gpucluster run"]),
    (PYTORCHJOB | {"PET_NPROC_PER_NODE": "auto"}, ["PET_NPROC_PER_NODE=auto is not 1"]),
    (TRAINJOB | {"PET_NODE_RANK": "2"}, ["PET_NODE_RANK=2 is not below PET_NNODES=2"]),
    (TRAINJOB | {"PET_NNODES": "1:4"}, ["PET_NNODES='1:4' is not a whole number"]),
    (without(TRAINJOB, "PET_NNODES"), ["PET_NNODES is missing"]),
    (without(TRAINJOB, "PET_MASTER_ADDR"), ["PET_MASTER_ADDR is missing"]),
    (TRAINJOB | {"PET_MASTER_ADDR": "localhost"}, ["PET_MASTER_ADDR=localhost "]),
    (TRAINJOB | {"PET_MASTER_PORT": "0"}, ["PET_MASTER_PORT=0 is not between"]),
    (TRAINJOB | {"JOB_COMPLETION_INDEX": "0"}, ["JOB_COMPLETION_INDEX=0 does not fit"]),
    (PYTORCHJOB | {"RANK": "0"}, ["RANK=0 does not fit: "]),
    (PYTORCHJOB | {"WORLD_SIZE": "16"}, ["WORLD_SIZE=16 does not fit"]),
    ({"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu-06", "MASTER_PORT": "29500"}, ["WORLD_SIZE=8 ", "torchrun"]),
    ({"RANK": "3"}, ["RANK=3 "]),
    ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1 "]),
    ({"PMI_SIZE": "4", "PMI_RANK": "1"}, ["PMI_SIZE=4", "MPICH or Intel MPI"]),
    (BATCH | {"SLURM_PROCID": "1"}, ["SLURM_PROCID=1 "]),
]


@of_each("complaint", COMPLAINTS)
def test_partial_and_contradictory_variables_are_one_error(complaint):
    environ, parts = complaint
    text = error_of(environ)
    for part in (*parts, "gpu-07", "found: ", "what to do: "):
        assert part in text


def test_the_error_shows_what_was_found():
    text = error_of(without(TORCHRUN, "RANK"))
    assert "found: WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8 GROUP_RANK=1 GROUP_WORLD_SIZE=2" in text
    complaints = error_of(TORCHRUN | {"RANK": "x", "WORLD_SIZE": "x"}).splitlines()[0]
    assert " below " not in complaints, "what could not be read is not compared"


@given(
    st.dictionaries(
        st.sampled_from(
            sorted({*TORCHRUN, *STEP, *OPENMPI, *KUBERNETES, *TRAINJOB, "PMI_SIZE", "CUDA_VISIBLE_DEVICES"})
        ),
        st.one_of(st.integers(-1, 20).map(str), st.sampled_from(["", "x", "8(x2)", "gpu-[1-2]", "1" * 30])),
    )
)
def test_any_environment_gives_consistent_facts_or_one_error(environ):
    try:
        found = facts(environ)
    except LaunchError:
        return
    assert 0 <= found.rank < found.world_size
    assert 0 <= found.local_rank < found.local_world_size <= found.world_size
    assert 0 <= found.node_rank < found.nnodes <= found.world_size
    if found.world_size > 1:
        assert found.master_addr
        assert found.master_port


def test_a_run_in_a_slurm_job_is_named_by_job_and_restart():
    assert facts(STEP).run_id != facts(STEP | {"SLURM_RESTART_COUNT": "1"}).run_id
    unnamed = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}
    in_job = {"SLURM_JOB_ID": "123", "SLURM_RESTART_COUNT": "2"}
    assert facts({**unnamed, **in_job}).run_id == "slurm-123-2"
    assert facts({**unnamed, "SLURM_JOB_ID": "123"}).run_id == "slurm-123-0"
    assert facts(unnamed).run_id == "none"
    assert facts({**TORCHRUN, **in_job}).run_id == TORCHRUN["TORCHELASTIC_RUN_ID"]


def test_what_stands_at_the_edge_of_a_launcher_s_variables():
    unnamed = {name: value for name, value in OPENMPI.items() if name != "PMIX_NAMESPACE"}
    assert detect({**unnamed, "OMPI_MCA_ess_base_jobid": "77"}, "node-a").run_id == "openmpi-77"
    assert facts(unnamed).run_id == "openmpi-run"
    beyond = TORCHRUN | {"RANK": "3", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}
    assert detect(beyond, "node-a").local_rank == 0, "before the first rank of its node"
