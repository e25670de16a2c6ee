"""The criterion fsdp itself, run by torchrun over gloo: what it accepts, and how each fault fails it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

# The faults that a sharded training can have, each put in the place of one of the product's own pieces. The file that a
# test is in says which one.
FAULTS = """
import math, os
from dataclasses import replace
import torch
from torch.utils.data import DistributedSampler
from pytest_gpucluster.benchmarks.training import data_parallel, fully_sharded, sharding
from pytest_gpucluster.benchmarks.training.decoder import make_decoder
from pytest_gpucluster.benchmarks.training.fully_sharded import PIECES
from pytest_gpucluster.benchmarks.training.step import PARTS, clip_gradients, token_mean

RANKS = int(os.environ["WORLD_SIZE"])
ON_LAST = int(os.environ["RANK"]) == RANKS - 1

def flip(weight):
    weight.detach().to_local().view(torch.int32)[3, 5] ^= 1

def unsynchronized(model, mesh, **how):
    sharded = sharding.shard(model, mesh, **how)
    sharded.set_requires_gradient_sync(False)
    return sharded

def unsynchronized_offload(model, mesh, *, cpu_offload=False, **how):
    sharded = sharding.shard(model, mesh, cpu_offload=cpu_offload, **how)
    sharded.set_requires_gradient_sync(not cpu_offload)
    return sharded

def undivided(model):
    # As if what is summed over the ranks were not divided by their number.
    for weight in model.parameters():
        weight.grad.mul_(RANKS)
    return clip_gradients(model)

def block_left_out(model, mesh, **how):
    one, model.blocks = model.blocks[1], torch.nn.ModuleList([model.blocks[0]])
    sharding.shard(model, mesh, **how)
    model.blocks.append(one)
    return model

def weight_left_out(model, mesh, **how):
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params={model.blocks[0].down.weight})
    return fully_shard(model, mesh=mesh, ignored_params={model.blocks[0].down.weight})

def flipped(model, optimizer):
    optimizer.step()
    if ON_LAST:
        flip(next(model.parameters()))

def three_moments(model, optimizer):
    optimizer.step()
    weight = next(model.parameters())
    optimizer.state[weight]["third"] = torch.zeros(weight.shape)

class Once:
    # Spoils a gradient once: neither the repeated step nor a limit can see one bit of that.
    def __init__(self):
        self.left = 1

    def __call__(self, model):
        norm = clip_gradients(model)
        if self.left and ON_LAST:
            self.left = 0
            flip(model.blocks[0].down.weight.grad)
        return norm

class Between:
    # Spoils a weight after the step is over: at the first reading of rows that follows.
    def __init__(self):
        self.model, self.calls = None, 0

    def shard(self, model, mesh, **how):
        made = sharding.shard(model, mesh, **how)
        self.model = self.model or made
        return made

    def read(self, data, rows):
        self.calls += 1
        if self.calls == 2 and ON_LAST:
            flip(next(self.model.parameters()))
        return data_parallel.read_rows(data, rows)

def read_of_rank_0(data, rows):
    mine, its = (list(DistributedSampler(data, num_replicas=RANKS, rank=rank, seed=0)) for rank in (RANKS - 1, 0))
    if not ON_LAST:
        return data_parallel.read_rows(data, rows)
    at = mine.index(rows[0])
    return data_parallel.read_rows(data, its[at : at + len(rows)])

def frozen(*arguments, **more):
    model = make_decoder(*arguments, **more)
    model.blocks[1].down.requires_grad_(False)
    return model

def other(*arguments, seed, **more):
    return make_decoder(*arguments, seed=seed + ON_LAST, **more)

def nan(*given):
    return token_mean(*given) * (math.nan if ON_LAST else 1.0)

def with_step(**parts):
    return replace(PIECES, step=replace(PARTS, **parts))

BETWEEN = Between()
FAULTS = {
    "none": PIECES,
    "nosync": replace(PIECES, shard=unsynchronized),
    "offload": replace(PIECES, shard=unsynchronized_offload),
    "sum": with_step(clip=undivided),
    "block": replace(PIECES, shard=block_left_out),
    "weight": replace(PIECES, shard=weight_left_out),
    "bit": with_step(update=flipped),
    "replay": with_step(clip=Once()),
    "between": replace(PIECES, shard=BETWEEN.shard, read=BETWEEN.read),
    "moments": with_step(update=three_moments),
    "samedata": replace(PIECES, read=read_of_rank_0),
    "scaled": with_step(loss=lambda *given: RANKS * token_mean(*given)),
    "nan": with_step(loss=nan),
    "frozen": replace(PIECES, make=frozen),
    "start": replace(PIECES, make=other),
}

def pytest_runtest_setup(item):
    fully_sharded.PIECES = FAULTS[item.path.stem.removeprefix("test_fsdp_")]
