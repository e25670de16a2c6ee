"""What the ranks of a group find together: trainings that go as on one rank, and faults of one that all know."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import CPU, on_ranks, outcome

from pytest_gpucluster.benchmarks.group import Ranks, on_all_ranks, on_first_rank
from pytest_gpucluster.benchmarks.storage.shared_filesystem import survey
from pytest_gpucluster.benchmarks.training import fsdp
from pytest_gpucluster.benchmarks.training.fsdp import check_fully_sharded
from pytest_gpucluster.benchmarks.training.model import Geometry

GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)


def group():
    return dist.group.WORLD


def tell(rank):
    pair = dist.new_group([1, 2])
    ranks = Ranks(group(), CPU)
    ranks.barrier()
    told = [ranks.gather([rank + 0.5, 2.0**53]), ranks.of_first([10.0 * rank, float(rank)]), ranks.name(2)]
    if rank:
        of_pair = Ranks(pair, CPU)
        told += [of_pair.count, of_pair.index, of_pair.gather([rank]), of_pair.of_first([rank]), of_pair.name(1)]
    return told


def test_numbers_of_all_ranks_are_told_in_their_order_and_a_rank_has_the_name_of_the_world():
    everyone = on_ranks(3, tell)
    assert [told[:3] for told in everyone] == [[[[r + 0.5, 2.0**53] for r in range(3)], [0.0, 0.0], "rank 2"]] * 3
    assert [told[3:] for told in everyone[1:]] == [[2, index, [[1.0], [2.0]], [1.0], "rank 2"] for index in (0, 1)]


# ---- trainings


def train_shards(rank, count):
    groups = [dist.new_group([one]) for one in range(count)]

    def check(**more):
        return check_fully_sharded(group(), CPU, GEOMETRY, alone=groups[rank], batch=2, steps=2, **more)

    def broken(*given, **how):
        model = fsdp.COMPONENTS.shard(*given, **how)
        if rank == 1:
            with torch.no_grad():
                model.head.weight.to_local()[0] += 1
        return model

    return check(), outcome(lambda: check(components=replace(fsdp.COMPONENTS, shard=broken)))


def test_shards_on_two_ranks_train_as_one_process_and_other_weights_are_found():
    ranks = on_ranks(2, train_shards, 2)
    for found, _ in ranks:
        for compared in (found.fp32, found.offloaded):
            assert compared.loss < 1e-5
            assert compared.gradient < 1e-4
        assert (found.share, found.fp32.global_batch, len(found.fp32.losses)) == (1, 4, 2)
    # Only the rank with another model's weights is at fault.
    (_, victim), (_, culprit) = ranks
    assert not victim.fp32.losses
    assert culprit.startswith("WrongResult: rank 1 ")


# ---- files


def fail_on_rank_1(rank):
    def act():
        if rank == 1:
            raise OSError(28, "full")
        return rank

    def once():
        return on_first_rank(group(), lambda: {"from": rank})

    return on_all_ranks(group(), lambda: rank), once(), outcome(lambda: on_all_ranks(group(), act))


def test_values_and_errors_of_one_rank_are_those_of_all():
    ranks = on_ranks(3, fail_on_rank_1)
    assert [told[:2] for told in ranks] == [([0, 1, 2], {"from": 0})] * 3
    for *_, error in ranks:
        assert error.startswith("EnvironmentBroken: rank 1: OSError: [Errno 28]")


def look_at_folder(rank, folder):
    hosts = ["node-a", "node-a", "node-b", "node-c"]
    return survey(group(), folder, nodes=[0, 0, 1, 2], hosts=hosts, file_bytes=5000, replaced=20, small=5)


def test_one_rank_of_each_node_looks_at_a_shared_folder(tmp_path: Path):
    a, other, *further = on_ranks(4, look_at_folder, tmp_path)
    assert other is None
    # The first node reads the files of all others twice, and each other one those of the first and of the next.
    for found, host, files in zip((a, *further), ("node-a", "node-b", "node-c"), (4, 4, 2), strict=True):
        assert found.mount.host == host
        assert (found.visibility.files, found.visibility.right) == (files, files)
        assert found.small_files_per_second > 0
        assert (found.reads.renames, found.reads.whole_ratio) == (20, 1.0)
    assert os.listdir(tmp_path) == []
