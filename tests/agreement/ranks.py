from dataclasses import replace

from pytest_gpucluster.launch.launchers import RankFacts

DEADLINE_SECONDS = 20.0
_TWO_NODES = RankFacts(
    rank=0,
    world_size=2,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    nnodes=2,
    hostname="gpu-06",
    launcher="torchrun",
    run_id="a1",
    master_addr="gpu-06",
    master_port=29500,
)


def facts_of(**changes):
    """Return rank 0 of two nodes with one rank each, with changes."""
    return replace(_TWO_NODES, **changes)
