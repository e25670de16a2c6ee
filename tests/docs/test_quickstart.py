"""docs/quickstart.md: each way to begin is a few lines, and what needs no GPU is run as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import doc_pages
import pytest
import sessions
import shell_words
from doc_pages import ROOT

PAGE = doc_pages.page_named("docs/quickstart.md")
WAYS = ["On a laptop", "On one GPU node", "Slurm", "Kubernetes", "Bare metal"]
LAPTOP, *_ = PAGE.blocks_of("console")


def environment(tmp_path: Path) -> dict[str, str]:
    """The reader's environment once `.venv` is active, with reports in a folder of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return sessions.environment({"PATH": path, "GPUCLUSTER_REPORT_DIR": str(tmp_path / "gpucluster-report")})


def test_there_are_five_ways_each_with_less_than_ten_lines():
    assert PAGE.headings[1:6] == WAYS
    assert len(PAGE.blocks_of("console")) == len(WAYS)
    assert all(block.text.count("\n") < 10 for block in PAGE.blocks_of("console"))


def test_the_laptop_s_commands_work_as_they_stand(tmp_path):
    make, activate, report, run = LAPTOP.text.splitlines()
    assert (make, activate) == ("make rehearsal", ". .venv/bin/activate")  # CI runs the first, and needs no second
    report = report.replace("gpucluster-report/latest", str(tmp_path / "gpucluster-report" / "latest"))
    said = []
    for line in (run, report):
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=ROOT,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=sessions.DEADLINE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    assert "REHEARSED" in said[0]
    assert "REHEARSED" in said[1]


def test_the_way_that_ends_with_a_record_has_what_an_accepted_run_needs():
    [block] = [block for block in PAGE.blocks_of("console") if "gpucluster accept " in block.text]
    assert "'.[lora,vision]'" in block.text, "without these extras criteria are skipped: INCOMPLETE, and no record"
    assert "--gpucluster-model=" in block.text
    assert "--gpucluster-data function_calls=" in block.text


@pytest.mark.parametrize("path", ["deploy/slurm/acceptance.sbatch", "deploy/bare-metal/hosts.example"])
def test_what_the_other_ways_use_is_there(path):
    assert (ROOT / path).is_file()
    words = {word for block in PAGE.blocks_of("console") for c in shell_words.commands(block.text) for word in c.words}
    assert path in words
