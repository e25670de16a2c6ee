from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from each import of_each

from pytest_gpucluster.device.clock import EventClock, ManualClock, WallClock


class FakeEvent:
    """A CUDA event on a device that is ``device_ms`` into its work when the event is recorded."""

    device_ms = 0.0
    synchronized = False

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "the current stream of cuda:1"
        self.at_ms = FakeEvent.device_ms

    def elapsed_time(self, end):
        assert FakeEvent.synchronized, "an event was read before the device had reached it"
        return end.at_ms - self.at_ms


@pytest.fixture
def event_clock(monkeypatch):
    waits = []

    def synchronize(device):
        FakeEvent.synchronized = True
        waits.append(str(device))

    monkeypatch.setattr(FakeEvent, "device_ms", 0.0)
    monkeypatch.setattr(FakeEvent, "synchronized", False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the current stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    current, spins = ["no device"], []

    @contextmanager
    def on(device):
        current.append(str(device))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: spins.append((current[-1], cycles)))
    return SimpleNamespace(clock=EventClock(torch.device("cuda", 1)), waits=waits, spins=spins)


def test_events_are_all_recorded_before_one_wait(event_clock):
    for took_ms in (10, 20, 5):
        with event_clock.clock.region():
            FakeEvent.device_ms += took_ms
        FakeEvent.device_ms += 1000  # between the regions: not counted
    assert event_clock.waits == []
    assert event_clock.clock.read() == pytest.approx([0.010, 0.020, 0.005])
    assert event_clock.waits == ["cuda:1"]
    assert event_clock.clock.read() == []


def test_an_event_region_that_raises_is_not_counted(event_clock):
    with pytest.raises(ZeroDivisionError), event_clock.clock.region():
        1 / 0  # noqa: B018  # what fails does not matter
    assert event_clock.clock.read() == []


@pytest.mark.parametrize(
    ("launches", "seconds", "spins"),
    [(1, 0.0, [("cuda:1", 100_000)]), (8, 0.0009, [("cuda:1", 800_000)]), (1, 0.001, []), (64, 0.5, [])],
    ids=["unknown time", "short region", "1 ms", "long region"],
)
def test_the_device_spins_ahead_of_short_regions_only(event_clock, launches, seconds, spins):
    event_clock.clock.get_ahead(launches, seconds=seconds)
    assert event_clock.spins == spins
    assert event_clock.waits == []
    assert event_clock.clock.read() == []  # it is no region


@of_each("clock", [WallClock(), ManualClock()])
def test_a_region_that_raises_is_not_counted(clock):
    with pytest.raises(ZeroDivisionError), clock.region():
        1 / 0  # noqa: B018
    clock.synchronize()
    assert clock.read() == []
