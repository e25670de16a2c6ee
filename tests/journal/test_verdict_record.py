"""The record of a run that a site's hook receives."""

import example_runs
from each import of_each

from pytest_gpucluster.isolation.finding import EXCLUDE_FILE
from pytest_gpucluster.journal import journal
from pytest_gpucluster.journal.run_directory import VerdictRecord


def record_of(folder, name):
    run = example_runs.write(folder / "run", name)
    found = journal.read(run / journal.JOURNAL_FILE, keep_samples=False)
    return VerdictRecord.of(found, run, verdict=found.verdict, exit=found.exit, reason=found.reason)


def test_it_has_the_excluded_hosts_and_the_folder(tmp_path):
    record = record_of(tmp_path, "cluster")
    assert (record.verdict, record.exit, record.kind, record.selection) == ("REJECTED", 1, "", False)
    assert record.hosts == ("gpu-01", "gpu-02")
    assert record.excluded == ("gpu-02",)
    assert record.directory == tmp_path / "run"
    assert record.journal.run.run_id == "example-1"
    assert record.problems == ()
    assert not record.is_accepted


def test_only_the_verdict_on_gpus_is_accepted(tmp_path):
    records = {name: record_of(tmp_path / name, name) for name in ("accepted", "rehearsal", "broken")}
    assert [name for name, record in records.items() if record.is_accepted] == ["accepted"]
    assert {record.excluded for record in records.values()} == {()}


def test_what_pytest_ends_with_counts_and_not_what_the_journal_hoped_for(tmp_path):
    found = example_runs.journal_of("accepted")
    record = VerdictRecord.of(found, tmp_path, verdict="BROKEN", exit=11, reason="no complete report")
    assert (record.verdict, record.is_accepted) == ("BROKEN", False)


BAD_LISTS = {b"": "[slurm]", b"[slurm]\n": "[slurm]", b"[slurm]\ngpu-[1-\n": "gpu-[1-", b"\xff\xfe": "decode"}


@of_each("content", list(BAD_LISTS))
def test_an_exclude_list_that_cannot_be_read_excludes_no_host_and_is_a_problem(tmp_path, content):
    run, why = tmp_path, BAD_LISTS[content]
    (run / EXCLUDE_FILE).write_bytes(content)
    found = example_runs.journal_of("cluster")
    record = VerdictRecord.of(found, run, verdict="REJECTED", exit=1, reason="")
    assert record.excluded == ()
    [problem] = record.problems
    assert why in problem
    assert str(run / EXCLUDE_FILE) in problem
