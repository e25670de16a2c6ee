"""The criteria training.step and ddp themselves, run by torchrun over gloo: what they accept, and how each fault fails
them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

# The faults that a training can have, each put in the place of one of the product's own pieces. The file that a test is
# in says which one.
FAULTS = """
import math, os
from dataclasses import replace
import torch
from pytest_gpucluster.benchmarks.training import data_parallel, step, step_check
from pytest_gpucluster.benchmarks.training.data_parallel import PIECES
from pytest_gpucluster.benchmarks.training.step import PARTS, token_mean
from torch.utils.data import DistributedSampler

ON_RANK_1 = os.environ["RANK"] == "1"
MAKE, NORMAL = step_check.make_decoder, data_parallel.replicate

def unsynchronized(model, device, group):
    replica = NORMAL(model, device, group)
    replica.require_backward_grad_sync = False
    return replica

def flipped(model, optimizer):
    optimizer.step()
    if ON_RANK_1:
        next(model.parameters()).detach().view(torch.int32)[3, 5] ^= 1

def frozen(*arguments, **more):
    model = MAKE(*arguments, **more)
    model.blocks[1].down.requires_grad_(False)
    return model

def read_of_rank_0(data, rows):
    others = list(DistributedSampler(data, num_replicas=2, rank=0, seed=0))
    at = list(DistributedSampler(data, num_replicas=2, rank=1, seed=0)).index(rows[0]) if ON_RANK_1 else None
    return data_parallel.read_rows(data, others[at : at + len(rows)] if ON_RANK_1 else rows)

def overlapping(dataset, *, num_replicas, rank, **more):
    return DistributedSampler(dataset, num_replicas=num_replicas, rank=0, **more)

def unshuffled(dataset, **more):
    sampler = DistributedSampler(dataset, **more)
    sampler.set_epoch = lambda epoch: None
    return sampler

def nan(*given):
    return token_mean(*given) * (math.nan if ON_RANK_1 else 1.0)

def other(*arguments, seed, **more):
    return MAKE(*arguments, seed=seed + ON_RANK_1, **more)

def with_step(**parts):
    return replace(PIECES, step=replace(PARTS, **parts))

DDP = {
    "none": PIECES,
    "nosync": replace(PIECES, replicate=unsynchronized),
    "samedata": replace(PIECES, read=read_of_rank_0),
    "bit": with_step(update=flipped),
    "scaled": with_step(loss=lambda *given: 2 * token_mean(*given)),
    "scaledone": with_step(loss=lambda *given: (1 + 0.001 * ON_RANK_1) * token_mean(*given)),
    "nan": with_step(loss=nan),
    "sampler": replace(PIECES, sampler=overlapping),
    "epoch": replace(PIECES, sampler=unshuffled),
    "frozen": replace(PIECES, make=frozen),
    "start": replace(PIECES, make=other),
}
STEP = {"nan": replace(PARTS, loss=nan)}

def pytest_runtest_setup(item):
    fault = item.path.stem.removeprefix("test_ddp_")
    data_parallel.PIECES = DDP.get(fault, PIECES)
    step.PARTS = STEP.get(fault, PARTS) if item.originalname == "test_training_step" else PARTS
    step_check.make_decoder = frozen if fault == "frozen" else MAKE
"""

ALL = (
    *("none", "nosync", "samedata", "bit", "scaled", "scaledone"),
    *("nan", "sampler", "epoch", "frozen", "start"),
)
RANK_1 = "rank 1 (node-a)"
METRICS = {f"ddp.{name}{kind}_error" for name in ("", "bf16_") for kind in ("loss", "gradient")}


def files(*faults):
    text = (ACCEPTANCE / "test_ddp.py").read_text(encoding="utf-8")
    workloads = (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8")
    return {f"test_ddp_{fault}.py": text for fault in faults} | {"workloads.yaml": workloads, "conftest.py": FAULTS}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run with all faults, one after the other: after each the ranks go on with a new group."""
    started = torchrun.start(tmp_path_factory.mktemp("run"), files(*ALL), "-k=not affinity", deadline=40.0)
    started.deadline = 300.0  # some trainings for each fault
    return started.wait()


def result(run, fault, test="test_ddp"):
    [found] = [each for each in run.journal.results if each.nodeid == f"test_ddp_{fault}.py::{test}"]
    return found


def test_a_right_training_passes_beside_the_wrong_ones(run):
    found = result(run, "none")
    assert (found.outcome, found.culprits) == ("passed", ())
    assert {one.metric for one in found.measurements} == METRICS
    for one in found.measurements:
        assert (one.status, len(one.values)) == ("passed", 2)
        assert one.labels == {"global_batch": "8", "steps": "4"}
    assert result(run, "sampler", "test_training_step").outcome == "passed"


@pytest.mark.parametrize(
    ("fault", "culprits", "told"),
    [
        (
            "nosync",
            (0, 1),
            "has other weights after step 1 than other ranks: 2 kinds on 2 ranks, none on most. The grad",
        ),
        ("samedata", (1,), "rank 1 has read other rows in step 1 than its share: those of rank 0"),
        ("bit", (1,), "rank 1 has other weights after step 1 than when it repeats the optimizer's step"),
        ("nan", (1,), "rank 1 has a loss of nan in step 1, and it must be finite"),
        ("sampler", (1,), "more from that of rank 0. Look at its sampler: num_replicas, rank, seed and set_epoch"),
        ("epoch", (0, 1), "of epoch 1, and its share is the rows"),
        ("frozen", (0, 1), "1 of 15 weight tensors that have not moved in 4 steps: blocks.1.down.weight"),
        (
            "start",
            (0, 1),
            "before the first step than other ranks: 2 kinds on 2 ranks, none on most. They were not made",
        ),
    ],
)
def test_each_fault_rejects_and_names_the_ranks_at_fault(run, fault, culprits, told):
    found = result(run, fault)
    assert found.outcome == "failed"
    assert found.culprits == culprits
    assert "WrongResult" in found.message
    assert told in found.text


def test_a_loss_times_the_number_of_ranks_misses_all_limits(run):
    found = result(run, "scaled")
    assert found.outcome == "failed"
    assert {one.metric: one.status for one in found.measurements} == dict.fromkeys(METRICS, "failed")
    assert all(one.value == pytest.approx(1.0, rel=0.02) for one in found.measurements)


def test_a_loss_that_is_off_on_one_rank_is_found_on_that_rank(run):
    found = result(run, "scaledone")
    assert found.outcome == "failed"
    assert found.message.startswith("ddp.loss_error 0.001")
    assert f"on {RANK_1}" in found.message
    values = {one.metric: one.values for one in found.measurements}
    assert values["ddp.loss_error"][0] < 1e-5 < values["ddp.loss_error"][1]


@pytest.mark.parametrize(
    ("fault", "culprits", "told"),
    [
        ("nan", (1,), "cpu in fp32: the loss of step 1 is nan, and must be finite"),
        ("frozen", (0, 1), "1 of 15 weight tensors have not moved in 4 steps: blocks.1.down.weight"),
    ],
)
def test_a_step_that_is_wrong_on_a_device_is_found_there(run, fault, culprits, told):
    found = result(run, fault, "test_training_step")
    assert (found.outcome, found.culprits) == ("failed", culprits)
    assert told in found.text


def test_the_run_goes_on_after_each_fault_and_ends_in_a_rejection(run):
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []
    assert not [one.nodeid for one in run.journal.results if one.outcome not in ("passed", "failed")]
