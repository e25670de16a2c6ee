from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch import Allocation, RankFacts, detect

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


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def facts(environ: Mapping[str, str]) -> RankFacts:
    return detect(environ, "gpu-07")


def complaint(environ: Mapping[str, str]) -> str:
    with pytest.raises(LaunchError) as caught:
        facts(environ)
    return str(caught.value)


def place(found: RankFacts) -> tuple[int, ...]:
    return (
        found.rank,
        found.world_size,
        found.local_rank,
        found.local_world_size,
        found.node_rank,
        found.nnodes,
    )


def test_torchrun_tells_everything() -> None:
    assert facts(TORCHRUN) == RankFacts(
        rank=9,
        world_size=16,
        local_rank=1,
        local_world_size=8,
        node_rank=1,
        nnodes=2,
        hostname="gpu-07",
        launcher="torchrun",
        run_id="a1",
        restart_count=1,
        max_restarts=3,
        master_addr="gpu-06",
        master_port=29500,
        agent_store=True,
        scheduler=Allocation(),
    )


@pytest.mark.parametrize(
    ("environ", "launcher", "expected"),
    [
        pytest.param(STEP, "slurm", (9, 16, 1, 8, 1, 2), id="slurm step"),
        pytest.param(OPENMPI, "openmpi", (9, 16, 1, 8, 1, 2), id="mpirun"),
        pytest.param(KUBERNETES, "kubernetes", (1, 2, 0, 1, 1, 2), id="indexed job"),
        pytest.param(TRAINJOB, "kubernetes", (1, 2, 0, 1, 1, 2), id="trainjob of one rank a pod"),
        pytest.param(PYTORCHJOB, "kubernetes", (1, 2, 0, 1, 1, 2), id="pytorchjob of one rank a pod"),
        pytest.param(TORCHRUN | TRAINJOB, "torchrun", (9, 16, 1, 8, 1, 2), id="torchrun in a trainjob"),
        pytest.param(
            TORCHRUN | without(PYTORCHJOB, *TORCHRUN), "torchrun", (9, 16, 1, 8, 1, 2), id="torchrun in a pytorchjob"
        ),
        pytest.param(
            without(TRAINJOB, "PET_MASTER_ADDR")
            | {"PET_NNODES": "1", "PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"},
            "single",
            (0, 1, 0, 1, 0, 1),
            id="trainjob of one pod",
        ),
        pytest.param(
            {"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "single", (0, 1, 0, 1, 0, 1), id="torchrun's defaults in a shell"
        ),
        pytest.param({}, "single", (0, 1, 0, 1, 0, 1), id="nothing"),
        pytest.param(BATCH, "single", (0, 1, 0, 1, 0, 1), id="batch script without a step"),
        pytest.param(
            STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            "single",
            (0, 1, 0, 1, 0, 1),
            id="step of one task",
        ),
        pytest.param(
            BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "2"},
            "single",
            (0, 1, 0, 1, 0, 1),
            id="interactive shell of salloc",
        ),
        pytest.param(KUBERNETES | {"WORLD_SIZE": "1"}, "single", (0, 1, 0, 1, 0, 1), id="every pod on its own"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, "single", (0, 1, 0, 1, 0, 1), id="a world of one"),
        pytest.param(TORCHRUN | STEP, "torchrun", (9, 16, 1, 8, 1, 2), id="torchrun under srun"),
        pytest.param(
            TORCHRUN | STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
            "torchrun",
            (9, 16, 1, 8, 1, 2),
            id="torchrun under srun with one task a node",
        ),
        pytest.param(TORCHRUN | {"JOB_COMPLETION_INDEX": "1"}, "torchrun", (9, 16, 1, 8, 1, 2), id="torchrun in a pod"),
        pytest.param(
            OPENMPI | STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            "openmpi",
            (9, 16, 1, 8, 1, 2),
            id="mpirun whose daemon is a slurm task",
        ),
        pytest.param(STEP | {"RANK": "5", "WORLD_SIZE": "99"}, "slurm", (9, 16, 1, 8, 1, 2), id="foreign variables"),
        pytest.param(
            STEP | {"SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "8,4"},
            "slurm",
            (9, 12, 1, 4, 1, 2),
            id="uneven slurm step",
        ),
    ],
)
def test_the_first_source_that_applies_wins(environ: dict[str, str], launcher: str, expected: tuple[int, ...]) -> None:
    found = facts(environ)
    assert (found.launcher, place(found)) == (launcher, expected)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(TORCHRUN, ("gpu-06", 29500, True), id="torchrun"),
        pytest.param(
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
            ("gpu-06", 29500, False),
            id="no agent store",
        ),
        pytest.param(STEP, ("gpu-06", 20000 + (16 * 4711 + 3) % 10000, False), id="slurm derives both"),
        pytest.param(
            STEP | {"MASTER_ADDR": "ib-06", "MASTER_PORT": "1234"},
            ("ib-06", 1234, False),
            id="slurm overridden",
        ),
        pytest.param(KUBERNETES, ("accept-0.accept", 29500, False), id="kubernetes"),
        pytest.param(TRAINJOB, ("accept-node-0-0.accept", 29400, False), id="trainjob"),
        pytest.param(PYTORCHJOB, ("accept-master-0", 23456, False), id="pytorchjob"),
        pytest.param({}, (None, None, False), id="single"),
    ],
)
def test_where_the_store_is(environ: dict[str, str], expected: tuple[str | None, int | None, bool]) -> None:
    found = facts(environ)
    assert (found.master_addr, found.master_port, found.agent_store) == expected


