"""The values of this plugin's markers. One that says nothing usable is a usage error: it must not be overlooked."""

from __future__ import annotations

import math
from typing import Any

import pytest


def criterion_of(item: pytest.Item) -> str | None:
    """Return the name in the test's ``criterion`` marker, or None for a test that is no criterion.

    Raises:
        pytest.UsageError: a criterion without a name.
    """
    found, name = _value(item, "criterion", "name")
    if not found:
        return None
    if not isinstance(name, str) or not name.strip():
        raise pytest.UsageError(f"{item.nodeid}: the marker criterion(name) needs a name, not {name!r}")
    return name


def deadline_of(item: pytest.Item, default: float) -> float:
    """Return how many seconds each phase of the test may take.

    Raises:
        pytest.UsageError: a deadline that is no positive number.
    """
    found, seconds = _value(item, "deadline", "seconds")
    if not found:
        return default
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise pytest.UsageError(
            f"{item.nodeid}: the marker deadline(seconds) needs a positive number of seconds, not {seconds!r}"
        )
    return float(seconds)


def turn_of(item: pytest.Item) -> tuple[int, float]:
    """Return the sort key of the order in which tests run.

    First those with the marker ``first``, by its number, without one after those that have one; then the tests without
    a marker of the order; then ``soak``; then ``last``.

    Raises:
        pytest.UsageError: a place in the order that is no number.
    """
    found, place = _value(item, "first", "place")
    if found:
        if isinstance(place, bool) or not isinstance(place, (int, float, type(None))):
            raise pytest.UsageError(f"{item.nodeid}: the marker first(place) needs a number, not {place!r}")
        return 0, math.inf if place is None else float(place)
    if item.get_closest_marker("last") is not None:
        return 3, 0.0
    return (1, 0.0) if item.get_closest_marker("soak") is None else (2, 0.0)


def require_usable(items: list[pytest.Item]) -> None:
    """Look at the markers of all tests before the first one runs.

    Raises:
        pytest.UsageError: as the functions above.
    """
    for item in items:
        criterion_of(item)
        deadline_of(item, 1.0)
        turn_of(item)


def _value(item: pytest.Item, marker_name: str, parameter: str) -> tuple[bool, Any]:
    marker = item.get_closest_marker(marker_name)
    if marker is None:
        return False, None
    return True, marker.args[0] if marker.args else marker.kwargs.get(parameter)
