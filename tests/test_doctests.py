"""The examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

from each import of_each

import pytest_gpucluster

FOLDER = Path(pytest_gpucluster.__file__).parent
# doctest looks every function up in its source, which takes long in modules that have no examples.
MODULES = [
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
]


@of_each("name", MODULES)
def test_examples_hold(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_formulas_that_everyone_knows_have_examples():
    for name in ("metrics.units", "metrics.stats", "benchmarks.collectives"):
        assert doctest.testmod(importlib.import_module(f"pytest_gpucluster.{name}")).attempted > 0
