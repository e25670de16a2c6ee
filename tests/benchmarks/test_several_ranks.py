"""What the ranks of a group find together: trainings that go as on one rank, and faults of one that all know."""

import os

import pytest
import torch
import torch.distributed as dist
from device_parts import device_with
from forked_ranks import CPU, on_ranks, outcome

from pytest_gpucluster.benchmarks.group import Ranks, on_all_ranks, on_first_rank
from pytest_gpucluster.benchmarks.storage.shared_filesystem import survey
from pytest_gpucluster.benchmarks.training import parity_check, scaling
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder, on_meta
from pytest_gpucluster.benchmarks.training.sharding import layout_defect, mesh_of, shard
from pytest_gpucluster.benchmarks.training.step import Training
from pytest_gpucluster.benchmarks.training.throughput_setup import Setup
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.metrics.sampling import Sampling

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

    def check():
        how = {"strategy": "fsdp", "precision": "fp32", "alone": groups[rank]}
        return parity_check.compare_ranks(group(), CPU, GEOMETRY, batch=2, steps=2, **how)

    def broken(*given, **how):
        model = shard(*given, **how)
        if rank == 1:
            with torch.no_grad():
                model.head.weight.to_local()[0] += 1
        return model

    right = check()
    parity_check.shard = broken
    return right, outcome(check)


def test_shards_on_two_ranks_train_as_one_process_and_other_weights_are_found():
    ranks = on_ranks(2, train_shards, 2)
    for found, _ in ranks:
        assert found.loss < 1e-5
        assert found.gradient < 1e-4
        assert (found.share, len(found.losses)) == (1, 2)
    # Only the rank with another model's weights is at fault.
    (_, victim), (_, culprit) = ranks
    assert not victim.losses
    assert culprit.startswith("WrongResult: rank 1 ")


def train_parts(rank):
    whole = Training(make_decoder(GEOMETRY, CPU, seed=1), CPU, precision="fp32")
    model = shard(make_decoder(GEOMETRY, CPU, seed=1), mesh_of(group(), CPU), precision="fp32")
    rows = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    mine = rows[rank::2]
    expected, found = whole.step([rows]), Training(model, CPU, precision="own").step([mine])
    [own] = [float(one) for one in found.losses.flatten()]
    layouts = [layout_defect(model, on_meta(GEOMETRY), ranks=ranks, rank=rank) for ranks in (2, 4)]
    norms = [float(one) for one in (found.gradient_norm, expected.gradient_norm)]
    return own, float(expected.losses), norms, layouts


def test_a_step_of_shards_has_the_loss_and_the_norm_of_a_whole_one():
    ranks = on_ranks(2, train_parts)
    assert sum(own for own, *_ in ranks) / 2 == pytest.approx(ranks[0][1], rel=1e-5)
    for _, _, (norm, whole), (right, wrong) in ranks:
        assert norm == pytest.approx(whole, rel=1e-4)
        assert right == ""
        assert "1/4" in wrong


class Ticking(ManualClock):
    """Each region takes as long as it is told."""

    def __init__(self, seconds):
        super().__init__()
        self.each = seconds

    def read(self):
        return [self.each for _ in super().read()]


def train_at_rates(rank):
    setup = Setup(geometry=GEOMETRY, strategy="ddp", batch=2, compiled=False, recompute=False, workers=0, prefetch=1)
    sampling = Sampling(warmup_seconds=0, window_seconds=8, longest_seconds=16, tolerance_ratio=0.1)
    # Alone rank 2 takes twice as long as the others; in the group each step takes what its slowest rank does, and more.
    with device_with(clock=lambda: Ticking(2.0 if rank == 2 else 1.0)):
        alone = scaling.rates(group(), None, CPU, setup, sampling=sampling)
    with device_with(clock=lambda: Ticking(2.5)):
        shared = scaling.rates(group(), group(), CPU, setup, sampling=sampling)
    medians = [[one.median for one in found.of_rank] for found in (alone, shared)]
    return alone.slowest, medians, scaling.efficiency(shared.of_rank, alone.of_rank).median


def test_all_ranks_know_the_rates_of_all_and_the_slowest():
    for slowest, (alone, shared), efficiency in on_ranks(3, train_at_rates):
        assert slowest == 2
        assert alone == pytest.approx([32, 32, 16])
        assert shared == pytest.approx([32 / 2.5] * 3)
        assert efficiency == pytest.approx(1 / 2.5)


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


def test_one_rank_of_each_node_looks_at_a_shared_folder(tmp_path):
    a, other, *further = on_ranks(4, look_at_folder, tmp_path)
    assert other is None
    # The first node reads the files of all others twice, and each other one those of the first and of the next.
    for found, host, files in zip((a, *further), ("node-a", "node-b", "node-c"), (4, 4, 2), strict=True):
        mounted, visibility, reads, small_files_per_second = found
        assert mounted.host == host
        assert (visibility.files, visibility.right) == (files, files)
        assert small_files_per_second > 0
        assert (reads.renames, reads.whole_ratio) == (20, 1.0)
    assert os.listdir(tmp_path) == []
