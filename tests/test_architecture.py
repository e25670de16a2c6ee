"""The tree is the architecture: imports go downward only, and the light parts stay light."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from each import of_each

import pytest_gpucluster

PACKAGE = Path(pytest_gpucluster.__file__).parent
NAME = "pytest_gpucluster"


def _table(text: str) -> dict[str, tuple[str, ...]]:
    """Read "name: word word" lines; a line that begins with a blank goes on with the one before."""
    entries = (entry.partition(":") for entry in re.split(r"\n(?=\S)", text.strip()))
    return {name: tuple(words.split()) for name, _, words in entries}


# Low to high. A module imports only what stands before it here, or beside it in the same folder ("x.*").
_LAYERS = """
__init__ wording whole_file footer step_file time_spent mounts errors units stats sampling catalogue.* metric_catalogue
metrics hostlist links.* isolation.* launch_variables launch nccl_reasons nccl_choice nccl_log nccl_environment cublas
hardware limits yaml_document thresholds evidence explained_limits schema workload_values sections.* workloads predicted
workload_file manifest collective_sizes workload_schema stragglers explanation misses missing_limit node_or_gpu judged
judge cause fault_dump verdict exit_note run_directory journal_fields journal_measurements journal_lines journal
verdict_record benchmarks.lora.curve reports.* comparison.* crosscheck.* merging.* fleet.* baseline stale_processes
light_process recorder report_process recording recorder_process agreement.release.* agreement.* record account
benchmarks.* nvml_queries nvml telemetry gpu_sampler node_sampler node_sampler_process kernel_log pci_bus process_table
infiniband health.* counters.* affinity host.* inventory surroundings.* dashboard.* live peer_memory rails fabric_ports
port_findings nccl_values nccl_rules nccl_findings fabric_exchange cluster training_inputs option_values options
selection refused start_notes markers workload_of_tests suite_properties hookspecs accompaniment provenance run closing
announcement opening judging console failure isolation_told isolation_plan isolating shown phase_outcome phase_verdict
phase live_hooks progress fixtures session left_behind local_worker local activation plugin remote.* sweep.*
node_info.* node_differences.* nccl_advice.* torchrun.* acceptance_record.* calibration.* commands.* cli __main__
"""
LAYERS = tuple(_LAYERS.split())

# What is held tighter than its place in the order.
CONFINED = _table("""
wording:
time_spent:
catalogue.*: catalogue.*
metric_catalogue: catalogue.*
errors:
hostlist: errors
links.*: errors units stats links.*
isolation.*: errors stats hostlist links.tournament isolation.*
launch_variables: errors
launch: errors hostlist launch_variables
limits: errors units metric_catalogue metrics hardware
yaml_document: units
evidence: errors units stats metrics limits
workload_values: units
sections.*: errors sampling workload_values sections.*
workloads: sampling sections.*
predicted: sampling workloads
account: errors journal
workload_file: errors units sections.* workloads yaml_document
collective_sizes: errors units workloads workload_file
stragglers: metric_catalogue metrics
explanation:
misses: stats units explanation limits metric_catalogue metrics
judged: limits metrics sampling
node_or_gpu:
benchmarks.*: errors time_spent units stats sampling cublas mounts links.* benchmarks.*
agreement.*: wording errors time_spent launch metrics metric_catalogue judge journal journal_lines fault_dump
    stale_processes agreement.*
nvml: errors nvml_queries
nvml_queries:
kernel_log:
pci_bus: kernel_log
process_table:
health.*: wording errors hardware nvml kernel_log pci_bus process_table health.*
infiniband: kernel_log
counters.*: errors nvml kernel_log infiniband health.finding health.situation health.nvlink health.xid_table
    counters.*
affinity: errors kernel_log health.finding
host.*: errors nvml kernel_log health.finding affinity mounts host.*
mounts:
surroundings.*: errors wording sampling hostlist launch nvml health.finding process_table affinity host.*
    surroundings.*
