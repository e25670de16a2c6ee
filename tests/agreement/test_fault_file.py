import faulthandler
import os
import sys
import tempfile

import pytest

from pytest_gpucluster.agreement.hang_diagnosis import FaultFile, remove_left


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    """Let temporary files lie in the test's folder, and give pytest its own fault handler back."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    enabled = faulthandler.is_enabled()
    yield
    if enabled:
        faulthandler.enable(sys.__stderr__)


def test_it_is_opened_once_where_the_other_ranks_were_told_and_an_orderly_end_leaves_no_file(tmp_path):
    FaultFile().close()
    file = FaultFile()
    assert list(tmp_path.iterdir()) == [], "nothing is made before it is opened"
    announced = file.path
    assert file.open() is file.open()
    assert list(tmp_path.iterdir()) == [announced]
    assert f"-{os.getpid()}-" in announced.name
    assert faulthandler.is_enabled()
    file.close()
    assert list(tmp_path.iterdir()) == []
    assert not faulthandler.is_enabled()
    file.close()


def test_a_file_left_by_a_process_of_the_same_number_is_not_in_the_way(tmp_path):
    left = FaultFile()
    left.open().write("Fatal Python error: of another process\n")
    left.open().flush()
    again = FaultFile()
    again.open()
    assert again.path.read_text() == ""
    assert left.path.read_text() != ""
    again.close()
    left.close()


def test_a_link_that_somebody_laid_there_is_not_followed(tmp_path):
    file = FaultFile()
    precious = tmp_path / "precious"
    precious.write_text("kept")
    file.path.symlink_to(precious)
    with pytest.raises(FileExistsError):
        file.open()
    assert precious.read_text() == "kept"


def test_what_a_dead_process_left_is_taken_away_and_nothing_else(tmp_path):
    left = FaultFile()
    left.open().write("Fatal Python error\n")
    precious = tmp_path / "notes.txt"
    precious.write_text("kept")
    remove_left(str(left.path))
    remove_left(str(left.path))  # by every survivor
    remove_left(str(precious))
    assert list(tmp_path.iterdir()) == [precious]
    left.close()
