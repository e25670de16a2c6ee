"""What tests of whole pytest sessions share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sessions import Project


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A folder with a suite that turns the plugin on by its ini file, in a clean environment."""
    import sessions  # imports torch, which other tests do without

    sessions.clean_environment(monkeypatch)
    return sessions.Project(pytester)
