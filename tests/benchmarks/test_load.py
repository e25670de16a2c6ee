from __future__ import annotations

import itertools
import math

import pytest
import torch

from pytest_gpucluster.benchmarks import load
from pytest_gpucluster.benchmarks.load import held_bytes, keep_busy

CPU = torch.device("cpu")


class Clock:
    """Time that passes with the work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_seconds: float) -> None:
        self.now = 0.0
        self.steps = 0
        monkeypatch.setattr(load.time, "monotonic", lambda: self.now)
        enqueue = load._Step.enqueue

        def counted(step: load._Step) -> None:
            self.steps += 1
            self.now += step_seconds
            enqueue(step)

        monkeypatch.setattr(load._Step, "enqueue", counted)


def test_the_device_is_looked_at_about_five_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, at = Clock(monkeypatch, 0.002), []
    looks = keep_busy(CPU, lambda: at.append(clock.now), seconds=3.0)
    assert looks == len(at)
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert max(gaps) < 0.3
    assert len([gap for gap in gaps if gap < 0.1]) < 10
    assert 3.0 <= clock.now < 3.3


def test_a_slow_device_is_looked_at_once_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 5.0)
    assert keep_busy(CPU, lambda: None, seconds=1.0) == 1


def test_the_products_and_copies_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done = {"mm": 0}
    mm = torch.mm

    def counted(*arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        done["mm"] += 1
        return mm(*arguments, **named)

    monkeypatch.setattr(torch, "mm", counted)
    clock = Clock(monkeypatch, 0.05)
    keep_busy(CPU, lambda: None, seconds=0.5)
    assert done["mm"] == clock.steps > 1


def test_what_goes_wrong_while_looking_is_not_hidden() -> None:
    def fail() -> None:
        raise RuntimeError("NVML is gone")

    with pytest.raises(RuntimeError, match="NVML is gone"):
        keep_busy(CPU, fail, seconds=0.1)


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan])
def test_a_load_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be positive and finite"):
        keep_busy(CPU, lambda: None, seconds=seconds)


@pytest.mark.parametrize(("product_seconds", "n"), [(0.01, 256), (0.0001, 512)])
def test_matrices_grow_until_a_product_is_long_enough(
    monkeypatch: pytest.MonkeyPatch, product_seconds: float, n: int
) -> None:
    monkeypatch.setattr(load, "LARGEST", 512)
    Clock(monkeypatch, product_seconds)
    assert load._large_enough(CPU)._out.shape == (n, n)


def test_a_cpu_has_no_allocator_to_ask() -> None:
    assert held_bytes(CPU) == 0
