import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from each import of_each

from pytest_gpucluster.metrics.datasheets import SKUS, Sku
from pytest_gpucluster.session.selection import Room, is_selection, only_lists, why_not_applicable


@pytest.fixture
def project(pytester):
    for folder in ("acceptance/gpu", "acceptance/net", "more", "tests"):
        (pytester.path / folder).mkdir(parents=True)
    (pytester.path / "acceptance/gpu/test_a.py").write_text("def test_a(): pass")
    return pytester


def asked(project, *arguments, testpaths="acceptance", below="."):
    """Tell whether these arguments, given in a folder of the project, are a selection."""
    project.makeini(f"[pytest]\ntestpaths = {testpaths}" if testpaths else "[pytest]")
    os.chdir(project.path / below)
    try:
        return is_selection(project.parseconfig(*arguments))
    finally:
        os.chdir(project.path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param([], False, id="nothing"),
        pytest.param(["acceptance"], False, id="the suite"),
        pytest.param(["acceptance/"], False, id="the suite with a slash"),
        pytest.param(["./acceptance"], False, id="the suite with a dot"),
        pytest.param(["."], False, id="all that the suite is part of"),
        pytest.param(["acceptance", "tests"], False, id="the suite and more"),
        pytest.param(["-v", "-x", "--ff", "acceptance"], False, id="options that choose nothing"),
        pytest.param(["acceptance/gpu"], True, id="a part of the suite"),
        pytest.param(["tests"], True, id="another folder"),
        pytest.param(["acceptance/gpu/test_a.py"], True, id="a file"),
        pytest.param(["acceptance/gpu/test_a.py::test_a"], True, id="a test"),
        pytest.param(["acceptance", "acceptance/gpu/test_a.py::test_a"], True, id="the suite and a test of it"),
        pytest.param(["-k", "nccl"], True, id="a keyword"),
        pytest.param(["-m", "not soak"], True, id="a marker"),
        pytest.param(["--deselect", "acceptance/gpu/test_a.py::test_a"], True, id="one deselected"),
        pytest.param(["--ignore", "acceptance/net"], True, id="one ignored"),
        pytest.param(["--ignore-glob", "*net*"], True, id="some ignored"),
        pytest.param(["--lf"], True, id="the last failed"),
        pytest.param(["--sw"], True, id="stepwise"),
        pytest.param(["-k", "", "acceptance"], False, id="an empty keyword"),
    ],
)
def test_what_is_a_selection(project, arguments, expected):
    assert asked(project, *arguments) is expected


@pytest.mark.parametrize(
    ("arguments", "testpaths", "below", "expected"),
    [
        pytest.param(["acceptance", "more"], "acceptance more", ".", False, id="both of two test paths"),
        pytest.param(["acceptance"], "acceptance more", ".", True, id="one of two test paths"),
        pytest.param([], "acceptance more", ".", False, id="two test paths and no argument"),
        pytest.param(["acceptance"], "acceptance/*", ".", False, id="what a pattern stands for"),
        pytest.param([], "acceptance/*", ".", False, id="a pattern and no argument"),
        pytest.param(["acceptance/gpu"], "acceptance/*", ".", True, id="a part of what a pattern stands for"),
        pytest.param([], "acceptance/gpu/test_a.py", ".", False, id="a test path that is a file"),
        pytest.param(["acceptance/gpu/test_a.py"], "acceptance/gpu/test_a.py", ".", False, id="that file itself"),
        pytest.param([], "", ".", False, id="no test paths and no argument"),
        pytest.param(["."], "", ".", False, id="no test paths and the root"),
        pytest.param(["acceptance"], "", ".", True, id="no test paths and a part of the root"),
        pytest.param(["gpu"], "acceptance", "acceptance", True, id="a part, from within"),
        pytest.param(["."], "acceptance", "acceptance", False, id="the suite, from within"),
        pytest.param(["../acceptance"], "acceptance", "tests", False, id="the suite, from beside it"),
        pytest.param([], "acceptance", "acceptance/gpu", True, id="from a part, and no argument"),
    ],
)
def test_the_suite_is_the_test_paths_or_all_below_the_root(project, arguments, testpaths, below, expected):
    assert asked(project, *arguments, testpaths=testpaths, below=below) is expected


