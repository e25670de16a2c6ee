"""Programs that are asked with a deadline."""

from __future__ import annotations

import os
import re

import pytest

from pytest_gpucluster.node.processes import Output, run_program


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
