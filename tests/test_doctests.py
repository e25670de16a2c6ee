"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

from each import of_each

import pytest_gpucluster

MODULES = [
    module.name
    for module in pkgutil.walk_packages(pytest_gpucluster.__path__, "pytest_gpucluster.")
    if not module.name.endswith("__main__")
]


@of_each("name", MODULES)
def test_examples_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_formulas_that_everyone_knows_have_examples() -> None:
    for name in ("units", "stats", "benchmarks.collective_result"):
        assert doctest.testmod(importlib.import_module(f"pytest_gpucluster.{name}")).attempted > 0
