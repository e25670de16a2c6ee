"""The criteria training.step, training.throughput, ddp, fsdp and failure_propagation themselves, run by torchrun over
gloo: what they accept, and how each fault fails them."""

import importlib.util
from types import SimpleNamespace

import planted_runs
import pytest
from each import of_each
from planted.planted_clock import REGION_SECONDS, SLOW_SECONDS
from planted_runs import assert_failed
from programs import require_program

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judge import loader
from pytest_gpucluster.metrics import datasheets

TOKENS = 128
"""Of a rank in a step."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return planted_runs.two_ranks(tmp_path_factory)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return planted_runs.four_ranks(tmp_path_factory)


def result(run, fault, case="ddp-contract"):
    return planted_runs.result(run, f"training::test_throughput[{case}]", fault)


def of_metric(found, metric):
    [one] = [one for one in found.measurements if one.metric == metric]
    return one


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_right_training_passes_and_tells_where_its_time_goes(run, strategy):
    found = result(run, "none", f"{strategy}-contract")
    assert (found.outcome, found.culprits) == ("passed", ())
    rate = of_metric(found, "training.tokens_per_second")
    assert (rate.status, rate.labels["compiled"]) == ("passed", "off")
    assert rate.values == dict.fromkeys((0, 1), pytest.approx(TOKENS / REGION_SECONDS))
    assert (rate.labels["strategy"], rate.labels["tokens_per_step"]) == (strategy, "256")
    for metric in ("training.step_time", "training.step_time_p99"):
        assert of_metric(found, metric).value == pytest.approx(1000 * REGION_SECONDS)
    parts = {one.labels["part"]: one.status for one in found.measurements if one.metric == "training.parts"}
    assert parts == dict.fromkeys(
        ("data_wait", "forward", "backward", "optimizer", "exposed_communication"), "recorded"
    )
    # There is no peak of a CPU: then nothing is said of MFU, and no limit is missed for it.
    assert not [one for one in found.measurements if one.metric in ("training.mfu", "training.tflops")]


def test_the_report_states_what_was_trained_and_what_the_figures_mean(run):
    told = dict(map(tuple, result(run, "none").properties))
    for field in ("0.1396M", "2 layers", "64 wide", "vocabulary 256", "by ddp", "4 x 32 tokens", "0 workers"):
        assert field in told["training.model"]
    assert int(told["training.flops_per_token"]) > 6 * 139_600 / 2


TWO, DDP, STEP, FSDP = (0, 1), "ddp::test_ddp", "ddp::test_training_step", "fsdp::test_fsdp"
RATE = {strategy: f"training::test_throughput[{strategy}-contract]" for strategy in ("ddp", "fsdp")}
JOB = "failure_propagation::test_failure_propagation"
DOWN, DIED = "1 of 15 weight tensors", "has died (exit)"
HANGING = ("has not ended", "rank 0, last seen at step-1 (pid ", "the launcher (pid ")
REJECTED = [
    *((rate, "nan", (1,), ("rank 1", "nan", "step 1,")) for rate in RATE.values()),
    *((rate, "frozen", TWO, (DOWN,)) for rate in RATE.values()),
    (RATE["ddp"], "idle", TWO, ("not learned anything",)),
    (RATE["ddp"], "skips", TWO, ("training steps, and its optimizer",)),
    (RATE["ddp"], "nosync", TWO, ("2 kinds on 2 ranks",)),
    (RATE["ddp"], "half", (1,), ("rank 1", "64 tokens", "4 x 32")),
    (DDP, "nosync", TWO, ("in step 1", "2 kinds on 2 ranks")),
    (DDP, "samedata", (1,), ("rank 1", "other rows in step 1", "those of rank 0")),
    (DDP, "bit", (1,), ("rank 1", "in step 1", "repeats the optimizer's step")),
    *((test, "nan", (1,), ("rank 1", "a loss of nan in step 1", "before any exchange")) for test in (DDP, FSDP)),
    *((test, "inf", (1,), ("rank 1", "gradients that are not finite in step 1")) for test in (DDP, FSDP)),
    (DDP, "sampler", (1,), ("rank 1", "epoch 0", "num_replicas, rank, seed")),
    (DDP, "epoch", TWO, ("of epoch 1, and its share",)),
    (DDP, "frozen", TWO, (DOWN, "in 4 steps in fp32: blocks.1.down.weight")),
    (DDP, "start", TWO, ("before the first step", "2 kinds on 2 ranks")),
    (STEP, "nan", (1,), ("cpu in fp32, step 1", "is nan")),
    (STEP, "frozen", TWO, (DOWN, "in 4 steps: blocks.1.down.weight")),
    (FSDP, "nosync", TWO, ("15 of 15 weight tensors", "2 steps in fp32: embedding.weight")),
    (FSDP, "block", TWO, ("1 of 3 modules", "fully_shard", "blocks.1.")),
    (FSDP, "weight", TWO, ("(64, 192) of blocks.0.down.weight", "1/2 is (32, 192)")),
    (FSDP, "samedata", (1,), ("rank 1", "other rows in step 1", "those of rank 0")),
    (FSDP, "frozen", TWO, (DOWN, "2 steps in fp32: blocks.1.down.weight")),
    (FSDP, "start", TWO, ("before the first step",)),
    (FSDP, "bit", (3,), ("rank 3", "weights or moments", "in step 1", "repeats the optimizer's step")),
    (FSDP, "replay", (3,), ("rank 3", "weights or moments", "after step 1", "the replay")),
    (FSDP, "between", (3,), ("rank 3", "weights or moments", "in step 2", "the step before")),
    (JOB, "hidden", (0,), (DIED, "exit code 0")),
    (JOB, "unnamed", (0,), (DIED, "names no rank", "rank 1", "exit code 43")),
    *((JOB, job, (0,), (DIED, "1 s later", *HANGING)) for job in ("stubborn", "unwatched")),
    (JOB, "leaves", (0,), (DIED, "launcher has ended", "0.5 s later", "this is left: rank 0, last seen at step-1")),
]
"""Test, fault, the ranks at fault, and what stands in the text. Rank 3 is one of four."""


@of_each("case", REJECTED)
def test_each_fault_rejects_and_names_the_ranks_at_fault(run, of_four, case):
    test, fault, culprits, fields = case
    of = of_four if culprits == (3,) else run
    assert_failed(planted_runs.result(of, test, fault), culprits, *fields)


def test_a_slow_rank_misses_the_limit_and_the_parts_tell_which_one_it_is(run):
    found = result(run, "slow")
    assert (found.outcome, found.culprits) == ("failed", (0, 1))
    rate = of_metric(found, "training.tokens_per_second")
    assert rate.status == "failed"
    # All ranks are as slow as the slow one, which is what a training feels.
    assert rate.values == dict.fromkeys((0, 1), pytest.approx(TOKENS / SLOW_SECONDS, rel=0.01))
    parts = {one.labels["part"]: one.values for one in found.measurements if one.metric == "training.parts"}
    region, slow = 1000 * REGION_SECONDS, 1000 * SLOW_SECONDS
    assert parts["data_wait"] == pytest.approx({0: region, 1: region + slow})
    # Forward and backward are two regions, and one without exchange.
    assert parts["exposed_communication"] == pytest.approx({0: region + slow, 1: region})


def test_without_a_compiler_on_one_rank_all_run_eager_and_the_report_says_so(run):
    found = result(run, "nocompiler", "fsdp-large")
    assert found.outcome == "passed"
    assert of_metric(found, "training.tokens_per_second").labels["compiled"] == "no"
    note = dict(map(tuple, found.properties))["training.note.1"]
    assert [field for field in ("no compiler", "ran eager", "rank 1") if field not in note] == []


def check_compiled(run):
    found = result(run, "compiled", "fsdp-large")
    assert found.outcome == "passed", found.text
    assert of_metric(found, "training.tokens_per_second").labels["compiled"] == "yes"


def test_blocks_that_are_recomputed_compiled_and_sharded_train(run):
    check_compiled(run)


@pytest.mark.extended
def test_blocks_that_a_compiler_has_made_train_too(tmp_path):
    require_program("g++")
    environment = {"COMPILER": "yes"}
    check_compiled(planted_runs.session(tmp_path, ("training",), "-k=compiled", environment=environment))


def test_a_model_that_fits_on_no_such_device_is_not_run_and_says_why(run):
    found = result(run, "huge")
    assert found.outcome == "skipped"
    for field in ("GB on each of 2 ranks", "more GPUs", "--gpucluster-workload training.throughput"):
        assert field in found.message


@pytest.fixture(scope="module")
def criterion(pytestconfig):
    """The module of the criterion, whose tests are not run here."""
    for marker in ("training", "criterion", "deadline"):  # the plugin, which knows them, is off here
        pytestconfig.addinivalue_line("markers", f"{marker}: of the plugin")
    path = planted_runs.ACCEPTANCE / "test_training.py"
    spec = importlib.util.spec_from_file_location("criterion_of_training", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_gpu_without_a_peak_is_an_error_where_a_limit_is_set_on_mfu(criterion):
    def peak(sku, *, known, model="large"):
        gpu = SimpleNamespace(name="a GPU", sku=sku, peaks=datasheets.SKUS[sku].peaks if known else None)
        where = SimpleNamespace(world_size=2, nnodes=1)
        return criterion.peak_flops(gpu, where, loader.load(), {"model": model})

    assert peak("H100 SXM", known=True) == 989e12
    assert peak("cpu-rehearsal", known=False) is None
    assert peak("H100 SXM", known=False, model="contract") is None
    with pytest.raises(MeasurementError, match=r"training\.mfu .* a GPU \(H100 SXM\)"):
        peak("H100 SXM", known=False)
    with pytest.raises(MeasurementError, match="an unknown SKU"):
        criterion.peak_flops(SimpleNamespace(name="a GPU", sku=None, peaks=None), None, loader.load(), {})


# ---- parity of ways to train in parallel -----------------------------------------------------------------------------

PARITY = {f"{name}{kind}_error" for name in ("", "bf16_") for kind in ("loss", "gradient")}


def test_a_right_training_of_replicas_passes_beside_the_wrong_ones(run):
    found = planted_runs.result(run, DDP, "none")
    assert (found.outcome, found.culprits) == ("passed", ())
    assert {one.metric for one in found.measurements} == {f"ddp.{name}" for name in PARITY}
    for one in found.measurements:
        assert (one.status, len(one.values)) == ("passed", 2)
        assert one.labels == {"global_batch": "8", "steps": "4"}
    assert planted_runs.result(run, STEP, "none").outcome == "passed"


def test_a_right_sharded_training_passes(run):
    found = planted_runs.result(run, FSDP, "none")
    assert (found.outcome, found.culprits) == ("passed", ())
    metrics = {f"fsdp.{name}" for name in (*PARITY, "share")}
    assert {one.metric for one in found.measurements} == metrics
    assert {(one.status, len(one.values)) for one in found.measurements} == {("passed", 2)}


@of_each(
    "case",
    [
        (DDP, "scaled", {f"ddp.{name}" for name in PARITY}),
        (FSDP, "scaled", {f"fsdp.{name}" for name in PARITY}),
        (FSDP, "sum", {"fsdp.gradient_error", "fsdp.bf16_gradient_error"}),
        (FSDP, "moments", {"fsdp.share"}),
    ],
)
def test_what_no_rank_can_see_alone_misses_the_limits(run, case):
    test, fault, missed = case
    found = planted_runs.result(run, test, fault)
    assert found.outcome == "failed"
    assert {one.metric for one in found.measurements if one.status == "failed"} == missed
    if test == DDP:
        assert all(one.value == pytest.approx(1.0, rel=0.02) for one in found.measurements)


def test_a_loss_that_is_off_on_one_rank_is_found_on_that_rank(run):
    found = planted_runs.result(run, DDP, "scaledone")
    assert (found.outcome, found.culprits) == ("failed", (1,))
    assert found.message.startswith("ddp.gradient_error 0.001")
    assert "on rank 1 (node-a)" in found.message
    for metric in ("ddp.loss_error", "ddp.gradient_error"):
        values = of_metric(found, metric).values
        assert values[0] < 1e-5 < values[1]


# ---- jobs of which a rank dies. With one rank on a node they are not run: test_acceptance_scaling.py


def test_a_job_that_ends_and_names_the_rank_is_accepted_with_the_time_it_took(run):
    found = planted_runs.result(run, JOB, "none")
    assert (found.outcome, found.culprits) == ("passed", ())
    [one] = found.measurements
    assert (one.metric, one.status) == ("failure_propagation.seconds", "passed")
    assert one.labels == {"death": "exit", "ranks": "2"}
    assert list(one.values) == [0], "the first rank of the node speaks for it"
    assert one.value > 0


def test_a_job_that_does_not_come_as_far_is_an_error_with_what_it_said_and_all_outputs_are_kept(run):
    found = planted_runs.result(run, JOB, "silent")
    assert found.outcome == "error"
    for field in ("ended with 1 (rank 0: not started, rank 1: not started)", "this_module_is_not_there"):
        assert field in found.text
    outputs = (run.directory / "reports" / "latest" / "artifacts").glob("*/node-0-exit/output.txt")
    kept = {path.parts[-3]: path.read_text() for path in outputs}
    assert len(kept) == 7
    assert any("exitcode  : 43" in text for name, text in kept.items() if name.endswith("none"))


def test_the_run_goes_on_after_each_fault_and_ends_in_a_rejection(run):
    """For the tests of all criteria that share the run."""
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []
    assert planted_runs.others(run, "full", "unshared", "huge", "silent") == []
