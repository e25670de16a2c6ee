from __future__ import annotations

import threading

import pytest

from pytest_gpucluster.benchmarks.storage import checkpoint
from pytest_gpucluster.benchmarks.storage.checkpoint import make_unique_folder, wait_for
from pytest_gpucluster.errors import EnvironmentBroken


def test_each_run_has_a_folder_of_its_own_beside_what_is_there(tmp_path):
    scratch = tmp_path / "not" / "there"
    first, second = make_unique_folder(scratch), make_unique_folder(scratch)
    assert first != second
    assert set(scratch.iterdir()) == {first, second}
    assert list(first.iterdir()) == []


def test_a_file_that_comes_late_is_waited_for(tmp_path):
    path = tmp_path / "late"
    later = threading.Timer(0.1, path.touch)
    later.start()
    wait_for(path)
    later.join()
    assert path.exists()


def test_a_folder_that_is_not_shared_is_the_environment_s_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VISIBILITY_SECONDS", 0.1)
    with pytest.raises(EnvironmentBroken, match=r"host after 0\.1 s.*--gpucluster-scratch"):
        wait_for(tmp_path / "none")
