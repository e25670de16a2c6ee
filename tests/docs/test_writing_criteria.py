"""docs/writing-criteria.md: its example is run as it stands, and fails where its limit is missed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import doc_pages
import pytest
import sessions

PAGE = doc_pages.page_named("docs/writing-criteria.md")
[SHOWN] = PAGE.blocks_of("console")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A folder with the files of the page, under the names that it gives them."""
    files = {block.file: block.text for block in PAGE.blocks if block.file}
    assert set(files) == {"pytest.ini", "conftest.py", "test_scratch.py", "limits.yaml"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=sessions.environment({"PATH": path}),
        capture_output=True,
        text=True,
        timeout=sessions.DEADLINE_SECONDS,
        check=False,
    )


def test_the_example_passes_under_torchrun(example):
    done = run(SHOWN.text.splitlines()[0], example)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REHEARSED" in done.stdout
    assert "2 ranks on 1 node (torchrun)" in done.stdout
    assert "site.scratch.write" in (example / "gpucluster-report" / "latest" / "journal.jsonl").read_text("utf-8")


def test_the_example_fails_where_its_limit_is_missed(example):
    limits = (example / "limits.yaml").read_text(encoding="utf-8")
    assert limits.count("min: 1 MB/s") == 1
    (example / "limits.yaml").write_text(limits.replace("min: 1 MB/s", "min: 900 TB/s"), encoding="utf-8")
    done = run("pytest test_scratch.py --gpucluster-device=cpu", example)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "REJECTED" in done.stdout
    assert "GB/s < 900000 GB/s" in done.stdout
