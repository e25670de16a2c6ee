"""The tree is the architecture: imports go downward only, and the light parts stay light."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import pytest_gpucluster

PACKAGE = Path(pytest_gpucluster.__file__).parent
NAME = "pytest_gpucluster"

# Low to high. A module imports only what stands before it here, or beside it in the same folder ("x.*").
LAYERS = (
    "__init__",
    "wording",
    "errors",
    "units",
    "stats",
    "sampling",
    "catalogue.*",
    "metric_catalogue",
    "metrics",
    "hostlist",
    "launch_variables",
    "launch",
    "nccl_choice",
    "nccl_log",
    "cublas",
    "hardware",
    "limits",
    "yaml_document",
    "thresholds",
    "schema",
    "workload_values",
    "sections.*",
    "workloads",
    "workload_file",
    "workload_schema",
    "stragglers",
    "misses",
    "missing_limit",
    "judged",
    "judge",
    "cause",
    "fault_dump",
    "verdict",
    "run_directory",
    "journal_fields",
    "journal_measurements",
    "journal_lines",
    "journal",
    "reports.*",
    "recorder",
    "recording",
    "recorder_process",
    "agreement.release.*",
    "agreement.*",
    "record",
    "refused",
    "benchmarks.*",
    "nvml_queries",
    "nvml",
    "telemetry",
    "kernel_log",
    "pci_bus",
    "process_table",
    "health.*",
    "affinity",
    "inventory",
    "cluster",
    "training_inputs",
    "option_values",
    "options",
    "selection",
    "markers",
    "workload_of_tests",
    "suite_properties",
    "hookspecs",
    "run",
    "opening",
    "judging",
    "failure",
    "phase",
    "progress",
    "fixtures",
    "session",
    "local",
    "activation",
    "plugin",
    "golden_command",
    "data_command",
    "cli",
    "__main__",
)

# What is held tighter than its place in the order.
CONFINED = {
    "wording": (),
    "catalogue.*": ("catalogue.*",),
    "metric_catalogue": ("catalogue.*",),
    "errors": (),
    "hostlist": ("errors",),
    "launch_variables": ("errors",),
    "launch": ("errors", "hostlist", "launch_variables"),
    "limits": ("errors", "units", "metric_catalogue", "metrics", "hardware"),
    "yaml_document": ("units",),
    "workload_values": ("units",),
    "sections.*": ("errors", "sampling", "workload_values", "sections.*"),
    "workloads": ("sampling", "sections.*"),
    "workload_file": ("errors", "units", "sections.*", "workloads", "yaml_document"),
    "stragglers": ("metric_catalogue", "metrics"),
    "misses": ("stats", "units", "limits", "metric_catalogue", "metrics"),
    "judged": ("limits", "metrics"),
    "benchmarks.*": ("errors", "units", "stats", "sampling", "cublas", "benchmarks.*"),
    "agreement.*": (
        *(
            "wording",
            "errors",
            "launch",
            "metrics",
            "metric_catalogue",
            "judge",
            "journal",
            "journal_lines",
            "fault_dump",
        ),
        "agreement.*",
    ),
    "nvml": ("errors", "nvml_queries"),
    "nvml_queries": (),
    "kernel_log": (),
    "pci_bus": ("kernel_log",),
    "process_table": (),
    "health.*": (
        *("wording", "errors", "hardware", "nvml", "kernel_log", "pci_bus", "process_table"),
        "health.*",
    ),
    "affinity": ("errors", "kernel_log", "health.finding"),
    "telemetry": ("stats", "nvml"),
    "inventory": ("__init__", "errors", "launch", "hardware", "nvml"),
    "progress": ("wording",),
    "journal_fields": ("errors",),
    "journal_measurements": ("journal_fields",),
    "journal_lines": ("journal_fields", "journal_measurements"),
    "journal": ("errors", "metrics", "journal_fields", "journal_measurements", "journal_lines", "run_directory"),
    "option_values": ("errors", "agreement.preflight", "workload_file", "training_inputs"),
    "golden_command": ("errors", "journal", "run_directory", "benchmarks.lora.curve", "benchmarks.lora.golden"),
    "training_inputs": ("errors", "benchmarks.lora.golden"),
    "nccl_choice": (),
    "nccl_log": ("nccl_choice",),
    "cublas": (),
    "cluster": ("errors", "launch", "nccl_log", "nccl_choice", "agreement.release.*"),
    "cli": (
        "__init__",
        *("wording", "errors", "units", "stats", "metrics", "launch", "hardware", "limits", "thresholds", "judge"),
        *("verdict", "journal*", "run_directory", "reports.*", "nvml*", "inventory", "recorder", "recording"),
        *("golden_command", "data_command"),
    ),
    "data_command": ("wording", "errors", "units", "benchmarks.lora.*"),
    "__main__": ("cli",),
}

# The only places that may import what is heavy, or what would tie them to pytest; wherever in the file.
ONLY_IN = {
    "torch": (
        "benchmarks.*",
        "cluster",
        "inventory",
        "agreement.store",
        "agreement.host",
        "agreement.release.*",
    ),
    "pynvml": ("nvml",),
    "yaml": ("yaml_document",),
    "junit_xml": ("reports.junit",),
    "pytest": (
        *("plugin", "options", "hookspecs", "fixtures", "progress", "selection", "markers", "suite_properties"),
        "workload_of_tests",
        *("activation", "session", "local", "opening", "run", "phase", "failure"),
        # The exception that is raised into a test must be one of pytest's own failures.
        "agreement.release.python",
    ),
    "_pytest": ("session", "suite_properties", "phase", "agreement.release.python"),
    "xdist": (),
}

LIGHT = (
    *("reports.*", "journal*", "recorder", "recording", "recorder_process", "cli", "golden_command", "__main__"),
    "data_command",
    *("benchmarks.lora.curve", "benchmarks.lora.golden"),
)
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def matches(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern) or (pattern.endswith(".*") and module == pattern[:-2])


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """Every import wherever it stands in the file: (dotted name, line). Relative ones are resolved."""
    path = MODULES[module]
    package = path.relative_to(PACKAGE.parent).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*start, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                known = inner.removeprefix(f"{NAME}.") in MODULES and inner.startswith(NAME)
                yield (inner if known else source), node.lineno


def own_imports(module: str) -> Iterator[tuple[str, int]]:
    for name, line in imports_of(module):
        if name == NAME:
            yield "__init__", line
        elif name.startswith(f"{NAME}."):
            yield name.removeprefix(f"{NAME}."), line


def layer(module: str) -> int | None:
    # agreement.release.* is more telling than agreement.*, and stands before it.
    return next((index for index, pattern in enumerate(LAYERS) if matches(module, pattern)), None)


def where(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(PACKAGE.parent)}:{line}"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_place_in_the_layers(module: str) -> None:
    assert layer(module) is not None, (
        f"{module} has no place in LAYERS of this file: add it where its imports put it, and to the"
        " picture in CONTRIBUTING.md"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward_only(module: str) -> None:
    own, wrong = layer(module), []
    for name, line in own_imports(module):
        target = layer(name)
        if own is None or target is None or target > own:
            wrong.append(f"{where(module, line)}: {module} imports {name}, which is not below it")
        elif target == own and not LAYERS[own].endswith(".*"):
            wrong.append(f"{where(module, line)}: {module} imports itself")
    assert wrong == []


@pytest.mark.parametrize("module", MODULES)
def test_confined_modules_import_only_what_they_may(module: str) -> None:
    allowed = next((CONFINED[pattern] for pattern in CONFINED if matches(module, pattern)), None)
    wrong = [
        f"{where(module, line)}: {module} may import {', '.join(allowed) or 'nothing'} from here, not {name}"
        for name, line in own_imports(module)
        if allowed is not None and not any(matches(name, pattern) for pattern in allowed)
    ]
    assert wrong == []


def test_no_imports_go_in_a_circle() -> None:
    graph = {module: {name for name, _ in own_imports(module)} - {module} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", MODULES)
def test_heavy_and_foreign_packages_are_imported_only_where_they_belong(module: str) -> None:
    wrong = [
        f"{where(module, line)}: only {', '.join(ONLY_IN[name.partition('.')[0]])} may import {name}"
        for name, line in imports_of(module)
        if name.partition(".")[0] in ONLY_IN
        and not any(matches(module, pattern) for pattern in ONLY_IN[name.partition(".")[0]])
    ]
    assert wrong == []


def test_no_file_is_a_drawer_for_leftovers() -> None:
    vague = [str(path) for path in MODULES.values() if VAGUE_NAMES & {path.stem, path.parent.name}]
    assert vague == [], "name a file after the one thing it holds"


def loaded_by(*modules: str) -> set[str]:
    """What a fresh interpreter has loaded after these imports."""
    names = [NAME if module == "__init__" else f"{NAME}.{module}" for module in modules]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert child.returncode == 0, child.stderr
    return {name.partition(".")[0] for name in child.stdout.split()}


def test_importing_the_plugin_loads_neither_torch_nor_nvml_nor_yaml() -> None:
    assert loaded_by("plugin") & {"torch", "pynvml", "yaml", "numpy"} == set()


def test_what_reads_and_renders_the_journal_needs_no_torch_pytest_or_yaml() -> None:
    light = [
        module for module in MODULES if module != "__main__" and any(matches(module, pattern) for pattern in LIGHT)
    ]
    assert {"journal", "recorder", "cli", "reports.junit"} <= set(light)
    assert loaded_by(*light) & {"torch", "pytest", "_pytest", "yaml", "pynvml", "numpy"} == set()


@pytest.mark.parametrize("module", ["launch", "inventory", "agreement.preflight", "judge", "thresholds", "metrics"])
def test_what_a_rank_is_and_how_it_is_judged_can_be_known_without_torch(module: str) -> None:
    assert loaded_by(module) & {"torch", "pytest", "pynvml"} == set()
