import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpucluster.agreement.preflight import Expectation
from pytest_gpucluster.config.criteria_file import Manifest
from pytest_gpucluster.journal.records import CollectedTest
from pytest_gpucluster.journal.test_record import TestRecord
from pytest_gpucluster.judge import loader
from pytest_gpucluster.session import run as session_run
from pytest_gpucluster.session.run import Run
from pytest_gpucluster.session.shutdown import decide

A100 = "NVIDIA A100-SXM4-80GB"


def run_on(gpu, *, sku=None, expect=None, allocated=(None, None), overlay=None):
    """Two nodes with four ranks each; nothing of it is started."""
    run = Run.__new__(Run)
    scheduler = SimpleNamespace(name=None, nnodes=allocated[0], gpus_per_node=allocated[1])
    made = {
        "facts": SimpleNamespace(world_size=8, nnodes=2, local_world_size=4, scheduler=scheduler),
        "settings": SimpleNamespace(
            device="cpu" if gpu is None else "cuda",
            sku=sku,
            profile="quick",
            thresholds=overlay,
            require=(),
            data=(),
            expect=None if expect is None else Expectation.parse(expect),
        ),
        "has_joined": False,
        "baseline": None,
        "roll": SimpleNamespace(who={rank: {"gpu": None if gpu is None else {"name": gpu}} for rank in range(4)}),
        "limits": loader.load(loader.shipped_path()),
        "records": {
            "test_a": TestRecord(
                test=CollectedTest.of("test_a", ("a.py", 1, "test_a"), "matmul"),
                outcome="passed",
                measurements=[{"metric": "matmul.bf16.tflops", "status": "passed"}],
            )
        },
        "problems": [],
        "deviations": [],
        "environ": {},
        "manifest": Manifest(node_ids=("test_a",), files=("criteria.txt",)),
        "tests": (),
        "workload_record": None,
        "selection": False,
    }
    for name, value in made.items():
        setattr(run, name, value)
    return run


def test_there_is_room_for_tests_of_the_data_that_were_given():
    run = run_on(None)
    assert (run.room().data, run.room().on_cpu, run_on(A100).room().on_cpu) == (frozenset(), True, False)
    run.settings.data = (SimpleNamespace(key="images"),)
    assert run.room().data == {"images"}


@pytest.mark.parametrize(
    ("expect", "allocated", "room"),
    [
        (None, (None, None), (8, 2, 4)),
        ("4x8", (None, None), (32, 4, 8)),
        (None, (3, 8), (24, 3, 8)),
        (None, (3, None), (12, 3, 4)),
        ("2x8", (3, 4), (16, 2, 8)),
    ],
    ids=["as launched", "as expected", "as allocated", "nodes as allocated", "expected rather than allocated"],
)
def test_what_was_ordered_decides_which_tests_apply(expect, allocated, room):
    found = run_on(A100, expect=expect, allocated=allocated).declared_room()
    assert (found.ranks, found.nodes, found.ranks_per_node) == room


@pytest.mark.parametrize(
    ("gpu", "sku", "known"),
    [
        (A100, None, "A100 80GB"),
        (A100, "H100 SXM", "H100 SXM"),
        ("NVIDIA X1", None, None),
        (A100, "no such SKU", None),
        (None, None, None),
    ],
    ids=["by its name", "by the option", "an unknown GPU", "an unknown SKU", "cpu"],
)
def test_the_data_sheet_is_that_of_the_sku_in_force(gpu, sku, known):
    sheet = run_on(gpu, sku=sku).room().data_sheet()
    assert (None if sheet is None else sheet.name) == known


@pytest.mark.parametrize(
    ("sku", "overlay", "told"),
    [
        ("H100 SXM", Path("mine.yaml"), "; judged as H100 SXM (--gpucluster-sku); limits overlaid by mine.yaml"),
        (None, Path("mine.yaml"), "; limits overlaid by mine.yaml"),
        (None, None, "(nothing was declared by --gpucluster-expect)"),
    ],
    ids=["another SKU and limits", "other limits", "the shipped limits"],
)
def test_a_verdict_tells_by_which_limits_it_was_reached(sku, overlay, told):
    run = run_on(A100, sku=sku, overlay=overlay)
    reached = decide(run, pytest_exit=0, abort=None)
    assert reached.word == "ACCEPTED"
    assert reached.reason.endswith(told)


@pytest.mark.parametrize(("outcome", "end"), [("passed", ("BROKEN", 11)), ("failed", ("REJECTED", 1))])
def test_a_record_that_cannot_be_read_is_never_a_pass_and_does_not_hide_a_failure(outcome, end):
    run = run_on(A100)
    run.records["test_a"].outcome = outcome
    run.records["test_a"].ranks = [{"rank": "not a number"}]
    reached = decide(run, pytest_exit=int(outcome == "failed"), abort=None)
    assert (reached.word, reached.exit) == end


def test_a_job_that_was_requeued_says_which_attempt_it_is():
    run = run_on(A100)
    run.environ = {"SLURM_JOB_ID": "123", "SLURM_RESTART_COUNT": "2"}
    reason = decide(run, pytest_exit=0, abort=None).reason
    assert "attempt 3" in reason
    assert "job 123" in reason


@pytest.mark.parametrize(("seconds", "factor"), [(1 / 20_000, 1.0), (1 / 2500, 4.0), (2.0, 8.0)])
def test_the_slowdown_of_a_rehearsal_is_measured_by_a_clock_in_a_moment(seconds, factor, monkeypatch):
    times = itertools.count(0.0, seconds)
    monkeypatch.setattr(session_run, "_MOST_SLOWDOWN", 8.0)
    monkeypatch.setattr(session_run, "_CALIBRATION_SECONDS", 0.25)
    monkeypatch.setattr(session_run, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert session_run.measure_slowdown() == pytest.approx(factor, rel=0.02)
    assert next(times) <= 0.25 + 3 * seconds
