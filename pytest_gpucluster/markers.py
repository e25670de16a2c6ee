"""The values of this plugin's markers. One that says nothing usable is a usage error: it must not be overlooked."""

from __future__ import annotations

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


def turn_of(item: pytest.Item) -> int:
    """Return when the test runs: 0 for those before all others, which find out why others would hang; 2 for those after
    all others, which take long; 1 for the rest."""
    if item.get_closest_marker("first") is not None:
        return 0
    return 1 if item.get_closest_marker("soak") is None else 2


def require_usable(items: list[pytest.Item]) -> None:
    """Look at the markers of all tests before the first one runs.

    Raises:
        pytest.UsageError: as the functions above.
    """
    for item in items:
        criterion_of(item)
        deadline_of(item, 1.0)


def _value(item: pytest.Item, marker_name: str, parameter: str) -> tuple[bool, Any]:
    marker = item.get_closest_marker(marker_name)
    if marker is None:
        return False, None
    return True, marker.args[0] if marker.args else marker.kwargs.get(parameter)
