"""The link between host and GPU: rates from the time of the copies alone, and no wrong bit that is not found."""

import itertools
import os
import re
import subprocess
import sys
import textwrap
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from device_parts import device_of
from each import of_each
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks import host_link, host_link_copies
from pytest_gpucluster.benchmarks.host_link import host_memory, measure_host_link, nodes_of
from pytest_gpucluster.benchmarks.host_link_copies import Turn
from pytest_gpucluster.device.backends import Cpu, Cuda
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.sampling import Sampling

CPU = torch.device("cpu")
WORDS = 1000
SAMPLING = Sampling(warmup_seconds=0.05, window_seconds=0.8, longest_seconds=2, tolerance_ratio=0.01)


class Timed(Cpu):
    """torch's own, each taking ``seconds`` of a manual clock. What copy ``at`` leaves is up to ``fault``."""

    def __init__(self, *, seconds=0.01, at=None, fault=None, direction=None):
        super().__init__(CPU)
        self.timer, self.copies, self.targets = ManualClock(), [], []
        self._seconds, self._at, self._fault, self._direction = seconds, at, fault, direction

    def clock(self):
        return self.timer

    def copy_over_link(self, direction, source, target):
        before = target.clone()
        super().copy_over_link(direction, source, target)
        number = self.copies.count(direction)
        self.timer.advance(self._seconds(number) if callable(self._seconds) else self._seconds)
        if number == self._at and self._direction in (None, direction):
            self._fault(target, before)
        self.copies.append(direction)
        self.targets.append(weakref.ref(target))


def measure(way, copier, *, words=WORDS, copies=4, sampling=SAMPLING, **others):
    with device_of(copier):
        return measure_host_link(CPU, way, payload_bytes=8 * words, copies=copies, sampling=sampling, **others)


def flip(offset, bit=0):
    def fault(target, before):
        target[offset] ^= 1 << bit

    return fault


def undone(target, before):
    target.copy_(before)


@of_each("way", ["h2d", "d2h"])
def test_the_rate_is_bytes_over_the_time_of_the_copies_alone(way):
    copier = Timed(seconds=1 / 128)
    result = measure(way, copier)
    assert result.bytes_per_second.samples == (8.0 * WORDS * 128,) * 8
    assert result.bytes_per_second.inconclusive == ""
    assert set(copier.copies) == {way}


def test_both_directions_at_once_count_the_bytes_of_each_over_the_time_of_both():
    copier = Timed(seconds=1 / 128)
    result = measure("both", copier)
    assert result.bytes_per_second.median == pytest.approx(8.0 * WORDS * 64), "on cpu they take turns"
    assert copier.copies.count("h2d") == copier.copies.count("d2h") > 0


@pytest.mark.parametrize("at", [0, 1, 5, 40], ids=["first", "second", "warm-up", "timed"])
@of_each("offset", [0, 1, 500, WORDS - 1])
@pytest.mark.parametrize(("way", "direction"), [("h2d", "h2d"), ("d2h", "d2h"), ("both", "h2d"), ("both", "d2h")])
def test_a_bit_that_flips_in_any_copy_is_found_and_described(at, offset, way, direction):
    with pytest.raises(WrongResult) as caught:
        measure(way, Timed(at=at, fault=flip(offset, bit=9), direction=direction))
    message = str(caught.value)
    assert re.search(
        rf"cpu: host link {way}, 8 kB: {direction} copy {at}: 1 of 1000 8-.*wrong, first.* {8 * offset}: found 0x",
        message,
    )
    found, expected = (int(word, 16) for word in re.findall(r"0x[0-9a-f]{16}", message))
    assert found ^ expected == 1 << 9
    assert message.endswith("(bits that differ: 1)")


@pytest.mark.parametrize("way", ["h2d", "d2h"])
@settings(max_examples=25, deadline=None)
@given(at=st.integers(0, 60), words=st.integers(1, 300), copies=st.integers(1, 9), data=st.data())
def test_a_copy_that_leaves_out_a_part_is_found(way, at, words, copies, data):
    begin = data.draw(st.integers(0, words - 1))
    end = data.draw(st.integers(begin + 1, words))

    def left_out(target, before):
        target[begin:end] = before[begin:end]

    with pytest.raises(WrongResult) as caught:
        measure(way, Timed(at=at, fault=left_out), words=words, copies=copies)
    assert re.search(rf"{way} copy {at}: {end - begin} of {words} 8-.*wrong, first.* {8 * begin}:", str(caught.value))


def test_no_tensor_is_left_when_all_is_over():
    copier = Timed()
    measure("both", copier)
    assert [target() for target in copier.targets if target() is not None] == []
    failing = Timed(at=3, fault=undone)
    with pytest.raises(WrongResult) as caught:
        measure("both", failing)
    assert caught.value is not None
    assert [target() for target in failing.targets if target() is not None] == []


