"""Is this the cluster that was ordered?"""

import pytest


def ranks_by(inventory, key):
    """Map each value of ``key(rank's entry)`` to the ranks that have it."""
    ranks = {}
    for who in inventory:
        ranks.setdefault(key(who), []).append(who["rank"])
    return ranks


@pytest.mark.first(1)
@pytest.mark.criterion("inventory")
def test_inventory(cluster, inventory, measure):
    """Accepted: every launched rank is there, on its node, with its own GPU and the same software.

    Why: a rank on a wrong node, two ranks that share a GPU, or one node with another driver or NCCL make
    every later number mean something else, or hang the first collective.

    When it fails: compare the named ranks' hosts. Versions differ: bring the nodes to one image and driver.
    One GPU for two ranks: look at CUDA_VISIBLE_DEVICES and at how the launcher hands out GPUs. Wrong count:
    compare --nnodes and --nproc-per-node, or the scheduler's allocation, with --gpucluster-expect.

    On cpu the processes stand for the GPUs.
    """
    measure("inventory.ranks", len(inventory), unit="ranks", record_only=True)

    assert sorted(who["rank"] for who in inventory) == list(range(cluster.world_size)), "ranks that reported"
    nodes = ranks_by(inventory, lambda who: who["node_rank"])
    assert sorted(nodes) == list(range(cluster.nnodes)), f"nodes that reported, with their ranks: {nodes}"
    assert len(nodes[cluster.node_rank]) == cluster.local_world_size, f"ranks of each node: {nodes}"

    for name in sorted({name for who in inventory for name in who["versions"]}):
        versions = ranks_by(inventory, lambda who, name=name: who["versions"].get(name))
        assert len(versions) == 1, f"ranks by version of {name}: {versions}"

    places = ranks_by(inventory, lambda who: who["gpu"]["uuid"] if who["gpu"] else (who["host"], who["pid"]))
    shared = {place: ranks for place, ranks in places.items() if len(ranks) > 1}
    assert not shared, f"ranks that share a GPU (on cpu: a process): {shared}"
    without = [who["rank"] for who in inventory if who["gpu"] is None]
    assert not cluster.has_gpus or not without, f"ranks without a GPU: {without}"