stale_processes:
light_process: stale_processes
telemetry: stats
gpu_sampler: nvml telemetry
node_sampler: light_process telemetry
node_sampler_process: errors light_process nvml telemetry gpu_sampler node_sampler
accompaniment: errors hardware metrics nvml telemetry node_sampler counters.* health.finding
provenance:
inventory: __init__ errors launch hardware nvml
progress: wording step_file live live_hooks
footer:
step_file:
dashboard.*: wording errors light_process nvml telemetry node_sampler_process process_table infiniband host.tree
    dashboard.*
live: wording footer step_file dashboard.node_state dashboard.reader
commands.watch: dashboard.* commands.command
journal_fields: errors
journal_measurements: sampling journal_fields
journal_lines: explanation time_spent verdict journal_fields journal_measurements
journal: verdict errors metrics journal_fields journal_measurements journal_lines run_directory
option_values: errors agreement.preflight workload_file collective_sizes training_inputs journal comparison.allowance
baseline: wording errors units journal judged comparison.*
training_inputs: errors benchmarks.lora.golden
nccl_reasons: wording
nccl_choice: nccl_reasons
nccl_environment: wording nccl_log
peer_memory:
rails:
fabric_ports: limits infiniband nccl_environment peer_memory rails
port_findings: infiniband fabric_ports rails health.finding
nccl_values: infiniband fabric_ports surroundings.interfaces health.finding
nccl_rules: nccl_values
nccl_findings: nccl_environment nccl_values nccl_rules health.finding
fabric_exchange: wording errors fabric_ports port_findings nccl_environment nccl_values health.finding
nccl_log: nccl_reasons nccl_choice
isolation_told: wording isolation.*
verdict_record: errors isolation.exclude journal verdict
announcement: wording run verdict_record
report_process: wording whole_file journal reports.*
cublas:
cluster: wording errors launch metrics cause nccl_log nccl_choice nccl_environment fabric_ports agreement.release.*
cli: __init__ commands.command
commands.command: wording errors whole_file journal
commands.golden: errors journal run_directory benchmarks.lora.curve benchmarks.lora.golden commands.command
commands.report: wording errors journal reports.* commands.command
remote.*: __init__ wording errors hostlist verdict run_directory thresholds agreement.preflight isolation.exclude
    remote.*
sweep.*: wording errors hostlist verdict journal agreement.preflight isolation.exclude remote.* sweep.*
comparison.*: wording errors stats units metrics journal reports.tables reports.outline reports.layout comparison.*
crosscheck.*: wording errors units journal reports.tables reports.layout crosscheck.*
commands.crosscheck: wording errors units journal comparison.allowance crosscheck.* commands.command
merging.*: wording errors workloads verdict journal journal_lines merging.*
fleet.*: wording stats stragglers journal isolation.exclude comparison.conditions reports.tables reports.outline
    reports.layout fleet.*
commands.compare: wording errors journal comparison.* reports.tables reports.layout commands.command
commands.merge: wording errors journal merging.* commands.command
commands.fleet: errors hostlist journal comparison.allowance comparison.side fleet.* commands.command
commands.verdict: wording errors verdict journal sweep.answer commands.command
commands.access: errors units remote.*
commands.ssh: __init__ wording errors whole_file verdict run_directory agreement.preflight remote.* sweep.answer
    commands.command commands.access
commands.sweep: errors units verdict run_directory remote.* sweep.* commands.command commands.access
commands.data: wording errors units benchmarks.lora.* commands.command
node_info.*: wording errors launch light_process nvml process_table infiniband kernel_log affinity host.* peer_memory
    surroundings.interfaces reports.layout node_info.*
commands.info: node_info.* commands.command
node_differences.*: wording errors hostlist node_differences.*
commands.nodes: errors hostlist node_differences.* commands.command
nccl_advice.*: wording errors hardware launch infiniband peer_memory fabric_ports host.tree nccl_environment
    nccl_values nccl_rules nccl_findings health.finding kernel_log surroundings.interfaces node_info.* reports.layout
    nccl_advice.*
