"""Host memory for copies: fresh, where it is asked for, and pinned by CUDA's own calls."""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pytest_gpucluster.benchmarks import host_link
from pytest_gpucluster.benchmarks.host_link import host_memory, nodes_of
from pytest_gpucluster.device.backends import Cuda
from pytest_gpucluster.errors import EnvironmentBroken

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WORDS = 2**17

MAPS = """\
7f00000000 default file=/usr/lib/libc.so mapped=2 N0=2 kernelpagesize_kB=4
7f10000000 default anon=300 dirty=300 N0=75 N1=225 kernelpagesize_kB=4
7f20000000 bind:1 stack anon=3 N1=3 kernelpagesize_kB=4
"""


def test_memory_is_zero_and_as_large_as_asked_for():
    with host_memory(CPU, WORDS) as memory:
        assert memory.words.dtype == torch.int64
        assert memory.words.shape == (WORDS,)
        assert not memory.words.any()
        memory.words.fill_(-1)


def test_the_thread_that_touches_it_runs_beside_the_device_and_then_where_it_was(monkeypatch):
    before, asked = os.sched_getaffinity(0), []
    touch = host_link.ctypes.memset

    def touched(*arguments):
        asked.append(os.sched_getaffinity(0))
        return touch(*arguments)

    monkeypatch.setattr(host_link, "ctypes", SimpleNamespace(memset=touched))
    one = frozenset({max(before)})
    with host_memory(CPU, WORDS, cpus=one):
        assert os.sched_getaffinity(0) == before
    with host_memory(CPU, WORDS):
        pass
    assert asked == [set(one), before]


def test_cpus_that_are_not_allowed_here_change_nothing():
    before = os.sched_getaffinity(0)
    with host_memory(CPU, WORDS, cpus=frozenset({100_000})) as memory:
        assert os.sched_getaffinity(0) == before
        assert len(memory.words) == WORDS


def test_more_than_there_is_is_an_error_that_says_how_to_ask_for_less():
    with (
        pytest.raises(EnvironmentBroken, match=r"cpu: no .* GB of host memory: .*host_link\.copies"),
        host_memory(CPU, 2**57),
    ):
        pass


@pytest.mark.parametrize(
    ("address", "nodes"),
    [(0x7F10000000, {0: 0.25, 1: 0.75}), (0x7F10000FFF, {0: 0.25, 1: 0.75}), (0x7F20000000, {1: 1.0}), (0x10, {})],
)
def test_the_pages_of_a_mapping_are_counted_by_node(tmp_path, address, nodes):
    maps = tmp_path / "numa_maps"
    maps.write_text(MAPS)
    assert nodes_of(address, maps) == nodes


@pytest.mark.parametrize("text", [None, "", "nonsense here\n", "7f10000000 default\n"])
def test_a_kernel_that_does_not_tell_leaves_it_open(tmp_path, text):
    maps = tmp_path / "numa_maps"
    if text is not None:
        maps.write_text(text)
    assert nodes_of(0x7F10000000, maps) == {}


def test_memory_for_a_gpu_is_pinned_while_it_is_in_use(monkeypatch):
    pinned = []

    @contextmanager
    def pin(by, buffer):
        pinned.append((by.place, buffer.data_ptr(), buffer.nbytes))
        yield
        pinned.clear()

    monkeypatch.setattr(Cuda, "pinned", pin)
    with host_memory(CUDA, WORDS) as memory:
        assert pinned == [(CUDA, memory.words.data_ptr(), 8 * WORDS)]
    assert pinned == []
