"""Is every link between two GPUs as fast as the others, in both directions, and are all data correct?"""

import json

import pytest

from pytest_gpucluster.benchmarks.links import rounds_of, survey
from pytest_gpucluster.isolation.link_survey import (
    compact,
    require_healthy,
    require_measured,
    survey_text,
    to_json,
)
from pytest_gpucluster.isolation.round_robin import Places
from pytest_gpucluster.metrics.units import parse

SETUP_SECONDS = 120.0  # making the groups, connecting every pair, filling and verifying the payloads
LONGER = 3.0  # than planned: rounds in which a pair is far too slow


def most_seconds(rounds, config):
    """Return how long the tournament may take."""
    return SETUP_SECONDS + LONGER * len(rounds) * config.round_seconds


@pytest.fixture
def all_links(request, cluster, gpu, inventory, limits, workload, telemetry, progress, artifacts, record_property):
    """Measure every link of a scope; return the survey and the labels of its figures."""
    config = workload.links

    def surveyed(scope):
        places = Places.of(inventory)
        rounds = rounds_of(scope, places, cluster.rank)
        group = cluster.group
        if scope == "node":
            group = cluster.node_group([who["node_rank"] for who in inventory])
        labels = {
            "scope": scope,
            "size": config.size,
            "world_size": group.size(),
            "nnodes": 1 if scope == "node" else cluster.nnodes,
        }
        where = {"world_size": cluster.world_size, "nnodes": cluster.nnodes}
        limit = limits.limit("link.ratio_to_median", sku=gpu.sku or "", **where, labels=as_text(labels))
        print(f"links, {scope}: {len(rounds)} rounds, about {len(rounds) * config.round_seconds:.3g} s")
        window = telemetry()
        result = survey(
            cluster.group,
            group,
            cluster.device,
            places,
            scope,
            payload_bytes=int(parse(config.size).to("B")),
            round_seconds=config.round_seconds,
            repeats=config.repeats,
            below=None if limit is None else limit.min,
            longest_seconds=most_seconds(rounds, config),
            progress=progress,
            during=window,
            sweeping=lambda: cluster.using(group),
        )
        transport = cluster.carried_by(group)
        for name, value in transport.properties("send_recv").items():
            record_property(f"nccl.{name}", value)
        record_property("links.matrix", compact(result))
        if cluster.rank == 0:
            (artifacts / f"links-{scope}.json").write_text(json.dumps(to_json(result)), encoding="utf-8")
            (artifacts / f"links-{scope}.txt").write_text(survey_text(result), encoding="utf-8")
        return result, {**labels, **transport.labels}, transport.add_to(window.summary())

    return surveyed


@pytest.fixture(autouse=True)
def deadline(request, cluster, inventory, workload):
    """Give the tournament, and what is measured once more, the time that the workload may take."""
    config = workload.links
    met = max(cluster.local_world_size, cluster.nnodes)
    seconds = 2 * SETUP_SECONDS + LONGER * (met + config.repeats) * config.round_seconds
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


def as_text(labels):
    """Return labels as the limits are looked up by them."""
    return {name: str(label) for name, label in labels.items()}


@pytest.mark.needs_local_ranks(2)
@pytest.mark.criterion("links")
def test_links_within_node(cluster, all_links, measure):
    """Accepted: each GPU sends to each other one of its node, and receives from it, at no less than the limit's part of
    the median of all other pairs, on all nodes; and no slower than the limit's floor. All data arrive as sent.

    Why: an all-reduce averages one bad link away, or slows down without a hint where. Here each pair is measured by
    itself: GPUs - 1 rounds, in each of which every GPU is in one pair. Pairs that are far behind are measured again,
    alone. A GPU that is slow with most of the others is named, and not its partners.

    When it fails: ``links-node.txt`` in the test's folder has the matrix, ``links-node.json`` all figures. One GPU:
    look at its NVLinks (``nvidia-smi nvlink -s``, ``-e``). One link: at both ends. The whole node: at the Fabric
    Manager. Alone it is as fast as the others: pairs share a way, such as a PCIe switch. Wrong data: take the named GPU
    out of service.

    On cpu this rehearses with gloo.
    """
    result, labels, summary = all_links("node")
    record(result, labels, summary, cluster, measure)


@pytest.mark.needs_nodes(2)
@pytest.mark.criterion("links")
def test_links_across_nodes(cluster, all_links, measure):
    """Accepted: each GPU sends to the GPU with its number on each other node, and receives from it, at no less than the
    limit's part of the median of all other pairs; and no slower than the limit's floor. All data arrive as sent.

    Why: as within a node. All nodes meet each other in nodes - 1 rounds, all rails of two nodes at once, so 1,024 GPUs
    on 128 nodes take 127 rounds. Nodes of which a rail is far behind meet once more, rail by rail.

    When it fails: ``links-world.txt`` in the test's folder has a matrix of each rail. One port: look at the NIC
    (``ibstat``) and its cable. A rail: at its leaf switch. Two nodes: at the way between them. Alone it is as fast as
    the others: the rails share a PCIe switch, or routing sends several pairs the same way (adaptive routing). Wrong
    data: take the named GPU or NIC out of service.

    On cpu this rehearses with gloo.
    """
    result, labels, summary = all_links("world")
    record(result, labels, summary, cluster, measure)


def record(result, labels, summary, cluster, measure):
    """Measure this rank's worst link; then name the suspected component."""
    if cluster.rank in result.matrix.touching:
        reading = result.of_rank(cluster.rank)
        measure("link.bandwidth", reading.bytes_per_second, unit="B/s", telemetry=summary, **labels)
        ratio = result.matrix.ratio(reading)
        if ratio is not None:  # one pair alone has no others to compare with
            measure("link.ratio_to_median", ratio, unit="ratio", **labels)
    require_healthy(result, cluster.rank)
    require_measured(result)