"""

RUNS = {
    "two": (
        2,
        (
            *("none", "nosync", "offload", "sum", "scaled", "moments"),
            *("block", "weight", "samedata", "nan", "frozen", "start"),
        ),
    ),
    "four": (4, ("bit", "replay", "between")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Some runs with all faults, one after the other: after each the ranks go on with a new group."""

    def run(name):
        ranks, faults = RUNS[name]
        text = (ACCEPTANCE / "test_fsdp.py").read_text(encoding="utf-8")
        files = {f"test_fsdp_{fault}.py": text for fault in faults} | {
            "workloads.yaml": (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8"),
            "conftest.py": FAULTS,
        }
        options = ("--gpucluster-workload=fsdp.steps=2", "-k=none or not memory")
        started = torchrun.start(tmp_path_factory.mktemp(name), files, *options, ranks=ranks, deadline=60.0)
        started.deadline = 300.0  # several trainings for each fault
        return started.wait()

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(RUNS, pool.map(run, RUNS), strict=True))


def result(runs, fault, test="test_fsdp"):
    [found] = [
        each for run in runs.values() for each in run.journal.results if each.nodeid == f"test_fsdp_{fault}.py::{test}"
    ]
    return found


def test_a_right_training_passes_beside_the_wrong_ones(runs):
    found = result(runs, "none")
    assert (found.outcome, found.culprits) == ("passed", ())
    of_parity = {f"fsdp.{name}{kind}_error" for name in ("", "bf16_") for kind in ("loss", "gradient")}
    assert {one.metric for one in found.measurements} == of_parity | {"fsdp.ddp_loss_error", "fsdp.share"}
    assert {(one.status, len(one.values)) for one in found.measurements} == {("passed", 2)}
    offloaded = [one.labels["cpu_offload"] for one in found.measurements if one.metric == "fsdp.loss_error"]
    assert offloaded == ["no", "yes"]


def test_two_ranks_hold_half_of_what_one_rank_holds(runs):
    found = result(runs, "none", "test_fsdp_memory")
    assert found.outcome == "passed"
    held = {one.labels["ranks"]: one.values for one in found.measurements}
    assert held["1"] == {rank: 2 * value for rank, value in held["2"].items()}
    assert {one.status for one in found.measurements} == {"recorded"}


@pytest.mark.parametrize(
    ("fault", "culprits", "told"),
    [
        ("nosync", (0, 1), "has 15 of 15 weight tensors whose part has not moved in 2 steps in fp32: embedding.weight"),
        ("offload", (0, 1), "whose part has not moved in 2 steps in fp32 with cpu_offload: embedding.weight"),
        ("block", (0, 1), "has 1 of 3 modules that fully_shard was not called for: blocks.1."),
        (
            "weight",
            (0, 1),
            "holds (64, 192) of blocks.0.down.weight, which is (64, 192), and its part of 1/2 is (32, 192)",
        ),
        ("samedata", (1,), "rank 1 has read other rows in step 1 in fp32 than its share: those of rank 0"),
        ("nan", (1,), "rank 1 has a loss of nan in step 1 in fp32, and it must be finite"),
        ("frozen", (0, 1), "has 1 of 15 weight tensors whose part has not moved in 2 steps in fp32: blocks.1.down.wei"),
        ("start", (0, 1), "has other weights before the first step than other ranks"),
        (
            "bit",
            (3,),
            "rank 3 has other weights or moments in step 1 in fp32 than when it repeats the optimizer's step",
        ),
        (
            "replay",
            (3,),
            "rank 3 has other weights or moments after step 1 than in the replay from the same seed. Its memory",
        ),
        ("between", (3,), "rank 3 has other weights or moments in step 2 in fp32 than it had after the step before"),
    ],
)
def test_each_fault_rejects_and_names_the_ranks_at_fault(runs, fault, culprits, told):
    found = result(runs, fault)
    assert found.outcome == "failed"
    assert found.culprits == culprits
    assert "WrongResult" in found.message
    assert told in found.text


@pytest.mark.parametrize(
    ("fault", "missed"),
    [
        (
            "scaled",
            {
                *("fsdp.loss_error", "fsdp.gradient_error", "fsdp.bf16_loss_error", "fsdp.bf16_gradient_error"),
                "fsdp.ddp_loss_error",
            },
        ),
        ("sum", {"fsdp.gradient_error", "fsdp.bf16_gradient_error"}),
        ("moments", {"fsdp.share"}),
    ],
)
def test_what_no_rank_can_see_alone_misses_the_limits(runs, fault, missed):
    found = result(runs, fault)
    assert found.outcome == "failed"
    assert {one.metric for one in found.measurements if one.status == "failed"} == missed


@pytest.mark.parametrize("name", RUNS)
def test_the_run_goes_on_after_each_fault_and_ends_as_it_should(runs, name):
    run = runs[name]
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []
    assert not [one.nodeid for one in run.journal.results if one.outcome not in ("passed", "failed")]
