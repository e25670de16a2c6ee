from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpucluster.selection import is_selection, only_lists, why_not_applicable


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    for folder in ("acceptance/gpu", "acceptance/net", "more", "tests"):
        (pytester.path / folder).mkdir(parents=True)
    (pytester.path / "acceptance/gpu/test_a.py").write_text("def test_a(): pass")
    return pytester


def asked(project: pytest.Pytester, *arguments: str, testpaths: str = "acceptance", below: str = ".") -> bool:
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
def test_what_is_a_selection(project: pytest.Pytester, arguments: list[str], expected: bool) -> None:
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
def test_the_suite_is_the_test_paths_or_all_below_the_root(
    project: pytest.Pytester, arguments: list[str], testpaths: str, below: str, expected: bool
) -> None:
    assert asked(project, *arguments, testpaths=testpaths, below=below) is expected


def test_a_link_to_the_suite_is_the_suite(project: pytest.Pytester) -> None:
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
def test_what_only_lists_is_no_run(project: pytest.Pytester, arguments: list[str], expected: bool) -> None:
    assert only_lists(project.parseconfig(*arguments)) is expected


class Marked:
    """An item with markers."""

    nodeid = "a.py::test"

    def __init__(self, **markers: Any) -> None:
        self._markers = markers

    def get_closest_marker(self, name: str) -> Any:
        return self._markers.get(name)


def marker(*args: Any, **kwargs: Any) -> Any:
    return SimpleNamespace(args=args, kwargs=kwargs)


@pytest.mark.parametrize(
    ("markers", "ranks", "nodes", "why"),
    [
        pytest.param({}, 1, 1, None, id="no marker"),
        pytest.param({"needs_ranks": marker(2)}, 2, 1, None, id="enough ranks"),
        pytest.param({"needs_ranks": marker(2)}, 1, 1, "needs 2 ranks, and there is 1", id="too few ranks"),
        pytest.param({"needs_ranks": marker(16)}, 8, 1, "needs 16 ranks, and there are 8", id="far too few ranks"),
        pytest.param({"needs_ranks": marker(n=4)}, 2, 1, "needs 4 ranks, and there are 2", id="given by name"),
        pytest.param({"needs_nodes": marker(2)}, 8, 1, "needs 2 nodes, and there is 1", id="too few nodes"),
        pytest.param({"needs_nodes": marker(2)}, 8, 2, None, id="enough nodes"),
        pytest.param(
            {"needs_ranks": marker(2), "needs_nodes": marker(3)}, 8, 2, "needs 3 nodes, and there are 2", id="both"
        ),
    ],
)
def test_a_test_does_not_run_with_too_few_ranks_or_nodes(
    markers: dict[str, Any], ranks: int, nodes: int, why: str | None
) -> None:
    item: Any = Marked(**markers)
    assert why_not_applicable(item, ranks=ranks, nodes=nodes) == why


@pytest.mark.parametrize("bad", [marker(), marker("2"), marker(2.0), marker(True), marker(m=2)], ids=str)
def test_a_marker_without_a_whole_number_is_not_taken_for_any_number(bad: Any) -> None:
    item: Any = Marked(needs_ranks=bad)
    with pytest.raises(
        pytest.UsageError, match=r"^a\.py::test: the marker needs_ranks\(n\) needs a whole number, not "
    ):
        why_not_applicable(item, ranks=8, nodes=1)
