"""What tests of the documentation share: the acceptance suite, collected once."""

from __future__ import annotations

import pytest
from suite_names import Item, collect


@pytest.fixture(scope="session")
def items() -> tuple[Item, ...]:
    """Every test of the suite, with what selects it."""
    return collect()
