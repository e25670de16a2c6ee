"""A scheduler's program that is missing, fails or hangs is named, with what it said."""

from __future__ import annotations

import sys

import pytest

from pytest_gpucluster.errors import EnvironmentBroken, OptionError
from pytest_gpucluster.sweep import tool


def python(code):
    return [sys.executable, "-c", code]


def test_what_it_prints_is_returned():
    assert tool.ask(python("print(input())"), given="hello\n", within_seconds=60) == "hello\n"


@pytest.mark.parametrize(
    ("command", "within", "message"),
    [
        (python("import sys; sys.exit('oops\\nthere')"), 60, "ended with exit code 1 and said: oops there"),
        (python("raise SystemExit(3)"), 60, "ended with exit code 3 and said: nothing"),
        (python("import time; time.sleep(600)"), 0.2, "has not ended within 0.2 s"),
        (["/no/such/program"], 60, "cannot be run: No such file"),
    ],
)
def test_anything_else_is_an_error(command, within, message):
    with pytest.raises(EnvironmentBroken, match=message):
        tool.ask(command, within_seconds=within)


def test_a_missing_program_is_named():
    tool.require("sh")
    with pytest.raises(OptionError, match="no-such-program is not on the PATH"):
        tool.require("sh", "no-such-program")
