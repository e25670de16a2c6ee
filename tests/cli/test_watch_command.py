"""``gpucluster node watch``: plain text, JSON, the display in a real terminal, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_reader
import pytest
from sysfs_ports import add_port
from tmux import DEADLINE_SECONDS, terminal

from pytest_gpucluster.cli import node
from pytest_gpucluster.cli.main import main
from pytest_gpucluster.launch.detached_process import child_environment
from pytest_gpucluster.node.health import node_reader

LOST = {"not available": ["the GPU is lost: it has fallen off the bus", "lost"]}


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plant GPUs, in a node with two ports, for this process."""
    for index in range(2):
        add_port(tmp_path / "sys", f"mlx5_{index}", pci=f"0000:{index:02}:00.0")

    def planted(gpus: Mapping[str, Any] | None) -> None:
        monkeypatch.setattr(node_reader, "COMMAND", fake_reader.command(tmp_path, gpus, tmp_path))

    monkeypatch.setenv("COLUMNS", "80")
    return planted


def script(folder: Path, gpus: Mapping[str, Any]) -> list[str]:
    """Return a command that is ``gpucluster`` with planted GPUs, in a process of its own."""
    path = folder / "planted.py"
    path.write_text(
        "import sys\nfrom pytest_gpucluster.node.health import node_reader\n"
        "from pytest_gpucluster.cli.main import main\n"
        f"node_reader.COMMAND = {fake_reader.command(folder, gpus, folder)!r}\nsys.exit(main())\n"
    )
    return [sys.executable, str(path)]


def test_one_picture_is_plain_text_with_rates(plant: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plant({"GPU-0": fake_reader.h100(), "GPU-1": fake_reader.h100(throttle__reasons=["hw_thermal"])})
    assert main(["node", "watch", "--once", "--interval", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "GPUs: 2 x NVIDIA H100 80GB HBM3, driver 580.65.06" in out
    [row] = [line for line in out.splitlines() if "hw_thermal" in line]
    assert row.split()[:4] == ["1", "100", "71.2/79.6", "61"]
    assert "-" not in row, "two looks give a rate"
    assert "mlx5_1/1 400 Gb/s 0.0 0.0" in " ".join(out.split())
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (None, "GPUs: none: NVML is not available"),
        ({}, "GPUs: none: NVML shows no GPU"),
        ({"GPU-0": fake_reader.h100(), "GPU-1": fake_reader.h100(utilization__gpu=LOST)}, "LOST"),
    ],
    ids=["no NVML", "no GPU", "a lost GPU"],
)
def test_what_is_not_all_there_is_exit_code_1_and_the_rest_is_shown(
    plant: Any, capsys: pytest.CaptureFixture[str], gpus: Any, text: str
) -> None:
    plant(gpus)
    assert main(["node", "watch", "--once", "--interval", "0.2"]) == 1
    out = capsys.readouterr().out
    assert text in out
    assert "mlx5_1/1  400 Gb/s" in out


def test_a_driver_that_hangs_is_exit_code_1(
    plant: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_reader, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(node, "ANSWER_SECONDS", 1.0)
    plant({"GPU-0": fake_reader.h100(power__draw={"hang": 1000})})
    assert main(["node", "watch", "--once", "--interval", "0.2"]) == 1
    assert "NVML has not" in capsys.readouterr().out


def test_without_another_process_it_is_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_reader, "COMMAND", ("/nowhere/python",))
    assert main(["node", "watch", "--once"]) == 4
    assert "No such file" in capsys.readouterr().err


def test_the_display_fits_the_terminal_follows_its_size_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    for index in range(8):
        add_port(tmp_path / "sys", f"mlx5_{index}", pci=f"0000:{index:02}:00.0")
    gpus = {f"GPU-{index}": fake_reader.h100(processes=[[os.getpid(), 2**30]]) for index in range(8)}
    with terminal(80, 24, tmp_path) as window:
        left_over = {"LINES": "24", "COLUMNS": "80"}
        window.run([*script(tmp_path, gpus), "node", "watch"], {**child_environment(), **left_over, "TERM": "screen"})
        screen = window.wait_for("2      1.0")
        assert len([line for line in screen.splitlines() if "71.2/79.6" in line]) == 8
        assert "7      1.0" not in screen
        window.resize(100, 32)
        window.wait_for("7      1.0")
        window.keys("C-c")
        assert "GPUs:" not in window.wait_for("ended with 0")


def test_a_terminal_that_is_closed_ends_it(tmp_path: Path) -> None:
    command = [*script(tmp_path, {"GPU-0": fake_reader.h100()}), "node", "watch", "--interval", "0.2"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        env=child_environment(),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup may have started these tests
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=DEADLINE_SECONDS) == 128 + signal.SIGHUP
    process.stdout.close()
