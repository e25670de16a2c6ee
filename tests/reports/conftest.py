"""The example runs on disk and their pages, made once for all tests of reports."""

import example_runs
import pytest

from pytest_gpucluster.journal import journal
from pytest_gpucluster.reports.html import page


@pytest.fixture(scope="session")
def example_folders(tmp_path_factory):
    """The folder of each example run, which no test may change."""
    return {name: example_runs.write(tmp_path_factory.mktemp(name), name) for name in example_runs.NAMES}


@pytest.fixture(scope="session")
def example_pages(example_folders):
    """``report.html`` of each example run."""
    return {
        name: page.render(journal.read(folder / journal.JOURNAL_FILE, keep_samples=False), folder=folder)
        for name, folder in example_folders.items()
    }