def test_one_node_of_mpirun_needs_no_address_and_every_mpirun_gets_its_port() -> None:
    local = without(OPENMPI, "MASTER_ADDR") | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "1"}
    first, second = facts(local), facts(local | {"PMIX_NAMESPACE": "prterun-gpu-06-100@1"})
    assert first.master_addr == "127.0.0.1"
    assert first.master_port != second.master_port
    assert first.run_id != second.run_id


ONE_NODE = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "16", "SLURM_LOCALID": "9", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(TORCHRUN | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, id="torchrun"),
        pytest.param(
            TORCHRUN | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"},
            id="no agent store",
        ),
        pytest.param(STEP | ONE_NODE, id="slurm"),
        pytest.param(STEP | ONE_NODE | {"MASTER_ADDR": "gpu-06"}, id="slurm overridden"),
        pytest.param(without(STEP | ONE_NODE, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), id="slurm without a list"),
        pytest.param(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "1"}, id="mpirun"),
    ],
)
def test_ranks_on_one_node_meet_on_its_loopback(environ: dict[str, str]) -> None:
    found = facts(environ)
    assert (found.nnodes, found.master_addr) == (1, "127.0.0.1")
    assert found.world_size > 1


@pytest.mark.parametrize(
    ("environ", "origin"),
    [
        pytest.param(TORCHRUN, "MASTER_ADDR", id="torchrun"),
        pytest.param(TORCHRUN | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR", id="two agents on one host"),
        pytest.param(STEP, "the first of SLURM_STEP_NODELIST", id="the step's nodes"),
        pytest.param(without(STEP, "SLURM_STEP_NODELIST"), "the first of SLURM_JOB_NODELIST", id="the job's nodes"),
        pytest.param(STEP | {"MASTER_ADDR": "ib-06"}, "MASTER_ADDR", id="slurm overridden"),
        pytest.param(OPENMPI, "MASTER_ADDR", id="mpirun"),
        pytest.param(KUBERNETES, "MASTER_ADDR", id="indexed job"),
        pytest.param(TRAINJOB, "PET_MASTER_ADDR", id="trainjob"),
        pytest.param(TRAINJOB | {"MASTER_ADDR": "pod-0"}, "MASTER_ADDR", id="trainjob overridden"),
    ],
)
def test_what_has_given_the_address_is_known(environ: dict[str, str], origin: str) -> None:
    assert facts(environ).master_addr_from == origin


def test_all_ranks_of_a_launch_agree_on_what_is_common() -> None:
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


def test_a_requeued_slurm_job_is_another_run() -> None:
    assert facts(STEP).run_id != facts(STEP | {"SLURM_RESTART_COUNT": "1"}).run_id


def test_virtual_local_ranks_of_torchrun_are_undone() -> None:
    virtual = TORCHRUN | {"RANK": "11", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}
    assert facts(virtual).local_rank == 3
    assert facts(virtual | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}).local_rank == 0


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, Allocation(), id="none"),
        pytest.param(BATCH, Allocation(name="slurm", nnodes=2, gpus_per_node=8), id="batch script: the job's"),
        pytest.param(
            STEP | {"SLURM_JOB_NUM_NODES": "4"},
            Allocation(name="slurm", nnodes=2, gpus_per_node=8),
            id="in a step: the step's nodes",
        ),
        pytest.param(
            without(BATCH, "SLURM_GPUS_ON_NODE") | {"SLURM_GPUS_PER_NODE": "h100:4"},
            Allocation(name="slurm", nnodes=2, gpus_per_node=4),
            id="typed GPUs per node",
        ),
        pytest.param(
            without(BATCH, "SLURM_GPUS_ON_NODE") | {"SLURM_GPUS": "h100:16"},
            Allocation(name="slurm", nnodes=2, gpus_per_node=8),
            id="GPUs of the job",
        ),
        pytest.param(without(BATCH, "SLURM_GPUS_ON_NODE"), Allocation(name="slurm", nnodes=2), id="no GPUs told"),
        pytest.param(BATCH | {"SLURM_GPUS_ON_NODE": "many"}, Allocation(name="slurm", nnodes=2), id="unreadable GPUs"),
        pytest.param(BATCH | {"SLURM_HET_SIZE": "2"}, Allocation(name="slurm"), id="heterogeneous job: no one shape"),
        pytest.param(TORCHRUN | {"KUBERNETES_SERVICE_HOST": "x"}, Allocation(name="kubernetes"), id="pod"),
    ],
)
def test_what_the_scheduler_gave(environ: dict[str, str], expected: Allocation) -> None:
    assert facts(environ).scheduler == expected


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        pytest.param(without(TORCHRUN, "RANK", "MASTER_PORT"), ["RANK is missing", "MASTER_PORT is missing"]),
        pytest.param(TORCHRUN | {"RANK": ""}, ["RANK is empty"]),
        pytest.param(TORCHRUN | {"RANK": "16"}, ["RANK=16 is not below WORLD_SIZE=16"]),
        pytest.param(TORCHRUN | {"LOCAL_RANK": "8"}, ["LOCAL_RANK=8 is not below LOCAL_WORLD_SIZE=8"]),
        pytest.param(TORCHRUN | {"GROUP_RANK": "2"}, ["GROUP_RANK=2 is not below GROUP_WORLD_SIZE=2"]),
        pytest.param(TORCHRUN | {"LOCAL_WORLD_SIZE": "32"}, ["LOCAL_WORLD_SIZE=32 is above WORLD_SIZE=16"]),
        pytest.param(TORCHRUN | {"WORLD_SIZE": "two"}, ["WORLD_SIZE='two' is not a whole number"]),
        pytest.param(TORCHRUN | {"WORLD_SIZE": "-2"}, ["WORLD_SIZE='-2' is not a whole number"]),
        pytest.param(TORCHRUN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE=0 is not at least 1"]),
        pytest.param(TORCHRUN | {"WORLD_SIZE": "\u0661"}, ["is not a whole number"]),
        pytest.param(TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000 is not between 1 and 65535"]),
        pytest.param(
            TORCHRUN | {"RANK": "x", "LOCAL_RANK": "9", "GROUP_RANK": "7"},
            ["RANK='x'", "LOCAL_RANK=9 is not below", "GROUP_RANK=7 is not below"],
        ),
        pytest.param(STEP | {"SLURM_PROCID": "16"}, ["SLURM_PROCID=16 is not below SLURM_STEP_NUM_TASKS=16"]),
        pytest.param(STEP | {"SLURM_LOCALID": "8"}, ["SLURM_LOCALID=8 is not below the 8 tasks of node 1"]),
        pytest.param(STEP | {"SLURM_NODEID": "2"}, ["SLURM_NODEID=2 is not below SLURM_STEP_NUM_NODES=2"]),
        pytest.param(without(STEP, "SLURM_PROCID"), ["SLURM_PROCID is missing"]),
        pytest.param(
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "8"},
            ["means 8 tasks on 1 nodes, not the 16 of SLURM_STEP_NUM_TASKS on the 2"],
        ),
        pytest.param(STEP | {"SLURM_STEP_TASKS_PER_NODE": "8*2"}, ["is not a list such as 8(x2),4"]),
        pytest.param(STEP | {"SLURM_STEP_NODELIST": "gpu-[06"}, ["unbalanced brackets"]),
        pytest.param(without(STEP, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), ["NODELIST is missing"]),
        pytest.param(STEP | {"MASTER_ADDR": "localhost"}, ["MASTER_ADDR=localhost is this node itself"]),
        pytest.param(STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, ["task 0 is on node 1", "export MASTER_ADDR"]),
        pytest.param(without(OPENMPI, "MASTER_ADDR"), ["MASTER_ADDR is missing", "-x MASTER_ADDR="]),
        pytest.param(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "12"}, ["12 ranks cannot be 8 on every node"]),
        pytest.param(
            OPENMPI | {"OMPI_COMM_WORLD_RANK": "3"},
            ["rank 3 is number 1 of 8", "not numbered node after node"],
        ),
        pytest.param(OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, ["LOCAL_SIZE=0 is not at least 1"]),
        pytest.param(without(OPENMPI, "OMPI_COMM_WORLD_RANK"), ["OMPI_COMM_WORLD_RANK is missing"]),
        pytest.param({"JOB_COMPLETION_INDEX": "0"}, ["WORLD_SIZE is missing", "MASTER_ADDR is missing"]),
        pytest.param(KUBERNETES | {"JOB_COMPLETION_INDEX": "2"}, ["JOB_COMPLETION_INDEX=2 is not below"]),
        pytest.param(KUBERNETES | {"RANK": "0"}, ["RANK=0 is not JOB_COMPLETION_INDEX=1"]),
        pytest.param(KUBERNETES | {"MASTER_ADDR": "127.0.0.1"}, ["127.0.0.1 is this node itself"]),
        pytest.param(TRAINJOB | {"PET_NPROC_PER_NODE": "8"}, ["PET_NPROC_PER_NODE=8 is not 1", "gpucluster run"]),
        pytest.param(PYTORCHJOB | {"PET_NPROC_PER_NODE": "auto"}, ["PET_NPROC_PER_NODE=auto is not 1"]),
        pytest.param(TRAINJOB | {"PET_NODE_RANK": "2"}, ["PET_NODE_RANK=2 is not below PET_NNODES=2"]),
        pytest.param(TRAINJOB | {"PET_NNODES": "1:4"}, ["PET_NNODES='1:4' is not a whole number"]),
        pytest.param(without(TRAINJOB, "PET_NNODES"), ["PET_NNODES is missing"]),
        pytest.param(without(TRAINJOB, "PET_MASTER_ADDR"), ["PET_MASTER_ADDR is missing"]),
        pytest.param(TRAINJOB | {"PET_MASTER_ADDR": "localhost"}, ["PET_MASTER_ADDR=localhost is this node itself"]),
        pytest.param(TRAINJOB | {"PET_MASTER_PORT": "0"}, ["PET_MASTER_PORT=0 is not between"]),
        pytest.param(TRAINJOB | {"JOB_COMPLETION_INDEX": "0"}, ["JOB_COMPLETION_INDEX=0 does not fit"]),
        pytest.param(PYTORCHJOB | {"RANK": "0"}, ["RANK=0 does not fit: this pod is 1 of 2"]),
        pytest.param(PYTORCHJOB | {"WORLD_SIZE": "16"}, ["WORLD_SIZE=16 does not fit"]),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu-06", "MASTER_PORT": "29500"},
            ["WORLD_SIZE=8 tells of several processes", "torchrun"],
        ),
        pytest.param({"RANK": "3"}, ["RANK=3 tells of other processes"]),
        pytest.param({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1 tells of other processes"]),
        pytest.param({"WORLD_SIZE": "eight"}, ["WORLD_SIZE='eight'"]),
        pytest.param({"PMI_SIZE": "4", "PMI_RANK": "1"}, ["PMI_SIZE=4", "MPICH or Intel MPI"]),
        pytest.param(BATCH | {"SLURM_PROCID": "1"}, ["SLURM_PROCID=1 tells of other processes"]),
    ],
    ids=lambda value: value[0][:50] if isinstance(value, list) else "",
)
def test_partial_and_contradictory_variables_are_one_error(environ: dict[str, str], parts: list[str]) -> None:
    text = complaint(environ)
    for part in (*parts, "gpu-07", "found: ", "what to do: "):
        assert part in text


def test_the_error_shows_what_was_found() -> None:
    text = complaint(without(TORCHRUN, "RANK"))
    assert "found: WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8 GROUP_RANK=1 GROUP_WORLD_SIZE=2" in text


@given(
    st.dictionaries(
        st.sampled_from(
            sorted({*TORCHRUN, *STEP, *OPENMPI, *KUBERNETES, *TRAINJOB, "PMI_SIZE", "CUDA_VISIBLE_DEVICES"})
        ),
        st.one_of(st.integers(-1, 20).map(str), st.sampled_from(["", "x", "8(x2)", "gpu-[1-2]", "1" * 30])),
    )
)
def test_any_environment_gives_consistent_facts_or_one_error(environ: dict[str, str]) -> None:
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


def test_facts_are_frozen_and_named_for_people() -> None:
    found = facts(TORCHRUN)
    assert str(found) == "rank 9 on gpu-07"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rank = 0  # type: ignore[misc]
