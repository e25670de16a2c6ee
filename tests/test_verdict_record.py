"""What a site's hook is told of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import example_runs
import pytest

from pytest_gpucluster import journal
from pytest_gpucluster.verdict_record import EXCLUDE, VerdictRecord


def record_of(folder: Path, name: str) -> VerdictRecord:
    run = example_runs.write(folder / "run", name)
    found = journal.read(run / journal.FILE_NAME, keep_samples=False)
    return VerdictRecord.of(found, run, verdict=found.verdict, exit=found.exit, reason=found.reason)


def test_it_says_who_is_excluded_and_where_everything_lies(tmp_path: Path) -> None:
    record = record_of(tmp_path, "cluster")
    assert (record.verdict, record.exit, record.rehearsal, record.selection) == ("REJECTED", 1, False, False)
    assert record.hosts == ("gpu-01", "gpu-02")
    assert record.excluded == ("gpu-02",)
    assert record.directory == tmp_path / "run"
    assert record.journal.run.run_id == "example-1"
    assert record.problems == ()
    assert not record.is_accepted


@pytest.mark.parametrize(("name", "accepted"), [("accepted", True), ("rehearsal", False), ("broken", False)])
def test_only_the_verdict_on_gpus_is_accepted(tmp_path: Path, name: str, accepted: bool) -> None:
    record = record_of(tmp_path, name)
    assert record.is_accepted is accepted
    assert record.excluded == ()


def test_what_pytest_ends_with_counts_and_not_what_the_journal_hoped_for(tmp_path: Path) -> None:
    run = example_runs.write(tmp_path / "run", "accepted")
    found = journal.read(run / journal.FILE_NAME, keep_samples=False)
    record = VerdictRecord.of(found, run, verdict="BROKEN", exit=11, reason="no complete report: the disk is full")
    assert (record.verdict, record.is_accepted) == ("BROKEN", False)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has no line after [slurm]"),
        (b"[slurm]\n", "has no line after [slurm]"),
        (b"[slurm]\ngpu-[1-\n", "gpu-[1-"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_an_exclude_list_that_cannot_be_read_accuses_nobody_and_says_so(
    tmp_path: Path, content: bytes, why: str
) -> None:
    run = example_runs.write(tmp_path / "run", "cluster")
    (run / EXCLUDE).write_bytes(content)
    found = journal.read(run / journal.FILE_NAME, keep_samples=False)
    record = VerdictRecord.of(found, run, verdict="REJECTED", exit=1, reason="")
    assert record.excluded == ()
    [problem] = record.problems
    assert why in problem
    assert str(run / EXCLUDE) in problem


def test_a_run_of_which_nothing_is_known_but_its_beginning(tmp_path: Path) -> None:
    builder = journal.JournalBuilder()
    builder.add({"type": "run", "schema_version": 1, "run_id": "r7", "started_at": ""})
    record = VerdictRecord.of(builder.journal(), tmp_path, verdict="BROKEN", exit=4, reason="usage")
    assert (record.hosts, record.excluded, record.job_id, record.problems) == ((), (), "r7", ())


def test_nobody_can_change_it(tmp_path: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        record_of(tmp_path, "accepted").exit = 0  # type: ignore[misc]  # that is what is tried
