"""An earlier run's JUnit file never passes for this one's, and two runs do not write one file."""

import argparse

import pytest

from pytest_gpucluster.session import rejected_run

EARLIER = "<testsuites><testsuite><testcase name='earlier'/></testsuite></testsuites>"


@pytest.mark.parametrize(
    ("conftest", "options", "code"),
    [
        pytest.param("def broken(:", (), 4, id="a conftest that cannot be read"),
        pytest.param("raise RuntimeError('no')", (), 4, id="a conftest that raises"),
        pytest.param("", ("--no-such-option",), 4, id="an unknown option"),
    ],
)
def test_a_run_that_ends_before_it_begins_replaces_the_report(project, conftest, options, code):
    project.suite("def test_it(): pass", conftest=conftest)
    (project.path / "report.xml").write_text(EARLIER)
    left = project.run_apart(*options)
    assert left.exit == code, left.output
    assert "earlier" not in left.verdicts
    assert (left.properties["verdict"], left.properties["exit"]) == ("BROKEN", "4")


def test_a_rank_0_that_is_killed_in_its_conftest_leaves_a_report_under_torchrun(project):
    project.suite("def test_it(): pass", conftest="import os; os.kill(os.getpid(), 9)")
    left = project.run_apart(more={"TORCHELASTIC_ERROR_FILE": str(project.path / "error.json")})
    assert left.exit == -9
    assert left.properties["verdict"] == "BROKEN"
    assert "rank 0" in left.verdicts["usage"]


@pytest.mark.parametrize(
    ("variables", "is_replaced"),
    [
        ({}, True),
        ({"RANK": "1"}, False),
        ({"SLURM_PROCID": "1"}, False),
        ({"JOB_COMPLETION_INDEX": "1"}, False),
        ({"JOB_COMPLETION_INDEX": "1", "RANK": "0"}, True),  # rank 0 of torchrun in the second pod
    ],
)
def test_rank_0_alone_replaces_the_report(tmp_path, variables, is_replaced):
    file = tmp_path / "report.xml"
    file.write_text(EARLIER)
    rejected_run.replace_earlier(argparse.Namespace(xmlpath=str(file)), variables)
    assert (file.read_text() != EARLIER) == is_replaced


@pytest.mark.parametrize("options", [("--collect-only",), ("--version",)])
def test_what_runs_nothing_leaves_the_report(project, options):
    project.suite("def test_it(): pass")
    (project.path / "report.xml").write_text(EARLIER)
    project.run(*options)
    assert (project.path / "report.xml").read_text() == EARLIER


def test_a_second_run_with_the_same_file_is_refused_while_the_first_is_alive(project, monkeypatch):
    project.suite("def test_it(): pass")
    file = project.path / "report.xml"
    first = rejected_run.claim(file)
    assert first is not None
    file.write_text(EARLIER)
    with first:
        left = project.run()
        assert left.exit == 4
        assert "report.xml" in left.stderr
        assert file.read_text() == EARLIER
    assert project.run().exit == 0


def test_a_file_is_claimed_once_by_whatever_path(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    found = [rejected_run.claim(tmp_path / folder / "report.xml") for folder in ("there", "link", "there")]
    assert [each is not None for each in found] == [True, False, False]
    found[0].close()


def test_what_is_no_report_is_not_replaced(project):
    project.suite("def test_it(): pass", conftest="raise RuntimeError('no')")
    (project.path / "report.xml").write_text("schema_version: 1\n")
    assert project.run_apart().exit == 4
    assert (project.path / "report.xml").read_text() == "schema_version: 1\n"
