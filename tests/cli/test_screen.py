"""How a node looks on a terminal: what fits, what is message in words, and what is never let through."""

from __future__ import annotations

from each import of_each
from watched_nodes import HOSTILE, gpu, node, port

from pytest_gpucluster.cli.watch_screen import plain
from pytest_gpucluster.node.health.node_reader import Node, Part
from pytest_gpucluster.text import columns

EIGHT_GPUS = """\
gpu-07, 12:00:00 UTC, load 12.3 / 192 CPUs, 7 % busy, memory 234 / 2,015 GiB
GPUs: 8 x NVIDIA H100 80GB HBM3, driver 580.65.06
GPU  util %    mem GiB  °C  power W  SM MHz  mem MHz  NVLink GB/s  throttled by
  0      98  71.2/79.6  61  690/700    1755     2619      312/310
"""


def shown(of: Node, width: int = 80) -> list[str]:
    """Return the lines of the plain text."""
    return plain(of, host="gpu-07", clock="12:00:00 UTC", width=width).splitlines()


def test_a_node_with_eight_gpus_and_eight_ports_fits_80_by_24_with_its_processes() -> None:
    busy = gpu(0, processes=[{"pid": 4242, "user": "ada", "command": "train", "memory_bytes": 70 * 2**30}])
    lines = shown(node(gpus=(busy, *(gpu(index) for index in range(1, 8)))))
    assert "\n".join(lines[:4]) + "\n" == EIGHT_GPUS
    assert len(lines) <= 23
    assert max(map(columns, lines)) <= 80
    assert "mlx5_0/1  400 Gb/s      45.1     44.9" in lines
    assert lines[-1] == "  0     70.0  4242  ada   train"


@of_each("case", [(width, gpus) for width in (40, 60, 77, 80, 120, 300) for gpus in (0, 1, 16)])
def test_no_line_is_wider_than_the_terminal(case: tuple[int, int]) -> None:
    width, gpus = case
    hostile = gpu(
        processes=[{"pid": 1, "user": HOSTILE, "command": HOSTILE, "memory_bytes": None}],
        name=HOSTILE,
        throttle=[HOSTILE, "hw_thermal"],
        not_available={"power_watts": HOSTILE},
    )
    ports = (port(HOSTILE, state=HOSTILE), *(port(f"mlx5_bond_{index}/1") for index in range(5)))
    lines = shown(node(gpus=(hostile, *(gpu(index) for index in range(gpus))), ports=ports, driver=HOSTILE), width)
    assert max(map(columns, lines)) <= width
    assert [line for line in lines if not line.isprintable()] == []


def test_gpus_with_trouble_come_first_for_a_terminal_without_room_for_all() -> None:
    troubled = (gpu(6, throttle=["hw_thermal"]), gpu(7, lost="fell off the bus"), gpu(8, age=9.0, stale=True))
    lines = shown(node(gpus=(*(gpu(index) for index in range(6)), *troubled), ports=8))
    assert [line.split()[-1] for line in lines[3:6]] == ["hw_thermal", "LOST", "s"]
    for width in (40, 60):
        assert "STALE 9 s" in "\n".join(shown(node(gpus=troubled), width))


@of_each(
    "case",
    [
        (node(gpus=(), why_no_gpus="NVML is not available"), "GPUs: none: NVML is not available"),
        (node(gpus=(), silent_seconds=12.4), "for 12 s"),
        (node(gpus=()), "GPUs: none"),
        (node(gpus=(gpu(age=9.0, stale=True),)), "for 9 s"),
        (node(gpus=(gpu(), gpu(1, age=9.0, stale=True))), "STALE 9 s"),
        (node(gpus=(gpu(), gpu(1, age=None, stale=True))), "not read"),
        (node(gpus=(gpu(), gpu(1, lost="fell off the bus"))), "LOST"),
        (node(gpus=(gpu(), gpu(1, lost="fell off the bus"))), "GPU 1: fell off the bus"),
        (node(gpus=(gpu(throttle=["hw_thermal"]),)), "hw_thermal"),
        (node(gpus=(gpu(), gpu(1, name="NVIDIA A100"))), "GPUs: 1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100"),
        (node(ports=(), why_no_ports="/sys/class/infiniband is empty"), "ports: none: /sys/class/infiniband is empty"),
        (node(ports=(port(state="DOWN"),)), "mlx5_0/1  DOWN"),
        (node(ports=(port(stale=True),)), "mlx5_0/1  STALE"),
        (node(ports=(port(state=None),)), "mlx5_0/1  unknown"),
        (node(problem="what reads this node has ended"), "what reads this node has ended"),
        (node(host=Part(values={}, age_seconds=50.0, is_stale=True)), "host stale for 50 s"),
        (node(host=Part(values={}, is_stale=True)), "host not read"),
    ],
    name=lambda case: case[1],
)
def test_what_is_wrong_is_reported_in_words(case: tuple[Node, str]) -> None:
    of, text = case
    assert text in "\n".join(shown(of))


def test_a_figure_that_is_not_there_is_a_dash_and_never_a_zero() -> None:
    bare = Part(values={"index": 0, "not_available": {}, "lost": ""}, age_seconds=0.1)
    lines = shown(node(gpus=(bare,), ports=(Part(values={"name": "a/1"}),)))
    [row] = [line for line in lines if line.startswith("  0")]
    assert set(row.split()[1:]) == {"-"}
    assert "0.0" not in "\n".join(lines)
