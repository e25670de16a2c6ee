"""A collective that fails on faulty ranks, nodes or links, and what comes after it: once for each fault of ``FAULTS``.

A fault is such as "slow:node-c", "wrong:2" (a rank), "slow:node-a+node-d" (the link between them), or "slow%60:node-c":
in the first group, and in 60 % of those that follow. "die", "full", "interrupt" and "break" are slow in the first
group, and strike in the next. "untimed" is slow where there is no time for a search, "again" in a test that is rerun.
"""

import os
import random
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from planted_clock import CLOCK
from stamps import stamp

from pytest_gpucluster.benchmarks import collectives
from pytest_gpucluster.config.workload import Workload
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.isolation import planner
from pytest_gpucluster.isolation.planner import Planner
from pytest_gpucluster.session.isolation import Isolator
from pytest_gpucluster.session.run import RUN

RANK = int(os.environ["RANK"])
HOST = os.environ["GPUCLUSTER_HOSTNAME"]
FAULTS = os.environ["FAULTS"].split()
SLOW_SECONDS = 1.0
DROPPED_SECONDS = 6.0
"""How long a probe of a fabric that drops something is waited for. Of all others the end is waited for."""
planner._SHOWN_PROBES = 8  # not 24: how often all is repeated is for tests/isolation
WHY_NOT, EXCLUDE = Isolator.why_not, Isolator._exclude


class Fault:
    """The one that is planted."""

    def __init__(self, text):
        self.text = text
        kind, _, self.place = text.partition(":")
        self.kind, _, self.often = kind.partition("%")
        self.draws = random.Random(1)
        self.groups = 0
        self.group, self.strikes_here = None, False

    def is_placed_in(self, group):
        if dist.get_world_size(group) == 1:
            return False  # nothing crosses a link
        if "+" not in self.place:
            return self.place in (HOST, str(RANK))
        hosts = [None] * dist.get_world_size(group)
        dist.all_gather_object(hosts, HOST, group=group)
        return {*self.place.split("+")} <= {*hosts} and HOST in self.place.split("+")

    def is_in(self, group):
        """Tell whether it is in this group, and on this rank of it. One group at a time, and each is asked once."""
        if self.group is not group:
            self.groups += 1
            often = self.groups == 1 or not self.often or 100 * self.draws.random() < int(self.often)
            self.group, self.strikes_here = group, self.is_placed_in(group) and often
        return self.strikes_here

    def strike(self):
        """What happens to this rank in the middle of the search."""
        if self.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if self.kind == "break":
            Planner.take = broken
        if self.kind == "full":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


PLANTED = [Fault("none")]


def faulty(sent, tensor, group):
    """What the fabric of these ranks does to a sum."""
    fault = PLANTED[-1]
    struck = fault.is_in(group)
    if struck:
        if fault.kind == "drop":
            time.sleep(3600)
        if fault.kind != "wrong":
            CLOCK.advance(SLOW_SECONDS)
        if fault.groups > 1:
            fault.strike()
    dist.all_reduce(tensor, group=group)
    if struck and fault.kind == "wrong":
        tensor.view(torch.uint8)[3] ^= 16


def broken(planner, outcomes):
    raise ValueError("a planner that is at its wits' end")


def why_not(isolator):
    """Each fault has a search of its own."""
    fault = PLANTED[-1]
    if not hasattr(fault, "asked"):
        fault.asked = True
        isolator._last, isolator._spent_seconds = None, 0.0
    return WHY_NOT(isolator)


def exclude(isolator, plan, found):
    """Each has a list of its own."""
    path = EXCLUDE(isolator, plan, found)
    if path:
        shutil.move(path, f"exclude-{PLANTED[-1].text}.txt")
    return path


Isolator.why_not, Isolator._exclude = why_not, exclude
collectives.CALLS["all_reduce"], Cpu.clock = faulty, lambda by: CLOCK


@pytest.fixture(autouse=True)
def fault(request, workload):
    text = request.node.callspec.params["planted"]
    if text != PLANTED[-1].text:
        PLANTED.append(Fault(text))
    changes = {"untimed": {"budget_seconds": 0.0}, "drop": {"probe_seconds": DROPPED_SECONDS}}.get(PLANTED[-1].kind, {})
    run = request.config.stash[RUN]
    sections = {**vars(workload), "isolation": replace(workload.isolation, **changes)}
    run.loaded_workload = Workload(**sections)
    return PLANTED[-1]


def pytest_generate_tests(metafunc):
    marks = {"again": [pytest.mark.flaky(reruns=1)]}
    planted = [pytest.param(text, id=text, marks=marks.get(text.partition(":")[0], [])) for text in FAULTS]
    metafunc.parametrize("planted", planted, scope="module")


@pytest.mark.isolate
@pytest.mark.criterion("fabric")
def test_fabric(planted, cluster, workload, measure):
    stamp("fault")
    result = collectives.measure_collective(
        "all_reduce", cluster.group, cluster.device, payload_bytes=2**16, sampling=workload.all_reduce.sampling
    )
    measure("nccl.all_reduce.busbw", result.busbw, unit="B/s", size="64 kB", dtype="fp32", transport="gloo")


def test_next(planted, cluster):
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=cluster.group)
    assert tensor.tolist() == [cluster.world_size] * 4
