"""What others have left is named by owner and size, and is an error where it takes what this job needs."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from complaints import in_order

from pytest_gpucluster.node import processes
from pytest_gpucluster.node.processes import (
    LEAST_BYTES,
    Process,
    stale_file_findings,
    stale_files,
    stale_process_findings,
)

UID = os.getuid()
OTHER = 61234


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def leave(folder: Path, name: str, size: int = 10, *, changed: float | None = None) -> None:
    path = folder / name
    path.write_bytes(b"x" * size)
    if changed is not None:
        os.utime(path, (changed, changed))


def now() -> float:
    """Return a time that is surely after what was there before, and before what comes next."""
    time.sleep(0.05)
    between = time.time()
    time.sleep(0.05)
    return between


def test_own_files_of_before_this_job_are_an_earlier_job_s(folder: Path) -> None:
    leave(folder, "nccl-AbCd", LEAST_BYTES)
    leave(folder, "torch_small")
    (folder / "subfolder").mkdir()
    began = now()
    leave(folder, "mine")
    leave(folder, "data.tar", changed=1000.0)  # copied by this job, with its old time of change
    left = stale_files(folder, uid=UID, before=began)
    assert left is not None
    assert (left.count, left.largest) == (2, ("nccl-AbCd", "torch_small"))
    assert left.bytes >= LEAST_BYTES
    assert list(left.owners.values()) == [2]
    assert str(left).startswith("2 entries with 1.0")
    assert stale_files(folder, uid=UID, before=None) is None, "without the job's begin they are this job's"
    (folder / "empty").mkdir()
    assert stale_files(folder / "empty", uid=UID, before=9e9) is None
    [unseen] = stale_file_findings("node-a", uid=UID, before=None, alone=True, shm=folder / "none")
    assert (unseen.kind, "/none " in unseen.found) == ("note", True)


@pytest.mark.parametrize("unknown", [False, True], ids=["a user", "somebody outside of this container"])
def test_files_of_another_user_are_his(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: bool
) -> None:
    (tmp_path / "overflowuid").write_text(f"{OTHER if unknown else 65534}\n")
    monkeypatch.setattr(processes, "_OVERFLOW", tmp_path / "overflowuid")
    leave(folder, "x", 5000)
    status = list((folder / "x").lstat())
    status[4] = OTHER
    his = os.stat_result(status, {"st_blocks": 16, "st_mtime": 9e9, "st_ctime": 9e9})
    entry = SimpleNamespace(name="x", stat=lambda *, follow_symlinks: his)
    monkeypatch.setattr(processes.os, "scandir", lambda path: contextlib.nullcontext(iter([entry])))
    left = stale_files(folder, uid=UID, before=1.0)
    if unknown:
        assert left is None, "it may be root's"
        return
    assert left is not None
    assert (left.owners, left.bytes) == ({f"uid {OTHER}": 1}, 8192)


@pytest.mark.parametrize(
    ("size", "alone", "kind"),
    [
        (2 * LEAST_BYTES, True, "environment"),
        (2 * LEAST_BYTES, False, "note"),
        (10, True, "note"),
    ],
    ids=["much, on a node of one's own", "much, on a shared node", "little"],
)
def test_memory_that_is_taken_on_a_node_of_one_s_own_is_an_error(
    folder: Path, size: int, alone: bool, kind: str
) -> None:
    leave(folder, "psm2_shm.1", size)
    [finding] = stale_file_findings("node-a", uid=UID, before=now(), alone=alone, shm=folder)
    assert (finding.code, finding.kind) == ("leftovers.files", kind)
    assert "psm2_shm.1" in finding.found


def test_processes_of_others_on_the_gpus_are_errors_and_this_job_s_are_not() -> None:
    people = {7: Process(pid=7, user="ann", command="python train.py"), 8: Process(pid=8, known=False)}
    found = list(
        stale_process_findings("node-a", {5: 100, 7: 2 * 10**9, 8: None}, own={5}, find_process=people.__getitem__)
    )
    assert [one.kind for one in found] == ["environment", "note"]
    assert found[0].found == "pid 7 of user ann (python train.py) uses 2 GB of GPU memory"
    assert in_order(found[1].found, "pid 8, unknown amount")
