"""The criterion training.throughput itself, run by torchrun over gloo: what it accepts, and how each fault fails it."""

from __future__ import annotations

import importlib.util
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torchrun

from pytest_gpucluster import hardware, thresholds
from pytest_gpucluster.errors import MeasurementError

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"
DEADLINE_SECONDS = 300.0
"""Of a run; on two idle cores each takes less than 30 s."""

SLOW_SECONDS = 0.25
"""A slow rank takes so much longer for its data. With 8 tokens a step that is below the limit of a rehearsal."""

# The faults that a timed training can have, each put in the place of one of the product's own pieces. The file that a
# test is in says which one.
FAULTS = """
import itertools, math, os, time
from dataclasses import replace
from pytest_gpucluster.benchmarks.training import throughput
from pytest_gpucluster.benchmarks.training.throughput import PIECES
from pytest_gpucluster.benchmarks.training.step import PARTS, optimizer_step, token_mean

ON_RANK_1 = os.environ["RANK"] == "1"

def with_step(**parts):
    return replace(PIECES, step=replace(PARTS, **parts))

def nan(*given):
    return token_mean(*given) * (math.nan if ON_RANK_1 else 1.0)

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

def unsynchronized(model, device, group):
    replica = PIECES.replicate(model, device, group)
    replica.require_backward_grad_sync = False
    return replica

def half(*arguments, **more):
    for rows in PIECES.batches(*arguments, **more):
        yield rows[:2] if ON_RANK_1 else rows

def slow(*arguments, **more):
    for rows in PIECES.batches(*arguments, **more):
        time.sleep(SLOW_SECONDS * ON_RANK_1)
        yield rows

FAULTS = {
    "none": lambda: PIECES,
    "compiled": lambda: PIECES,
    "nan": lambda: with_step(loss=nan),
    "frozen": lambda: with_step(update=frozen),
    "idle": lambda: with_step(update=lambda model, optimizer: None),
    "skips": lambda: with_step(update=skipping()),
    "nosync": lambda: replace(PIECES, replicate=unsynchronized),
    "half": lambda: replace(PIECES, batches=half),
    "slow": lambda: replace(PIECES, batches=slow),
    "nocompiler": lambda: replace(PIECES, missing_compiler=lambda device: "none found" if ON_RANK_1 else ""),
}

def pytest_runtest_setup(item):
    throughput.PIECES = FAULTS[item.path.stem.removeprefix("test_training_")]()
""".replace("SLOW_SECONDS", str(SLOW_SECONDS))


