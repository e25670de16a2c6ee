"""The rows follow from the seed, and no two are alike; ranks that read the wrong ones are named."""

from __future__ import annotations

import re

import pytest
import torch
from each import of_each
from torch.utils.data import DistributedSampler

from pytest_gpucluster.benchmarks.training.data import STRIDES, PackedTokens, share, share_defects


def rows(seed=0, count=200):
    data = PackedTokens(rows=count, sequence=32, vocab=100, seed=seed)
    return torch.stack([data[row] for row in range(len(data))])


def test_the_same_seed_gives_the_same_rows_and_another_one_others():
    assert torch.equal(rows(), rows())
    assert not torch.equal(rows(), rows(seed=1))


def test_rows_are_whole_in_range_and_all_different():
    found = rows()
    assert (found.shape, found.dtype) == ((200, 33), torch.int64)
    assert 0 <= int(found.min()) <= int(found.max()) < 100
    assert len({tuple(row) for row in found.tolist()}) == 200


def test_there_is_something_to_learn():
    found = rows()
    steps = (found[:, 1:] - found[:, :-1]) % 100
    usual = steps.mode(dim=1, keepdim=True).values
    assert 1 <= int(usual.min()) <= int(usual.max()) <= STRIDES
    assert float((steps == usual).float().mean()) > 0.6


@of_each("row", [-1, 200])
def test_a_row_that_is_not_there_is_an_error(row):
    with pytest.raises(IndexError, match=f"row {row} of 200"):
        PackedTokens(rows=200, sequence=4, vocab=9, seed=0)[row]


ROWS = 30
DATA = PackedTokens(rows=ROWS, sequence=4, vocab=9, seed=0)


def shares(ranks=4):
    return [share(DATA, rank=rank, world_size=ranks, seed=0) for rank in range(ranks)]


@of_each("ranks", [1, 2, 3, 4, 7, 30])
def test_torch_s_own_sampler_has_no_defect(ranks):
    assert share_defects(shares(ranks), shares(ranks), rows=ROWS) == {}


def test_a_rank_with_another_one_s_rows_is_named():
    found = shares()
    found[2] = found[1]
    message = share_defects(found, shares(), rows=ROWS)
    assert list(message) == [2]
    assert re.search(r"its share is .*its sampler: num_replicas, rank, seed and set_epoch", message[2])


@of_each(
    "wrong",
    [
        {"seed": 1},
        {"world_size": 5},
        {"make": lambda data, **more: DistributedSampler(data, **(more | {"shuffle": False}))},
    ],
)
def test_a_sampler_made_otherwise_is_seen_on_its_rank_alone(wrong):
    found = shares()
    found[3] = share(DATA, **({"rank": 3, "world_size": 4, "seed": 0} | wrong))
    assert list(share_defects(found, shares(), rows=ROWS)) == [3]


def test_a_sampler_that_forgets_the_epoch_is_seen():
    found = shares()
    found[0][1] = found[0][0]
    assert re.search(r"of epoch 1, .*its share", share_defects(found, shares(), rows=ROWS)[0])


def change(how):
    made = [[list(rows) for rows in of_rank] for of_rank in shares(2)]
    how(made)
    return made


def lose(made):
    made[0][0] = [made[0][0][1] if row == made[0][0][0] else row for row in made[0][0]]


def shorten(made):
    del made[1][1][-1]


def repeat(made):
    for epochs in made:
        epochs[0] += made[0][0][:3]


def stand_still(made):
    for epochs in made:
        epochs[1] = epochs[0]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lose, "15 rows each in epoch 0, 1 of 30 are read by no rank, and 1 twice"),
        (shorten, "14, 15 rows each in epoch 1"),
        (repeat, "0 of 30 are read by no rank, and 6 twice; fewer than the 2 ranks may be, as padding"),
        (stand_still, "the order of the rows does not change with the epoch"),
    ],
    ids=["a row that nobody reads", "unequal", "too much padding", "the same order"],
)
def test_a_sampler_that_is_wrong_on_every_rank_is_every_rank_s_fault(how, message):
    made = change(how)
    found = share_defects(made, made, rows=ROWS)
    assert list(found) == [0, 1]
    assert found[0] == found[1]
    assert message in found[0]
