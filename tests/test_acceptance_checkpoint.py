"""The criteria checkpoint and checkpoint.bandwidth themselves, run by torchrun over gloo: what they accept, and how
each fault fails them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

# The faults that saving, loading and a file system can have, each put in the place of one of the product's own pieces.
# The file that a test is in says which one.
FAULTS = """
import errno, os, shutil
from dataclasses import replace
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from pytest_gpucluster.benchmarks.checkpoint import bandwidth, resume, shared_folder, storage, store
from pytest_gpucluster.errors import WrongResult

ON_RANK_1 = os.environ["RANK"] == "1"
RESUME, STORE, BANDWIDTH = resume.PIECES, store.PIECES, bandwidth.PIECES

def damaging(damage):
    # What a file system has done to the shard of rank 1 by the time that it is read.
    def save(folder, *arguments, **more):
        saved = store.save(folder, *arguments, **more)
        if ON_RANK_1:
            damage(saved.path / "__1_0.distcp")
        return saved
    return replace(RESUME, save=save)

def change(path):
    with path.open("r+b") as stream:
        stream.seek(5000)
        byte = stream.read(1)[0]
        stream.seek(5000)
        stream.write(bytes([byte ^ 1]))

def without_moments(path, model, optimizer, **more):
    told = store.load(path, model, optimizer, **more)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    return told

def other_rows(*arguments, **more):
    return store.load(*arguments, **more) | {"rows_consumed": 0}

def other_rate(path, model, optimizer, **more):
    told = store.load(path, model, optimizer, **more)
    for group in optimizer.param_groups:
        group["lr"] /= 10
    return told

def lenient(*arguments, **more):
    try:
        return store.load(*arguments, **more)
    except WrongResult:
        return {}

def wrong_alone(path, model, optimizer, *, group, **more):
    told = store.load(path, model, optimizer, group=group, **more)
    if group.size() == 1 and ON_RANK_1:
        next(model.parameters()).detach().to_local().zero_()
    return told

class Full(FileSystemWriter):
    def write_data(self, plan, planner):
        if ON_RANK_1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write_data(plan, planner)

def write_to_full(state, folder, group):
    save_state(state, storage_writer=Full(folder), process_group=group)

def write_over_older(state, folder, group):
    if torch.distributed.get_rank(group) == 0:
        for older in folder.parent.glob("step-*"):
            shutil.rmtree(older)
    store.write_shards(state, folder, group)

def writing(spoil, *, on_rank_1=True):
    def write(path, size_bytes, contents):
        seconds = storage.write_file(path, size_bytes, contents)
        if ON_RANK_1 or not on_rank_1:
            seconds = spoil(path) or seconds
        return seconds
    return replace(BANDWIDTH, write=write)

NONE = (RESUME, STORE, BANDWIDTH)
FAULTS = {
    "none": NONE,
    "truncated": (damaging(lambda path: os.truncate(path, 1000)), STORE, writing(lambda path: os.truncate(path, 8192))),
    "missing": (damaging(os.unlink), STORE, BANDWIDTH),
    "changed": (damaging(change), STORE, writing(change)),
    "moments": (replace(RESUME, load=without_moments), STORE, BANDWIDTH),
    "rows": (replace(RESUME, load=other_rows), STORE, BANDWIDTH),
    "rate": (replace(RESUME, load=other_rate), STORE, BANDWIDTH),
    "lenient": (replace(RESUME, load=lenient), STORE, BANDWIDTH),
    "alone": (replace(RESUME, load=wrong_alone), STORE, BANDWIDTH),
    "full": (RESUME, replace(STORE, write=write_to_full), BANDWIDTH),
    "older": (RESUME, replace(STORE, write=write_over_older), BANDWIDTH),
    "slow": (RESUME, STORE, writing(lambda path: 1000.0)),
    "unshared": (RESUME, STORE, writing(lambda path: os.rename(path, path.with_suffix(".elsewhere")))),
}

def pytest_runtest_setup(item):
    shared_folder.SEEN_SECONDS = 0.5
    fault = item.path.stem.removeprefix("test_checkpoint_")
    resume.PIECES, store.PIECES, bandwidth.PIECES = FAULTS[fault]
"""

OF_STORAGE = ("slow", "unshared", "truncated", "changed")
RUNS = {
    "two": (
        2,
        (
            *("none", "truncated", "missing", "changed", "full", "older"),
            *("moments", "rows", "rate", "lenient", "alone", "slow", "unshared"),
        ),
    ),
    "four": (4, ("none",)),
}
BANDWIDTH = "test_checkpoint_bandwidth"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Some runs with all faults, one after the other: after each the ranks go on with a new group."""

    def run(name):
        ranks, faults = RUNS[name]
        text = (ACCEPTANCE / "test_checkpoint.py").read_text(encoding="utf-8")
        files = {f"test_checkpoint_{fault}.py": text for fault in faults} | {
            "workloads.yaml": (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8"),
            "conftest.py": FAULTS,
        }
        # Each fault is shown to the one of the two tests that it is one for.
        skipped = [f"({fault} and bandwidth)" for fault in faults if fault not in ("none", *OF_STORAGE)]
        skipped += [f"({fault} and not bandwidth)" for fault in faults if fault in ("slow", "unshared")]
        selected = f"-k=not ({' or '.join(skipped)})" if skipped else "-k=checkpoint"
        started = torchrun.start(tmp_path_factory.mktemp(name), files, selected, ranks=ranks, deadline=60.0)
        started.deadline = 300.0  # several trainings for each fault
        return started.wait()

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(RUNS, pool.map(run, RUNS), strict=True))


