from __future__ import annotations

import pytest
import torch

from pytest_gpucluster.benchmarks.cublas import NAME
from pytest_gpucluster.benchmarks.verify import deterministic
from pytest_gpucluster.errors import EnvironmentBroken


def test_the_switch_is_set_inside_and_as_before_outside():
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_algorithm_that_gives_other_bits_each_time_is_refused_inside():
    def act():
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)

    act()
    with deterministic(), pytest.raises(RuntimeError, match=r"deterministic implementation"):
        act()


@pytest.mark.parametrize("chosen", [None, ":4096:2:16:8"])
def test_a_workspace_that_keeps_cublas_from_it_is_an_error_where_a_gpu_is_in_use(monkeypatch, chosen):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv(NAME, raising=False)
    if chosen is not None:
        monkeypatch.setenv(NAME, chosen)
    told = f"CUBLAS_WORKSPACE_CONFIG is {chosen!r}, and cuBLAS is reproducible only with :4096:8 or :16:8"
    with pytest.raises(EnvironmentBroken, match=told), deterministic():
        pass
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(NAME, ":16:8")
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
