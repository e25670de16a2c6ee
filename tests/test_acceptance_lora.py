"""The LoRA criteria themselves, run by torchrun over gloo: what they accept, and which measurement each fault fails."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import torchrun

from pytest_gpucluster.benchmarks.lora import golden, prepared
from pytest_gpucluster.benchmarks.lora.curve import Curve, Point, read_csv
from pytest_gpucluster.benchmarks.lora.model import make_base, tiny_base
from pytest_gpucluster.benchmarks.lora.rows import Rows
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.benchmarks.lora.tokenizer import tiny_tokenizer, tokenizer_for

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"
LONGEST_SECONDS = 500.0

# Small, and yet each condition but the final loss can hold: for that there are too few steps.
SHORT = {
    "steps": 12,
    "warmup_steps": 1,
    "global_batch": 8,
    "micro_batch": 2,
    "sequence": 64,
    "rows": 200,
    "held_out_blocks": 5,
    "parity": "fp32",
    "parity_steps": 3,
    "parity_sequence": 64,
    "checkpoint_every": 4,
    "calls": 2,
    "call_tokens": 8,
}
LIMITS = """
schema_version: 1
every_sku:
  limits:
    lora.final_loss:
      when: {labels: {model: lora_tiny}}
      max: 6.2 nats
      source: a test's own, for few steps
"""

# The faults that a training can have, each put in the place of one of the product's own pieces. The file that a test is
# in says which one.
FAULTS = """
import importlib.util, math, os
from dataclasses import replace
import pytest
import torch
import torch.distributed as dist
from pytest_gpucluster.benchmarks.checkpoint import store
from pytest_gpucluster.benchmarks.lora import golden, loop, memory_need
from pytest_gpucluster.benchmarks.lora.loop import PIECES, fully_sharded, token_mean
from pytest_gpucluster.benchmarks.lora.model import make_adapted
from pytest_gpucluster.benchmarks.lora.packing import share
from pytest_gpucluster.benchmarks.lora.plan import cosine

ON_RANK_1 = os.environ["RANK"] == "1"
COMPARED = 3  # steps before the training
calls = {}

def in_training(what, step=1):
    # A reference of one rank is made of the product's own pieces, and the steps taken again come after these.
    calls[what] = calls.get(what, 0) + 1
    return calls[what] == COMPARED + step

def unsynchronized(model, group, device, precision):
    rank = int(os.environ["RANK"])
    fully_sharded(model, dist.new_group([rank], use_local_synchronization=True), device, precision)

def same(blocks, *, rank, world_size):
    return share(blocks, rank=0, world_size=world_size)

def flip(weight):
    local = weight.to_local().detach()
    local.view(torch.int16 if local.element_size() == 2 else torch.int32).flatten()[0] ^= 1

def flipped(model, optimizer):
    optimizer.step()
    if in_training("bit", 10) and ON_RANK_1:
        flip(next(weight for weight in model.parameters() if weight.requires_grad))

def based(model, optimizer):
    optimizer.step()
    if in_training("base", 3) and ON_RANK_1:
        flip(next(weight for weight in model.parameters() if not weight.requires_grad))

def scaled(of_judged, targets):
    return 2 * token_mean(of_judged, targets)

def nan(*given, **more):
    model = make_adapted(*given, **more)
    if ON_RANK_1:
        # Of what only this rank computes: its weights are the others'.
        head = model.get_base_model().lm_head
        head.register_forward_hook(lambda module, inputs, logits: logits * math.nan)
    return model

def frozen(*given, **more):
    model = make_adapted(*given, **more)
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            weight.requires_grad_(False)
    return model

def other(*given, seed, **more):
    return make_adapted(*given, seed=seed + ON_RANK_1, **more)

def poisoned(model, optimizer):
    optimizer.step()
    if in_training("late", 6) and ON_RANK_1:
        weight = next(weight for weight in model.parameters() if weight.requires_grad)
        weight.to_local().detach().fill_(math.nan)