def result(runs, fault, test="test_checkpoint", run=None):
    name = run or next(name for name, (_, faults) in RUNS.items() if fault in faults)
    [found] = [each for each in runs[name].journal.results if each.nodeid == f"test_checkpoint_{fault}.py::{test}"]
    return found


@pytest.mark.parametrize(("run", "ranks", "fewer"), [("two", 2, "1"), ("four", 4, "2")], ids=["2 ranks", "4 ranks"])
def test_a_right_checkpoint_passes(runs, run, ranks, fewer):
    found = result(runs, "none", run=run)
    assert (found.outcome, found.culprits) == ("passed", ())
    assert [(one.metric, one.labels["ranks"], one.labels.get("sharded")) for one in found.measurements] == [
        ("checkpoint.resume_error", str(ranks), None),
        ("checkpoint.reshard_error", str(ranks), "no"),
        ("checkpoint.reshard_error", fewer, "yes"),
    ]
    assert {(one.status, len(one.values)) for one in found.measurements} == {("passed", ranks)}
    assert found.measurements[0].value == 0


@pytest.mark.parametrize("run", ["two", "four"])
def test_the_bandwidth_of_every_rank_is_measured(runs, run):
    found = result(runs, "none", BANDWIDTH, run=run)
    assert found.outcome == "passed"
    ranks = RUNS[run][0]
    values = {one.metric: one for one in found.measurements}
    assert set(values) == {f"checkpoint.{name}" for name in ("verified", "write_bandwidth", "read_bandwidth")}
    for one in values.values():
        assert (one.status, len(one.values)) == ("passed", ranks)
    assert {len(samples) for samples in values["checkpoint.read_bandwidth"].samples.values()} == {2}
    labels = values["checkpoint.read_bandwidth"].labels
    assert labels["past_the_cache"] in ("O_DIRECT", "posix_fadvise")
    assert labels["other_host"] == "no"
    assert labels["file_bytes"] == str(16 * 2**20)


def test_nothing_is_left_in_the_folder(runs):
    [found] = (runs["four"].directory / "reports" / "latest").rglob("test_checkpoint_none.py_test_checkpoint")
    assert list(found.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("truncated", "step-00000002/__1_0.distcp is truncated: 1000 bytes found, "),
        ("missing", "step-00000002/__1_0.distcp is missing; "),
        ("changed", "step-00000002/__1_0.distcp is changed: "),
        ("moments", "step-00000002, loaded by the same ranks: model and optimizer are not what was saved: fingerprint"),
        (
            "rows",
            "step-00000002, loaded by the same ranks: it says {'epoch': 0, 'rows_consumed': 0}, and {'epoch': 0, ",
        ),
        ("lenient", "0.distcp is truncated there. It must be refused"),
        ("older", "after a save that was interrupted the newest checkpoint is None, not "),
    ],
)
def test_each_fault_rejects_and_names_the_file(runs, fault, told):
    found = result(runs, fault)
    assert (found.outcome, found.culprits) == ("failed", (0, 1))
    assert "WrongResult" in found.message
    assert told in found.text


def test_a_wrong_state_on_some_of_the_fewer_ranks_is_theirs(runs):
    found = result(runs, "alone")
    assert (found.outcome, found.culprits) == ("failed", (1,))
    assert "step-00000002, loaded by 1 of the ranks: model and optimizer are not what was saved" in found.text


def test_another_learning_rate_after_the_checkpoint_misses_both_limits(runs):
    found = result(runs, "rate")
    assert found.outcome == "failed"
    assert {one.status for one in found.measurements} == {"failed"}


def test_a_full_file_system_is_an_error_on_all_ranks_that_names_the_rank(runs):
    found = result(runs, "full")
    assert found.outcome == "error"
    assert "could not be written to" in found.text
    assert "rank 1: OSError: [Errno 28] No space left on device" in found.text


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("truncated", "pass-0-rank-00001.bin ends at byte 8192 of 16777216"),
        ("changed", "pass-0-rank-00001.bin at byte 5000: found "),
    ],
)
def test_a_file_that_is_read_otherwise_than_it_was_written_rejects_and_names_who_read_it(runs, fault, told):
    found = result(runs, fault, BANDWIDTH)
    assert (found.outcome, found.culprits) == ("failed", (0,))
    assert "rank 0 has read something else than rank 1 has written" in found.text
    assert told in found.text


def test_a_rank_that_writes_slowly_misses_the_limit(runs):
    found = result(runs, "slow", BANDWIDTH)
    assert found.outcome == "failed"
    assert found.message.startswith("checkpoint.write_bandwidth 0.0000")
    assert "on rank 1" in found.message


def test_a_file_that_other_ranks_do_not_see_is_an_error_that_names_it(runs):
    found = result(runs, "unshared", BANDWIDTH)
    assert found.outcome == "error"
    assert "pass-0-rank-00001.bin, which another rank has made, is not there on this host after 0.5 s" in found.text


@pytest.mark.parametrize(("name", "end"), [("two", "REJECTED"), ("four", "REHEARSED")])
def test_the_run_goes_on_after_each_fault_and_ends_as_it_should(runs, name, end):
    assert runs[name].end[0] == end
    assert runs[name].left_over == []
