"""What tests of the documentation share: the tests of the acceptance suite."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import shipped_suite


@pytest.fixture(scope="session")
def items() -> list[SimpleNamespace]:
    """Every test of the suite: its id, file, name, markers and criteria."""
    return shipped_suite.shipped_tests()
