"""criteria.txt: what an acceptance needs and was not collected is a skipped testcase, and the run is INCOMPLETE."""

from pathlib import Path

import pytest

from pytest_gpucluster.config.criteria_file import read_manifest
from pytest_gpucluster.errors import ThresholdsError

ROOT = Path(__file__).parents[2]
SUITE = {
    "test_a": """
        import pytest

        @pytest.mark.criterion("first")
        def test_first(measure):
            measure("matmul.fp32.tflops", 1.0, unit="TFLOPS", n=512)

        @pytest.mark.parametrize("kind", ["x", "y"])
        def test_both(kind):
            assert kind
    """,
    "test_b": "def test_other(): pass",
}
NEEDED = ["test_a.py::test_first", "test_a.py::test_both[x]", "test_a.py::test_both[y]", "test_b.py::test_other"]
DROPS = """
    def pytest_collection_modifyitems(items):
        items[:] = [item for item in items if item.name != "test_both[x]"]
"""


def write(project, *, needed=NEEDED, leave_out=(), **files):
    project.suite(**{name: text for name, text in {**SUITE, **files}.items() if name not in leave_out})
    (project.path / "criteria.txt").write_text("# what is needed\n\n" + "\n".join(needed) + "\n")


def test_a_suite_of_which_all_is_there_is_rehearsed(project):
    write(project)
    run = project.run()
    assert (run.exit, run.end) == (0, ("REHEARSED", 0))
    assert len(run.verdicts) == 4


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        pytest.param(
            {"test_b": "import pytest; pytest.skip('no disk', allow_module_level=True)"},
            {"test_other": "no disk"},
            id="a module skips itself",
        ),
        pytest.param({"conftest": DROPS}, {"test_both[x]": ""}, id="a conftest drops an item"),
        pytest.param({"leave_out": ["test_b"]}, {"test_other": ""}, id="a file is not there"),
        pytest.param(
            {"conftest": "collect_ignore = ['test_b.py']"}, {"test_other": ""}, id="a conftest ignores a file"
        ),
    ],
)
def test_what_is_absent_is_skipped_in_the_report_and_leaves_the_run_incomplete(project, changes, absent):
    write(project, **changes)
    run = project.run()
    assert (run.exit, run.end) == (10, ("INCOMPLETE", 10))
    skipped = {name: found for name, found in run.verdicts.items() if found.startswith("skipped")}
    assert set(skipped) == set(absent)
    for name, why in absent.items():
        assert "criteria.txt" in skipped[name]
        assert why in skipped[name]
        assert name in run.journal.reason


def test_local_workers_miss_what_is_absent_too(project):
    write(project, leave_out=["test_b"])
    run = project.run("-n", "2", "--dist", "each")
    assert (run.exit, run.end) == (10, ("INCOMPLETE", 10))
    assert run.verdicts["test_other"].startswith("skipped")


@pytest.mark.parametrize("options", [("-k", "first"), ("test_a.py",), ("--deselect", "test_b.py::test_other")])
def test_a_selection_needs_no_more_than_was_asked_for(project, options):
    write(project)
    run = project.run(*options)
    assert run.exit == 0
    assert not any(found.startswith("skipped") for found in run.verdicts.values())


def test_a_malformed_list_is_a_usage_error_that_names_each_line(project):
    write(project, needed=["test_a.py::test_first", "test_b.py", "test_a.py::test_first"])
    run = project.run()
    assert run.exit == 4
    assert "criteria.txt:4: 'test_b.py'" in run.output
    assert "criteria.txt:5: 'test_a.py::test_first'" in run.output


def test_the_nearest_list_counts_and_names_are_relative_to_it(tmp_path):
    (tmp_path / "suite" / "deep").mkdir(parents=True)
    (tmp_path / "suite" / "criteria.txt").write_text("test_x.py::test_x\ndeep/test_y.py::test_y\n")
    found = read_manifest(["suite/deep/test_y.py::test_y"], tmp_path)
    assert found.files == ("suite/criteria.txt",)
    assert found.absent(["suite/deep/test_y.py::test_y"]) == ["suite/test_x.py::test_x"]
    assert read_manifest(["other/test_z.py::test_z"], tmp_path) is None
    (tmp_path / "suite" / "criteria.txt").write_text("# nothing\n")
    with pytest.raises(ThresholdsError, match="names no test"):
        read_manifest(["suite/test_x.py::test_x"], tmp_path)
