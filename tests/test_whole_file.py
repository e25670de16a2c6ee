"""Files that are there whole or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpucluster.files import atomic_write


def test_writing_replaces_a_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "new" / "report.xml"
    atomic_write(path, "<old/>")
    before = path.stat().st_ino
    atomic_write(path, "<é/>")
    assert path.read_bytes() == "<é/>".encode()
    assert path.stat().st_ino != before
    assert os.listdir(path.parent) == ["report.xml"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link.xml").symlink_to("real.xml")
    atomic_write(tmp_path / "link.xml", "<a/>")
    assert (tmp_path / "link.xml").is_symlink()
    assert (tmp_path / "real.xml").read_text() == "<a/>"


def test_what_is_no_plain_file_is_written_to_and_not_replaced():
    atomic_write(Path("/dev/null"), "<a/>")
    assert Path("/dev/null").is_char_device()


def test_a_pipe_that_has_no_name_but_its_descriptor_is_written_to():
    script = (
        "from pathlib import Path; from pytest_gpucluster.files import atomic_write;"
        " atomic_write(Path('/dev/stdout'), 'é')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True)
    assert done.stdout == "é".encode()


def test_a_failed_write_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "report.xml"
    atomic_write(path, "<old/>")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, "<new/>")
    assert path.read_text() == "<old/>"
    assert os.listdir(tmp_path) == ["report.xml"]
