"""Programs that are asked with a deadline."""

from __future__ import annotations

import os
import sys

import pytest

from pytest_gpucluster.node_info.program import Answer, ask


def test_an_answer_is_what_was_printed():
    assert ask(["sh", "-c", "echo told; echo said >&2"]) == Answer(text="told\n")


@pytest.mark.parametrize(
    ("command", "why_not"),
    [
        (["gpucluster-no-such-program"], "gpucluster-no-such-program: No such file or directory"),
        (["sh", "-c", "echo 'no driver' >&2; exit 9"], "sh: no driver"),
        (["sh", "-c", "exit 9"], "sh: it ended with 9"),
    ],
)
def test_what_does_not_end_well_says_why(command, why_not):
    assert ask(command).why_not == why_not


def test_what_never_ends_is_killed_and_what_it_said_is_kept():
    answer = ask(["sh", "-c", "echo $$; trap '' TERM INT; while :; do sleep 600; done"], 2.0)
    assert answer.why_not == "sh has not answered within 2 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(answer.text), 0)


def test_bytes_that_are_no_text_do_no_harm():
    assert ask([sys.executable, "-c", "import os; os.write(1, b'a\\xff')"]).text == "a\N{REPLACEMENT CHARACTER}"
