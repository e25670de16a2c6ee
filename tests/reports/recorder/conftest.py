"""A folder for the recorder's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the empty folder of a run."""
    (tmp_path / "run").mkdir()
    return tmp_path
