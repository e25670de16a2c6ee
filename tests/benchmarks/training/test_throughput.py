"""What the measurement of throughput finds on one rank; with two, tests/acceptance/test_acceptance_training.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from device_parts import device_with
from verdicts import world_of

from pytest_gpucluster.benchmarks.training import step, throughput_setup
from pytest_gpucluster.benchmarks.training import throughput as module
from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.step import PARTS, Training, optimizer_step
from pytest_gpucluster.benchmarks.training.throughput import throughput
from pytest_gpucluster.benchmarks.training.throughput_setup import (
    Setup,
    compile_blocks,
    fresh_compiler,
    missing_compiler,
)
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement, WrongResult
from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.judge import judge
from pytest_gpucluster.metrics.measurement import measurement
from pytest_gpucluster.metrics.sampling import Sampling

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)
SAMPLING = Sampling(warmup_seconds=0, window_seconds=0.05, longest_seconds=0.2, tolerance_ratio=3)


def setup(**more):
    given = {"strategy": "ddp", "batch": 2, "compiled": False, "recompute": False, "workers": 0, "prefetch": 1}
    return Setup(geometry=GEOMETRY, **given | more)


def stepping(**parts):
    """Let each step have these parts."""
    return patch.object(step, "PARTS", replace(PARTS, **parts))


def alone(*, sampling=SAMPLING, progress=None, **more):
    return throughput(None, CPU, setup(**more), sampling=sampling, progress=progress)


def test_a_rank_alone_is_measured_without_a_group():
    found = alone()
    assert found.tokens_per_second.samples == tuple(32 / seconds for seconds in found.step_seconds.samples)
    assert found.tokens_per_second.median == pytest.approx(32 / found.step_seconds.median, rel=0.5)
    assert found.step_seconds.median <= found.p99_seconds <= max(found.step_seconds.samples)
    assert found.parts["exposed_communication"] == 0
    assert min(found.parts.values()) >= 0
    assert (found.compiled, found.notes) == (False, ())


def test_one_rank_of_fsdp_can_be_measured(group):
    throughput(group, CPU, setup(strategy="fsdp", recompute=True), sampling=SAMPLING)


def test_progress_is_reported_until_the_last_step_that_counts():
    reports = []
    alone(progress=lambda step, of, **figures: reports.append((step, of, sorted(figures))))
    assert reports[-1][0] == reports[-1][1]
    assert {tuple(names) for _, _, names in reports} == {("loss", "tokens_per_second")}


def test_a_setup_without_a_compiler_runs_eager_and_says_so(monkeypatch):
    monkeypatch.setattr(throughput_setup, "missing_compiler", lambda device: "no g++")
    found = alone(compiled=True)
    assert (found.compiled, found.notes) == (False, ("no compiler, ran eager: no g++",))


def test_no_flash_attention_is_noted(monkeypatch):
    monkeypatch.setattr(module, "missing_flash_attention", lambda device, geometry: "no kernel")
    assert alone().notes == ("no flash attention: no kernel",)


def test_a_clock_that_stands_still_measures_nothing():
    with pytest.raises(InconclusiveMeasurement, match=r"the clock.* 0 did not advance"), device_with(clock=ManualClock):
        alone()


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda model, optimizer: None, "it has not learned anything"),
        (lambda model, optimizer: [optimizer.step(), optimizer.step()], "and its optimizer"),
    ],
    ids=["none", "twice"],
)
def test_an_optimizer_that_does_something_else_is_seen(update, message):
    with pytest.raises(WrongResult, match=f"rank 0 has .*{message}"), stepping(update=update):
        alone()


def test_a_norm_that_is_not_finite_is_seen_although_every_loss_is():
    def clip(model):
        return PARTS.clip(model) * float("inf")

    with pytest.raises(WrongResult, match=r"rank 0 .*gradients' norm.* 1"), stepping(clip=clip):
        alone()


def test_weights_that_stop_moving_are_named():
    def update(model, optimizer):
        for name, weight in model.named_parameters():
            weight.grad = None if "norm" in name else weight.grad
        optimizer_step(model, optimizer)

    with (
        pytest.raises(WrongResult, match=r"3 of 9 .* not changed in \d+ steps: blocks\.0\.attention_norm\.weight, "),
        stepping(update=update),
    ):
        alone()


def test_too_little_memory_is_reported_before_anything_is_made(monkeypatch):
    monkeypatch.setattr("pytest_gpucluster.device.backends.Cpu.free_bytes", lambda device: 1000)
    monkeypatch.setattr(module, "make_decoder", None)
    with pytest.raises(EnvironmentBroken, match=r"rank 0: training 0\.06163M parameters by.* 1 ranks with 32 tokens"):
        alone()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "2 GiB. The estimate was 0.00138 GB"),
        (
            torch._dynamo.exc.InternalTorchDynamoError("cannot\nmore"),
            "blocks cannot be compiled: InternalTorchDynamoError: cannot. Check",
        ),
    ],
    ids=["memory", "compiler"],
)
def test_what_the_step_runs_into_is_the_environment_s_fault_and_holds_no_model(error, message):
    alive = []

    def loss(logits, targets):
        alive.append(weakref.ref(logits))
        raise error

    with pytest.raises(EnvironmentBroken, match=message) as caught, stepping(loss=loss):
        alone()
    assert "by --gpucluster-workload" in str(caught.value)
    assert caught.value.__suppress_context__
    assert [ref() for ref in alive] == [None]


def test_any_other_error_stays_what_it_is():
    def loss(logits, targets):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"), stepping(loss=loss):
        alone()


def test_ranks_that_would_train_something_else_are_reported_on_all_of_them(monkeypatch):
    monkeypatch.setattr(module.Ranks, "name", lambda ranks, index: f"rank {index}")
    monkeypatch.setattr(module.Ranks, "gather_objects", lambda ranks, mine: [mine, ("training by fsdp", mine[1])])
    with pytest.raises(EnvironmentBroken, match=r"not measure the same: rank 1 training by fsdp, rank 0 .* by ddp "):
        alone()


def test_without_memory_for_whole_weights_the_exchange_is_not_known(monkeypatch):
    monkeypatch.setattr("pytest_gpucluster.device.backends.Cpu.free_bytes", lambda device: 1000)
    monkeypatch.setattr(module, "time_parts", lambda *given: {"forward": 1.0})
    steps = SimpleNamespace(
        _ranks=SimpleNamespace(count=2, gather=lambda numbers: [numbers, numbers]),
        _setup=setup(strategy="fsdp"),
        _device=torch.device("cpu"),
        _notes=[],
        **dict.fromkeys(("_training", "_batches", "_clock")),
    )
    assert module._Steps._parts(steps) == {"forward": 1.0}
    assert re.search(r"exposed_communication .*without exchange", steps._notes[0])


@pytest.mark.parametrize("fails", [False, True], ids=["passed", "failed"])
def test_nothing_of_the_training_stays_alive(group, fails):
    alive = []

    def make(*arguments, **more):
        model = make_decoder(*arguments, **more)
        alive.append(weakref.ref(model))
        return model

    def update(model, optimizer):
        if not fails:
            optimizer.step()

    kept = None
    try:
        with patch.object(module, "make_decoder", make), stepping(update=update):
            throughput(group, CPU, setup(workers=1), sampling=SAMPLING)
    except WrongResult as error:
        kept = error
    assert (kept is not None) == fails
    assert [ref() for ref in alive] == [None]


def test_a_rate_above_the_data_sheet_s_peak_is_too_fast_to_be_true():
    def verdict(tflops):
        found = measurement("training.tflops", tflops, unit="TFLOPS", record_only=True)
        return judge(
            {0: [found]}, world=world_of(1), node_of={0: 0}, limits=loader.load(), sku="H100 SXM", gpu_name=None
        )

    assert verdict(988).outcome == "passed"
    assert verdict(990).outcome == "error"
    assert re.search(r"too fast", verdict(990).message)


def test_others_can_be_waited_for_after_the_first_step_and_parts_can_be_left_out():
    seen, steps = [], []

    def update(model, optimizer):
        optimizer_step(model, optimizer)
        steps.append(1)

    watch = {"in_parts": False, "ready": lambda: seen.append(len(steps))}
    with stepping(update=update):
        found = throughput(None, CPU, setup(), sampling=SAMPLING, **watch)
    assert seen == [1], "after what compiles, and before what warms up"
    assert found.parts == {}


BILLION = Geometry(layers=16, width=2048, heads=16, vocab=50304, sequence=2048)
SEVEN = Geometry(layers=28, width=3584, heads=28, key_heads=4, inner=18944, vocab=152064, sequence=4096)


def large_setup(geometry=BILLION, **more):
    given = {"strategy": "ddp", "batch": 4, "compiled": False, "recompute": False, "workers": 0, "prefetch": 1}
    return Setup(geometry=geometry, **given | more)


def gigabytes(ranks, **more):
    return large_setup(**more).needed_bytes(ranks) / 1e9


def test_the_large_model_fits_on_a_gpu_of_48_gb_and_the_7b_one_on_four_of_80():
    assert gigabytes(1) < gigabytes(8) < 48
    shared = {"geometry": SEVEN, "strategy": "fsdp", "batch": 2, "recompute": True}
    assert gigabytes(4, **shared) < 80 < gigabytes(2, **shared)
    # 16 bytes for each weight and nothing else would be 122 GB.
    assert gigabytes(1, **shared) > 122


def test_more_ranks_take_less_with_fsdp_and_recomputing_takes_less():
    assert gigabytes(2, strategy="fsdp") < gigabytes(1, strategy="fsdp")
    assert gigabytes(1, recompute=True) < gigabytes(1)


TWO_BLOCKS = Geometry(layers=2, width=64, heads=2, vocab=64, sequence=16)


@pytest.mark.extended
def test_a_compiler_that_is_not_there_is_reported(tmp_path):
    # In a process of its own: torch remembers whether it has found one.
    code = (
        "import torch; from pytest_gpucluster.benchmarks.training.throughput_setup import missing_compiler; "
        "print(missing_compiler(torch.device('cpu')))"
    )
    without = {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    how = {"env": {**os.environ, **without}, "capture_output": True, "text": True, "check": True, "timeout": 240}
    child = subprocess.run([sys.executable, "-c", code], **how)
    assert re.fullmatch(r"\w+: (InvalidCxxCompiler: )?No working C\+\+ compiler found .*\n", child.stdout), child.stdout


def test_a_compiler_that_compiles_wrongly_is_reported(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda given: function(given) + 1)
    assert re.search(r"compiled code.*: \[2\.0, 5\.0", missing_compiler(CPU))


def test_what_triton_s_import_raises_is_reported(monkeypatch):
    def compile(function, **options):
        raise ImportError("cannot import name 'x' from 'triton'\nmore")

    monkeypatch.setattr(torch, "compile", compile)
    assert missing_compiler(CPU) == "ImportError: cannot import name 'x' from 'triton'"


def test_a_bug_is_no_missing_compiler(monkeypatch):
    def compile(function, **options):
        raise KeyError("x")

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(KeyError):
        missing_compiler(CPU)


def blocks_train_alike():
    """Compiled and recomputed blocks take the steps of others; they share what was compiled once."""
    data = PackedTokens(rows=4, sequence=TWO_BLOCKS.sequence, vocab=TWO_BLOCKS.vocab, seed=0)
    rows = torch.stack([data[row] for row in range(4)])

    def losses(compiled):
        model = make_decoder(TWO_BLOCKS, CPU, seed=0)
        model.recompute()
        if compiled:
            compile_blocks(model)
        training = Training(model, CPU, precision="fp32")
        return [float(training.step([rows]).losses) for _ in range(3)]

    graphs = torch._dynamo.utils.counters["stats"]
    with fresh_compiler():
        before = graphs["unique_graphs"]
        assert losses(compiled=True) == pytest.approx(losses(compiled=False), rel=1e-5)
        assert graphs["unique_graphs"] - before == 1


def test_compiled_and_recomputed_blocks_train_as_others_do(monkeypatch):
    """With all of the compiler but its last part, which writes C++."""
    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile(self, backend="eager", **how))
    blocks_train_alike()


@pytest.mark.extended
def test_blocks_compiled_by_g_plus_plus_train_as_others_do():
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler here")
    assert missing_compiler(CPU) == ""
    blocks_train_alike()


def test_what_is_to_be_compiled_again_is_not_chosen_by_measuring():
    inductor = pytest.importorskip("torch._inductor.config")
    seen = []
    for repeatable in (False, True):
        with fresh_compiler(repeatable=repeatable):
            seen.append(inductor.deterministic)
    assert [*seen, inductor.deterministic] == [False, True, False]
