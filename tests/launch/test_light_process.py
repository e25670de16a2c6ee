"""What the recorder and the node's sampler have in common."""

import os
import select
import subprocess
import sys

import pytest

from pytest_gpucluster.launch import detached_process


def test_a_new_interpreter_finds_this_package_wherever_it_is_started(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert detached_process.child_environment()["PYTHONPATH"].split(os.pathsep)[-1] == "/theirs"
    code = "import sys, pytest_gpucluster.launch.detached_process; print('torch' in sys.modules, '' in sys.path)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=detached_process.child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    safe = sys.version_info >= (3, 11)  # an older one knows no PYTHONSAFEPATH
    assert done.stdout.split() == ["False", str(not safe)]


def test_the_descriptor_of_the_parent_is_not_readable_while_it_lives():
    end = detached_process.end_descriptor(os.getppid())
    if end is None:
        pytest.skip("this kernel or sandbox has no descriptors of processes")
    assert select.select([end], [], [], 0)[0] == []
    os.close(end)


def test_another_process_is_not_taken_for_the_parent():
    for parent in (os.getpid(), 2**22 + 1):  # no parent, no process
        assert detached_process.end_descriptor(parent) is None
