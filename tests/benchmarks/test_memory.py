import re
import weakref

import pytest
import torch
from device_parts import device_of
from each import of_each
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks import memory_budget, memory_passes
from pytest_gpucluster.benchmarks.hbm import measure_hbm
from pytest_gpucluster.benchmarks.memory_passes import KINDS, STEP_WORDS
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult, kind_of
from pytest_gpucluster.metrics.sampling import Sampling

CPU = torch.device("cpu")
WORDS = 1000
SAMPLING = Sampling(warmup_seconds=0.05, window_seconds=0.8, longest_seconds=2, tolerance_ratio=0.01)


class Passes(Cpu):
    """torch's own, each taking ``seconds`` of a manual clock. Pass ``at`` leaves what ``fault(target, before)`` does:
    it is given what was written to, and what was there before."""

    def __init__(self, *, seconds=0.01, at=None, fault=None):
        super().__init__(CPU)
        self.timer, self.cache = ManualClock(), 0
        self.calls = 0
        self.targets = []
        self._seconds, self._at, self._fault = seconds, at, fault

    def clock(self):
        return self.timer

    def cache_bytes(self):
        return self.cache

    def copy(self, source, target):
        self._step(super().copy, target, source, target)

    def read(self, source, total):
        self._step(super().read, total, source, total)

    def write(self, target, value):
        self._step(super().write, target, target, value)

    def _step(self, operation, target, *arguments):
        before = target.clone()
        operation(*arguments)
        self.timer.advance(self._seconds(self.calls) if callable(self._seconds) else self._seconds)
        if self.calls == self._at:
            self._fault(target, before)
        self.calls += 1
        self.targets.append(weakref.ref(target))


def measure(kind, operations, *, words=WORDS, sampling=SAMPLING, cache=0, **others):
    operations.cache = cache
    with device_of(operations):
        return measure_hbm(CPU, kind, payload_bytes=8 * words, sampling=sampling, **others)


def flip(offset, bit=0):
    def fault(target, before):
        target.view(-1)[offset] ^= 1 << bit

    return fault


def undone(target, before):
    target.copy_(before)


@pytest.mark.parametrize(("kind", "factor"), [("copy", 2), ("read", 1), ("write", 1)])
def test_the_rate_is_bytes_over_the_time_of_the_passes_alone(kind, factor):
    operations = Passes(seconds=1 / 128)
    result = measure(kind, operations)
    assert result.bytes_per_pass == factor * 8 * WORDS
    assert result.bytes_per_second.samples == (factor * 8.0 * WORDS * 128,) * 8
    assert result.bytes_per_second.inconclusive == ""


@pytest.mark.parametrize("at", [0, 1, 5, 40], ids=["first", "second", "warm-up", "timed"])
@of_each("offset", [0, 1, 500, WORDS - 1])
@of_each("bit", [0, 31, 62])
def test_a_bit_that_flips_in_any_copy_is_found_whatever_comes_after_it(at, offset, bit):
    with pytest.raises(WrongResult) as caught:
        measure("copy", Passes(at=at, fault=flip(offset, bit)))
    message = str(caught.value)
    where = f"cpu: memory copy of 8 kB: 1 of 1000 8-byte words are wrong, first at byte {8 * offset}: found 0x"
    assert message.startswith(where)
    assert re.search(r" \(bits that differ: 1\); after copies \d+ to \d+, .*one before.*$", message)
    found, expected = (int(word, 16) for word in re.findall(r"0x[0-9a-f]{16}", message))
    assert found ^ expected == 1 << bit
    assert "\n" not in message


@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=20, deadline=None)
@given(at=st.integers(0, 90), words=st.integers(1, 300), data=st.data())
def test_a_pass_that_leaves_out_a_part_is_found(kind, sets, at, words, data):
    # A read leaves one sum. Of all but the last write only the beginning is spared by the next one.
    visible = {"copy": words, "read": 1, "write": min(words, STEP_WORDS)}[kind]
    begin = data.draw(st.integers(0, visible - 1))
    end = data.draw(st.integers(begin + 1, visible))

    def left_out(target, before):
        target.view(-1)[begin:end] = before.view(-1)[begin:end]

    # The cache is such that three sets are needed.
    cache = (sets - 1) * (2 if kind == "copy" else 1) * 8 * words // 3 + 1
    with pytest.raises(WrongResult):
        measure(kind, Passes(at=at, fault=left_out), words=words, cache=cache if sets > 1 else 0)


def test_a_wrong_sum_is_found_and_the_memory_cleared_of_it():
    with pytest.raises(WrongResult) as caught:
        measure("read", Passes(at=40, fault=flip(0, 17)))
    message = str(caught.value)
    assert re.search(r"memory read.* 8 kB: the sum.* 40 is wrong: found 0x", message)
    assert re.search(r"; 1 of \d+ .*memory itself.*$", message)
    found, expected = (int(word, 16) for word in re.findall(r"0x[0-9a-f]{16}", message))
    assert abs(found - expected) == 1 << 17


def test_a_bit_that_flips_in_memory_makes_the_sum_wrong_and_is_located():
    class Decaying(Passes):
        def read(self, source, total):
            if self.calls == 30:
                source[123] ^= 1 << 40
            super().read(source, total)

    with pytest.raises(WrongResult) as caught:
        measure("read", Decaying())
    # Read 30 began at the first place, and the buffer is a little longer than what is read.
    assert re.search(
        r"; in memory 1 of 1128 8-.*wrong, first.* 984: found .* \(bits that differ: 1\)$",
        str(caught.value),
    )


