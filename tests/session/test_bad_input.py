"""What is asked for in a way that cannot work: a clear error, its exit code, and a report that is no pass."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from sessions import CPU

from pytest_gpucluster.session.startup import Startup

SUITE = "def test_it(): raise AssertionError('must not run')"
STALE = '<testsuites><testsuite name="pytest" tests="1"><testcase name="test_it" time="0"/></testsuite></testsuites>'
BAD_LIMITS = """
schema_version: 1
skus:
  cpu-rehearsal:
    limits:
      matmul.fp32.tflops: {minimum: 1 TFLOPS}
      matmul.bf16.tflops: {min: 1 GB/s, source: here}
"""


@pytest.fixture
def stale(project):
    """A project whose last run has passed, as its report says."""
    project.suite(SUITE)
    (project.path / "report.xml").write_text(STALE)
    (project.path / "file").write_text("no directory")
    (project.path / "bad.yaml").write_text(BAD_LIMITS)
    # Not report.xml itself: a run replaces that while it reads its limits.
    return project


def refused(left, *texts, exit=4):
    """Check that a session was refused with these texts, on the terminal and in the report."""
    assert left.exit == exit, left.output
    name = "usage" if exit == 4 else "preflight"
    assert list(left.verdicts) == [name], left.verdicts
    assert left.verdicts[name].startswith("error: ")
    assert (left.properties["verdict"], left.properties["exit"]) == ("BROKEN", str(exit))
    for text in texts:
        assert text in left.body(name)
        assert text in left.output
    assert "Traceback" not in left.output
    assert "must not run" not in left.output
    assert "collected" not in left.stdout


OPTIONS = {
    "no CUDA": (
        ["--gpucluster-device=cuda"],
        ["rank 0 on ", "device is cuda", "what to do: ", "--gpucluster-device=cpu"],
    ),
    "several at once": (
        ["--gpucluster-device=gpu", "--gpucluster-deadline=0", "--gpucluster-expect=8"],
        [
            "--gpucluster-device gpu: 'gpu' is not",
            "--gpucluster-deadline 0: '0' is not",
            "'8' is no shape of a cluster",
        ],
    ),
    "data missing": (
        [CPU, "--gpucluster-data=images=nowhere"],
        ["--gpucluster-data images=nowhere: no such folder (rank 0 on ", "what to do: correct the option"],
    ),
    "resumed from nowhere": (
        [CPU, "--gpucluster-resume"],
        ["--gpucluster-resume (command line): does nothing without --gpucluster-scratch"],
    ),
    "scratch missing for workers": (
        [CPU, "--gpucluster-scratch=nowhere", "-n", "2", "--dist", "each"],
        ["--gpucluster-scratch nowhere: no such folder"],
    ),
    "limits missing": ([CPU, "--gpucluster-thresholds=none.yaml"], ["none.yaml", "No such file"]),
    "limits malformed": (
        [CPU, "--gpucluster-thresholds=bad.yaml"],
        ["bad.yaml:6:28: ", "'minimum'", "did you mean 'min'", "bad.yaml:7:33: ", "GB/s", "TFLOPS"],
    ),
    "report directory below a file": (
        [CPU, "--gpucluster-report-dir=file/reports"],
        ["the report directory file/reports: cannot be written to", "a file is in the way"],
    ),
    "rehearsal limits for a GPU": (
        ["--gpucluster-device=cuda", "--gpucluster-sku=cpu-rehearsal"],
        ["--gpucluster-sku cpu-rehearsal", "say nothing about a GPU"],
    ),
    "SKU misspelt": (
        [CPU, "--gpucluster-sku=H100SXM"],
        ["--gpucluster-sku is 'H100SXM' (command line)", "known are H100 SXM, ", "did you mean 'H100 SXM'?"],
    ),
    "SKU empty": (
        [CPU, "--gpucluster-sku="],
        ["--gpucluster-sku is '' (command line), and no limits are known for it"],
    ),
    "one test for each worker": (
        [CPU, "-n", "2"],
        ["--dist load gives each test to one worker", "pytest -n <GPUs> --dist each --max-worker-restart=0"],
    ),
}


@pytest.mark.parametrize(("options", "texts"), OPTIONS.values(), ids=OPTIONS)
def test_a_wrong_option_is_told_and_replaces_an_earlier_report(stale, options, texts):
    refused(stale.run(*options, device=None), *texts)


CONTRADICTIONS = {
    "RANK without WORLD_SIZE": ({"RANK": "3"}, ["RANK=3 means that there are other processes"]),
    "WORLD_SIZE without a launcher": ({"WORLD_SIZE": "8"}, ["WORLD_SIZE=8 means several processes"]),
    "a task without its number": (
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"},
        ["SLURM_PROCID is missing", "SLURM_LOCALID is missing"],
    ),
}


@pytest.mark.parametrize(("variables", "texts"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictory_variables_of_a_launcher_are_shown(stale, monkeypatch, variables, texts):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused(stale.run(), "do not define a rank", "what to do: ", *texts)
    left = stale.run("--junitxml=file/report.xml", junit=False)  # which cannot be written
    assert left.exit == 4
    for text in (*texts, "file/report.xml"):
        assert text in left.output


@pytest.mark.parametrize(
    ("option", "texts"),
    [
        ("--junitxml=file/report.xml", ["the directory of --junitxml ", "/file: cannot be written to"]),
        ("--junitxml=/dev/stdout", ["--junitxml /dev/stdout: ", "Name a file", "gpucluster report"]),
        ("--junitxml=/proc/self/fd/1", ["--junitxml /proc/self/fd/1: "]),
    ],
)
def test_a_report_that_cannot_be_kept_is_refused_and_the_one_beside_the_journal_says_so(stale, option, texts):
    left = stale.run(option, junit=False)
    left.junit_path = Path("gpucluster-report/latest/junit.xml")
    refused(left, *texts)
    assert "JUnit: gpucluster-report/" in left.output
    assert left.end == ("BROKEN", 4)


def test_a_report_replaces_no_other_file(stale):
    left = stale.run("--junitxml=bad.yaml", junit=False)
    assert left.exit == 4
    assert "bad.yaml: is a file that is no JUnit report" in left.output
    assert (stale.path / "bad.yaml").read_text() == BAD_LIMITS


def test_a_report_at_dev_null_is_a_way_to_have_none(stale):
    stale.suite("def test_it(): pass")
    assert stale.run("--junitxml=/dev/null", junit=False).exit == 0


def test_where_nothing_can_be_written_the_reason_is_still_told(stale):
    left = stale.run("--junitxml=file/report.xml", "--gpucluster-report-dir=file/reports", junit=False)
    assert left.exit == 4
    assert "the directory of --junitxml " in left.output


def test_the_report_directory_of_the_command_line_counts_although_another_option_is_wrong(stale):
    left = stale.run("--gpucluster-device=gpu", "--gpucluster-report-dir=elsewhere", device=None)
    assert left.exit == 4
    assert (stale.path / "elsewhere" / "latest" / "journal.jsonl").exists()
    assert not (stale.path / "gpucluster-report").exists()


@pytest.mark.parametrize("options", [["no/such/dir"], ["test_it.py::test_no_such"]])
def test_a_path_that_is_not_there_replaces_an_earlier_report(stale, options):
    left = stale.run(*options)
    assert left.exit == 4
    assert left.end == ("BROKEN", 4)
    assert [verdict.split(":")[0] for verdict in left.verdicts.values()] == ["error"]
    assert options[0] in left.output


def test_of_many_ranks_with_different_problems_a_few_are_told_and_the_others_counted():
    who = {rank: {"problem": f"rank {rank} has no GPU\nwhat to do: look", "exit": 4} for rank in range(16)}
    refusal = Startup(SimpleNamespace(config=SimpleNamespace(pluginmanager=pytest.PytestPluginManager())))._check(
        {**who, 15: {"problem": who[2]["problem"], "exit": 4}}
    )
    assert (refusal.message, refusal.exit) == ("rank 0 has no GPU", 4)
    assert refusal.text.count("has no GPU") == 4
    assert refusal.text.splitlines()[-1] == "and 11 other problems"
