"""The process that reads a node, with planted GPUs and files, and the one that has started it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fake_reader
import pytest
from fake_nvml import FakeNvml

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node.health import node_reader, node_state
from pytest_gpucluster.node.health.node_state import NodeState

DEADLINE_SECONDS = 60.0


class Stopped(Exception):
    """Enough lines were written."""


def lines_of(read: Any, *arguments: Any, after: int) -> list[Mapping[str, Any]]:
    """Return the first lines, and stop there."""
    lines: list[Mapping[str, Any]] = []

    def say(one: Mapping[str, Any]) -> None:
        lines.append(one)
        if len(lines) >= after:
            raise Stopped

    with contextlib.suppress(Stopped):
        read(*arguments[:1], say, *arguments[1:])
    return lines


def test_all_gpus_are_listed_and_those_that_answer_are_read_round_after_round() -> None:
    nvml = FakeNvml({"GPU-0": {"power.draw": 5.0}, "GPU-1": {}, "GPU-2": {}}, silent=["GPU-1"])
    first, *looks = lines_of(node_reader.read_gpus, lambda: nvml, 0.01, ("power_watts",), after=5)
    assert [(gpu["index"], gpu["uuid"]) for gpu in first["nvml"]["gpus"]] == [(0, "GPU-0"), (1, None), (2, "GPU-2")]
    assert first["nvml"]["driver"] == nvml.driver
    assert [look["gpu"]["uuid"] for look in looks] == ["GPU-0", "GPU-2", "GPU-0", "GPU-2"]
    assert looks[0]["gpu"]["power_watts"] == 5.0


class Listener:
    """Keeps the lines of the process."""

    def __init__(self) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self._condition = threading.Condition()

    def take(self, one: Mapping[str, Any]) -> None:
        with self._condition:
            self.lines.append(one)
            self._condition.notify_all()

    def wait_for(self, key: str) -> Mapping[str, Any]:
        with self._condition:
            there = self._condition.wait_for(lambda: any(key in one for one in self.lines), DEADLINE_SECONDS)
            assert there, f"{key} was never written: {self.lines}"
            return next(one for one in self.lines if key in one)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    opened: list[node_reader.NodeReader] = []

    def start(gpus: Mapping[str, Any] | None, take: Any, **settings: Any) -> node_reader.NodeReader:
        monkeypatch.setattr(node_reader, "COMMAND", fake_reader.command(tmp_path, gpus, tmp_path))
        opened.append(node_reader.NodeReader(take, 0.05, **settings))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_driver_that_hangs_over_one_gpu_leaves_the_rest_of_the_node_fresh(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_state, "STALE_SECONDS", 0.5)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("1.0 1.0 1.0 1/2 3\n")
    state = NodeState(0.05)
    hanging = fake_reader.h100(power__draw={"hang": 1000})
    started({"GPU-0": fake_reader.h100(), "GPU-1": hanging, "GPU-2": fake_reader.h100()}, state.take)
    until = time.monotonic() + DEADLINE_SECONDS
    while not (node := state.node()).gpus or not all(gpu.is_stale for gpu in node.gpus) or node.host.is_stale:
        assert time.monotonic() < until, "the host is as old as the GPUs, or they are not called stale"
        time.sleep(0.02)
    assert node.gpus[0].values["power_watts"] == 690.0, "the last value stays"
    assert [gpu.age_seconds is None for gpu in node.gpus] == [False, True, True]
    assert node.host.age_seconds is not None
    assert node.host.values["load"] == [1.0, 1.0, 1.0]


def test_a_reader_that_is_closed_has_not_ended_on_its_own(started: Any) -> None:
    listener = Listener()
    opened = started({"GPU-0": fake_reader.h100()}, listener.take)
    listener.wait_for("gpu")
    opened.close()
    assert not any("ended" in one for one in listener.lines)


def test_a_reader_that_ends_on_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        node_reader, "COMMAND", (sys.executable, "-c", "print('cut'); print(3); raise SystemExit(3)", "--")
    )
    listener = Listener()
    opened = node_reader.NodeReader(listener.take, 1.0)
    assert listener.wait_for("ended") == {"ended": 3}
    opened.close()
    assert listener.lines == [{"ended": 3}], "other output is ignored"


def test_without_a_thread_there_is_no_reader_and_its_process_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    started: list[Any] = []
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **named: started.append(real(*args, **named)) or started[0])
    monkeypatch.setattr(node_reader, "COMMAND", fake_reader.command(tmp_path, {}))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="new thread"):
        node_reader.NodeReader(print, 1.0)
    started[0].stdout.close()
    assert started[0].poll() is not None


def test_it_exits_when_its_output_is_closed_and_with_its_parent(tmp_path: Path) -> None:
    command = [*fake_reader.command(tmp_path, {"GPU-0": {}}), "--interval", "0.05", "--parent", str(os.getpid())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    json.loads(process.stdout.readline())
    process.stdout.close()
    assert process.wait(timeout=DEADLINE_SECONDS) == 0
    script = "import subprocess, sys, os; print(subprocess.Popen([*sys.argv[1:], str(os.getpid())]).pid)"
    done = subprocess.run(
        [sys.executable, "-c", script, *command[:-1]],
        stdout=subprocess.PIPE,
        timeout=DEADLINE_SECONDS,
        check=True,
    )  # which only returns when the reader has let go of the pipe
    pid = int(next(line for line in done.stdout.splitlines() if not line.startswith(b"{")))
    assert not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("error", "why"),
    [(EnvironmentBroken("no driver library"), "no driver library"), (KeyError("x"), "NVML failed: KeyError: 'x'")],
)
def test_without_nvml_the_reason_is_written(error: Exception, why: str) -> None:
    def fail() -> Any:
        raise error

    assert lines_of(node_reader.read_gpus, fail, 0.01, (), after=9) == [{"nvml": {"why_not": why}}]