def truncated(folder, step, *given, group, **more):
    saved = store.save(folder, step, *given, group=group, **more)
    dist.barrier(group)
    if ON_RANK_1:
        path = saved.path / "__1_0.distcp"
        os.truncate(path, path.stat().st_size // 2)
    dist.barrier(group)
    return saved

def drifting(model, optimizer):
    optimizer.step()
    if in_training("drift", 5) and ON_RANK_1:
        for weight in model.parameters():
            if weight.requires_grad:
                weight.to_local().detach().mul_(1.5)

def interrupted(model, optimizer):
    optimizer.step()
    if in_training("interrupted", 10):
        raise RuntimeError("the training is interrupted here")

PIECES_OF = {
    "none": {},
    "nosync": {"shard": unsynchronized},
    "samedata": {"share": same},
    "bit": {"update": flipped},
    "scaled": {"loss": scaled},
    "rate": {"learning_rate": lambda step, recipe: cosine(step, recipe) / 10},
    "frozen": {"make": frozen},
    "nan": {"make": nan},
    "late": {"update": poisoned},
    "truncated": {"save": truncated},
    "base": {"update": based},
    "other": {"make": other},
    "groups": {},
    "drift": {"update": drifting},
    "golden": {},
    "astray": {"learning_rate": lambda step, recipe: cosine(step, recipe) / 2},
    "foreign": {},
    "weights": {},
    "model": {},
    "noextra": {},
    "nomemory": {},
    "a_whole": {},
    "b_interrupted": {"update": interrupted},
    "c_resumed": {},
}

# What the golden curve that is read is of.
CURVE_OF = {"foreign": {"model": "qwen2-7b"}, "weights": {"weights": "0" * 16}}
FIND, FREE = importlib.util.find_spec, memory_need.free_bytes

def fault_of(item):
    return item.path.stem.removeprefix("test_lora_")

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # So far as to look at the memory it needs no GPU.
    for item in items:
        if fault_of(item) == "nomemory":
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "needs_gpu"]

def pytest_runtest_setup(item):
    calls.clear()
    fault = fault_of(item)
    missing = fault == "noextra"
    importlib.util.find_spec = lambda name, *more: None if missing and name == "peft" else FIND(name, *more)
    loop.PIECES = replace(PIECES, **PIECES_OF[fault])
    memory_need.free_bytes = (lambda device: 10**9) if fault == "nomemory" else FREE

    def read(path):
        curve = golden.read(path)
        return replace(curve, context={**curve.context, **CURVE_OF.get(fault, {})})

    item.module.read = read
