"""Processes by their pids, and programs with a deadline."""

import os
import pwd
import re

import pytest
from complaints import in_order

from pytest_gpucluster.node.processes import Output, Process, find_process, run_program
from pytest_gpucluster.node.sysfs import Tree


def test_a_process_has_its_user_and_command():
    who = find_process(os.getpid())
    assert who.known
    assert who.user == pwd.getpwuid(os.getuid()).pw_name
    assert "python" in who.command
    assert str(who).startswith(f"pid {os.getpid()} of user {who.user} (")


def test_a_process_that_this_host_does_not_show_says_so(tmp_path):
    who = find_process(4711, Tree(root=tmp_path))
    assert who == Process(pid=4711, known=False)
    assert in_order(str(who), "pid 4711")


def test_a_zombie_has_its_name_and_an_unknown_user_its_number(tmp_path):
    folder = tmp_path / "proc" / "7"
    folder.mkdir(parents=True)
    (folder / "status").write_text("Name:\tpython\nState:\tZ (zombie)\nUid:\t3999999999\t0\t0\t0\n")
    (folder / "cmdline").write_bytes(b"")
    (folder / "comm").write_text("python\n")
    assert str(find_process(7, Tree(root=tmp_path))) == "pid 7 of user uid 3999999999 (python)"


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
