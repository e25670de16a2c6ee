"""Processes of a node by pid, and programs that only print.

A process is described for an operator who has to find and kill it; a scheduler's epilog should do that. A program has a
deadline: a tool of a broken driver or scheduler may never end.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.node.sysfs import Tree
from pytest_gpucluster.text import first_line

_LONGEST_COMMAND = 120


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process as this host shows it; ``known`` is False for one that is not in the process table."""

    pid: int
    user: str = ""
    command: str = ""
    known: bool = True

    def __str__(self) -> str:
        if not self.known:
            return f"pid {self.pid}, which this host or container does not list"
        return f"pid {self.pid} of user {self.user or 'unknown'} ({self.command or 'no command'})"


def find_process(pid: int, tree: Tree | None = None) -> Process:
    """Look a process up in the process table.

    Source: proc_pid_status(5), proc_pid_cmdline(5), proc_pid_comm(5).
    """
    tree = tree or Tree()
    status = tree.text(f"/proc/{pid}/status")
    if status is None:
        return Process(pid=pid, known=False)
    uid = re.search(r"^Uid:\s*(\d+)", status, re.MULTILINE)
    user = ""
    if uid is not None:
        try:
            user = pwd.getpwuid(int(uid[1])).pw_name
        except KeyError:
            user = f"uid {uid[1]}"
    # A zombie has a name but no command line.
    command = (tree.text(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip() or tree.text(f"/proc/{pid}/comm")
    command = " ".join((command or "").split())
    more = "..." if len(command) > _LONGEST_COMMAND else ""
    return Process(pid=pid, user=user, command=command[:_LONGEST_COMMAND] + more)


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
    command: Sequence[str],
    seconds: float = ANSWER_SECONDS,
    *,
    environ: Mapping[str, str] | None = None,
    given: str = "",
) -> Output:
    """Run a program with ``given`` as its standard input, and return its output, in the C locale unless there is an
    ``environ``; after ``seconds`` it is killed."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"} if environ is None else environ,
            start_new_session=True,
        )
    except OSError as error:
        return Output(why_not=f"{command[0]}: {error.strerror or error}")
    try:
        out, err = process.communicate(given.encode("utf-8"), timeout=seconds)
    except subprocess.TimeoutExpired as late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and its children
        # A process blocked in the driver cannot be killed: it is not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_SECONDS)
        for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
            pipe.close()
        return Output(text=_text(late.stdout), why_not=f"{command[0]}: no answer within {seconds:g} s")
    except BaseException:  # Ctrl-C does not reach it, for it has a session of its own
        kill(process)
        raise
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
