"""What the live line says, and that the thread which draws it ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.node.health.node_state import NodeState
from pytest_gpucluster.session import status_line as module
from pytest_gpucluster.session.status_line import Live, StepFile, describe_gpus


class FakeFooter:
    """Keeps what was shown."""

    def __init__(self) -> None:
        self.shown: list[Sequence[str]] = []
        self.is_shown = self.is_closed = self.is_held = False

    def show(self, lines: Sequence[str]) -> None:
        self.shown.append(lines)
        self.is_shown = bool(lines)

    def erase(self) -> None:
        self.is_shown = False

    def hold(self) -> None:
        self.is_held = True

    def close(self) -> None:
        self.is_closed = True


class Clock:
    """Stands still until it is moved."""

    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def live(clock: Clock) -> Live:
    return Live(FakeFooter(), now=clock)  # type: ignore[arg-type]  # what is needed of it


def test_between_tests_nothing_is_shown_and_nothing_said_is_kept(live: Live) -> None:
    assert live.lines() == []
    live.phase(300.0)
    live.rewrite("test_it: step 1 of 2", ends=False)
    live.begin("test_it")
    assert live.lines() == ["test_it: 0:00 so far"]
    live.end()
    assert live.lines() == []


def test_without_steps_the_deadline_of_the_phase_says_how_long_it_may_still_take(live: Live, clock: Clock) -> None:
    live.begin("test_it")
    clock.time += 10
    live.phase(300.0)
    clock.time += 65
    assert live.lines() == ["test_it: 1:15 so far, at most 3:55 left"]
    clock.time += 1000
    assert live.lines() == ["test_it: 17:55 so far, at most 0:00 left"]
    live.begin("test_next")
    assert live.lines() == ["test_next: 0:00 so far"], "nothing of the test before is left"


def test_a_step_is_shown_until_the_last_one_which_is_a_line_of_its_own(live: Live, clock: Clock) -> None:
    live.begin("test_it")
    live.phase(300.0)
    live.rewrite("test_it: step 3 of 9, loss 1, 0:12 left", ends=False)
    clock.time += 5
    assert live.lines() == ["test_it: step 3 of 9, loss 1, 0:12 left (0:05 so far)"]
    live.rewrite("test_it: step 9 of 9", ends=True)
    assert live.lines() == ["test_it: 0:05 so far, at most 4:55 left"]


def test_the_step_of_a_worker_is_shown_if_it_is_of_this_test(live: Live, tmp_path: Path) -> None:
    file = StepFile(tmp_path / "step")
    live.follow(file)
    live.begin("test_it")
    file.rewrite("test_other: step 1 of 2", ends=False)
    assert live.lines() == ["test_it: 0:00 so far"]
    file.rewrite("test_it: step 1 of 2 \x1b[31m", ends=False)
    assert live.lines() == ["test_it: step 1 of 2 \N{REPLACEMENT CHARACTER}[31m (0:00 so far)"]
    live.close()
    assert not (tmp_path / "step").exists()


def test_a_hostile_name_moves_no_cursor(live: Live) -> None:
    live.begin("test_it[\x1b[2J\n\u202e]")
    [line] = live.lines()
    assert line.isprintable()


GIB = 2**30


def node_of(*gpus: dict[str, Any], age: float = 0.0) -> Any:
    """Return a node with these GPUs, each read so long ago."""
    state = NodeState(2.0, now=lambda: 10.0 + age)
    named = [{"index": index, "uuid": f"GPU-{index}", "name": "H100"} for index in range(len(gpus))]
    state.take({"nvml": {"driver": "580", "gpus": named}, "at": 1.0})
    for index, told in enumerate(gpus):
        state.take({"gpu": {"uuid": f"GPU-{index}", "not_available": {}, "lost": "", **told}, "at": 10.0})
    return state.node()


def gpu(utilization: int | None = 98, memory: int = 71, temperature: int = 61, power: int = 690) -> dict[str, Any]:
    figures = {
        "utilization_percent": utilization,
        "memory_used_bytes": memory * GIB,
        "temperature_celsius": temperature,
        "power_watts": power,
    }
    return {key: value for key, value in figures.items() if value is not None}


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (node_of(gpu()), "GPU 0: 98 %, 71 GiB, 61 °C, 690 W"),
        (node_of(gpu(), gpu()), "2 GPUs: 98 %, 71 GiB, 61 °C, 690 W"),
        (
            node_of(gpu(), gpu(40, 60, 64, 500), gpu(99)),
            "3 GPUs: 40 (GPU 1)-99 %, 60-71 GiB, 61-64 °C (GPU 1), 500-690 W",
        ),
        (node_of(gpu(None), gpu(None)), "2 GPUs: 71 GiB, 61 °C, 690 W"),
        (node_of(gpu(), {"lost": "fell off the bus"}), "2 GPUs: 98 %, 71 GiB, 61 °C, 690 W, LOST: 1"),
        (node_of({"lost": "fell off the bus"}), "GPU 0: LOST"),
        (node_of(gpu(), gpu(), age=60.0), "GPUs: NVML has not answered for 60 s"),
        (node_of(), ""),
        (NodeState(2.0).node(), ""),
    ],
    ids=["one", "alike", "apart", "untold", "lost", "all lost", "stale", "none", "not yet"],
)
def test_gpus_are_told_by_the_least_and_the_most_with_who_stands_out(node: Any, text: str) -> None:
    assert describe_gpus(node) == text


def test_the_thread_draws_until_it_is_closed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOON_SECONDS", 0.01)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    live.begin("test_it")
    live.start(gpus=None, reads_gpus=False)
    status_line: Any = live.status_line
    thread = live._thread
    assert thread is not None
    for _ in range(1000):
        if status_line.shown:
            break
        thread.join(0.01)
    assert status_line.shown[0] == ["test_it: 0:00 so far"]
    live.close()
    thread.join(60)
    assert not thread.is_alive()
    assert status_line.is_closed
    live.close()


def test_a_line_that_cannot_be_drawn_ends_and_is_no_error_of_the_thread(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest would make a warning of an error in a thread, which fails a test where warnings do."""

    def fail(lines: Sequence[str]) -> None:
        raise ValueError("no such\ncolour")

    status_line: Any = live.status_line
    monkeypatch.setattr(status_line, "show", fail)
    monkeypatch.setattr(module, "SOON_SECONDS", 0.0)
    live.begin("test_it")
    live.start(gpus=None, reads_gpus=False)
    assert live._thread is not None
    live._thread.join(60)
    assert live.problem == "ValueError: no such colour"
    assert status_line.is_held
    live.close()


def test_without_a_process_for_the_gpus_the_line_tells_of_the_test(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(module, "NodeReader", refuse)
    live.start(gpus=None, reads_gpus=True)
    live.begin("test_it")
    assert live.lines() == ["test_it: 0:00 so far"]
    live.close()
