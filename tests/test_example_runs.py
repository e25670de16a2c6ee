"""The example runs are such as the product writes, always the same, and what their names say."""

import json
import xml.etree.ElementTree as ET

import example_runs
import pytest
from example_runs import ARTIFACTS, HOT_RANK, LOST_RANK, NAMES, SLOW_LINK_RANK, artifacts_name

from pytest_gpucluster import journal, journal_lines
from pytest_gpucluster.journal import JournalBuilder
from pytest_gpucluster.journal_fields import Fields
from pytest_gpucluster.reports import junit
from pytest_gpucluster.reports.outline import NOT_RUN, RUNNING, outline

VERDICTS = {"cluster": "REJECTED", "accepted": "ACCEPTED", "rehearsal": "REHEARSED", "broken": "BROKEN"}


def read(tmp_path, name):
    return journal.read(example_runs.write(tmp_path / name, name) / journal.FILE_NAME)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_always_the_same(tmp_path, name):
    first = example_runs.write(tmp_path / "first", name)
    second = example_runs.write(tmp_path / "second", name)
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


@pytest.mark.parametrize("name", NAMES)
def test_a_run_tells_nothing_of_this_machine(tmp_path, name):
    folder = example_runs.write(tmp_path / name, name)
    text = "\n".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    assert str(example_runs.__file__).rpartition("/")[0] not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(("name", "verdict"), VERDICTS.items())
def test_a_run_ends_as_its_name_says(tmp_path, name, verdict):
    told = read(tmp_path, name)
    assert told.verdict == verdict
    assert told.run.rehearsal is (name in ("rehearsal", "broken"))


def test_the_bad_cluster_has_one_of_everything(tmp_path):
    told = read(tmp_path, "cluster")
    assert {row.outcome for row in outline(told).rows} == {"passed", "failed", "error", "skipped", NOT_RUN}
    by_id = {result.nodeid: result for result in told.results}
    assert by_id[example_runs.MATMUL].culprits == (HOT_RANK,)
    assert by_id[example_runs.LINKS].culprits == (SLOW_LINK_RANK,)
    assert by_id[example_runs.THROUGHPUT].culprits == (LOST_RANK,)
    assert [one["units"] for one in by_id[example_runs.NODE_ALL_REDUCE].isolation["culprits"]] == [[1]]
    assert "NET/Socket" in str(by_id[example_runs.WORLD_ALL_REDUCE].measurements)
    assert "hw_thermal" in by_id[example_runs.MATMUL].telemetry[HOT_RANK]["throttle"]


def test_the_broken_run_is_cut_off_in_a_test(tmp_path):
    told = read(tmp_path, "broken")
    assert told.cut
    assert told.end is None
    assert RUNNING in {row.outcome for row in outline(told).rows}


@pytest.mark.parametrize("name", NAMES)
def test_every_test_of_a_run_is_in_its_junit_file(tmp_path, name):
    told = read(tmp_path, name)
    suite = ET.fromstring(junit.render(told).encode()).find("testsuite")
    assert len(suite.findall("testcase")) >= len(outline(told).rows)
    bad = int(suite.get("failures")) + int(suite.get("errors"))
    assert (bad == 0) == (told.verdict in ("ACCEPTED", "REHEARSED"))


def test_the_files_of_a_run_lie_where_its_tests_leave_them(tmp_path):
    folder = example_runs.write(tmp_path, "cluster")
    assert (folder / ARTIFACTS / artifacts_name(example_runs.LINKS) / "links-node.json").is_file()
    assert (folder / ARTIFACTS / artifacts_name(example_runs.LORA) / "curve-group-0.csv").is_file()
    assert len(list((folder / ARTIFACTS / artifacts_name(example_runs.BURN_IN)).glob("burn-in-rank-*.csv"))) == 16
    assert "gpu-02" in (folder / "exclude.txt").read_text()


def test_the_large_run_has_as_many_ranks_and_criteria_as_asked():
    builder = JournalBuilder(keep_samples=False)
    for line in example_runs.large(ranks=16, criteria=5):
        builder.add(json.loads(journal.encode(line)))
    told = builder.journal()
    assert told.run.world_size == 16
    assert len(told.results) == 5
    assert all(len(judged.values) == 16 for result in told.results for judged in result.measurements)


def test_of_many_ranks_the_most_telling_telemetry_is_looked_for_once(monkeypatch):
    """Once for each rank, reading the journal of 1,024 ranks took minutes."""
    looked = []
    original = journal_lines.most_telling
    monkeypatch.setattr(journal_lines, "most_telling", lambda told: looked.append(len(told)) or original(told))
    told = {str(rank): {"temperature_celsius": [60, 61, 62 + rank % 7]} for rank in range(100)}
    line = Fields({"nodeid": "a::b", "outcome": "passed", "telemetry": told}, "line")
    result = journal_lines.read_test_result(line, keep_samples=False)
    assert looked == [100]
    assert list(result.telemetry) == [6]
