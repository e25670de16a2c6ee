"""README and CONTRIBUTING are true: exit codes, examples, commands. Checks of every page are in test_pages.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sessions
import yaml

from pytest_gpucluster.journal import verdict
from pytest_gpucluster.launch.launchers import detect
from pytest_gpucluster.metrics import measurement

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def table(text, first):
    body = text.partition(f"| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body]


def test_the_table_of_exit_codes_is_the_code_s():
    rows = table(README, "exit code")
    assert {int(code): text for code, text, now in rows if now} == dict(verdict.EXIT_CODES)


def test_the_pod_template_makes_a_rank():
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    [template] = [block for block in blocks(page, "yaml") if block.startswith("env:")]
    variables = {entry["name"]: entry["value"] for entry in yaml.safe_load(template)["env"]}
    assert all(isinstance(value, str) for value in variables.values()), "Kubernetes takes text only"
    facts = detect({"JOB_COMPLETION_INDEX": "3", **variables}, "pod-3")
    assert (facts.rank, facts.world_size, facts.nnodes) == (3, 16, 16)


def test_the_example_test_passes_in_a_rehearsal(project):
    [example] = blocks(README, "python")
    (project.path / "test_example.py").write_text(example, encoding="utf-8")
    left = project.run()
    assert (left.exit, "REHEARSED" in left.stdout) == (0, True), left.output


def test_the_example_of_a_criterion_fails_where_its_limit_is_missed_and_passes_else(project, request):
    request.addfinalizer(lambda: measurement._REGISTRY.pop("site.scratch.write", None))  # which the example adds
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
def test_the_commands_for_a_laptop_work_as_they_stand(tmp_path):
    first, *_ = blocks((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"), "console")
    make, activate, report, begin = first.splitlines()
    assert (make, activate) == ("make rehearsal", ". .venv/bin/activate")
    reports = tmp_path / "gpucluster-report"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = sessions.environment({"PATH": path, "GPUCLUSTER_REPORT_DIR": str(reports)})
    for line in (begin, report.replace("gpucluster-report/latest", f"{reports}/latest")):
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
        assert (done.returncode, "REHEARSED" in done.stdout) == (0, True), done.stdout + done.stderr


def test_the_list_of_packages_is_the_tree():
    [picture] = blocks(CONTRIBUTING, "text")
    folders = {path.parent.name for path in (ROOT / "pytest_gpucluster").glob("*/__init__.py")}
    assert {line.split()[0] for line in picture.splitlines()} == folders
