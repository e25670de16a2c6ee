"""How far a local worker is, in a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from pytest_gpucluster.session.status_line import StepFile


def test_what_is_said_last_is_read_and_the_last_step_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = StepFile.new()
    assert file is not None
    assert file.read() == ""
    file.rewrite("test_it: step 1 of 9", ends=False)
    file.rewrite("test_it: step 2 of 9", ends=False)
    assert file.read() == "test_it: step 2 of 9"
    file.rewrite("test_it: step 9 of 9", ends=True)
    assert file.read() == ""
    file.path.with_suffix(".new").write_text("the writer was killed")
    file.remove()
    assert list(tmp_path.iterdir()) == []
    file.remove()


def test_what_somebody_else_has_put_beside_it_stays(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("precious")
    StepFile(tmp_path / "step").remove()
    assert (tmp_path / "other").exists()


def test_where_no_folder_can_be_made_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert StepFile.new() is None


def test_a_controller_that_has_ended_with_its_folder_fails_no_test(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "gone" / "step")
    file.rewrite("test_it: step 1 of 9", ends=False)
    assert file.read() == ""


def test_what_is_no_text_is_read_as_none_of_it_can_be_trusted(tmp_path: Path) -> None:
    (tmp_path / "step").write_bytes(b"\xff\xfe")
    assert "\N{REPLACEMENT CHARACTER}" in StepFile(tmp_path / "step").read()
