from types import SimpleNamespace

import pytest

from pytest_gpucluster.session.selection import criterion_of, deadline_of, require_usable, turn_of


def marker(name, /, *args, **kwargs):
    """A marker as pytest keeps it; pytest's own needs a session, which looks through the whole heap at its end."""
    return SimpleNamespace(name=name, args=args, kwargs=kwargs)


def item_with(*marks, name="test_func"):
    own = {mark.name: mark for mark in marks}
    return SimpleNamespace(name=name, nodeid=f"t.py::{name}", get_closest_marker=own.get)


@pytest.mark.parametrize(
    ("mark", "name", "seconds"),
    [
        (marker("other"), None, 300.0),
        (marker("criterion", "matmul"), "matmul", 300.0),
        (marker("criterion", name="matmul"), "matmul", 300.0),
        (marker("deadline", 5), None, 5.0),
        (marker("deadline", seconds=0.5), None, 0.5),
    ],
)
def test_a_test_has_the_criterion_and_the_deadline_of_its_markers(mark, name, seconds):
    item = item_with(mark)
    assert (criterion_of(item), deadline_of(item, 300.0)) == (name, seconds)


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        pytest.param(marker("criterion"), r"criterion\(name\) needs a name, not None", id="no name"),
        pytest.param(marker("criterion", ""), r"needs a name, not ''", id="an empty name"),
        pytest.param(marker("criterion", 3), r"needs a name, not 3", id="a number for a name"),
        pytest.param(marker("deadline"), r"positive number of seconds, not None", id="no seconds"),
        pytest.param(marker("deadline", "5"), r"positive number of seconds, not '5'", id="text"),
        pytest.param(marker("deadline", 0), r"positive number of seconds, not 0", id="nothing"),
        pytest.param(marker("deadline", float("inf")), r"not inf", id="for ever"),
        pytest.param(marker("deadline", True), r"not True", id="a flag"),
        pytest.param(marker("first", "1"), r"first\(place\) needs a number, not '1'", id="a place in words"),
    ],
)
def test_a_marker_that_says_nothing_usable_is_a_usage_error_before_the_first_test(mark, told):
    with pytest.raises(pytest.UsageError, match=told):
        require_usable([item_with(mark)])


def test_the_markers_of_the_order_put_numbered_tests_first_and_the_last_ones_behind_a_soak():
    items = [
        item_with(marker("last"), name="last"),
        item_with(marker("soak"), name="soak"),
        item_with(name="a"),
        item_with(marker("first"), name="first"),
        item_with(marker("first", 10), name="10"),
        item_with(marker("first", place=9), name="9"),
        item_with(name="b"),
    ]
    assert [item.name for item in sorted(items, key=turn_of)] == ["9", "10", "first", "a", "b", "soak", "last"]


def test_the_markers_move_tests_of_a_session_and_leave_the_others_in_their_order(project):
    project.suite(
        test_a="import pytest\n@pytest.mark.soak\ndef test_a(): pass\ndef test_b(): pass\n",
        test_z="import pytest\ndef test_y(): pass\n@pytest.mark.first\ndef test_z(): pass\n",
    )
    assert list(project.run().verdicts) == ["test_z", "test_b", "test_y", "test_a"]
