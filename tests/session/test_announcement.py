"""The hook pytest_gpucluster_verdict: called once, when everything is on disk, and unable to change the verdict."""

import json
import textwrap

import pytest
import torchrun

TOLD = """
import json
from pathlib import Path

def pytest_gpucluster_verdict(record):
    seen = {
        "verdict": record.verdict,
        "exit": record.exit,
        "reason": record.reason,
        "kind": record.kind,
        "hosts": record.hosts,
        "is_absolute": record.directory.is_absolute(),
        "results": [result.outcome for result in record.journal.results],
        "closed": record.journal.end is not None,
        "files": sorted(path.name for path in record.directory.iterdir() if path.is_file()),
    }
    with open("told.jsonl", "a") as file:
        file.write(json.dumps(seen) + "\\n")
"""
FILES = ["journal.jsonl", "metrics.prom", "report.html", "results.json"]
PASS = "def test_a(measure): measure('inventory.ranks', 1, unit='ranks', record_only=True)"
FAIL = "def test_a(): assert 0"


def told(project):
    [line] = (project.path / "told.jsonl").read_text().splitlines()
    return json.loads(line)


def run(project, suite, *options, conftest=TOLD):
    project.suite(textwrap.dedent(suite), conftest=textwrap.dedent(conftest))
    return project.run(*options)


@pytest.mark.parametrize(
    ("suite", "options", "verdict", "exit", "results"),
    [
        (PASS, [], "REHEARSED", 0, ["passed"]),
        (FAIL, [], "REJECTED", 1, ["failed"]),
        ("def test_a(): raise KeyboardInterrupt", [], "BROKEN", 2, []),
        (PASS, ["--gpucluster-sku=H1000"], "BROKEN", 4, []),
    ],
    ids=["passed", "failed", "interrupted", "refused before its first test"],
)
def test_it_is_called_once_with_everything_on_disk(project, suite, options, verdict, exit, results):
    left = run(project, suite, *options)
    seen = told(project)
    assert (left.exit, seen["verdict"], seen["exit"], seen["results"]) == (exit, verdict, exit, results)
    assert (seen["kind"], seen["closed"], seen["is_absolute"]) == ("REHEARSAL", True, True)
    assert seen["files"] == FILES
    assert seen["reason"] == left.journal.reason
    if exit < 2:
        assert len(seen["hosts"]) == 1


BROKEN = {
    "1 / 0": "ZeroDivisionError: division by zero",
    "import sys; sys.exit(0)": "SystemExit: 0",
    "import pytest; pytest.exit('fine', returncode=0)": "Exit: fine",
    "import pytest; pytest.skip('not now')": "Skipped: not now",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "record.exit = 0": "FrozenInstanceError: cannot assign to field 'exit'",
    "raise ValueError('\\x1b[31m' + 'x' * 5000)": "ValueError: #x1B[31mxxx",
}


@pytest.mark.parametrize("exit", [0, 1])
def test_whatever_goes_wrong_in_it_is_shown_and_changes_nothing(project, exit):
    plugins = {
        f"broken{number}": f"def pytest_gpucluster_verdict(record):\n    {what}\n" for number, what in enumerate(BROKEN)
    }
    project.suite(FAIL if exit else PASS, conftest=f"{TOLD}\npytest_plugins = {list(plugins)}", **plugins)
    left = project.run()
    assert left.exit == exit
    assert left.end == ({0: "REHEARSED", 1: "REJECTED"}[exit], exit)
    assert told(project)["exit"] == exit
    assert "\x1b[31mx" not in left.stdout
    for plugin, (what, shown) in zip(plugins, BROKEN.items(), strict=True):
        assert f"pytest_gpucluster_verdict of {plugin} has failed: {shown}" in left.stdout
        assert what.split(";")[-1].strip().split("+")[0] in left.stdout, "its traceback"


def test_an_exclude_list_that_cannot_be_read_is_told(project):
    suite = """
    def test_a(artifacts):
        (artifacts.parents[1] / "exclude.txt").write_text("[slurm]")
        assert 0
    """
    left = run(project, suite)
    assert left.exit == 1
    assert "exclude.txt: " in left.stdout


def test_a_report_that_could_not_be_made_is_named_and_nothing_else_is_lost(project):
    suite = """
    def test_a(artifacts):
        (artifacts.parents[1] / "metrics.prom").mkdir()
        (artifacts.parents[1] / "metrics.prom" / "x").write_text("")
    """
    left = run(project, suite)
    assert (left.exit, left.end) == (0, ("REHEARSED", 0))
    assert ": metrics.prom: not written: " in left.stdout
    assert told(project)["files"] == [name for name in FILES if name != "metrics.prom"]


def test_with_workers_of_one_node_the_controller_calls_it_once(project):
    project.suite(PASS, conftest=TOLD)
    left = project.run_apart("-n", "2", "--dist", "each", "--max-worker-restart=0")
    assert left.exit == 0, left.output
    assert (told(project)["verdict"], told(project)["files"]) == ("REHEARSED", FILES)


# ---- with a launcher ------------------------------------------------------------------------------------------------


def test_when_a_rank_is_lost_rank_0_still_calls_it_with_everything_on_disk(tmp_path):
    suite = """
    import os, signal

    def test_a(measure): measure('inventory.ranks', 1, unit='ranks', record_only=True)

    def test_b(cluster):
        if cluster.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        cluster.barrier()
    """
    run = torchrun.torchrun(tmp_path, {"test_it.py": suite, "conftest.py": TOLD})
    [line] = (tmp_path / "suite" / "told.jsonl").read_text().splitlines()
    seen = json.loads(line)
    assert (seen["verdict"], seen["exit"], seen["closed"]) == ("BROKEN", 11, True), run.output
    assert "rank 1" in seen["reason"]
    assert seen["files"] == FILES
