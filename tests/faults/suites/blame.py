"""A collective that fails on faulty ranks, nodes or links, and what comes after it."""

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from stamps import stamp

from pytest_gpucluster.benchmarks import collectives
from pytest_gpucluster.isolation.planner import Planner

RANK = int(os.environ["RANK"])
HOST = os.environ["GPUCLUSTER_HOSTNAME"]
KIND, _, PLACE = os.environ["FAULT"].partition(":")
"""Such as "slow:node-c", "wrong:2" (a rank), "slow:node-a+node-c" (the link between them), or "slow%60:node-c": in the
first group, and in 60 % of those that follow. "die", "full", "interrupt" and "break" are slow in the first group, and
strike in the next."""
KIND, _, OFTEN = KIND.partition("%")
DRAWS = random.Random(1)
GROUPS = 0
SLOW_SECONDS = 0.1


def is_struck(group):
    """Tell whether the fault is in this group, and on this rank of it."""
    if dist.get_world_size(group) == 1:
        return False  # nothing crosses a link
    if "+" not in PLACE:
        return PLACE in (HOST, str(RANK))
    hosts = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, HOST, group=group)
    return {*PLACE.split("+")} <= {*hosts} and HOST in PLACE.split("+")


def struck(group, known={}):  # noqa: B006  # one group at a time, and each is asked once
    global GROUPS
    if known.get("group") is not group:
        GROUPS += 1
        often = GROUPS == 1 or not OFTEN or 100 * DRAWS.random() < int(OFTEN)
        known.update(group=group, struck=is_struck(group) and often)
    return known["struck"]


def faulty(tensor, group):
    """What the fabric of these ranks does to a sum."""
    if struck(group):
        if KIND == "drop":
            time.sleep(3600)
        if KIND != "wrong":
            time.sleep(SLOW_SECONDS)
        if GROUPS > 1:
            strike()
    dist.all_reduce(tensor, group=group)
    if struck(group) and KIND == "wrong":
        tensor.view(torch.uint8)[3] ^= 16


def broken(planner, outcomes):
    raise ValueError("a planner that is at its wits' end")


def strike():
    """What happens to this rank in the middle of the search."""
    if KIND == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if KIND == "break":
        Planner.take = broken
    if KIND == "full":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture(autouse=True)
def fault(monkeypatch):
    collectives._sum = faulty


@pytest.mark.isolate
@pytest.mark.criterion("fabric")
def test_fabric(cluster, workload, measure):
    stamp("fault")
    result = collectives.all_reduce(
        cluster.group, cluster.device, payload_bytes=2**16, sampling=workload.all_reduce.sampling
    )
    measure("nccl.all_reduce.busbw", result.busbw, unit="B/s", size="64 kB", dtype="fp32", transport="gloo")


def test_next(cluster):
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=cluster.group)
    assert tensor.tolist() == [cluster.world_size] * 4
