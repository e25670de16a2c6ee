from __future__ import annotations

import os

import pytest
import torch

from pytest_gpucluster.benchmarks.determinism import deterministic

NAME = "CUBLAS_WORKSPACE_CONFIG"


@pytest.mark.parametrize(
    ("before", "inside"), [(None, ":4096:8"), (":16:8", ":16:8"), (":4096:2:16:8", ":4096:8")], ids=str
)
def test_the_switches_are_set_inside_and_as_before_outside(monkeypatch, before, inside):
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    with deterministic():
        assert (torch.are_deterministic_algorithms_enabled(), os.environ[NAME]) == (True, inside)
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert (torch.are_deterministic_algorithms_enabled(), os.environ.get(NAME)) == (False, before)


def test_an_algorithm_that_gives_other_bits_each_time_is_refused_inside():
    def act():
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)

    act()
    with deterministic(), pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        act()