def test_an_acceptance_suite_that_is_named_is_the_whole_unless_the_test_paths_have_more(project):
    (project.path / "acceptance" / "criteria.txt").touch()
    assert not asked(project, "acceptance", testpaths="")
    assert not asked(project, "acceptance", testpaths="tests")
    assert asked(project, "acceptance/gpu", testpaths="tests")
    assert asked(project, "acceptance", testpaths="acceptance more")


def test_a_link_to_the_suite_is_the_suite(project):
    Path(project.path / "link").symlink_to("acceptance")
    assert not asked(project, "link")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param([], False, id="a run"),
        pytest.param(["--collect-only"], True, id="collect only"),
        pytest.param(["--fixtures"], True, id="fixtures"),
        pytest.param(["--fixtures-per-test"], True, id="fixtures per test"),
    ],
)
def test_what_only_lists_is_no_run(project, arguments, expected):
    assert only_lists(project.parseconfig(*arguments)) is expected


class Marked:
    nodeid = "a.py::test"

    def __init__(self, **markers):
        self._markers = markers

    def get_closest_marker(self, name):
        return self._markers.get(name)


def marker(*args, **kwargs):
    return SimpleNamespace(args=args, kwargs=kwargs)


def room(ranks=8, nodes=1, per_node=None, *, on_cpu=False, sku="H100 SXM"):
    known = None if sku is None else SKUS.get(sku, Sku(name=sku))
    per_node = ranks // nodes if per_node is None else per_node
    return Room(ranks=ranks, nodes=nodes, ranks_per_node=per_node, on_cpu=on_cpu, data_sheet=lambda: known)


@pytest.mark.parametrize(
    ("markers", "place", "why"),
    [
        pytest.param({}, room(1), None, id="no marker"),
        pytest.param({"needs_ranks": marker(2)}, room(2), None, id="enough ranks"),
        pytest.param({"needs_ranks": marker(2)}, room(1), "needs 2 ranks, and there is 1", id="too few ranks"),
        pytest.param({"needs_ranks": marker(16)}, room(8), "needs 16 ranks, and there are 8", id="far too few ranks"),
        pytest.param({"needs_ranks": marker(n=4)}, room(2), "needs 4 ranks, and there are 2", id="given by name"),
        pytest.param({"needs_nodes": marker(2)}, room(8), "needs 2 nodes, and there is 1", id="too few nodes"),
        pytest.param({"needs_nodes": marker(2)}, room(8, 2), None, id="enough nodes"),
        pytest.param({"needs_local_ranks": marker(4)}, room(8, 2), None, id="enough ranks on each node"),
        pytest.param(
            {"needs_local_ranks": marker(8)},
            room(8, 2),
            "needs 8 ranks on each node, and there are 4",
            id="too few ranks on each node",
        ),
        pytest.param({"needs_gpu": marker()}, room(), None, id="a GPU"),
        pytest.param(
            {"needs_gpu": marker()},
            room(on_cpu=True, sku=None),
            "needs a GPU, and this is a rehearsal on cpu",
            id="no GPU",
        ),
        pytest.param({"needs_hardware": marker()}, room(), None, id="hardware"),
        pytest.param(
            {"needs_hardware": marker()},
            replace(room(), is_simulated=True),
            "needs a GPU, and this is a simulated cluster",
            id="a simulated GPU",
        ),
        pytest.param({"needs_gpu": marker()}, replace(room(), is_simulated=True), None, id="a simulated GPU will do"),
        pytest.param({"needs_peak": marker("fp8_tflops")}, room(), None, id="a peak"),
        pytest.param(
            {"needs_peak": marker(name="fp8_tflops")},
            room(sku="A100 80GB"),
            "needs fp8_tflops, and the data sheet of A100 80GB has none",
            id="no such peak",
        ),
        pytest.param({"needs_peak": marker("fp8_tflops")}, room(sku=None), None, id="an unknown GPU"),
        pytest.param({"needs_peak": marker("fp8_tflops")}, room(sku="mine"), None, id="a SKU without a data sheet"),
        pytest.param({"needs_peak": marker("fp8_tflops")}, room(on_cpu=True, sku=None), None, id="a peak on cpu"),
        pytest.param({"needs_data": marker("images")}, replace(room(), data=frozenset({"images"})), None, id="data"),
        pytest.param(
            {"needs_data": marker(name="images")},
            replace(room(), data=frozenset({"function_calls"})),
            "needs --gpucluster-data images=PATH, and it was not given",
            id="no data",
        ),
        pytest.param({"needs_scheduler": marker("slurm")}, replace(room(), scheduler="slurm"), None, id="Slurm"),
        pytest.param(
            {"needs_scheduler": marker(name="kubernetes")},
            replace(room(), scheduler="slurm"),
            "needs a job of kubernetes, and this is none",
            id="another scheduler",
        ),
        pytest.param({"needs_scheduler": marker("slurm")}, room(), "needs a job of slurm, and this is none", id="none"),
    ],
)
def test_a_test_does_not_run_where_it_has_no_room(markers, place, why):
    item = Marked(**markers)
    assert why_not_applicable(item, place) == why


