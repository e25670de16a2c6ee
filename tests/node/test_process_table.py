from __future__ import annotations

import os
import pwd
from pathlib import Path

from complaints import in_order

from pytest_gpucluster.node.processes import Process, find_process


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
