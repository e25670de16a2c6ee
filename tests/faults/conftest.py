"""The table of times, printed under the tests for faults."""

from __future__ import annotations

import pytest
from times import GOAL_SECONDS, Times

_TIMES = pytest.StashKey[Times]()


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> Times:
    """Takes times for the table at the end."""
    return request.config.stash.setdefault(_TIMES, Times())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    times = config.stash.get(_TIMES, None)
    if times is not None and times.rows:
        terminalreporter.section(f"from fault to report and to the next test; goal {GOAL_SECONDS:g} s each")
        for line in times.lines():
            terminalreporter.write_line(line)
