"""The LoRA criteria themselves, run by torchrun over gloo: what they accept, and which measurement each fault fails."""

import csv

import planted_runs
import pytest
from each import of_each
from planted_runs import assert_failed

RIGHT = "none"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return planted_runs.fine_tuning(tmp_path_factory)


def result(run, fault, test="test_lora_tiny"):
    return planted_runs.result(run, f"qwen2_lora::{test}", fault)


def of_metric(found, metric):
    [one] = [one for one in found.measurements if one.metric == metric]
    return one


def failing(found):
    return {one.metric for one in found.measurements if one.status == "failed"}


CONDITIONS = {
    "lora.finite_steps",
    "lora.loss_error",
    "lora.gradient_error",
    "lora.weight_error",
    "lora.final_loss",
    "lora.held_out_ratio",
    "lora.moved_adapters",
    "lora.unchanged_base",
    "lora.replayed_steps",
    "lora.resume_error",
    "lora.reload_error",
}


def test_a_right_training_passes_beside_the_wrong_ones_and_each_condition_is_a_measurement(run):
    found = result(run, RIGHT)
    assert (found.outcome, found.culprits) == ("passed", ())
    assert {one.metric for one in found.measurements if one.status == "passed"} == CONDITIONS
    recorded = {one.metric for one in found.measurements if one.status == "recorded"}
    assert recorded >= {"lora.held_out_loss", "lora.tokens_per_second", "lora.calls.well_formed"}
    assert all(len(one.values) == 2 for one in found.measurements)


BOTH, SECOND = (0, 1), (1,)
FAULTS = [
    ("nosync", BOTH, {"gradient_error"}),
    ("samedata", SECOND, {"loss_error", "gradient_error"}),
    ("scaled", BOTH, {"gradient_error"}),
    ("doubled", SECOND, {"gradient_error"}),
    ("half", SECOND, {"loss_error", "gradient_error"}),
    ("rate", BOTH, {"weight_error"}),
    ("slowly", SECOND, {"weight_error"}),
    ("never", SECOND, {"weight_error", "moved_adapters"}),
    ("frozen", BOTH, {"gradient_error", "moved_adapters"}),
    ("inf", SECOND, {"finite_steps"}),
    ("later", SECOND, {"finite_steps"}),
    ("late", SECOND, {"finite_steps"}),
    ("bit", SECOND, {"replayed_steps"}),
    ("base", SECOND, {"unchanged_base"}),
]
"""Fault, the ranks at fault, and the metrics that miss their limits."""


@of_each("case", FAULTS)
def test_each_fault_fails_by_the_measurement_that_is_there_for_it_and_names_the_rank(run, case):
    fault, culprits, missed = case
    found = result(run, fault)
    assert (found.outcome, tuple(found.culprits)) == ("failed", culprits), found.text
    missing = {f"lora.{metric}" for metric in missed}
    assert failing(found) >= missing
    if culprits == SECOND:
        assert failing(found) == missing
        assert " on rank 1 (" in found.message
        assert "rank 0" not in found.message


@pytest.mark.parametrize("fault", ["bit", "base"])
def test_a_bit_that_changes_on_one_rank_is_found_on_that_rank(run, fault):
    metric = {"bit": "lora.replayed_steps", "base": "lora.unchanged_base"}[fault]
    found = of_metric(result(run, fault), metric)
    assert found.worst_rank == 1
    assert found.values[1] < found.values[0]


@pytest.mark.parametrize("fault", ["nan", "late", "later"])
def test_what_is_not_finite_ends_the_training_of_all_ranks(run, fault):
    found = result(run, fault)
    assert found.outcome == "failed"
    assert "lora.finite_steps" in failing(found)
    assert "lora.final_loss" not in {one.metric for one in found.measurements}


def test_nan_is_found_on_the_rank_that_it_comes_from(run):
    found = of_metric(result(run, "nan"), "lora.finite_steps")
    assert found.worst_rank == 1
    assert found.values[0] > found.values[1]


def test_the_recipe_of_the_contract_is_judged_by_the_loss_of_all_tokens_alone(run):
    right, idle = (result(run, fault) for fault in ("contract", "idle"))
    assert (right.outcome, idle.outcome) == ("passed", "failed")
    for found, status in ((right, "passed"), (idle, "failed")):
        assert of_metric(found, "lora.all_token_loss").status == status
        assert {one.labels["recipe"] for one in found.measurements if "recipe" in one.labels} == {"contract"}
        assert "lora.final_loss" not in {one.metric for one in found.measurements}
    packed = result(run, RIGHT)
    assert of_metric(packed, "lora.all_token_loss").status == "recorded"
    assert of_metric(packed, "lora.all_token_loss").labels["recipe"] == "packed"


def test_a_truncated_checkpoint_rejects_and_names_the_file(run):
    assert_failed(result(run, "truncated"), (0, 1), "__1_0.distcp is truncated")


def test_ranks_that_start_with_other_weights_are_found_before_they_are_sharded(run):
    assert_failed(result(run, "other"), (0, 1), "before the first step", "rank 1")


def test_a_checkpoint_of_a_longer_training_is_refused(run):
    found = result(run, "shortened")
    assert found.outcome == "error"
    assert "step-00000008 is of step 8, and this training ends at step 5" in found.text


