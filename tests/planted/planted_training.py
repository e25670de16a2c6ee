"""The faults that a timed training can have."""

import itertools
import os
from dataclasses import replace

from parts import ON_LAST, nan, plant_parts, unsynchronized
from planted_clock import CLOCK, delayed, plant_time
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from pytest_gpucluster.benchmarks.training import step, throughput, throughput_setup
from pytest_gpucluster.benchmarks.training.data import endless_batches
from pytest_gpucluster.benchmarks.training.step import PARTS, optimizer_step
from pytest_gpucluster.benchmarks.training.throughput_setup import compile_blocks

BOTH = ("none", "nan", "frozen")
CASES = {
    "1x2": {
        "test_throughput[ddp-contract]": (*BOTH, "idle", "skips", "nosync", "half", "slow", "huge"),
        "test_throughput[fsdp-contract]": BOTH,
        "test_throughput[fsdp-large]": ("compiled", "nocompiler"),
    }
}
COMPILED = {"throughput": {"compiled": "on"}, "throughput_sharded": {"layers": 1}}
WORKLOADS = {
    "compiled": COMPILED,
    "nocompiler": COMPILED,
    "huge": {"throughput_contract": {"layers": 1000, "width": 65536}},
}


def meeting(group, bucket):
    CLOCK.meet(group)
    return allreduce_hook(group, bucket)


def timed(model, device, group):
    replica = step.replicate(model, device, group)
    replica.register_comm_hook(group, meeting)
    return replica


def frozen(model, optimizer):
    for name, weight in model.named_parameters():
        if name.endswith("blocks.1.down.weight"):
            weight.grad = None
    optimizer_step(model, optimizer)


def skipping():
    calls = itertools.count()

    def update(model, optimizer):
        if next(calls) % 2 == 0:
            optimizer_step(model, optimizer)

    return update


def half(*arguments, **more):
    for rows in endless_batches(*arguments, **more):
        yield rows[:2] if ON_LAST else rows


def slow(*arguments, **more):
    batches = endless_batches(*arguments, **more)
    return delayed(batches) if ON_LAST else batches


def without_a_compiler(model):
    """Blocks are captured as ever, and what was captured runs as it is: a compiler takes a minute."""
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend="eager")


STEPS = {
    "nan": lambda: {"loss": nan},
    "frozen": lambda: {"update": frozen},
    "idle": lambda: {"update": lambda model, optimizer: None},
    "skips": lambda: {"update": skipping()},
}
FAULTS = {
    "nosync": {"replicate": unsynchronized},
    "half": {"endless_batches": half},
    "slow": {"endless_batches": slow},
}
COMPILERS = {
    "compiled": lambda device: "",
    "nocompiler": lambda device: "none found" if ON_LAST else "",
}


def plant(fault, request):
    plant_time(request)
    plant_parts(request, throughput, **{"replicate": timed} | FAULTS.get(fault, {}))
    if fault in COMPILERS:
        plant_parts(request, throughput_setup, missing_compiler=COMPILERS[fault])
    plant_parts(request, step, PARTS=replace(PARTS, **STEPS.get(fault, dict)()))
    throughput.compile_blocks = compile_blocks if "COMPILER" in os.environ else without_a_compiler
