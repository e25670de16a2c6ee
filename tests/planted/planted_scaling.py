"""What can go wrong with four ranks on two nodes."""

import os
from dataclasses import replace

import torch.distributed as dist
from parts import nan, plant_parts
from planted_clock import CLOCK, SLOW_SECONDS, delayed, plant_time
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from pytest_gpucluster.benchmarks import collectives
from pytest_gpucluster.benchmarks.training import step, throughput
from pytest_gpucluster.benchmarks.training.data import endless_batches
from pytest_gpucluster.benchmarks.training.step import PARTS
from pytest_gpucluster.device.backends import Cpu

NODE, FABRIC, TOTAL = ("test_scaling[node]", "test_scaling[fabric]", "test_scaling[total]")
SHARDED = tuple(f"test_sharded_scaling[{kind}]" for kind in ("node", "fabric", "total"))
ALL = ("test_stragglers", NODE, FABRIC, TOTAL, "test_busbw_retention", *SHARDED)
CASES = {
    "2x2": {
        "test_stragglers": ("none", "rank", "fabric", "nan"),
        NODE: ("none", "rank", "fabric", "alone"),
        FABRIC: ("none", "fabric"),
        TOTAL: ("none", "rank", "fabric", "nan"),
        "test_busbw_retention": ("none", "fabric", "nan"),
        **dict.fromkeys(SHARDED, ("none", "rank")),
    },
    "2x1": dict.fromkeys(ALL, ("none",)),
    "1x2": {**dict.fromkeys(ALL, ("huge",)), "test_stragglers": ("huge", "full")},
}
WORKLOADS = {"huge": {"scaling": {"layers": 1000, "width": 65536}}}
RANK = int(os.environ["RANK"])
SUM, FREE_BYTES = collectives.CALLS["all_reduce"], Cpu.free_bytes


def waiting(group, bucket):
    CLOCK.meet(group)
    return allreduce_hook(group, bucket)


def waiting_longer(group, bucket):
    CLOCK.advance(SLOW_SECONDS)
    return waiting(group, bucket)


def replicate(model, device, group, hook=waiting):
    replica = step.replicate(model, device, group)
    replica.register_comm_hook(group, hook)
    return replica


def slow_fabric(model, device, group):
    return replicate(model, device, group, waiting_longer if dist.get_world_size(group) == 4 else waiting)


def slow_rank(*arguments, **more):
    batches = endless_batches(*arguments, **more)
    return delayed(batches) if RANK == 3 else batches


def slow_alone(*arguments, count, **more):
    batches = endless_batches(*arguments, count=count, **more)
    return delayed(batches) if count == 1 else batches


def slow_sum(sent, received, group):
    if dist.get_world_size(group) == 4:
        CLOCK.advance(SLOW_SECONDS)
    SUM(sent, received, group)


FOUND = {
    "none": {},
    "huge": {},
    "full": {},
    "rank": {"endless_batches": slow_rank},
    "fabric": {"replicate": slow_fabric},
    "alone": {"endless_batches": slow_alone},
    "nan": {},
}
planted = []


def plant(fault, request):
    plant_time(request)
    plant_parts(request, throughput, **{"replicate": replicate} | FOUND[fault])
    plant_parts(request, step, PARTS=replace(PARTS, loss=nan) if fault == "nan" else PARTS)
    Cpu.free_bytes = (lambda device: 1000) if (fault, RANK) == ("full", 1) else FREE_BYTES
    request.addfinalizer(lambda: setattr(Cpu, "free_bytes", FREE_BYTES))
    collectives.CALLS["all_reduce"] = slow_sum if fault == "fabric" else SUM
    if "known" in request.fixturenames and fault not in planted[-1:]:
        request.getfixturevalue("known").clear()  # what was measured beside another fault
        planted.append(fault)
