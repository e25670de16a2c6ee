from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sessions import Project  # also for torch, which must be loaded before a session in this process

from pytest_gpucluster.markers import criterion_of, deadline_of, require_usable, turn_of


def item_with(pytester: pytest.Pytester, marker: str) -> pytest.Item:
    pytester.makeini("[pytest]\nmarkers =\n    criterion\n    deadline\n    first\n")
    return pytester.getitem(f"import pytest\n\n{marker}\ndef test_func(): pass\n", "test_func")


@pytest.mark.parametrize(
    ("marker", "name", "seconds"),
    [
        ("", None, 300.0),
        ("@pytest.mark.criterion('matmul')", "matmul", 300.0),
        ("@pytest.mark.criterion(name='matmul')", "matmul", 300.0),
        ("@pytest.mark.deadline(5)", None, 5.0),
        ("@pytest.mark.deadline(seconds=0.5)", None, 0.5),
    ],
)
def test_a_test_has_the_criterion_and_the_deadline_of_its_markers(
    pytester: pytest.Pytester, marker: str, name: str | None, seconds: float
) -> None:
    item = item_with(pytester, marker)
    assert (criterion_of(item), deadline_of(item, 300.0)) == (name, seconds)


@pytest.mark.parametrize(
    ("marker", "told"),
    [
        pytest.param("@pytest.mark.criterion", r"criterion\(name\) needs a name, not None", id="no name"),
        pytest.param("@pytest.mark.criterion('')", r"needs a name, not ''", id="an empty name"),
        pytest.param("@pytest.mark.criterion(3)", r"needs a name, not 3", id="a number for a name"),
        pytest.param("@pytest.mark.deadline", r"positive number of seconds, not None", id="no seconds"),
        pytest.param("@pytest.mark.deadline('5')", r"positive number of seconds, not '5'", id="text"),
        pytest.param("@pytest.mark.deadline(0)", r"positive number of seconds, not 0", id="nothing"),
        pytest.param("@pytest.mark.deadline(float('inf'))", r"not inf", id="for ever"),
        pytest.param("@pytest.mark.deadline(True)", r"not True", id="a flag"),
        pytest.param("@pytest.mark.first('1')", r"first\(place\) needs a number, not '1'", id="a place in words"),
    ],
)
def test_a_marker_that_says_nothing_usable_is_a_usage_error_before_the_first_test(
    pytester: pytest.Pytester, marker: str, told: str
) -> None:
    with pytest.raises(pytest.UsageError, match=told):
        require_usable([item_with(pytester, marker)])


def test_what_finds_out_why_others_would_hang_comes_before_them() -> None:
    def item(name: str, *markers: str) -> Any:
        return SimpleNamespace(
            name=name, get_closest_marker=lambda name: getattr(pytest.mark, name).mark if name in markers else None
        )

    items = [item("a"), item("b", "first"), item("c", "nccl"), item("d", "nccl", "first")]
    assert [one.name for one in sorted(items, key=turn_of)] == ["b", "d", "a", "c"]


def test_the_markers_of_the_order_put_numbered_tests_first_and_the_last_ones_behind_a_soak(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    first\n    soak\n    last\n")
    items = pytester.getitems(
        """
        import pytest

        @pytest.mark.last
        def test_last(): pass

        @pytest.mark.soak
        def test_soak(): pass

        def test_a(): pass

        @pytest.mark.first
        def test_first(): pass

        @pytest.mark.first(10)
        def test_10(): pass

        @pytest.mark.first(place=9)
        def test_9(): pass

        def test_b(): pass
        """
    )
    found = [item.name for item in sorted(items, key=turn_of)]
    assert found == ["test_9", "test_10", "test_first", "test_a", "test_b", "test_soak", "test_last"]


def test_the_markers_move_tests_of_a_session_and_leave_the_others_in_their_order(project: Project) -> None:
    project.suite(
        test_a="import pytest\n@pytest.mark.soak\ndef test_a(): pass\ndef test_b(): pass\n",
        test_z="import pytest\ndef test_y(): pass\n@pytest.mark.first\ndef test_z(): pass\n",
    )
    assert list(project.run().verdicts) == ["test_z", "test_b", "test_y", "test_a"]
