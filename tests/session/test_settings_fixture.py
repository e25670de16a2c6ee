"""The fixture ``settings``: from the options to the test and the journal; ranks that were given other things stop."""

import re
import shutil

from torchrun import start, write_suite

SUITE = """
    import pytest

    def test_settings(settings):
        assert settings.data["images"].path.name == "pictures"
        assert settings.data["function_calls"].revision == "v1"
        assert settings.model.name == "org/model"
        assert settings.resume and settings.scratch.name == "scratch"
        assert settings.reference_curve is None
        with pytest.raises(TypeError):
            settings.data["images"] = None
"""
NOTHING = """
    def test_nothing(settings):
        assert settings.model is None and settings.scratch is None and settings.reference_curve is None
        assert not settings.resume and not settings.data
"""
MUST_NOT_RUN = "def test_it(settings): raise AssertionError('must not run')"


def test_a_test_gets_what_the_options_say(project):
    project.suite(SUITE)
    for name in ("pictures", "scratch"):
        (project.path / name).mkdir()
    project.ini("gpucluster = true\ngpucluster_model = org/model")
    left = project.run(
        "--gpucluster-data=images=pictures",
        "--gpucluster-data=function_calls=org/calls@v1",
        "--gpucluster-scratch=scratch",
        "--gpucluster-resume",
    )
    assert left.verdicts == {"test_settings": "passed"}, left.output
    told = " ".join(left.output.split())  # a long line is broken
    assert "model=org/model " in told
    assert "resume=yes (command line)" in told


def test_without_options_there_is_nothing(project):
    project.suite(NOTHING)
    assert project.run().verdicts == {"test_nothing": "passed"}


def test_ranks_that_were_given_other_things_do_not_start(tmp_path):
    write_suite(tmp_path, {"test_it.py": MUST_NOT_RUN})
    shutil.copytree(tmp_path / "suite", tmp_path / "other")
    (tmp_path / "suite" / "pictures").mkdir()
    run = start(
        tmp_path,
        None,
        "--gpucluster-data=images=pictures",
        ranks=1,
        hosts=("node-a", "node-b"),
        environment=lambda host: {"GPUCLUSTER_MODEL": f"org/{host[-1]}"},
        other_folders={"node-b": tmp_path / "other"},
    ).wait()
    assert "must not run" not in run.output
    body = run.body("preflight")
    assert re.search(r"--gpucluster-model .*'org/b .* on rank 1 \(node-b\)", body)
    assert re.search(r"--gpucluster-data images=pictures: .* \(rank 1 on node-b\)", body)
    assert run.end[:2] == ("BROKEN", 11)
