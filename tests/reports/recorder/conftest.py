"""A folder for the recorder's tests."""

import pytest


@pytest.fixture
def place(tmp_path):
    """A folder with the empty folder of a run."""
    (tmp_path / "run").mkdir()
    return tmp_path
