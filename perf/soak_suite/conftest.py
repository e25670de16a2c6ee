"""Plants the fault around the struck test."""

import planting
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        struck = item.originalname == planting.PLAN["test"]
        item.add_marker(pytest.mark.deadline(planting.PLAN["deadline" if struck else "plenty"]))


@pytest.fixture(autouse=True)
def planted(request):
    name = request.node.originalname
    planting.make_room()
    planting.strike(name, "set-up")
    yield
    planting.strike(name, "teardown")
