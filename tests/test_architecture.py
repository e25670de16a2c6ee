"""The tree is the architecture: a package imports what its row allows, and the light parts stay light."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

from each import of_each

import pytest_gpucluster

PACKAGE = Path(pytest_gpucluster.__file__).parent
NAME = "pytest_gpucluster"
FOR_ALL = {"__init__", "errors", "text", "files"}
"""Modules of the root that every package may import."""


def _table(text):
    """Read "name: word word" lines; a line that begins with a blank goes on with the one before."""
    entries = (entry.partition(":") for entry in re.split(r"\n(?=\S)", text.strip()))
    return {name: set(words.split()) for name, _, words in entries}


# From low to high. Beside FOR_ALL, a package imports what its row names.
PACKAGES = _table("""
short_fixtures:
launch:
metrics:
config: metrics
isolation: launch metrics
device:
benchmarks: isolation device metrics
judge: config metrics
node: launch metrics device judge
simulation: launch metrics config device benchmarks judge node
agreement: launch metrics device
selftest: launch metrics config device benchmarks judge node agreement
journal: metrics config isolation judge agreement
reports: launch metrics judge agreement journal
analysis: launch metrics config isolation judge journal reports
session: short_fixtures launch metrics config isolation device benchmarks judge node simulation agreement journal
 reports analysis
plugin: journal metrics device session
runners: launch metrics isolation node agreement journal
cli: launch metrics benchmarks judge node simulation selftest agreement journal reports analysis runners
__main__: cli
""")

# What only these may import, wherever in the file.
ONLY_IN = _table("""
torch: device benchmarks session node simulation agreement selftest runners
pynvml: node
yaml: config
jinja2: reports
markupsafe: reports
prometheus_client: reports
pytest: plugin short_fixtures session agreement
_pytest: session agreement
xdist:
""")
OF_THE_DEVICE = re.compile(
    r"torch\.cuda|backends\.cuda|ProcessGroupNCCL|exception_dump|_scaled_mm|from torch import [^\n]*\bcuda\b"
)
"""What only ``device`` may name, in comments too."""
TORCH_IS_LATE = ("launch", "node", "runners", "cli")
"""They are imported where no torch may be loaded: a function imports it."""
LIGHT = ("launch", "isolation", "journal", "reports", "analysis", "runners", "cli")
"""What reads and renders a journal, starts runs, or is started by another program: no torch, pytest, YAML or NVML."""
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package(module):
    return module.partition(".")[0]


@functools.cache
def imports_of(module):
    """Every import wherever it stands in the file: (dotted name, line, at module level)."""
    return tuple(_imports_of(module))


def _imports_of(module):
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"), str(MODULES[module]))
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in at_once
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{where(module, node.lineno)}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                known = inner.removeprefix(f"{NAME}.") in MODULES and inner.startswith(NAME)
                yield (inner if known else str(node.module)), node.lineno, id(node) in at_once


def own_imports(module):
    if module == "__init__":  # loads what it exports when that is first used: it imports for type checkers only
        return
    for name, line, _ in imports_of(module):
        if name == NAME:
            yield "__init__", line
        elif name.startswith(f"{NAME}."):
            yield name.removeprefix(f"{NAME}."), line


def where(module, line):
    return f"{MODULES[module].relative_to(PACKAGE.parent)}:{line}"


def test_the_table_has_every_package_and_goes_downward():
    assert {package(module) for module in MODULES} == {*PACKAGES, *FOR_ALL}
    order = list(PACKAGES)
    for name, allowed in PACKAGES.items():
        assert allowed <= set(order[: order.index(name)]), f"{name}: only what stands above its row"


@of_each("module", MODULES)
def test_a_package_imports_only_what_its_row_allows(module):
    own = package(module)
    allowed = {own} | FOR_ALL | PACKAGES[own] if own in PACKAGES else {"__init__", "errors"}
    wrong = [
        f"{where(module, line)}: {own} may import {', '.join(sorted(allowed))}, not {name}"
        for name, line in own_imports(module)
        if package(name) not in allowed
    ]
    assert wrong == []


def test_every_import_that_is_allowed_is_made():
    made = {(package(module), package(name)) for module in MODULES for name, _ in own_imports(module)}
    idle = {(name, each) for name, allowed in PACKAGES.items() for each in allowed} - made
    assert idle == set(), "take it out of the row"


def test_no_imports_go_in_a_circle():
    graph = {module: {name for name, _ in own_imports(module)} - {module} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()


@of_each("module", MODULES)
def test_heavy_and_foreign_packages_are_imported_only_where_they_belong(module):
    wrong = [
        f"{where(module, line)}: {name} may be imported by {', '.join(sorted(ONLY_IN[package(name)]))}"
        for name, line, at_once in imports_of(module)
        if package(name) in ONLY_IN
        and (
            package(module) not in ONLY_IN[package(name)]
            or (package(name) == "torch" and package(module) in TORCH_IS_LATE and at_once)
        )
    ]
    assert wrong == []


def test_only_the_package_device_names_cuda_and_nccls_part_of_torch():
    wrong = [
        f"{where(module, line)}: belongs to the package device: {text.strip()}"
        for module, path in MODULES.items()
        if package(module) != "device"
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if OF_THE_DEVICE.search(text)
    ]
    assert wrong == []


def test_no_file_is_a_drawer_for_leftovers():
    vague = [str(path) for path in MODULES.values() if VAGUE_NAMES & {path.stem, path.parent.name}]
    assert vague == [], "name a file after the one thing it holds"


def loaded_by(*modules):
    """What a fresh interpreter has loaded after these imports."""
    names = [NAME if module == "__init__" else f"{NAME}.{module}" for module in modules]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert child.returncode == 0, child.stderr
    return {name.partition(".")[0] for name in child.stdout.split()}


def test_importing_the_plugin_loads_neither_torch_nor_nvml_nor_yaml():
    assert loaded_by("plugin") & {"torch", "pynvml", "yaml", "numpy"} == set()


def test_what_reads_and_renders_the_journal_needs_no_torch_pytest_or_yaml():
    light = [module for module in MODULES if package(module) in LIGHT]
    assert loaded_by(*light) & {"torch", "pytest", "_pytest", "yaml", "pynvml", "numpy"} == set()


def test_what_a_rank_is_and_how_it_is_judged_can_be_known_without_torch():
    modules = (
        "launch.launchers",
        "node.inventory",
        "device.environment",
        "device.identity",
        "device.process_group",
        "agreement.preflight",
        "judge.judge",
        "config.workload",
        "config.criteria",
    )
    assert loaded_by(*modules) & {"torch", "pytest", "pynvml", "yaml"} == set()
    assert loaded_by("judge.loader") & {"torch", "pytest", "pynvml"} == set()
