"""Which test of a suite has which fault. It lies beside the conftest.py of a suite of planted faults."""

import json
import os

PLAN = json.loads(os.environ["PLANTED"])
"""Stem of a file -> name of a test -> its fault; "" for none."""


def pytest_collection_modifyitems(items):
    """Leave only the tests that the plan names."""
    items[:] = [item for item in items if item.name in PLAN[item.path.stem]]


def fault_of(item):
    """Return the fault of a test."""
    return PLAN[item.path.stem][item.name]


def criterion_of(item):
    """Return the file of acceptance/ that a test is a copy of, without its suffix."""
    return item.path.stem.partition("__")[0]
