"""Time that is planted: a region takes as long as is said here, however busy the machine is."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.device.clock import ManualClock

REGION_SECONDS = 0.1
SLOW_SECONDS = 400.0
"""What a slow piece adds: far beyond the limits of a rehearsal."""


class PlantedClock(ManualClock):
    """Each region takes ``REGION_SECONDS``, and what is added inside of it. Who meets others waits for the last one."""

    @contextmanager
    def region(self):
        with super().region():
            self.advance(REGION_SECONDS)
            yield

    def meet(self, group):
        last = torch.tensor([self.now_seconds], dtype=torch.float64)
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
        self.advance(last.item() - self.now_seconds)


CLOCK = PlantedClock()


def plant_time(request):
    """Let the device have this clock, for one test."""
    request.getfixturevalue("monkeypatch").setattr(Cpu, "clock", lambda by: CLOCK)


def delayed(batches):
    """Batches that come late."""
    for rows in batches:
        CLOCK.advance(SLOW_SECONDS)
        yield rows
