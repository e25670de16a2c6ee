"""Run a program that only prints, with a deadline: a tool of a broken driver or scheduler may never end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.text import first_line

ANSWER_SECONDS = 5.0
_KILL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a program printed until it exited or was killed.

    Attributes:
        text, errors: its standard output and standard error.
        code: its exit code; None if it did not exit, or could not be started.
        why_not: why there is no result; empty if it exited with 0.
    """

    text: str = ""
    errors: str = ""
    code: int | None = None
    why_not: str = ""


Run = Callable[[Sequence[str]], Output]


def run_program(
    command: Sequence[str], seconds: float = ANSWER_SECONDS, *, environ: Mapping[str, str] | None = None
) -> Output:
    """Run a program, and return its output; after ``seconds`` it is killed."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**(os.environ if environ is None else environ), "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        return Output(why_not=f"{command[0]}: {error.strerror or error}")
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and its children
        # A process blocked in the driver cannot be killed: it is not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_SECONDS)
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
        return Output(text=_text(late.stdout), why_not=f"{command[0]}: no answer within {seconds:g} s")
    text, errors, code = _text(out), _text(err), process.returncode
    why_not = f"{command[0]}: {first_line(errors) or f'exit code {code}'}" if code else ""
    return Output(text=text, errors=errors, code=code, why_not=why_not)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a child process that writes no files. One that is blocked in the driver exits when that answers."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_KILL_SECONDS)
    process.returncode = process.returncode or 0  # so that subprocess warns of no running child


def _text(output: bytes | None) -> str:
    return (output or b"").decode("utf-8", "replace")
