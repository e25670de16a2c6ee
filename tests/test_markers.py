from __future__ import annotations

import pytest

from pytest_gpucluster.markers import criterion_of, deadline_of, require_usable


def item_with(pytester: pytest.Pytester, marker: str) -> pytest.Item:
    pytester.makeini("[pytest]\nmarkers =\n    criterion\n    deadline\n")
    return pytester.getitem(f"import pytest\n\n{marker}\ndef test_func(): pass\n", "test_func")


@pytest.mark.parametrize(
    ("marker", "name"),
    [
        pytest.param("", None, id="no criterion"),
        pytest.param("@pytest.mark.criterion('matmul')", "matmul", id="by position"),
        pytest.param("@pytest.mark.criterion(name='matmul')", "matmul", id="by keyword"),
    ],
)
def test_a_criterion_is_known_by_its_marker(pytester: pytest.Pytester, marker: str, name: str | None) -> None:
    assert criterion_of(item_with(pytester, marker)) == name


@pytest.mark.parametrize(
    ("marker", "seconds"),
    [
        pytest.param("", 300.0, id="none"),
        pytest.param("@pytest.mark.deadline(5)", 5.0, id="by position"),
        pytest.param("@pytest.mark.deadline(seconds=0.5)", 0.5, id="by keyword"),
    ],
)
def test_a_deadline_is_that_of_the_marker_or_else_the_general_one(
    pytester: pytest.Pytester, marker: str, seconds: float
) -> None:
    assert deadline_of(item_with(pytester, marker), 300.0) == seconds


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
    ],
)
def test_a_marker_that_says_nothing_usable_is_a_usage_error_before_the_first_test(
    pytester: pytest.Pytester, marker: str, told: str
) -> None:
    with pytest.raises(pytest.UsageError, match=told):
        require_usable([item_with(pytester, marker)])
