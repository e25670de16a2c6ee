"""The criteria checkpoint and checkpoint.bandwidth themselves, run by torchrun over gloo: what they accept, and how
each fault fails them."""

import planted_runs
import pytest
from each import of_each
from planted_runs import assert_failed

STATE, BANDWIDTH = "test_checkpoint", "test_checkpoint_bandwidth"
AFTER = {"two_ranks": ("2", "1", "no"), "four_ranks": ("4", "2", "yes")}
"""Session -> its ranks, half of them, and whether they read what another host has written."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return planted_runs.two_ranks(tmp_path_factory)


@pytest.fixture(params=AFTER)
def right(request, tmp_path_factory):
    return getattr(planted_runs, request.param)(tmp_path_factory), *AFTER[request.param]


def result(run, fault, test=STATE):
    return planted_runs.result(run, f"checkpoint::{test}", fault)


def test_a_right_checkpoint_passes_and_leaves_nothing_in_the_folder(right):
    run, ranks, fewer, _ = right
    found = result(run, "none")
    assert (found.outcome, found.culprits) == ("passed", ())
    assert [(one.metric, one.labels["ranks"], one.labels.get("sharded")) for one in found.measurements] == [
        ("checkpoint.resume_error", ranks, None),
        ("checkpoint.reshard_error", ranks, "no"),
        ("checkpoint.reshard_error", fewer, "yes"),
    ]
    assert {(one.status, len(one.values)) for one in found.measurements} == {("passed", int(ranks))}
    assert found.measurements[0].value == 0
    [folder] = (run.directory / "reports" / "latest").rglob("test_checkpoint.py_test_checkpoint_none*")
    assert list(folder.iterdir()) == []


def test_the_bandwidth_of_every_rank_is_measured(right):
    run, ranks, _, other_host = right
    found = result(run, "none", BANDWIDTH)
    assert found.outcome == "passed"
    values = {one.metric: one for one in found.measurements}
    assert set(values) == {f"checkpoint.{name}" for name in ("verified", "write_bandwidth", "read_bandwidth")}
    for one in values.values():
        assert (one.status, len(one.values)) == ("passed", int(ranks))
    assert {len(samples) for samples in values["checkpoint.read_bandwidth"].samples.values()} == {2}
    labels = values["checkpoint.read_bandwidth"].labels
    assert labels["past_the_cache"] in ("O_DIRECT", "posix_fadvise")
    assert labels["other_host"] == other_host
    assert labels["file_bytes"] == str(2**20)


OF_A_FILE = ("rank 0 has read", "rank 1 has written", "pass-0-rank-00001.bin")
REJECTED = [
    (STATE, "truncated", (0, 1), ("step-00000002/__1_0.distcp is truncated: 1000 bytes",)),
    (STATE, "missing", (0, 1), ("step-00000002/__1_0.distcp is missing",)),
    (STATE, "changed", (0, 1), ("step-00000002/__1_0.distcp is changed",)),
    (STATE, "moments", (0, 1), ("step-00000002", "same ranks", "model and optimizer", "fingerprint")),
    (STATE, "rows", (0, 1), ("step-00000002", "same ranks", "{'epoch': 0, 'rows_consumed': 0}, and {'epoch': 0, ")),
    (STATE, "lenient", (0, 1), ("0.distcp is truncated", "refused")),
    (STATE, "older", (0, 1), ("checkpoint is None, not ",)),
    # A wrong state on some of the fewer ranks is theirs.
    (STATE, "alone", (1,), ("step-00000002", "1 of the ranks", "model and optimizer")),
    (BANDWIDTH, "truncated", (0,), (*OF_A_FILE, "byte 8192 of 1048576")),
    (BANDWIDTH, "changed", (0,), (*OF_A_FILE, "byte 5000")),
]
"""Test, fault, the ranks that have seen it, and what stands in the text."""


@of_each("case", REJECTED)
def test_each_fault_rejects_and_names_the_file(run, case):
    test, fault, culprits, fields = case
    assert_failed(result(run, fault, test), culprits, *fields)


def test_another_learning_rate_after_the_checkpoint_misses_both_limits(run):
    found = result(run, "rate")
    assert found.outcome == "failed"
    assert {one.status for one in found.measurements} == {"failed"}


@of_each(
    "case",
    [
        (STATE, "full", ("rank 1: OSError: [Errno 28]",)),
        (BANDWIDTH, "unshared", ("pass-0-rank-00001.bin", "after 0.5 s")),
    ],
)
def test_a_full_file_system_and_a_file_that_others_do_not_see_are_errors_that_say_where(run, case):
    test, fault, fields = case
    found = result(run, fault, test)
    assert found.outcome == "error"
    assert [field for field in fields if field not in found.text] == []


def test_a_rank_that_writes_slowly_misses_the_limit(run):
    found = result(run, "slow", BANDWIDTH)
    assert (found.outcome, found.culprits) == ("failed", (1,))
    assert found.message.startswith("checkpoint.write_bandwidth 0.0000")
    assert "on rank 1" in found.message