def files(*faults):
    text = (ACCEPTANCE / "test_training.py").read_text(encoding="utf-8")
    workloads = (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8")
    return {f"test_training_{fault}.py": text for fault in faults} | {
        "workloads.yaml": workloads,
        "conftest.py": FAULTS,
    }


SMALL = [f"--gpucluster-workload=training.throughput.contract.{key}" for key in ("batch=1", "sequence=8")]
HUGE = [f"--gpucluster-workload=training.throughput.contract.{key}" for key in ("layers=1000", "width=65536")]
COMPILED = "--gpucluster-workload=training.throughput.compiled=on"
ALONE = "--gpucluster-workload=training.throughput.workers=0"  # each would have to import torch
RUNS = {
    "both": (("none", "nan", "frozen"), "-k=contract"),
    # Blocks that are recomputed, compiled and sharded.
    "compiled": (("compiled", "nocompiler"), "-k=fsdp-large or ddp-contract", COMPILED, *HUGE, ALONE),
    "ddp": (("idle", "skips", "nosync", "half"), "-k=ddp-contract", ALONE),
    "slow": (("slow",), "-k=ddp-contract", *SMALL, ALONE),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs with all faults, one after the other in each: after each the ranks go on with a new group."""

    def run(name):
        faults, *options = RUNS[name]
        started = torchrun.start(tmp_path_factory.mktemp(name), files(*faults), *options, timeouts="stuck=30")
        started.deadline = DEADLINE_SECONDS
        return started.wait()

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(RUNS, pool.map(run, RUNS), strict=True))


def result(runs, fault, case="ddp-contract"):
    nodeid = f"test_training_{fault}.py::test_throughput[{case}]"
    [found] = [each for run in runs.values() for each in run.journal.results if each.nodeid == nodeid]
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_right_training_passes_and_tells_where_its_time_goes(runs, strategy):
    found = result(runs, "none", f"{strategy}-contract")
    assert (found.outcome, found.culprits) == ("passed", ())
    [rate] = [one for one in found.measurements if one.metric == "training.tokens_per_second"]
    assert (rate.status, len(rate.values), rate.labels["compiled"]) == ("passed", 2, "off")
    assert (rate.labels["strategy"], rate.labels["tokens_per_step"]) == (strategy, "256")
    [step] = [one for one in found.measurements if one.metric == "training.step_time"]
    [tail] = [one for one in found.measurements if one.metric == "training.step_time_p99"]
    assert tail.value >= step.value
    parts = {one.labels["part"]: one.status for one in found.measurements if one.metric == "training.parts"}
    assert parts == dict.fromkeys(
        ("data_wait", "forward", "backward", "optimizer", "exposed_communication"), "recorded"
    )
    # There is no peak of a CPU: then nothing is said of MFU, and no limit is missed for it.
    assert not [one for one in found.measurements if one.metric in ("training.mfu", "training.tflops")]


def test_the_report_states_what_was_trained_and_what_the_figures_mean(runs):
    told = dict(map(tuple, result(runs, "none").properties))
    assert told["training.model"].startswith("0.1396M parameters, 2 layers, 64 wide, vocabulary 256, by ddp, 4 x 32")
    assert "the median of the steady steps; the slowest rank decides" in told["training.tokens_per_second"]
    assert "what is recomputed does not count" in told["training.flops_per_token"]
    assert "dense bf16 peak" in told["training.mfu"]
    assert "waiting for a slower rank is part of it" in told["training.parts.exposed_communication"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("fault", "culprits", "told"),
    [
        ("nan", (1,), "rank 1 has a loss of nan in step 1, and it must be finite"),
        ("frozen", (0, 1), "has 1 of 15 weight tensors that have not moved in"),
    ],
)
def test_each_fault_rejects_and_names_the_ranks_at_fault(runs, fault, strategy, culprits, told):
    found = result(runs, fault, f"{strategy}-contract")
    assert found.outcome == "failed", found.text
    assert found.culprits == culprits
    assert "WrongResult" in found.message
    assert told in found.text


@pytest.mark.parametrize(
    ("fault", "culprits", "told"),
    [
        ("idle", (0, 1), "it has learnt nothing"),
        ("skips", (0, 1), "work was skipped, so its rate is that of something else"),
        ("nosync", (0, 1), "2 kinds on 2 ranks. The gradients were not made the same on all of them"),
        ("half", (1,), "rank 1 has trained on 64 tokens in a step, and 4 x 32 were asked for"),
    ],
)
def test_each_fault_of_what_every_strategy_shares_or_replicas_have_rejects_and_names_the_ranks_at_fault(
    runs, fault, culprits, told
):
    found = result(runs, fault)
    assert (found.outcome, found.culprits) == ("failed", culprits)
    assert told in found.text


def test_a_slow_rank_misses_the_limit_and_the_parts_tell_which_one_it_is(runs):
    found = result(runs, "slow")
    assert found.outcome == "failed"
    [rate] = [one for one in found.measurements if one.metric == "training.tokens_per_second"]
    assert rate.status == "failed"
    # All ranks are as slow as the slow one, which is what a training feels.
    assert all(value < 8 / SLOW_SECONDS for value in rate.values.values())
    parts = {one.labels["part"]: one.values for one in found.measurements if one.metric == "training.parts"}
    milliseconds = 1000 * SLOW_SECONDS
    assert parts["data_wait"][1] >= milliseconds > parts["data_wait"][0]
    assert parts["exposed_communication"][0] >= milliseconds / 2


def test_without_a_compiler_on_one_rank_all_run_eager_and_the_report_says_so(runs):
    found = result(runs, "nocompiler", "fsdp-large")
    assert found.outcome == "passed"
    [rate] = [one for one in found.measurements if one.metric == "training.tokens_per_second"]
    assert rate.labels["compiled"] == "no"
    told = dict(map(tuple, found.properties))
    assert told["training.note.1"] == "no compiler, ran eager: rank 1 has none, and all ranks must run alike"


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")
def test_blocks_that_are_recomputed_compiled_and_sharded_train(runs):
    found = result(runs, "compiled", "fsdp-large")
    assert found.outcome == "passed", found.text
    [rate] = [one for one in found.measurements if one.metric == "training.tokens_per_second"]
    assert rate.labels["compiled"] == "yes"


def test_a_model_that_fits_on_no_such_device_is_not_run_and_says_why(runs):
    found = result(runs, "compiled")
    assert found.outcome == "skipped"
    assert "needs about" in found.message
    assert "take more GPUs, or a smaller model" in found.message


@pytest.fixture(scope="module")
def criterion(pytestconfig):
    """The module of the criterion, whose tests are not run here."""
    for marker in ("training", "criterion", "deadline"):  # the plugin, which knows them, is off here
        pytestconfig.addinivalue_line("markers", f"{marker}: of the plugin")
    spec = importlib.util.spec_from_file_location("criterion_of_training", ACCEPTANCE / "test_training.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peak(criterion, sku, *, known, model="large"):
    gpu = SimpleNamespace(name="a GPU", sku=sku, peaks=hardware.SKUS[sku].peaks if known else None)
    where = SimpleNamespace(world_size=2, nnodes=1)
    return criterion.peak_flops(gpu, where, thresholds.load(), {"model": model})


def test_a_gpu_without_a_peak_is_an_error_where_a_limit_is_set_on_mfu(criterion):
    assert peak(criterion, "H100 SXM", known=True) == 989e12
    assert peak(criterion, "cpu-rehearsal", known=False) is None
    assert peak(criterion, "H100 SXM", known=False, model="contract") is None
    with pytest.raises(MeasurementError, match=r"training\.mfu cannot be measured on a GPU \(H100 SXM\)"):
        peak(criterion, "H100 SXM", known=False)


def test_a_gpu_of_an_unknown_sku_is_an_error(criterion):
    gpu = SimpleNamespace(name="a GPU", sku=None, peaks=None)
    with pytest.raises(MeasurementError, match="an unknown SKU"):
        criterion.peak_flops(gpu, None, thresholds.load(), {})


@pytest.mark.parametrize("name", ["both", "ddp", "slow"])
def test_the_run_goes_on_after_each_fault_and_ends_in_a_rejection(runs, name):
    run = runs[name]
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []
    assert not [one.nodeid for one in run.journal.results if one.outcome not in ("passed", "failed")]