def test_an_interrupted_training_goes_on_from_its_checkpoint_and_reaches_the_same_losses(run):
    assert result(run, "interrupted").outcome == "failed"
    steps = [row["step"] for row in curve(run, "interrupted")]
    assert steps == [str(step) for step in range(10)], "what the killed training has written until then"
    found = result(run, "resumed")
    assert (found.outcome, found.culprits) == ("passed", ())
    assert "resumed from step-00000008" in dict(found.properties)["lora.notes"]
    whole, resumed = (curve(run, name) for name in (RIGHT, "resumed"))
    assert [row["step"] for row in resumed] == [str(step) for step in range(13)]
    assert resumed == whole


def test_groups_that_train_at_once_are_compared(run):
    found = result(run, "groups")
    assert (found.outcome, found.culprits) == ("passed", ())
    error = of_metric(found, "lora.group_error")
    assert (error.status, error.values) == ("passed", {0: 0.0, 1: 0.0})
    assert (error.labels["groups"], error.labels["group_ranks"]) == ("2", "1")


def test_a_training_that_crosses_no_link_says_so_and_does_not_stand_for_qwen2_lora(run):
    assert "cross no link" in dict(result(run, "groups").properties)["lora.notes"]
    assert "cross no link" not in dict(result(run, RIGHT).properties)["lora.notes"]
    found = result(run, "nolink", "test_qwen2_lora")
    assert (found.outcome, found.measurements, found.criterion) == ("skipped", (), "qwen2_lora")
    assert "groups of 1 ranks are trained, which cross no link" in found.message


def test_a_group_that_learns_otherwise_is_found(run):
    found = result(run, "drift")
    assert found.outcome == "failed"
    error = of_metric(found, "lora.group_error")
    assert (error.status, error.worst_rank, error.values[0]) == ("failed", 1, 0.0)


def test_the_first_steps_alone_are_judged_by_the_reference_curve_of_all_and_without_one_by_nothing(run):
    for fault, status in (("start", "passed"), ("slowstart", "failed")):
        found = result(run, fault)
        assert (found.outcome, of_metric(found, "lora.reference_deviation").status) == (status, status)
        assert len(curve(run, fault)) == 1 + 10
        for metric in ("lora.final_loss", "lora.all_token_loss", "lora.held_out_ratio"):
            assert of_metric(found, metric).status == "recorded"
    found = result(run, "nocurve", "test_qwen2_lora")
    assert (found.outcome, found.measurements, found.criterion) == ("skipped", (), "qwen2_lora")
    assert "9 of 20 steps are judged by a reference curve" in found.message


def test_a_curve_that_leaves_the_band_of_the_reference_curve_fails(run):
    same, other = (of_metric(result(run, fault), "lora.reference_deviation") for fault in ("resumed", "rate"))
    assert (same.status, same.value) == ("passed", 0.0)
    assert (other.status, other.value > 1) == ("failed", True)


@pytest.mark.parametrize(
    ("fault", "fields"), [("foreign", ("of qwen2-7b", "trains qwen2-7b")), ("weights", ("weights is ", "0" * 16))]
)
def test_a_reference_curve_that_cannot_be_compared_is_an_error_before_the_training(run, fault, fields):
    found = result(run, fault)
    assert found.outcome == "error"
    assert "CurveError" in found.message
    assert [field for field in fields if field not in found.text] == []
    assert not found.measurements
    assert not list((run.directory / "reports" / "latest").rglob(f"*test_lora_tiny_{fault}*/curve-*.csv"))


def test_a_model_that_is_given_is_trained_under_its_own_name_and_stands_for_no_criterion(run):
    trained = result(run, "model", "test_lora_of_model")
    assert (trained.outcome, trained.criterion) == ("passed", None)
    assert {one.labels["model"] for one in trained.measurements} == {"small-qwen2"}
    statuses = {one.metric: one.status for one in trained.measurements}
    unlimited = {"lora.final_loss", "lora.held_out_ratio"}
    assert {metric for metric, status in statuses.items() if status == "passed"} == CONDITIONS - unlimited
    assert {statuses[metric] for metric in unlimited} == {"recorded"}
    assert "lora.reference_deviation" not in statuses, "the curve is of a model that another test trains"
    for criterion in ("test_qwen2_lora", "test_qwen2_lora_throughput"):
        assert result(run, "model", criterion).outcome == "skipped"


def test_too_little_memory_for_the_throughput_is_told_with_its_figures_and_nothing_is_run(run):
    found = result(run, "nomemory", "test_qwen2_lora_throughput")
    assert (found.outcome, found.measurements) == ("skipped", ())
    for field in ("qwen2-7b-random on 2 ranks", "2 blocks of 64 tokens", "needs about 17.5 GB", "1 GB free"):
        assert field in found.message


def test_without_the_extra_nothing_is_run_and_the_way_to_install_it_is_told(run):
    found = result(run, "noextra")
    assert (found.outcome, found.measurements) == ("skipped", ())
    assert found.message.startswith("peft not installed")
    assert "pip install -c constraints.txt -e '.[lora]'" in found.message


def curve(run, fault):
    [path] = (run.directory / "reports" / "latest").rglob(f"*test_lora_tiny_{fault}*/curve-group-0.csv")
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def test_the_run_goes_on_after_each_fault_and_ends_in_a_rejection(run):
    """For the tests of vision as well."""
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []
    listed = (run.directory / "reports" / "latest" / "exclude.txt").read_text(encoding="utf-8")
    assert "# node-a: failed test_" in listed
    assert "\n[slurm]\nnode-a\n" in listed
    assert (
        planted_runs.others(
            run, "model", "noextra", "nomemory", "nolink", "nocurve", "foreign", "weights", "shortened", "death", "shm"
        )
        == []
    )
    assert result(run, "model", "test_lora_of_model").outcome == "passed"
