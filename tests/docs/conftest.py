"""What tests of the documentation share: the tests of the acceptance suite."""

import pytest
import shipped_suite


@pytest.fixture(scope="session")
def items():
    """Every test of the suite: its id, file, name, markers and criteria."""
    return shipped_suite.shipped_tests()
