"""Where the time of a test goes: what counts for which part, and what is recorded."""

import contextlib
import threading

import pytest
import torchrun

from pytest_gpucluster.benchmarks import blocks
from pytest_gpucluster.benchmarks.blocks import measure_rate
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.metrics import time_budget
from pytest_gpucluster.metrics.sampling import Sampling
from pytest_gpucluster.metrics.time_budget import LEDGER, MEASURING, OTHER, PARTS, VERIFYING, WARM_UP, Ledger, counted


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(clock):
    ledger = Ledger(clock)
    ledger.open()
    return ledger


def counted_in(ledger):
    """The parts that took any time."""
    return {part: seconds for part, seconds in zip(PARTS, ledger.seconds(), strict=True) if seconds}


# ---- the ledger --------------------------------------------------------------------------------------------------


def test_of_nested_parts_the_innermost_counts_and_all_parts_are_the_whole(clock, ledger):
    clock.now += 1
    with ledger.part(MEASURING):
        clock.now += 10
        with ledger.part(VERIFYING):
            clock.now += 4
        clock.now += 20
    clock.now += 2
    assert counted_in(ledger) == {OTHER: 3, MEASURING: 30, VERIFYING: 4}
    assert sum(ledger.seconds()) == clock.now - 100


def test_a_part_ends_with_what_was_begun_in_it_and_not_ended(clock, ledger):
    late = ledger.part(VERIFYING)
    with ledger.part(WARM_UP):
        late.__enter__()
        clock.now += 1
    clock.now += 5
    late.__exit__(None, None, None)  # too late to mean anything
    clock.now += 7
    assert counted_in(ledger) == {VERIFYING: 1, OTHER: 12}


def test_between_tests_nothing_is_counted_and_attempts_are_one_sum(clock, ledger):
    clock.now += 1
    ledger.close()
    with ledger.part(MEASURING):
        clock.now += 10
        ledger.move(VERIFYING, 3)
        ledger.open()  # another attempt at the same test
        clock.now += 2
    assert counted_in(ledger) == {OTHER: 3}, "what was begun before a test is no part of it"
    ledger.clear()
    assert counted_in(ledger) == {}


def test_other_threads_change_nothing(clock, ledger):
    def elsewhere():
        with ledger.part(VERIFYING):
            clock.now += 5
            ledger.move(VERIFYING, 5)

    with ledger.part(MEASURING):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        clock.now += 1
    assert counted_in(ledger) == {MEASURING: 6}


@pytest.mark.parametrize(("seconds", "found"), [(3, {MEASURING: 7, VERIFYING: 3}), (99, {VERIFYING: 10})])
def test_no_more_is_moved_than_there_was(clock, ledger, seconds, found):
    with ledger.part(MEASURING):
        clock.now += 10
        ledger.move(VERIFYING, seconds)
        ledger.move(VERIFYING, -1)
    assert counted_in(ledger) == found


def test_a_part_that_raises_ends_and_a_misspelt_one_is_refused(clock, ledger, monkeypatch):
    monkeypatch.setattr(time_budget, "LEDGER", ledger)
    with contextlib.suppress(RuntimeError), counted("measuring"):
        clock.now += 1
        raise RuntimeError
    clock.now += 2
    assert counted_in(ledger) == {MEASURING: 1, OTHER: 2}
    with pytest.raises(ValueError, match=r"one of set_up, warm_up, .* not 'warmup'"):
        counted("warmup")


def test_the_most_of_any_rank_is_reported_with_the_first_rank_s():
    ranks = {2: [0.0, 1.0, 5.0, 0, 0, 0], 0: [0.5, 1.0, 4.0, 0, 2.0, 0], 1: [0.1, 1.0, 5.0, 0, 0, 0]}
    found = time_budget.summarize(ranks)
    assert list(found) == list(PARTS)
    assert found["measuring"] == {"seconds": 4.0, "most_seconds": 5.0, "most_rank": 1}
    assert found["agreeing"] == {"seconds": 2.0, "most_seconds": 2.0, "most_rank": 0}
    assert time_budget.summarize({1: ranks[1]}) == {}


# ---- benchmarks --------------------------------------------------------------------------------------------------


SAMPLING = Sampling(warmup_seconds=0.05, window_seconds=0.2, longest_seconds=0.2, tolerance_ratio=0.5)


