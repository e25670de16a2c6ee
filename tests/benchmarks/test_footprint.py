import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks.memory_budget import CACHES, memory_released, require_free, sets_beyond_cache
from pytest_gpucluster.device.backends import Cpu, Cuda
from pytest_gpucluster.errors import EnvironmentBroken, kind_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@settings(deadline=None)
@given(set_bytes=st.integers(1, 10**10), cache=st.integers(0, 10**9))
def test_buffers_exceed_the_cache_and_no_more_than_they_must(set_bytes, cache):
    sets = sets_beyond_cache(set_bytes, cache)
    assert sets * set_bytes >= CACHES * cache
    assert sets == 1 or (sets - 1) * set_bytes < CACHES * cache


def test_too_little_memory_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(Cuda, "free_bytes", lambda self: 40 * 10**9)
    require_free(CUDA, 40 * 10**9, "copy", instead="ask for less")
    with pytest.raises(EnvironmentBroken) as caught:
        require_free(CUDA, 64 * 10**9, "memory copy of 32 GB", instead="ask for less")
    assert str(caught.value) == (
        "cuda:1: memory copy of 32 GB needs 64 GB of memory, and 40 GB are free; end what else uses this device"
        " (nvidia-smi names the processes), or ask for less"
    )
    assert kind_of(caught.value, "call") == "error"


def test_memory_that_cannot_be_counted_is_not_refused(monkeypatch):
    monkeypatch.setattr(Cpu, "free_bytes", lambda self: None)
    require_free(CPU, 10**15, "copy", instead="ask for less")


def test_the_cache_is_emptied_either_way(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    with memory_released():
        pass
    with pytest.raises(ValueError, match="as planned"), memory_released():
        raise ValueError("as planned")
    assert emptied == [True, True]


def test_a_lost_device_does_not_hide_why(monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: device lost")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    with pytest.raises(ValueError, match="the reason"), memory_released():
        raise ValueError("the reason")


def test_errors_that_were_raised_from_each_other_end_too():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    with pytest.raises(ValueError, match="first"), memory_released():
        raise first