commands.nccl_env: nccl_advice.* commands.command
commands.node: errors wording kernel_log health.xid_table commands.command
exit_note:
torchrun.*: wording errors verdict exit_note torchrun.*
commands.run: wording errors verdict exit_note journal recorder torchrun.* agreement.address commands.command
acceptance_record.*: wording errors hostlist hardware metrics metric_catalogue limits judge verdict journal
    journal_lines acceptance_record.*
explained_limits: units limits
calibration.*: wording errors units stats metrics limits journal acceptance_record.objections calibration.*
commands.accept: __init__ wording errors journal acceptance_record.* commands.command
commands.thresholds: errors commands.command commands.thresholds_*
commands.thresholds_check: wording errors thresholds evidence limits metrics explained_limits commands.command
commands.thresholds_judge: wording errors units metrics limits thresholds evidence judge judged explained_limits
    commands.command
commands.thresholds_explain: wording errors units metrics limits thresholds evidence explained_limits journal
    reports.tables commands.command
commands.thresholds_calibrate: __init__ wording errors hardware metrics limits thresholds journal
    acceptance_record.verification calibration.* commands.command
__main__: cli
""")

# The only places that may import what is heavy, or what would tie them to pytest; wherever in the file.
ONLY_IN = _table("""
torch: benchmarks.* cluster inventory agreement.store agreement.host agreement.release.* torchrun.agent
pynvml: nvml
yaml: yaml_document
junit_xml: reports.junit
jinja2: reports.html.page
markupsafe: reports.html.* reports.charts.*
prometheus_client: reports.prometheus
rich: dashboard.screen footer commands.watch
pytest: plugin options hookspecs fixtures progress selection markers suite_properties workload_of_tests console
    live_hooks activation session local local_worker opening closing start_notes run failure phase phase_outcome
    phase_verdict isolating shown agreement.release.python
_pytest: session suite_properties shown phase_outcome phase live_hooks agreement.release.python
xdist:
""")

_LIGHT = """
node_differences.* reports.* journal* recorder report_process recording recorder_process cli __main__ remote.* sweep.*
node_info.* torchrun.* commands.* exit_note comparison.* merging.* fleet.* crosscheck.* nccl_advice.* dashboard.*
footer step_file live acceptance_record.* calibration.* explained_limits benchmarks.lora.curve benchmarks.lora.golden
"""
LIGHT = tuple(_LIGHT.split())
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def matches(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern) or (pattern.endswith(".*") and module == pattern[:-2])


@functools.cache
def imports_of(module: str) -> tuple[tuple[str, int], ...]:
    """Every import wherever it stands in the file: (dotted name, line). Relative ones are resolved."""
    return tuple(_imports_of(module))


def _imports_of(module: str) -> Iterator[tuple[str, int]]:
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


@functools.cache
def layer(module: str) -> int | None:
    # agreement.release.* is more telling than agreement.*, and stands before it.
    return next((index for index, pattern in enumerate(LAYERS) if matches(module, pattern)), None)


def where(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(PACKAGE.parent)}:{line}"


@of_each("module", MODULES)
def test_every_module_has_its_place_in_the_layers(module: str) -> None:
    assert layer(module) is not None, (
        f"{module} has no place in LAYERS of this file: add it where its imports put it, and to the"
        " picture in CONTRIBUTING.md"
    )


@of_each("module", MODULES)
def test_imports_go_downward_only(module: str) -> None:
    own, wrong = layer(module), []
    for name, line in own_imports(module):
        target = layer(name)
        if own is None or target is None or target > own:
            wrong.append(f"{where(module, line)}: {module} imports {name}, which is not below it")
        elif target == own and not LAYERS[own].endswith(".*"):
            wrong.append(f"{where(module, line)}: {module} imports itself")
    assert wrong == []


@of_each("module", MODULES)
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


@of_each("module", MODULES)
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


def test_what_a_rank_is_and_how_it_is_judged_can_be_known_without_torch() -> None:
    modules = ("launch", "inventory", "agreement.preflight", "judge", "metrics", "nvml", "workloads")
    assert loaded_by(*modules) & {"torch", "pytest", "pynvml", "yaml"} == set()
    assert loaded_by("thresholds") & {"torch", "pytest", "pynvml"} == set()