class Work:
    """Operations on a device, and their verification: each takes what is planted, of the device and of the host."""

    def __init__(self, device, host, *, awaits):
        self._device, self._host = device, host
        self._awaits = awaits
        self.max_in_flight = 1 if awaits else 4

    def start(self, index):
        self._device.advance(0.02)
        if not self._awaits:
            self._host.now += 0.02

    def verify(self, done):
        # Of work that the host has only enqueued it waits for the device, and takes no time else.
        self._host.now += 0.02 if self._awaits else 0.06 * len(done)


def parts_of_a_rate(clock, monkeypatch, *, awaits):
    monkeypatch.setattr(LEDGER, "_now", clock)
    monkeypatch.setattr(blocks, "perf_counter", clock)
    LEDGER.clear()
    LEDGER.open()
    device = ManualClock()
    measure_rate(Work(device, clock, awaits=awaits), device, sampling=SAMPLING)
    found = counted_in(LEDGER)
    LEDGER.clear()
    assert sum(found.values()) == pytest.approx(clock.now - 100.0)
    return found


def test_a_rate_is_warm_up_measuring_and_verifying(clock, monkeypatch):
    found = parts_of_a_rate(clock, monkeypatch, awaits=False)
    assert found[WARM_UP] >= 0.05
    assert found[MEASURING] >= 0.2
    assert found[VERIFYING] == pytest.approx(3 * (found[WARM_UP] + found[MEASURING]), rel=0.3)


def test_waiting_for_the_device_is_no_verification(clock, monkeypatch):
    found = parts_of_a_rate(clock, monkeypatch, awaits=True)
    assert found.get(VERIFYING, 0.0) < 0.5 * found[MEASURING]
    assert found[MEASURING] >= 0.19


# ---- a session ---------------------------------------------------------------------------------------------------

SUITE = """
import time

import pytest

from pytest_gpucluster.metrics.time_budget import counted

SECONDS = {"warm_up": 0.6, "measuring": 1.2, "verifying": 0.9}


@pytest.fixture
def slow():
    time.sleep(0.3)
    yield
    time.sleep(0.5)


@pytest.mark.criterion("site.parts")
@pytest.mark.single_gpu
def test_parts(slow, measure, rank):
    for part, seconds in SECONDS.items():
        with counted(part):
            time.sleep(seconds)
    if rank == 1:
        with counted("measuring"):
            time.sleep(1.5)
    measure("matmul.bf16.tflops", 1.0, unit="TFLOPS", record_only=True)


@pytest.mark.single_gpu
def test_quick():
    pass
"""
OF_TORCHRUN = """
@pytest.fixture
def rank(cluster):
    return cluster.rank
"""
OF_WORKERS = """
@pytest.fixture
def rank():
    import os
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""


def require_parts(result, *, ranks):
    """The parts of ``test_parts``, by how they stand to each other."""
    spent = result.spent
    assert list(spent) == list(PARTS)
    seconds = {part: one.seconds for part, one in spent.items()}
    for part, least in {"set_up": 0.3, "warm_up": 0.6, "measuring": 1.2, "verifying": 0.9, "other": 0.5}.items():
        assert seconds[part] >= least - 0.001, seconds
    assert result.duration_seconds == pytest.approx(sum(seconds.values()), rel=0.1)
    if ranks > 1:
        assert (spent["measuring"].most_rank, spent["warm_up"].most_seconds >= 0.6) == (1, True)
        # Rank 1 has slept 1.5 s longer there. Each sleeps about as long elsewhere.
        assert spent["measuring"].most_seconds - seconds["measuring"] > 1.0


def test_ranks_exchange_their_parts_and_the_first_waits_for_the_other(tmp_path):
    files = {"test_it.py": SUITE + OF_TORCHRUN}
    run = torchrun.torchrun(
        tmp_path, files, timeouts="stuck=30", deadline=30.0, environment={"COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    )
    assert run.exits == [0], run.output
    parts, quick = run.journal.results
    require_parts(parts, ranks=2)
    # Its own work is 1.5 s less than rank 1's, which it must wait for where the body ends.
    assert parts.spent["agreeing"].seconds > 1.0
    assert parts.spent["agreeing"].most_rank == 0
    assert quick.spent["measuring"].seconds == 0


def test_one_process_reports_its_parts_also_of_a_test_that_fails(project):
    project.suite(SUITE + OF_WORKERS + "\ndef test_bad(slow):\n    with counted('verifying'):\n        assert 0\n")
    left = project.run("-v")
    assert left.exit == 1, left.output
    by_name = {result.name: result for result in left.journal.results}
    require_parts(by_name["test_parts"], ranks=1)
    assert by_name["test_bad"].spent["set_up"].seconds >= 0.3
    assert "warm-up 0.6, measuring 1.2, verifying 0.9" in left.measured("test_parts")["seconds"]
