"""What README and other pages promise happens: exit codes, examples, commands. Checks of every page: test_pages.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sessions
import yaml
from pages import ROOT, page_named, rows

from pytest_gpucluster.journal import verdict
from pytest_gpucluster.launch.launchers import detect
from pytest_gpucluster.metrics import measurement


def test_the_table_of_exit_codes_is_the_code_s():
    table = rows(page_named("README.md").text, ["exit code", "verdict", "what now"])
    assert {int(code): text for code, text, now in table if now} == dict(verdict.EXIT_CODES)


def test_the_pod_template_makes_a_rank():
    [env] = [one for one in page_named("docs/how-it-works.md").blocks_of("yaml") if one.text.startswith("env:")]
    variables = {entry["name"]: entry["value"] for entry in yaml.safe_load(env.text)["env"]}
    assert all(isinstance(value, str) for value in variables.values()), "Kubernetes takes text only"
    facts = detect({"JOB_COMPLETION_INDEX": "3", **variables}, "pod-3")
    assert (facts.rank, facts.world_size, facts.nnodes) == (3, 16, 16)


def test_the_example_test_passes_in_a_rehearsal(project):
    [example] = page_named("README.md").blocks_of("python")
    (project.path / "test_example.py").write_text(example.text, encoding="utf-8")
    left = project.run()
    assert (left.exit, "REHEARSED" in left.stdout) == (0, True), left.output


def test_the_example_of_a_criterion_fails_where_its_limit_is_missed_and_passes_else(project, request):
    request.addfinalizer(lambda: measurement._REGISTRY.pop("site.scratch.write", None))  # which the example adds
    files = {block.file: block.text for block in page_named("docs/writing-criteria.md").blocks if block.file}
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
    first, *_ = page_named("docs/quickstart.md").blocks_of("console")
    make, activate, report, begin = first.text.splitlines()
    assert (make, activate) == ("make rehearsal", ". .venv/bin/activate")
    reports = tmp_path / "gpucluster-report"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = sessions.environment({"PATH": path, "GPUCLUSTER_REPORT_DIR": str(reports)})
    for line in (begin, report.replace("gpucluster-report/latest", f"{reports}/latest")):
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
        assert (done.returncode, "REHEARSED" in done.stdout) == (0, True), done.stdout + done.stderr
