"""perf/reports.py: what reports of 1,024 ranks cost, and when it says that this is too much."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import example_runs
import pytest

from pytest_gpucluster import journal

SCRIPT = Path(__file__).parents[1] / "perf" / "reports.py"
CRITERIA, OF = 4, 40
ONCE_BYTES = 400_000
"""Of a page, for what does not grow with the criteria: styles, scripts and the inventory of all ranks."""


spec = importlib.util.spec_from_file_location("perf_reports", SCRIPT)  # a program, not a package
reports = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reports)
GOOD = {"name": "html", "read_seconds": 2.7, "render_seconds": 1.0, "peak_bytes": 9e7, "report_bytes": 1.2e6}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tenth of the large run: as many ranks, fewer criteria."""
    return example_runs.write_large(tmp_path_factory.mktemp("large"), criteria=CRITERIA) / journal.FILE_NAME


# The largest ones; `make perf` makes all of them, of the whole run.
@pytest.mark.parametrize("name", ["html", "json", "prometheus"])
def test_a_report_of_1024_ranks_keeps_its_bounds(run, name):
    command = [sys.executable, str(SCRIPT), "--journal", str(run), "--one", name]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)
    # All criteria of a journal are never in memory at once, so that more of them hardly need more of it.
    assert told["peak_bytes"] < reports.MOST_BYTES
    if name == "html":
        assert told["report_bytes"] < reports.MOST_HTML_BYTES * CRITERIA / OF + ONCE_BYTES
    assert told["report_bytes"] > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({}, "", id="good"),
        pytest.param({"render_seconds": 2.3}, "5 s or more", id="slow"),
        pytest.param({"read_seconds": float("nan")}, "5 s or more", id="no time"),
        pytest.param({"peak_bytes": 500e6}, "500 MB of memory or more", id="memory"),
        pytest.param({"report_bytes": 2e6}, "2 MB of page or more", id="page"),
        pytest.param({"name": "json", "report_bytes": 6e6}, "", id="another report may be larger"),
    ],
)
def test_it_says_what_is_too_much(change, said):
    assert reports.missed(GOOD | change) == said
    assert (said or "yes") in reports.row(GOOD | change)


def test_of_more_ranks_more_is_allowed_and_of_fewer_not_less():
    large = GOOD | {"render_seconds": 17.0, "peak_bytes": 1.9e9, "report_bytes": 7.9e6}
    assert reports.missed(large, 4096) == ""
    assert reports.missed(large, 2048) == "10 s or more, 1000 MB of memory or more, 4 MB of page or more"
    assert reports.missed(large | {"render_seconds": 17.4}, 4096) == "20 s or more"
    assert reports.missed(GOOD, 8) == ""


def test_a_report_that_cannot_be_made_is_told(tmp_path):
    path = tmp_path / journal.FILE_NAME
    path.write_text("no journal\n")
    with pytest.raises(SystemExit, match="the report reading alone could not be made"):
        reports.main(["--journal", str(path)])
