"""What a run would require and leave out here, from its options and its collection: a program for `gpucluster doctor`.

``python -m pytest_gpucluster.session.forecast FILE NODES RANKS_PER_NODE WHERE ARGUMENT...`` collects the tests as
torchrun with these arguments would, and writes to the file, as JSON: ``nodes`` and ``ranks_per_node`` of the launch (0:
one for each GPU that torch sees; where WHERE is "elsewhere", one for each that was ordered), ``device``, ``expect`` and
``thresholds`` as given, ``sku``; ``part``: why this is not the whole suite with its limits, or ""; ``problems``: inputs
that cannot be used; ``tests``: those that an acceptance needs here, each with ``nodeid``, ``criterion``, ``skipped``
and ``remedy``; ``torch`` and its ``cuda``; ``gpus``: names of those that are visible; ``driver``, ``driver_cuda``, or
in ``nvml`` why they are unknown.

torch and NVML are loaded here, so that a driver that hangs stops this process alone.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster import files
from pytest_gpucluster.agreement.preflight import sku_matches
from pytest_gpucluster.benchmarks.lora.model import QWEN2_LABEL, given_base
from pytest_gpucluster.config.criteria_file import read_manifest
from pytest_gpucluster.config.workload import CRITERIA
from pytest_gpucluster.device.identity import VisibleGpus
from pytest_gpucluster.errors import EnvironmentBroken, OptionError, UsageProblem
from pytest_gpucluster.judge.limits import Limit, Thresholds, demand, explain
from pytest_gpucluster.judge.loader import load, shipped_path
from pytest_gpucluster.launch.launchers import allocation
from pytest_gpucluster.node.nvml import open_nvml
from pytest_gpucluster.session.options import Settings, resolve
from pytest_gpucluster.session.run import load_limits
from pytest_gpucluster.session.selection import (
    Room,
    TrainingInputs,
    criterion_of,
    is_selection,
    read_workload,
    root_of,
    why_not_applicable,
)

NEEDS = {
    "test_qwen2_lora.py": ("transformers", "peft"),
    "test_vision.py::test_vision_throughput": ("transformers",),
    "test_vision.py::test_vision_data": ("transformers", "PIL"),
}
"""Tests -> the packages without which they skip themselves."""
_INSTALL = "`python -m pip install -c constraints.txt -e '.[lora,vision]'`, on every node"
_LAUNCH = "launch the whole cluster, as --gpucluster-expect declares it"
_GIVE = "--gpucluster-model=/shared/models/Qwen2-7B --gpucluster-data function_calls=/shared/data/FILE.json"
_SHARE = "--gpucluster-scratch=/shared/scratch; `findmnt -T /shared/scratch` shows its file system"


def required_tests(items: Sequence[pytest.Item], launched: Room, declared: Room, settings: Settings) -> list[Any]:
    """Return the required tests among those that were collected: criteria for which there is room as declared.

    Args:
        items: that were collected.
        launched: what they would run on.
        declared: what was ordered.
        settings: for model, data and scratch folder.
    """
    found = []
    for item in items:
        criterion = criterion_of(item)
        if criterion and why_not_applicable(item, declared) is None:
            skipped, remedy = why_not_applicable(item, launched), _LAUNCH
            if skipped is None:
                skipped, remedy = _why_skipped(item.nodeid.rpartition("/")[2], launched, settings)
            found.append({"nodeid": item.nodeid, "criterion": criterion, "skipped": skipped, "remedy": remedy})
    return found


def _why_skipped(nodeid: str, launched: Room, settings: Settings) -> tuple[str, str]:
    """Return why a test would skip itself or fail for want of what was not given, and what to do."""
    packages = [name for tests, names in NEEDS.items() if nodeid.startswith(tests) for name in names]
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        return f"not installed: {', '.join(missing)}", _INSTALL
    no_inputs = settings.model is None or "function_calls" not in launched.data
    if nodeid == "test_qwen2_lora.py::test_qwen2_lora" and no_inputs:
        return "Qwen2-7B's weights or its data were not given (docs/lora.md)", _GIVE
    if launched.nodes > 1 and nodeid.startswith(("test_checkpoint.py", "test_shared_filesystem.py")):
        folder = Path(os.path.realpath(settings.scratch or settings.report_dir))
        mount = files.mount_of(folder, files.read_mounts())
        if mount is None or not mount.is_network:
            return f"the nodes do not share {folder}: it is on {mount or 'an unknown file system'}", _SHARE
    return "", ""


class Forecast:
    """A plugin for a pytest that only collects. ``result`` is what is written; None if nothing could be collected."""

    def __init__(self, nodes: int, ranks_per_node: int, *, elsewhere: bool = False) -> None:
        self.result: dict[str, Any] | None = None
        self._nodes, self._ranks, self._elsewhere = nodes, ranks_per_node, elsewhere

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Look at the tests that were collected, and at the options.

        Raises: pytest.UsageError if an option, a limit or a workload is wrong.
        """
        try:
            self._look(session.config, session.items)
        except UsageProblem as error:
            raise pytest.UsageError(str(error)) from None

    def _look(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        settings = resolve(config)
        on_cpu, expect, inputs = settings.device == "cpu", settings.expect, TrainingInputs.of(settings)
        software = _software(settings.device != "cuda" or self._elsewhere)
        ranks = self._ranks or (2 if on_cpu else len(software["gpus"]) or (expect.gpus_per_node if expect else 1))
        limits = load_limits(settings)
        ordered = [sku for sku in limits.skus if expect and expect.sku and sku_matches(expect.sku, sku)]
        known = limits.sku_for(software["gpus"][0]) if software["gpus"] else next(iter(ordered), None)
        sku = "cpu-rehearsal" if on_cpu else settings.sku or known
        launched = Room(
            ranks=self._nodes * ranks,
            nodes=self._nodes,
            ranks_per_node=ranks,
            on_cpu=on_cpu,
            is_simulated=settings.device == "simulated",
            data_sheet=lambda: limits.skus.get(sku or ""),
            data=frozenset(inputs.data),
            scheduler=allocation(os.environ).name,
        )
        nodes, each = (expect.nodes, expect.gpus_per_node) if expect else (self._nodes, ranks)
        declared = replace(launched, ranks=nodes * each, nodes=nodes, ranks_per_node=each)
        tests, part = required_tests(items, launched, declared, settings), _part(config, items, settings)
        manifest = read_manifest([item.nodeid for item in items], root_of(config))
        for nodeid in [] if manifest is None or part else manifest.absent(item.nodeid for item in items):
            absent = {"skipped": "it was not collected", "remedy": "`git status acceptance/`; criteria.txt names it"}
            tests.append({"nodeid": nodeid, "criterion": nodeid.partition("::")[2], **absent})
        why = "--gpucluster-require names it, and no test that would run here has it"
        for name in sorted({*settings.require} - {str(test["criterion"]) for test in tests}):
            tests.append({"nodeid": "", "criterion": name, "skipped": why, "remedy": "correct --gpucluster-require"})
        known_facts = {"world_size": str(launched.ranks), "nnodes": str(self._nodes)}
        criteria = [] if on_cpu else [str(test["criterion"]) for test in tests]
        if recorded := recorded_only(limits, sku or "", known_facts, criteria):
            part = "; ".join([*filter(None, [part]), f"PASSED WITH DEVIATIONS at best: {'; '.join(recorded)}"])
        self.result = {
            "nodes": self._nodes,
            "ranks_per_node": ranks,
            "device": settings.device,
            "expect": asdict(expect) if expect else None,
            "sku": sku,
            "thresholds": str(settings.thresholds) if settings.thresholds else None,
            "part": part or ("" if manifest else "no criteria.txt lists what an acceptance needs"),
            "problems": _problems(inputs),
            "tests": tests,
            **software,
        }


def recorded_only(limits: Thresholds, sku: str, known: Mapping[str, str], criteria: Sequence[str]) -> list[str]:
    """Return what the site's limits only record and the shipped ones demand, of the metrics of these criteria.

    Args:
        limits: the shipped ones, and over them the site's.
        sku: of the GPUs.
        known: world_size and nnodes of the launch.
        criteria: that are required.
    """

    def deciding(some: Thresholds, metric: str) -> list[Limit]:
        found = explain(some, metric, sku=sku, known=known)
        return [one.limit for one in found if one.effect in ("decides", "decides where")]

    shipped, texts = load(shipped_path()), []
    patterns = [pattern for name in criteria if name in CRITERIA for pattern in CRITERIA[name].metrics]
    for metric in shipped.metrics:
        if any(fnmatch.fnmatchcase(metric, pattern) for pattern in patterns):
            for limit in deciding(shipped, metric):
                first = next((own for own in deciding(limits, metric) if own.overlaps(limit)), None)
                if not limit.record_only and first is not None and first.record_only and first.layer > 0:
                    texts.append(
                        f"{metric} is recorded only, by {first.origin}; shipped is {demand(limit, limit.unit)}"
                    )
    return list(dict.fromkeys(texts))


def _part(config: pytest.Config, items: Sequence[pytest.Item], settings: Settings) -> str:
    profile = "cpu" if settings.device == "cpu" else settings.profile
    loaded = read_workload(items, root=root_of(config), profile=profile, overrides=settings.workload)
    if loaded is not None and loaded.record.weakened:
        return f"PASSED WITH DEVIATIONS at best: {'; '.join(loaded.record.weakened)}"
    return "SELECTION PASSED at best: a part of the suite was asked for" if is_selection(config) else ""


def _problems(inputs: TrainingInputs) -> list[str]:
    """Return what is wrong with the inputs, as far as it is seen without loading weights."""
    problems, model = inputs.problems(), inputs.model
    if model is None or problems:
        return problems
    option = f"--gpucluster-model {model.name}"
    if model.path is None:
        return [] if model.revision else [f"{option}: a model of the hub needs its commit: {model.name}@COMMIT"]
    try:
        base = given_base(model.name, path=model.path)
    except EnvironmentBroken as error:
        return [f"{option}: {error}"] if importlib.util.find_spec("transformers") else []
    return [] if base.label == QWEN2_LABEL else [f"{option}: it does not have Qwen2-7B's sizes"]


def _software(without_gpus: bool) -> dict[str, Any]:
    visible = VisibleGpus()
    versions = visible.software()
    found: dict[str, Any] = {"torch": versions["torch"], "cuda": versions["cuda"], "gpus": [], "nvml": ""}
    if without_gpus:
        return found
    found["gpus"] = [visible[index].name for index in range(visible.count())]
    try:
        nvml = open_nvml()
        return found | {"driver": nvml.driver_version(), "driver_cuda": nvml.cuda_version()}
    except EnvironmentBroken as error:
        return found | {"nvml": str(error)}


def pytest_arguments(launch: list[str]) -> list[str]:
    """Return the arguments of pytest among those of torchrun.

    Raises: OptionError if torchrun refuses its options, or would run another program.
    """
    from torch.distributed import run as torchrun_module

    torchrun: Any = torchrun_module  # it has no types
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            options = torchrun.parse_args(launch)
    except SystemExit:
        last = (stderr.getvalue().strip().splitlines() or ["no message"])[-1]
        raise OptionError(f"torchrun refuses its options: {last.partition('error: ')[2] or last}") from None
    if not options.module or options.training_script != "pytest":
        raise OptionError(f"torchrun would run {options.training_script!r} and not pytest")
    return list(options.training_script_args)


def main(arguments: list[str]) -> int:
    """Collect, write the file, and return pytest's exit code."""
    file, nodes, ranks, where, *launch = arguments
    try:
        words = pytest_arguments(launch)
    except OptionError as error:
        print(error, file=sys.stderr)
        return int(pytest.ExitCode.USAGE_ERROR)
    forecast = Forecast(int(nodes), int(ranks), elsewhere=where == "elsewhere")
    code = int(pytest.main([*words, "--collect-only", "-qq"], plugins=[forecast]))
    if forecast.result is not None:
        Path(file).write_text(json.dumps(forecast.result), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