"""

RIGHT = "none"
WRONG = ("nosync", "samedata", "scaled", "rate", "nan", "other", "frozen", "bit", "base", "late", "truncated")
RUNS = {
    "faults": ((RIGHT, *WRONG), ()),
    "resume": (("a_whole", "b_interrupted", "c_resumed"), ("--gpucluster-resume",)),
    # Not to be divided among two ranks: each trains by itself.
    "groups": (("groups", "drift"), ("--gpucluster-workload=lora.tiny.global_batch=7",)),
}


def files(*faults):
    text = (ACCEPTANCE / "test_qwen2_lora.py").read_text(encoding="utf-8")
    workloads = (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8")
    tests = {f"test_lora_{fault}.py": text for fault in faults}
    return tests | {"workloads.yaml": workloads, "conftest.py": FAULTS, "limits.yaml": LIMITS}


def start(name, directory, faults, *options, chosen="test_lora_tiny"):
    scratch = directory / "scratch"
    scratch.mkdir()
    set_already = [option for option in options if option.startswith("--gpucluster-workload")]
    more = [f"--gpucluster-workload=lora.tiny.{key}={value}" for key, value in SHORT.items()]
    more = [one for one in more if not any(other.startswith(one.rpartition("=")[0]) for other in set_already)]
    if name == "resume":
        more.append(f"--gpucluster-scratch={scratch}")
    run = torchrun.start(
        directory,
        files(*faults),
        f"-k={chosen}",
        "--gpucluster-thresholds=limits.yaml",
        *options,
        *more,
        deadline=120.0,
        extras=True,
    )
    run.deadline = LONGEST_SECONDS
    return run.wait()


class Runs(dict):
    """The runs by name, each started when it is first looked at: two at once would share the cores."""

    def __init__(self, make_directory):
        super().__init__()
        self._make_directory = make_directory

    def __missing__(self, name):
        faults, options = RUNS[name]
        self[name] = start(name, self._make_directory(name), faults, *options)
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All faults, one after the other in each run: after each the ranks go on with a new group."""
    return Runs(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def against_golden(runs, tmp_path_factory):
    """A run against the curve of a right one."""
    directory = tmp_path_factory.mktemp("golden")
    golden.write(directory / "golden.json", [read_csv(curve_path(runs["faults"], RIGHT))])
    faults = ("golden", "astray", "foreign", "weights")
    return start("golden", directory, faults, f"--gpucluster-golden={directory / 'golden.json'}")


@pytest.fixture(scope="module")
def of_model(runs, tmp_path_factory):
    """A run with a small model and data of its own; in one file the extra is missing, in one the memory."""
    directory = tmp_path_factory.mktemp("model")
    rows = synthetic_rows(600, seed=5)
    tokenizer = tiny_tokenizer(rows)
    folder = directory / "small-qwen2"
    make_base(tiny_base(len(tokenizer)), torch.device("cpu"), precision="bf16", seed=3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given = Rows(rows=tuple(rows), malformed=(), sha256="0" * 64, source="rows")
    blocks = directory / "blocks.safetensors"
    prepared.write(
        blocks, prepared.prepare(given, tokenizer_for(folder), name="small", sequence=64, held_out=0.1, seed=0)
    )
    # Of the other model of this run, whose test would compare it.
    tiny = Curve(
        points=(Point(step=1, loss=1.0, all_token_loss=1.0, gradient_norm=1.0, learning_rate=1.0),),
        context={**dict.fromkeys(golden.REQUIRED, "x"), "model": "lora_tiny"},
    )
    golden.write(directory / "golden.json", [tiny])
    options = (
        f"--gpucluster-model={folder}",
        f"--gpucluster-data=function_calls={blocks}",
        f"--gpucluster-golden={directory / 'golden.json'}",
    )
    chosen = "(lora_model and not tiny) or (noextra and tiny) or (nomemory and throughput)"
    return start("model", directory, ("model", "noextra", "nomemory"), *options, chosen=chosen)


def result(runs, fault):
    [run] = [name for name, (faults, _) in RUNS.items() if fault in faults]
    name = f"test_lora_{fault}.py::test_lora_tiny"
    [found] = [each for each in runs[run].journal.results if each.nodeid == name]
    return found


def failing(found):
    return {one.metric for one in found.measurements if one.status == "failed"}


CONDITIONS = {
    "lora.finite_steps",
    "lora.loss_error",
    "lora.gradient_error",
    "lora.final_loss",
    "lora.held_out_ratio",
    "lora.moved_adapters",
    "lora.unchanged_base",
    "lora.replayed_steps",
    "lora.resume_error",
    "lora.reload_error",
}


@pytest.mark.parametrize("fault", [RIGHT, "a_whole"])
def test_a_right_training_passes_beside_the_wrong_ones_and_each_condition_is_a_measurement(runs, fault):
    found = result(runs, fault)
    assert (found.outcome, found.culprits) == ("passed", ())
    assert {one.metric for one in found.measurements if one.status == "passed"} == CONDITIONS
    recorded = {one.metric for one in found.measurements if one.status == "recorded"}
    assert recorded >= {"lora.held_out_loss", "lora.tokens_per_second", "lora.calls.well_formed"}
    assert all(len(one.values) == 2 for one in found.measurements)


@pytest.mark.parametrize(
    ("fault", "missed"),
    [
        ("nosync", {"lora.loss_error", "lora.gradient_error"}),
        ("samedata", {"lora.loss_error", "lora.gradient_error"}),
        ("scaled", {"lora.gradient_error"}),
        ("rate", {"lora.loss_error"}),
        ("frozen", {"lora.loss_error", "lora.gradient_error", "lora.moved_adapters"}),
        ("bit", {"lora.replayed_steps"}),
        ("base", {"lora.unchanged_base"}),
    ],
)
def test_each_fault_fails_by_the_measurement_that_is_there_for_it(runs, fault, missed):
    found = result(runs, fault)
    assert found.outcome == "failed"
    assert failing(found) >= missed
    assert "lora.finite_steps" not in failing(found)


@pytest.mark.parametrize("fault", ["bit", "base"])
def test_a_bit_that_changes_on_one_rank_is_found_on_that_rank(runs, fault):
    [metric] = {"bit": ["lora.replayed_steps"], "base": ["lora.unchanged_base"]}[fault]
    [found] = [one for one in result(runs, fault).measurements if one.metric == metric]
    assert found.worst_rank == 1
    assert found.values[1] < found.values[0]


@pytest.mark.parametrize("fault", ["nan", "late"])
def test_what_is_not_finite_ends_the_training_of_all_ranks(runs, fault):
    found = result(runs, fault)
    assert found.outcome == "failed"
    assert "lora.finite_steps" in failing(found)
    assert "lora.final_loss" not in {one.metric for one in found.measurements}


def test_nan_is_found_on_the_rank_that_it_comes_from(runs):
    [found] = [one for one in result(runs, "nan").measurements if one.metric == "lora.finite_steps"]
    assert found.worst_rank == 1
    assert found.values[0] > found.values[1]


def test_a_truncated_checkpoint_rejects_and_names_the_file(runs):
    found = result(runs, "truncated")
    assert found.outcome == "failed"
    assert "WrongResult" in found.message
    assert "__1_0.distcp is truncated" in found.text


def test_ranks_that_start_with_other_weights_are_found_before_they_are_sharded(runs):
    found = result(runs, "other")
    assert found.outcome == "failed"
    assert "before the first step the model's weights are not the same on all ranks" in found.text


def test_an_interrupted_training_goes_on_from_its_checkpoint_and_reaches_the_same_losses(runs):
    assert result(runs, "b_interrupted").outcome == "failed"
    found = result(runs, "c_resumed")
    assert (found.outcome, found.culprits) == ("passed", ())
    assert "resumed from step-00000008" in dict(found.properties)["lora.notes"]
    whole, resumed = (curve(runs["resume"], name) for name in ("a_whole", "c_resumed"))
    assert [row["step"] for row in resumed] == [str(step) for step in range(13)]
    assert resumed == whole


def test_groups_that_train_at_once_are_compared(runs):
    found = result(runs, "groups")
    assert (found.outcome, found.culprits) == ("passed", ())
    [error] = [one for one in found.measurements if one.metric == "lora.group_error"]
    assert (error.status, error.values) == ("passed", {0: 0.0, 1: 0.0})
    assert (error.labels["groups"], error.labels["group_ranks"]) == ("2", "1")


def test_a_group_that_learns_otherwise_is_found(runs):
    found = result(runs, "drift")
    assert found.outcome == "failed"
    [error] = [one for one in found.measurements if one.metric == "lora.group_error"]
    assert (error.status, error.worst_rank, error.values[0]) == ("failed", 1, 0.0)


def test_a_curve_that_leaves_the_band_of_the_golden_one_fails(against_golden):
    found = {
        each.nodeid.partition("::")[0]: next(one for one in each.measurements if one.metric == "lora.golden_deviation")
        for each in against_golden.journal.results
        if each.measurements
    }
    same, astray = found["test_lora_golden.py"], found["test_lora_astray.py"]
    assert (same.status, same.value) == ("passed", 0.0)
    assert (astray.status, astray.value > 1) == ("failed", True)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("foreign", "is a golden curve of qwen2-7b, and no test of this run trains qwen2-7b"),
        ("weights", "not the same experiment: weights is '"),
    ],
)
def test_a_golden_curve_that_cannot_be_compared_is_an_error_before_the_training(against_golden, fault, told):
    [found] = [each for each in against_golden.journal.results if f"lora_{fault}.py" in each.nodeid]
    assert found.outcome == "error"
    assert told in found.text
    assert not found.measurements
    assert not list((against_golden.directory / "reports" / "latest").rglob(f"*lora_{fault}.py*/curve-*.csv"))


