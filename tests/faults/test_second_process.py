"""A rank that forks, or is ended from a thread of its own: it is named, and so is what ended the run."""

import pytest
from torchrun import SUITES, suite, torchrun


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("second")
    files = {**suite("second_process"), "conftest.py": (SUITES / "reporter.py").read_text(encoding="utf-8")}
    return torchrun(directory, files, f"--alluredir={directory / 'allure'}", deadline=30.0)


def test_another_reporter_tells_each_test_once_and_as_all_ranks_agreed(run):
    told = sorted(path.read_text() for path in (run.directory / "allure").iterdir())
    assert told == ["test_fails failed", "test_forks passed", "test_is_ended_by_a_timer failed"]


def test_the_rank_is_named_and_what_ended_the_run(run):
    assert run.verdicts["test_fails"] == "failure: rank 1 (node-a): AssertionError: a bad GPU", run.output
    assert run.verdicts["test_forks"] == "passed"
    [lost] = [verdict for name, verdict in run.verdicts.items() if name == "rank lost"]
    assert lost.startswith("error: rank 1 (node-a) is lost during call of ")
    assert f"process {run.stamp('fault', 1).pid} " in lost
    assert run.verdicts["test_is_ended_by_a_timer"] == lost
    # It rejects the hardware that a test has failed, but that did not end the run.
    assert run.end == ("REJECTED", 1, "rank 0")
    assert run.verdicts["test_next"] == lost.replace("error: ", "skipped: not run: ")
    assert run.left_over == []
