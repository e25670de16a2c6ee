"""The table of times, printed under the tests for faults."""

import os
from pathlib import Path

import pytest
from cases import TIMES_VARIABLE
from times import Times, table, verdicts

_TIMES = pytest.StashKey[Times]()


@pytest.fixture(scope="session")
def times(request):
    """Takes times for the table at the end."""
    return request.config.stash.setdefault(_TIMES, Times())


def pytest_terminal_summary(terminalreporter, config):
    """Print the table, and write it for perf/faults.py."""
    times = config.stash.get(_TIMES, None)
    if times is None or not times.rows:
        return
    terminalreporter.section("from fault to report and to the next test")
    for line in [*table(times.rows), "", *verdicts(times.rows)]:
        terminalreporter.write_line(line)
    if path := os.environ.get(TIMES_VARIABLE):
        times.write(Path(path))
