"""Plants the fault around the struck test."""

import planting
import pytest

if planting.PLAN["kind"] == "start":
    planting.strike(planting.PLAN["test"], planting.PLAN["moment"])


def pytest_collection_modifyitems(items):
    if planting.PLAN["fault"] == "drop_test":
        items[:] = [item for item in items if item.originalname != planting.PLAN["test"]]
    for item in items:
        struck = item.originalname == planting.PLAN["test"]
        item.add_marker(pytest.mark.deadline(planting.PLAN["deadline" if struck else "plenty"]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    left_out = planting.PLAN["fault"] == "leave_out_test" and item.originalname == planting.PLAN["test"]
    return True if left_out and planting.PLAN["victim"] == planting.RANK else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if planting.PLAN["fault"] == "change_exit":
        session.exitstatus = 0


@pytest.fixture(autouse=True)
def planted(request):
    name = request.node.originalname
    planting.make_room()
    planting.strike(name, "set-up")
    yield
    planting.strike(name, "teardown")
