import itertools

import pytest
import torch

from pytest_gpucluster.benchmarks import burn_in
from pytest_gpucluster.benchmarks.burn_in import keep_busy

CPU = torch.device("cpu")


class Device:
    """A device with a queue: what is enqueued takes its time, whoever waits or looks meanwhile."""

    def __init__(self, monkeypatch, step_seconds, look_seconds=0.0):
        self.now = self.busy_until = self.idle_seconds = 0.0
        self.steps, self.looks, self.looked_at_rest = 0, [], 0
        self._step_seconds, self._look_seconds = step_seconds, look_seconds
        monkeypatch.setattr(burn_in.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(burn_in._Step, "__init__", lambda *_: None)
        monkeypatch.setattr(burn_in._Step, "enqueue", lambda _, count: [self.enqueue() for _ in range(count)])
        monkeypatch.setattr(burn_in._Step, "wait", lambda _: self.wait())

    def enqueue(self):
        self.steps += 1
        self.idle_seconds += max(0.0, self.now - self.busy_until)
        self.busy_until = max(self.now, self.busy_until) + self._step_seconds

    def wait(self):
        self.now = max(self.now, self.busy_until)

    def look(self):
        self.looks.append(self.now)
        self.now += self._look_seconds
        self.looked_at_rest += self.now > self.busy_until


@pytest.mark.parametrize("step_seconds", [1e-5, 0.002, 0.015])
def test_the_device_is_looked_at_about_five_times_a_second(monkeypatch, step_seconds):
    device = Device(monkeypatch, step_seconds)
    assert keep_busy(CPU, device.look, seconds=3.0) == len(device.looks)
    gaps = [later - earlier for earlier, later in itertools.pairwise(device.looks)]
    assert 0.09 < min(gaps) <= max(gaps) < 0.3
    assert 3.0 <= device.now < 3.6


def test_looks_that_take_long_do_not_let_the_device_rest(monkeypatch):
    # Several ranks that ask one driver at once wait for each other.
    device = Device(monkeypatch, 0.005, look_seconds=0.7)
    keep_busy(CPU, device.look, seconds=10.0)
    assert len(device.looks) > 8
    assert device.looked_at_rest == 1, "only the first look, whose length nobody knew"
    assert device.idle_seconds < 0.7


def test_a_slow_device_is_looked_at_once_at_least(monkeypatch):
    device = Device(monkeypatch, 5.0)
    assert keep_busy(CPU, device.look, seconds=1.0) == 1


def test_multiplying_outlasts_the_copy_in_every_step(monkeypatch):
    done = []
    mm, copy = torch.mm, torch.Tensor.copy_

    def counted_mm(*arguments, **named):
        done.append("mm")
        return mm(*arguments, **named)

    def counted_copy(*arguments, **named):
        done.append("copy")
        return copy(*arguments, **named)

    monkeypatch.setattr(torch, "mm", counted_mm)
    monkeypatch.setattr(torch.Tensor, "copy_", counted_copy)
    step = burn_in._Step(CPU)
    step.enqueue(1)
    step.wait()
    assert done == ["mm"] * burn_in.PRODUCTS_PER_COPY + ["copy"]
    assert torch.equal(step._out, step._a @ step._b)
    # A B200, the fastest here, on PCIe gen5 at full speed: the link must be the one that rests.
    product_seconds = 2 * burn_in.ROWS**3 / 2250e12
    assert burn_in.PRODUCTS_PER_COPY * product_seconds > 1.5 * burn_in.COPY_BYTES / 63e9


def test_what_goes_wrong_while_looking_is_not_hidden():
    def fail():
        raise RuntimeError("NVML is gone")

    with pytest.raises(RuntimeError, match="NVML is gone"):
        keep_busy(CPU, fail, seconds=0.1)
