"""The rows follow from the seed, and no two are alike."""

from __future__ import annotations

import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks.training.data import STRIDES, PackedTokens


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


def test_no_rows_at_all_are_refused():
    with pytest.raises(ValueError, match=r"rows must.* 1, not 0"):
        PackedTokens(rows=0, sequence=4, vocab=9, seed=0)
