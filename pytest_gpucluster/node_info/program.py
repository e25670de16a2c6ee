"""The answer of another program, waited for with a deadline: a tool of a broken driver may never end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.text import first_line

ANSWER_SECONDS = 5.0
_GONE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program has printed until it ended, or until nobody waited any longer. ``why_not`` is empty if it ended
    well."""

    text: str = ""
    why_not: str = ""


Ask = Callable[[Sequence[str]], Answer]


def ask(command: Sequence[str], seconds: float = ANSWER_SECONDS, *, environ: Mapping[str, str] | None = None) -> Answer:
    """Run a program that only tells, and return its answer; after ``seconds`` it is killed."""
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
        return Answer(why_not=f"{command[0]}: {error.strerror or error}")
    try:
        out, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and with it what it has started itself
        # One that waits inside of the driver does not even hear that. It is left to the kernel, and not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GONE_SECONDS)
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
        return Answer(text=_text(late.stdout), why_not=f"{command[0]} has not answered within {seconds:g} s")
    if process.returncode:
        why = first_line(_text(said)) or f"it ended with {process.returncode}"
        return Answer(text=_text(out), why_not=f"{command[0]}: {why}")
    return Answer(text=_text(out))


def _text(told: bytes | None) -> str:
    return (told or b"").decode("utf-8", "replace")
