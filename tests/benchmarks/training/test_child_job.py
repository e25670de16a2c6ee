"""A job inside of another one: its environment, and that nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_gpucluster.benchmarks.training.failure_propagation import ChildJob, child_environment

# A child of the job in a session of its own, as torchrun starts its ranks, that takes no SIGTERM.
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
)
STARTS_IT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)"


def job(tmp_path: Path, code: str) -> ChildJob:
    return ChildJob([sys.executable, "-c", code], dict(os.environ), tmp_path / "output.txt")


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_its_environment_has_what_the_site_has_set_and_nothing_of_this_rank() -> None:
    site = {"PATH", "HOME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "LD_PRELOAD"}
    rank = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_ADDR"}
    rank |= {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NNODES", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    rank |= {"TORCH_FR_BUFFER_SIZE", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"}
    assert set(child_environment(dict.fromkeys(site | rank, "1"))) == site


def test_what_is_set_for_this_suite_s_own_ranks_is_taken_away() -> None:
    from pytest_gpucluster.agreement import release
    from pytest_gpucluster.node.fabric import nccl_log

    own: dict[str, str] = dict(release.ENVIRONMENT)
    nccl_log.prepare_log(own)
    assert child_environment(own) == {}


def test_a_job_that_ends_leaves_its_exit_code_and_its_words(tmp_path: Path) -> None:
    with job(tmp_path, "import sys; print('some words'); sys.exit(7)") as child:
        assert child.wait(lambda: child.exit_code is not None, seconds=60)
        assert (child.exit_code, child.output_tail) == (7, "some words")
        assert child.processes() == []


def test_its_processes_are_found_whatever_session_they_are_in_and_none_is_left(tmp_path: Path) -> None:
    with job(tmp_path, STARTS_IT) as child:
        assert child.wait(lambda: "here" in child.text and child.exit_code is not None, seconds=60)
        [living] = child.processes()
        assert living != child.pid
        assert child.state_of(living) in "RSD"
    assert not is_there(living)
    assert child.state_of(living) in ("", "Z")


def test_it_is_ended_too_where_the_test_is_torn_out_of_its_wait(tmp_path: Path) -> None:
    child = job(tmp_path, STUBBORN)

    def torn_out() -> None:
        with child:
            assert child.wait(lambda: "here" in child.text, seconds=60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        torn_out()
    assert child.exit_code == -9
    assert not is_there(child.pid)


def test_other_processes_are_not_touched(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with job(tmp_path, STUBBORN) as child:
            assert child.wait(lambda: "here" in child.text, seconds=60)
            assert other.pid not in child.processes()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_wait_has_a_deadline(tmp_path: Path) -> None:
    with job(tmp_path, STUBBORN) as child:
        begin = time.monotonic()
        assert not child.wait(lambda: False, seconds=0.1)
        assert time.monotonic() - begin < 30


def test_of_many_words_the_last_are_kept(tmp_path: Path) -> None:
    with job(tmp_path, "print('x' * 100000 + 'the end')") as child:
        child.wait(lambda: child.exit_code is not None, seconds=60)
        assert len(child.output_tail) < 5000
        assert child.output_tail.endswith("the end")
    with ChildJob(["true"], {}, tmp_path / "silent.txt") as child:
        assert child.output_tail == "nothing was printed"