def test_a_model_that_is_given_is_trained_under_its_own_name_and_stands_for_no_criterion(of_model):
    found = {each.nodeid: each for each in of_model.journal.results}
    trained = found["test_lora_model.py::test_lora_of_model"]
    assert (trained.outcome, trained.criterion) == ("passed", None)
    assert {one.labels["model"] for one in trained.measurements} == {"small-qwen2"}
    statuses = {one.metric: one.status for one in trained.measurements}
    assert {metric for metric, status in statuses.items() if status == "passed"} == CONDITIONS - {"lora.final_loss"}
    assert statuses["lora.final_loss"] == "recorded"
    assert "lora.golden_deviation" not in statuses
    for criterion in ("test_qwen2_lora", "test_qwen2_lora_throughput"):
        assert found[f"test_lora_model.py::{criterion}"].outcome == "skipped"


def test_too_little_memory_for_the_throughput_is_told_with_its_figures_and_nothing_is_run(of_model):
    [found] = [
        each for each in of_model.journal.results if each.nodeid == "test_lora_nomemory.py::test_qwen2_lora_throughput"
    ]
    assert (found.outcome, found.measurements) == ("skipped", ())
    assert "training qwen2-7b-random on 2 ranks with 2 blocks of 64 tokens at once needs about" in found.message
    assert "GB of memory on each, and the rank with the least has 1 GB free" in found.message


def test_without_the_extra_nothing_is_run_and_the_way_to_install_it_is_told(of_model):
    [found] = [
        each for each in of_model.journal.results if each.nodeid.startswith("test_lora_noextra.py::test_lora_tiny")
    ]
    assert found.outcome == "skipped"
    assert (
        "peft not installed; install them with python -m pip install -c constraints.txt -e '.[lora]'" in found.message
    )
    assert of_model.end[:2] == ("INCOMPLETE", 10)


def curve_path(run, name):
    [path] = (run.directory / "reports" / "latest").rglob(f"*lora_{name}.py*/curve-group-0.csv")
    return path


def curve(run, name):
    with curve_path(run, name).open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def test_the_run_goes_on_after_each_fault_and_ends_in_a_rejection(runs):
    run = runs["faults"]
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []
    assert not [one.nodeid for one in run.journal.results if one.outcome not in ("passed", "failed")]
