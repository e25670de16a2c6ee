"""What the README and CONTRIBUTING tell an operator to expect is so. What holds for every page is in tests/docs/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sessions
import yaml
from each import of_each

from pytest_gpucluster import metrics, thresholds, verdict
from pytest_gpucluster.launch import detect

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MODULES = sorted(
    path.relative_to(ROOT / "pytest_gpucluster")
    for path in (ROOT / "pytest_gpucluster").rglob("*.py")
    if not path.stem.startswith("__")
)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose header begins so."""
    body = text.partition(f"| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body]


def test_the_table_of_exit_codes_is_the_code_s() -> None:
    rows = table(README, "exit code")
    assert {int(code): text for code, text in rows} == dict(verdict.EXIT_CODES)


def test_variables_of_launchers_are_those_that_are_read() -> None:
    modules = [ROOT / "pytest_gpucluster" / name for name in ("launch.py", "launch_variables.py")]
    source = "".join(module.read_text(encoding="utf-8") for module in modules)
    section = README.partition("### srun, mpirun, Kubernetes")[2].partition("\n## ")[0]
    documented = {name for name in re.findall(r"`([A-Z][A-Z_]{3,})\b", section) if name != "GPUCLUSTER_HOSTNAME"}
    assert len(documented) > 20
    assert sorted(name for name in documented if f'"{name}"' not in source) == []


def test_the_pod_template_makes_a_rank() -> None:
    [template] = [block for block in blocks(README, "yaml") if block.startswith("env:")]
    variables = {entry["name"]: entry["value"] for entry in yaml.safe_load(template)["env"]}
    assert all(isinstance(value, str) for value in variables.values()), "Kubernetes takes text only"
    facts = detect({"JOB_COMPLETION_INDEX": "3", **variables}, "pod-3")
    assert (facts.rank, facts.world_size, facts.nnodes) == (3, 16, 16)


def test_the_example_of_limits_loads_over_the_shipped_file(tmp_path: Path) -> None:
    [example] = [block for block in blocks(README, "yaml") if block.startswith("schema_version")]
    file = tmp_path / "my-limits.yaml"
    file.write_text(example, encoding="utf-8")
    limits = thresholds.load(thresholds.shipped_path(), file)
    found = limits.limit("nccl.all_reduce.busbw", sku="H100 SXM", world_size=16, nnodes=2, labels={"size": "1 GB"})
    assert found is not None
    assert (found.min, found.origin) == (380.0, f"{file}:6:11")
    assert limits.sku_for("NVIDIA My GPU 96GB") == "My GPU"


def test_the_expected_cluster_of_the_readme_is_one() -> None:
    from pytest_gpucluster.agreement.preflight import Expectation

    found = set(re.findall(r"--gpucluster-expect=(\w+)", README))
    assert {str(Expectation.parse(text)) for text in found} == found


def test_the_example_test_passes_in_a_rehearsal(project: sessions.Project) -> None:
    [example] = blocks(README, "python")
    (project.path / "test_example.py").write_text(example, encoding="utf-8")
    left = project.run()
    assert (left.exit, "REHEARSED" in left.stdout) == (0, True), left.output


def test_the_example_of_a_criterion_fails_where_its_limit_is_missed_and_passes_else(
    project: sessions.Project, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: metrics._REGISTRY.pop("site.scratch.write", None))  # which the example adds
    page = (ROOT / "docs" / "writing-criteria.md").read_text(encoding="utf-8")
    shown = r"`([\w]+\.[\w]+)`[^`\n]*:\n+```\w+\n(.*?)^```$"
    files = dict(re.findall(shown, page, re.DOTALL | re.MULTILINE))
    assert set(files) == {"pytest.ini", "conftest.py", "test_scratch.py", "limits.yaml"}
    for name, text in files.items():
        (project.path / name).write_text(text, encoding="utf-8")
    passing = project.run()
    assert (passing.exit, "REHEARSED" in passing.stdout) == (0, True), passing.output
    assert "site.scratch.write" in (project.path / "gpucluster-report/latest/journal.jsonl").read_text("utf-8")
    (project.path / "limits.yaml").write_text(files["limits.yaml"].replace("min: 1 MB/s", "min: 900 TB/s"))
    failing = project.run()
    assert (failing.exit, "REJECTED" in failing.stdout) == (1, True), failing.output
    assert "GB/s < 900000 GB/s" in failing.stdout


@pytest.mark.extended
def test_the_commands_for_a_laptop_work_as_they_stand(tmp_path: Path) -> None:
    first, *_ = blocks((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"), "console")
    make, activate, report, begin = first.splitlines()
    assert (make, activate) == ("make rehearsal", ". .venv/bin/activate")
    reports = tmp_path / "gpucluster-report"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = sessions.environment({"PATH": path, "GPUCLUSTER_REPORT_DIR": str(reports)})
    for line in (begin, report.replace("gpucluster-report/latest", f"{reports}/latest")):
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
        assert (done.returncode, "REHEARSED" in done.stdout) == (0, True), done.stdout + done.stderr


def test_what_an_acceptance_needs_is_given_where_a_page_ends_with_a_record() -> None:
    """Without the extras, weights and data ``qwen2_lora`` is skipped: INCOMPLETE, and there is no record."""
    shown = blocks((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"), "console")
    [block] = [block for block in shown if "gpucluster accept " in block]
    for needed in ("'.[lora,vision]'", "--gpucluster-model=", "--gpucluster-data function_calls="):
        assert needed in block
    before = (ROOT / "docs" / "whole-cluster.md").read_text(encoding="utf-8").partition("\n## Bare metal\n")[0]
    for needed in ("MODEL=/", "DATA=function_calls=/", "SCRATCH=/"):
        assert f"\nexport GPUCLUSTER_{needed}" in before


SAID = {
    "is gone without a word": "is gone without a word",
    "hangs at": "hangs {place}",
    "does not answer (": "does not answer (",
    "different tests collected: ": "different tests collected: ",
    " were launched, but --gpucluster-expect=": " were launched, but --gpucluster-expect=",
    "is built without CUDA": "is built without CUDA",
    ") ended without a word": "ended without a word",
    ": no SKU matches it": ": no SKU matches it",
    "too fast to be true: ": "too fast to be true: ",
    " GB/s < ": "_beyond(metric, of[rank].value, limit)",
    " is not surely ": " is not surely ",
    " is inconclusive: ": " is inconclusive: ",
    " is 0.62 of the median of the ": " is {found} of {of_whom}",
    " (look at the node)": " (look at the node)",
    "the slowest at 3.1 GB/s": "the slowest at {",
    " carries it, expected is ": " carries it, expected is ",
    "HW thermal slowdown 62 %": '"HW thermal slowdown"',
    " during this test: GPU 3": "{codes} during this test: {places}",
    " does not reach ": " does not reach ",
    "isolated: node-c; ": '"isolated: "',
    "ecc_uncorrected: GPU 3 (": "{codes}: {places}",
}
"""What a row says -> what stands for it in the source; names and numbers are made up when it is shown."""


@of_each("row", [row[0] for row in table(README, "you see")])
def test_what_an_operator_sees_is_what_the_code_says(row: str) -> None:
    source = "".join((ROOT / "pytest_gpucluster" / path).read_text(encoding="utf-8") for path in MODULES)
    [words] = [said for shown, said in SAID.items() if shown in row]
    assert words in source


def test_the_picture_of_the_layers_names_every_module() -> None:
    [picture] = blocks(CONTRIBUTING, "text")
    missing = [path.as_posix() for path in MODULES if not re.search(rf"\b{path.stem}\b", picture)]
    assert missing == [], "add it to the picture in CONTRIBUTING.md, where its imports put it"
