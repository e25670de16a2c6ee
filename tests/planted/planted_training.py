"""The faults that a timed training can have."""

import itertools
import os
from dataclasses import replace

from parts import ON_LAST, nan, unsynchronized
from planted_clock import CLOCK, clock_for, delayed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from pytest_gpucluster.benchmarks.training import throughput
from pytest_gpucluster.benchmarks.training.step import PARTS, optimizer_step
from pytest_gpucluster.benchmarks.training.throughput import COMPONENTS
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


def with_step(**parts):
    return replace(PLANTED, step=replace(PARTS, **parts))


def meeting(group, bucket):
    CLOCK.meet(group)
    return allreduce_hook(group, bucket)


def timed(model, device, group):
    replica = COMPONENTS.replicate(model, device, group)
    replica.register_comm_hook(group, meeting)
    return replica


PLANTED = replace(COMPONENTS, clock=clock_for, replicate=timed)


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
    for rows in PLANTED.batches(*arguments, **more):
        yield rows[:2] if ON_LAST else rows


def slow(*arguments, **more):
    batches = PLANTED.batches(*arguments, **more)
    return delayed(batches) if ON_LAST else batches


def without_a_compiler(model):
    """Blocks are captured as ever, and what was captured runs as it is: a compiler takes a minute."""
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend="eager")


FAULTS = {
    "none": lambda: PLANTED,
    "compiled": lambda: replace(PLANTED, missing_compiler=lambda device: ""),
    "huge": lambda: PLANTED,
    "nan": lambda: with_step(loss=nan),
    "frozen": lambda: with_step(update=frozen),
    "idle": lambda: with_step(update=lambda model, optimizer: None),
    "skips": lambda: with_step(update=skipping()),
    "nosync": lambda: replace(PLANTED, replicate=unsynchronized),
    "half": lambda: replace(PLANTED, batches=half),
    "slow": lambda: replace(PLANTED, batches=slow),
    "nocompiler": lambda: replace(PLANTED, missing_compiler=lambda device: "none found" if ON_LAST else ""),
}


def plant(fault, request):
    throughput.COMPONENTS = FAULTS[fault]()
    throughput.compile_blocks = compile_blocks if "COMPILER" in os.environ else without_a_compiler