def test_too_little_memory_is_an_error_that_says_how_to_ask_for_less(monkeypatch):
    monkeypatch.setattr(Cpu, "free_bytes", lambda device: 1000)
    with pytest.raises(EnvironmentBroken, match=r"host link h2d, 4 copies of 8 kB needs .*host_link\.copies=8"):
        measure("h2d", Timed())


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="a way is one of h2d, d2h, both, not 'h2h'; did you mean 'h2d'"):
        measure_host_link(CPU, "h2h", payload_bytes=8000, copies=4, sampling=SAMPLING)


def test_the_time_allowed_grows_with_the_rate_of_the_link_for_all_of_it_is_compared():
    rates = [host_link.longest_seconds(SAMPLING, ranks=8, gb_per_second=rate) for rate in (31.5, 63.0, 450.0)]
    copying = SAMPLING.warmup_seconds + SAMPLING.at_most_seconds
    assert rates == sorted(rates)
    assert rates[-1] >= 450 / host_link.COMPARED_GB_PER_SECOND * copying


CUDA = torch.device("cuda", 0)
MANY = 2**17

MAPS = """\
7f00000000 default file=/usr/lib/libc.so mapped=2 N0=2 kernelpagesize_kB=4
7f10000000 default anon=300 dirty=300 N0=75 N1=225 kernelpagesize_kB=4
7f20000000 bind:1 stack anon=3 N1=3 kernelpagesize_kB=4
"""


def test_memory_is_zero_and_as_large_as_asked_for():
    with host_memory(CPU, MANY) as memory:
        assert memory.words.dtype == torch.int64
        assert memory.words.shape == (MANY,)
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
    with host_memory(CPU, MANY, cpus=one):
        assert os.sched_getaffinity(0) == before
    with host_memory(CPU, MANY):
        pass
    assert asked == [set(one), before]


def test_cpus_that_are_not_allowed_here_change_nothing():
    before = os.sched_getaffinity(0)
    with host_memory(CPU, MANY, cpus=frozenset({100_000})) as memory:
        assert os.sched_getaffinity(0) == before
        assert len(memory.words) == MANY


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
    with host_memory(CUDA, MANY) as memory:
        assert pinned == [(CUDA, memory.words.data_ptr(), 8 * MANY)]
    assert pinned == []


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(host_link_copies, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(host_link_copies, "shared_path", lambda: tmp_path / "turn.lock")
    return tmp_path / "turn.lock"


def test_one_waits_until_the_other_has_ended(path):
    with Turn() as first, Turn() as second:
        first.begin()
        with pytest.raises(EnvironmentBroken, match=r"alone within 0\.01 s"):
            second.begin()
        first.end()
        second.begin()


def test_the_kernel_takes_the_turn_of_a_process_that_dies(path):
    code = """
        import os, sys
        from pathlib import Path
        from pytest_gpucluster.benchmarks import host_link_copies
        host_link_copies.shared_path = lambda: Path(sys.argv[1])
        with host_link_copies.Turn() as turn:
            turn.begin()
            os._exit(9)
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], timeout=60, check=False)
    assert child.returncode == 9
    with Turn() as turn:
        turn.begin()


def test_a_turn_can_be_begun_again_and_ended_without_one(path):
    with Turn() as turn:
        turn.end()
        turn.begin()
        turn.begin()
        turn.end()
    turn.end()


def test_where_no_lock_can_be_made_it_is_an_error_and_no_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(host_link_copies, "shared_path", lambda: tmp_path / "nowhere" / "turn.lock")
    with pytest.raises(EnvironmentBroken, match=r"ranks cannot.* .*: .*or directory; .* TMPDIR"):
        Turn().__enter__()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    monkeypatch.setattr(host_link_copies, "shared_path", lambda: tmp_path / "link")
    with pytest.raises(EnvironmentBroken, match=r"ranks cannot"):
        Turn().__enter__()


def test_a_turn_is_begun_before_the_first_copy_and_ended_before_the_comparison(path, monkeypatch):
    done = []

    class Noted(Turn):
        def begin(self):
            super().begin()
            done.append("begin")

        def end(self):
            super().end()
            done.append("end")

    class Copying(Cpu):
        def copy_over_link(self, direction, source, target):
            super().copy_over_link(direction, source, target)
            done.append("copy")

    equal = torch.equal

    def compared(found, expected):
        done.append("compare")
        return equal(found, expected)

    monkeypatch.setattr(torch, "equal", compared)
    quick = Sampling(warmup_seconds=0.001, window_seconds=0.01, longest_seconds=0.01, tolerance_ratio=10)
    monkeypatch.setattr(host_link, "Turn", Noted)
    with device_of(Copying(CPU)):
        measure_host_link(CPU, "h2d", payload_bytes=8000, copies=4, sampling=quick)
    assert {"-".join(step for step, _ in itertools.groupby(done))[: len("begin-copy-end-compare-") * 3]} == {
        "begin-copy-end-compare-" * 3
    }
