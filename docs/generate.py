"""Write every file that is made from the code: pages, JSON Schemas, the list of criteria, sections of the playbook.

python docs/generate.py

A criterion without a section in the playbook gets one, with what its test states, to be completed by hand.
"""

from __future__ import annotations

import functools
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.workload import predict
from pytest_gpucluster.config.workload_loader import load
from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.editor_schemas import limits_schema
from pytest_gpucluster.reports.results_json import results_schema

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PHASES = ("discovery", "single-node", "fabric", "training", "lora")
"""The pages of the playbook with sections of criteria."""
_PHASE_OF_MARKER = {"training": "training", "single_gpu": "single-node", "nccl": "fabric"}
_CRITERIA = ROOT / "acceptance" / "criteria.txt"
_TIMES = "| what runs | profile | tests | predicted of them | at least | at most | of unknown length |"
"""The header of the table of predicted times, in playbook.md."""
_COLLECT = """
import inspect, json, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        print("\\n" + json.dumps([
            {"id": item.nodeid, "name": item.originalname, "doc": inspect.getdoc(item.function) or "",
             "markers": sorted({mark.name for mark in item.iter_markers()}),
             "criteria": [str(mark.args[0]) for mark in item.iter_markers("criterion")]} for item in session.items
        ]))

options = ["acceptance", "--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
sys.exit(pytest.main(options, plugins=[Collected()]))
"""


@functools.cache
def files() -> dict[Path, str]:
    """Return each generated file with its text."""
    limits = loader.load(loader.shipped_path())
    return {
        DOCS / "reference" / "reference.md": _program("reference")["page"](),
        DOCS / "reference" / "limits.md": _program("limits")["page"](limits),
        **schemas(),
        _CRITERIA: _list_of_criteria(),
        **dict(_playbook()),
    }


def schemas() -> dict[Path, str]:
    """Return each JSON Schema: of files of limits, for editors, and of results.json."""
    made = {"thresholds": limits_schema(), "results": results_schema()}
    return {DOCS / f"{name}.schema.json": json.dumps(schema, indent=2) + "\n" for name, schema in made.items()}


def _program(name: str) -> dict[str, Any]:
    return runpy.run_path(str(DOCS / f"{name}.py"), run_name=name)


@functools.cache
def _tests() -> list[dict[str, Any]]:
    """Return the tests of the acceptance suite as pytest collects them."""
    done = subprocess.run(
        [sys.executable, "-c", _COLLECT], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    tests: list[dict[str, Any]] = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{"))
    return tests


def _list_of_criteria() -> str:
    head = [line for line in _CRITERIA.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    names = sorted(test["id"].removeprefix("acceptance/") for test in _tests())
    return "\n".join([*head, *names]) + "\n"


def _playbook() -> Iterator[tuple[Path, str]]:
    """Yield each page of the playbook, with a section for each criterion that no page has."""
    pages = {phase: (DOCS / f"{phase}.md").read_text(encoding="utf-8") for phase in PHASES}
    present = {name for page in pages.values() for name in _sections(page)}
    tests = {name: test for test in _tests() for name in test["criteria"] if name not in present}
    for criterion, test in tests.items():
        phase = next((page for name, page in _PHASE_OF_MARKER.items() if name in test["markers"]), "discovery")
        pages[phase] = _with_section(pages[phase], criterion, test)
    index = (DOCS / "playbook.md").read_text(encoding="utf-8")
    for phase, page in pages.items():
        yield DOCS / f"{phase}.md", page
        names = ", ".join(f"`{name}`" for name in _sections(page))
        index = re.sub(rf"^(\| \[.*\({phase}\.md\) \|[^|]*\|)[^|]*\|$", rf"\1 {names} |", index, flags=re.MULTILINE)
    yield DOCS / "playbook.md", _with_times(index)


def _chosen(what: str, fabric: list[str]) -> list[dict[str, Any]]:
    """Return the tests of a row of the table of times, by what the row states.

    Raises: StopIteration if the row is none of these.
    """
    chosen: dict[str, Callable[[dict[str, Any]], bool]] = {
        "`-m single_gpu`": lambda test: "single_gpu" in test["markers"],
        '`-m "single_gpu or nccl"`': lambda test: (
            bool({"single_gpu", "nccl"} & {*test["markers"]}) and "needs_nodes" not in test["markers"]
        ),
        "the survivors together": lambda test: bool({"single_gpu", "nccl"} & {*test["markers"]}),
        "the seven files": lambda test: test["id"].partition("::")[0] in fabric,
        "`-m training`": lambda test: "training" in test["markers"],
        "a node alone, everything": lambda test: "needs_nodes" not in test["markers"],
        "sign-off: everything": lambda test: True,
    }
    rule = next(rule for key, rule in chosen.items() if key in what)
    return [test for test in _tests() if rule(test)]


def _with_times(page: str) -> str:
    """Return the page with the predicted times of the suite as it is now."""
    before, header, rest = page.partition(_TIMES)
    table, end, after = rest.partition("\n\n")
    fabric = re.findall(
        r"acceptance/test_\w+\.py", page.partition("--report-dir fabric")[2].partition("\ngpucluster")[0]
    )
    rows = []
    for line in table.strip().splitlines()[1:]:
        what, profile = (cell.strip() for cell in line.strip("|").split("|")[:2])
        tests = _chosen(what, fabric)
        pairs = [(test["id"].partition("::")[2], next(iter(test["criteria"]), None)) for test in tests]
        found = predict(pairs, load(ROOT / "acceptance" / "workloads.yaml", profile=profile).workload)
        minutes = [f"{seconds / 60:.1f} min" for seconds in (found.span.least_seconds, found.span.most_seconds)]
        cells = [what, profile, str(len(tests)), str(found.tests), *minutes, str(found.other_tests)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([before + header, "|---|---|---|---|---|---|---|", *rows]) + end + after


def _sections(page: str) -> list[str]:
    return re.findall(r"^## `([^`]+)`$", page, re.MULTILINE)


def _with_section(page: str, criterion: str, test: dict[str, Any]) -> str:
    file = test["id"].partition("::")[0]
    accepted = " ".join(test["doc"].partition("\n\n")[0].removeprefix("Accepted: ").split())
    if file not in page:
        page = re.sub(r"^( +)(--gpucluster-expect)", rf"\1{file} \\\n\1\2", page, count=1, flags=re.MULTILINE)
    anchor = re.sub(r"[^a-z0-9_-]", "", criterion)
    return f"""{page.rstrip()}

## `{criterion}`

`{test["name"]}`. {accepted[:1].upper()}{accepted[1:]}

Limits: [`{criterion}`](reference/limits.md#{anchor}).

| you see | look at | what to do | call |
|---|---|---|---|
| a missed limit | the docstring of its test, in `{file}` | what it states | systems |
"""


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