REFUSED = [
    *(
        (name, bad, rf"{name}\(n\) ")
        for name in ("needs_ranks", "needs_nodes", "needs_local_ranks")
        for bad in (marker(), marker("2"), marker(2.0), marker(True), marker(m=2))
    ),
    ("needs_gpu", marker("H100"), "needs_gpu "),
    ("needs_hardware", marker(False), "needs_hardware "),
    ("needs_peak", marker(), r"needs_peak\(name\) .* fp32_tflops, .*host_gb_per_second, not None$"),
    ("needs_peak", marker("fp8_tflop"), r"needs_peak\(name\) .* not 'fp8_tflop'; did you mean 'fp8_tflops'\?$"),
    ("needs_peak", marker(8), r"needs_peak\(name\) .* not 8$"),
    ("needs_peak", marker(peak="fp8_tflops"), r"needs_peak\(name\) .* not None$"),
    ("needs_data", marker(), r"needs_data\(name\) .* images, function_calls, .*not None$"),
    ("needs_data", marker("image"), r"needs_data\(name\) .* not 'image'; did you mean 'images'\?$"),
    ("needs_data", marker(data="images"), r"needs_data\(name\) .* not None$"),
    ("needs_scheduler", marker(), r"needs_scheduler\(name\) .* slurm, kubernetes, .*not None$"),
    ("needs_scheduler", marker("Slurm"), r"needs_scheduler\(name\) .* not 'Slurm'; did you mean 'slurm'\?$"),
    ("needs_scheduler", marker(3), r"needs_scheduler\(name\) .* not 3$"),
]
"""Marker, what it is given, and what the complaint says."""


@of_each("case", REFUSED)
@pytest.mark.parametrize("sku", ["H100 SXM", "A100 80GB", None], ids=["H100", "A100", "cpu"])
def test_a_marker_that_is_wrong_is_refused_wherever_it_runs(sku, case):
    name, bad, told = case
    item = Marked(**{name: bad})
    with pytest.raises(pytest.UsageError, match=rf"^a\.py::test: .*{told}"):
        why_not_applicable(item, room(sku=sku, on_cpu=sku is None))


def test_the_data_sheet_is_looked_up_only_for_a_test_that_depends_on_it():
    def fail():
        raise AssertionError("asked for")

    item = Marked(needs_ranks=marker(1))
    assert why_not_applicable(item, Room(ranks=1, nodes=1, ranks_per_node=1, data_sheet=fail)) is None
