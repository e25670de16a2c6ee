"""Processes by their pids, programs with a deadline, and what others have left, by owner and size."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
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
    Output,
    Process,
    find_process,
    run_program,
    stale_file_findings,
    stale_files,
    stale_process_findings,
)


def test_a_process_has_its_user_and_command() -> None:
    who = find_process(os.getpid())
    assert who.known
    assert who.user == pwd.getpwuid(os.getuid()).pw_name
    assert "python" in who.command
    assert str(who).startswith(f"pid {os.getpid()} of user {who.user} (")


def test_a_process_that_this_host_does_not_show_says_so(tmp_path: Path) -> None:
    who = find_process(4711, proc=tmp_path)
    assert who == Process(pid=4711, known=False)
    assert in_order(str(who), "pid 4711")


def test_a_zombie_has_its_name_and_an_unknown_user_its_number(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "status").write_text("Name:\tpython\nState:\tZ (zombie)\nUid:\t3999999999\t0\t0\t0\n")
    (folder / "cmdline").write_bytes(b"")
    (folder / "comm").write_text("python\n")
    assert str(find_process(7, proc=tmp_path)) == "pid 7 of user uid 3999999999 (python)"


def test_an_answer_is_what_was_printed():
    assert run_program(["sh", "-c", "echo text; echo >&2 err"]) == Output(text="text\n", errors="err\n", code=0)


@pytest.mark.parametrize(
    ("command", "why_not"),
    [
        (["gpucluster-no-such-program"], "gpucluster-no-such-program: "),
        (["sh", "-c", "echo 'no driver' >&2; exit 9"], "sh: no driver"),
        (["sh", "-c", "exit 9"], "sh: .* 9"),
    ],
)
def test_what_does_not_end_well_says_why(command, why_not):
    assert re.match(why_not, run_program(command).why_not)


def test_a_program_that_hangs_is_killed_and_its_output_is_kept():
    answer = run_program(["sh", "-c", "echo $$; trap '' TERM INT; while :; do sleep 600; done"], 2.0)
    assert answer.why_not.startswith("sh: ")
    assert " 2 s" in answer.why_not
    with pytest.raises(ProcessLookupError):
        os.kill(int(answer.text), 0)


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
