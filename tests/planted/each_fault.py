"""The conftest of a suite that runs each test of a criterion once for each fault that is planted for it.

``planted_NAME`` beside it belongs to ``test_NAME.py`` of the acceptance suite. It says which faults each test is shown
in sessions of so many nodes and ranks (``CASES``), puts a fault in the place of one of the product's own pieces
(``plant``), and may change workload and settings for it.
"""

import dataclasses
import importlib
import itertools
import os

import pytest

from pytest_gpucluster.config.workload import Workload

TOPOLOGY = "{GROUP_WORLD_SIZE}x{LOCAL_WORLD_SIZE}".format_map(os.environ)


def planted_for(module):
    return importlib.import_module(f"planted_{module.__name__.removeprefix('test_')}")


def cases_of(module):
    return planted_for(module).CASES.get(TOPOLOGY, {})


@pytest.hookimpl(trylast=True)  # the fault stands last in the name
def pytest_generate_tests(metafunc):
    faults = [
        faults for test, faults in cases_of(metafunc.module).items() if test.split("[")[0] == metafunc.function.__name__
    ]
    metafunc.parametrize("fault", list(dict.fromkeys(itertools.chain(*faults))), indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    order = {}

    def is_asked(item):
        fault = item.callspec.params["fault"]
        test = item.name.removesuffix(f"[{fault}]")
        test = test if test != item.name else item.name.removesuffix(f"-{fault}]") + "]"
        return isinstance(fault, str) and fault in cases_of(item.module).get(test, ())

    items[:] = filter(is_asked, items)
    for item in items:
        getattr(planted_for(item.module), "prepare", lambda item: None)(item)
        order.setdefault((item.path, item.callspec.params["fault"]), len(order))
    items.sort(key=lambda item: order[item.path, item.callspec.params["fault"]])


@pytest.fixture(autouse=True)
def fault(request):
    planted_for(request.module).plant(request.param, request)
    return request.param


def changed(workload, fault, request):
    """The workload of the session, with what the fault needs otherwise: section -> key -> value."""
    changes = getattr(planted_for(request.module), "WORKLOADS", {}).get(fault, {})
    sections = {name: dataclasses.replace(getattr(workload, name), **keys) for name, keys in changes.items()}
    return Workload(**{**vars(workload), **sections})


# Of tests whose workload is their conftest's own no file is read.
changed.__module__ = "pytest_gpucluster.session.fixtures"
workload = pytest.fixture(name="workload")(changed)


@pytest.fixture
def settings(settings, fault, request):
    changes = getattr(planted_for(request.module), "SETTINGS", {}).get(fault, dict)
    return dataclasses.replace(settings, **changes())