def test_a_sum_that_is_no_sum_of_words_is_found():
    def rounded(target, before):
        target.fill_(int(torch.tensor(float(target), dtype=torch.float32)))

    with pytest.raises(WrongResult, match=r"the sum.* 10 is wrong"):
        measure("read", Passes(at=10, fault=rounded))


def test_a_wrong_write_is_counted_and_located():
    def fault(target, before):
        target[[5, 7]] ^= 3

    with pytest.raises(WrongResult) as caught:
        measure("write", Passes(at=40, fault=fault))
    assert re.search(
        r"^.*memory write.* 8 kB: 2 of (64|1000) 8-.*wrong, first.* 40: found 0x[0-9a-f]{16},"
        r" expected 0x[0-9a-f]{16} \(bits that differ: 2\); after write 40, 1 of \d+ writes are wrong$",
        str(caught.value),
    )


def test_wrong_words_of_a_write_are_looked_for_in_parts(monkeypatch):
    monkeypatch.setattr(memory_passes, "PART_WORDS", 300)

    class Short(Passes):
        def write(self, target, value):
            super().write(target[:-20], value)

    with pytest.raises(WrongResult, match=r": 20 of 1000 8-.*wrong, first.* 7840: found 0x"):
        measure("write", Short())


def test_a_wrong_word_that_is_right_when_looked_at_again_is_still_a_wrong_result(monkeypatch):
    monkeypatch.setattr(memory_passes, "_count_different", lambda words, value: torch.tensor(1))
    with pytest.raises(WrongResult, match=r"1 of \d+ 8-.*wrong, first.* 0: .* \(bits that differ: 0\)"):
        measure("write", Passes())


def test_no_value_is_written_twice_and_none_is_zero():
    values = []

    class Look(Passes):
        def write(self, target, value):
            values.append(value)
            super().write(target, value)

    measure("write", Look())
    assert len(set(values)) == len(values)
    assert 0 not in values


@pytest.mark.parametrize(
    ("kind", "cache", "sets"),
    [("copy", 0, 1), ("copy", 5333, 1), ("copy", 5334, 2), ("read", 5334, 3), ("write", 2666, 1), ("write", 2667, 2)],
    ids=str,
)
def test_buffers_that_fit_the_cache_are_used_in_turn_with_others(kind, cache, sets):
    places = []

    class Look(Passes):
        def _step(self, operation, target, *arguments):
            buffers = [each for each in arguments if isinstance(each, torch.Tensor) and each.dim()]
            places.append(tuple(sorted(each.untyped_storage().data_ptr() for each in buffers)))
            super()._step(operation, target, *arguments)

    measure(kind, Look(), cache=cache)
    assert len(set(places)) == sets
    assert places == [places[index % sets] for index in range(len(places))]


@pytest.mark.parametrize("kind", list(KINDS))
@given(words=st.integers(1, 3000), cache=st.integers(0, 30_000))
@settings(max_examples=4, deadline=None)
def test_what_is_allocated_is_what_was_asked_to_be_free(kind, words, cache):
    made = KINDS[kind]
    sets = memory_budget.sets_beyond_cache(made.touched_bytes(words), cache)
    passes = made(CPU, words, sets, Cpu(CPU), name="here")
    held = sum(buffer.nbytes for entry in passes._sets for buffer in (entry if isinstance(entry, tuple) else [entry]))
    if kind != "write":
        held += passes._writer._multiples.nbytes + passes._writer._expected.nbytes
    needed = made.needed_bytes(words, sets)
    assert held <= needed
    assert needed - held <= 0.2 * held + 4096


@pytest.mark.parametrize(("kind", "needs"), [("copy", "1.15e+09"), ("read", "5.76e+08"), ("write", "5.76e+08")])
def test_too_little_memory_is_an_error_before_anything_is_allocated(monkeypatch, kind, needs):
    monkeypatch.setattr(KINDS[kind], "__init__", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(EnvironmentBroken) as caught:
        measure_hbm(CPU, kind, payload_bytes=2**59, sampling=SAMPLING)
    message = str(caught.value)
    assert message.startswith(f"cpu: memory {kind} of 512 PiB needs {needs} GB of memory, and ")
    assert re.search(r"smaller buffers.* --gpucluster-workload hbm\.sizes=8GiB$", message)
    assert kind_of(caught.value, "call") == "error"


def test_a_copy_of_32_gb_fits_into_the_memory_of_an_h100():
    # 80 GB cards offer 79.19 GiB; the driver and torch keep about 1 GiB of it.
    assert 64e9 < KINDS["copy"].needed_bytes(4 * 10**9, 1) < 65e9


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("outcome", ["measured", "wrong"])
def test_no_buffer_is_held_when_the_memory_is_given_back(monkeypatch, kind, outcome):
    buffers, alive = [], []
    real = memory_passes._empty

    def noted(device, words):
        buffer = real(device, words)
        buffers.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(memory_passes, "_empty", noted)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append([each() is not None for each in buffers]))
    if outcome == "wrong":
        with pytest.raises(WrongResult):
            measure(kind, Passes(at=40, fault=undone))
    else:
        measure(kind, Passes())
    assert buffers
    assert not any(alive[-1])


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind is one of copy, read, write, not 'reed'; did you mean 'read'"):
        measure_hbm(CPU, "reed", payload_bytes=800, sampling=SAMPLING)
