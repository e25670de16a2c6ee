"""The programs of nccl-tests: where they are, one run with a deadline, and the ranges of sizes.

Sizes become the fewest ranges of nccl-tests: ``-b FIRST -e LAST -f FACTOR``.

>>> [str(each) for each in ranges([1_000_000, 10_000_000, 100_000_000, 1_000_000_000])]
['-b 1000000 -e 1000000000 -f 10']
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.text import one_line

USUAL_FOLDERS = (Path("/opt/nccl-tests/build"), Path("/usr/local/nccl-tests/build"), Path("/opt/nccl_tests/build"))
_HELP_SECONDS = 20.0
_ENDING_SECONDS = 10.0
_QUOTED = 300
_JSON_OPTION = "-J,--output_file"
"""In the usage text of programs that can write JSON. Source: nccl-tests, src/common.cu."""

# Messages of CUDA and nccl-tests where there is no GPU.
_NO_GPU = (
    "no CUDA-capable device",
    "Invalid number of GPUs",
    "CUDA driver version is insufficient",
    "libcuda.so.1: cannot open",
    "invalid device ordinal",
)


def find_program(program: str, folder: Path | None, *, mpi: bool = False) -> Path:
    """Return the path of a program: in the given folder, else on the PATH, else in a usual folder.

    Args:
        program: its name.
        folder: searched with its ``build``; None for the PATH and the usual folders.
        mpi: a launcher starts it, so that one built with ``NAME_SUFFIX=_mpi`` is preferred.

    Raises:
        EnvironmentBroken: it is missing, or not executable.
    """
    names = (f"{program}_mpi", program) if mpi else (program, f"{program}_mpi")
    for name in names:
        if folder is not None:
            places = [folder / name, folder / "build" / name]
        else:
            on_path = shutil.which(name)
            places = [*([Path(on_path)] if on_path else []), *(usual / name for usual in USUAL_FOLDERS)]
        for place in places:
            if place.is_file() and os.access(place, os.X_OK):
                return place.absolute()
    searched = (
        f"{folder} or {folder}/build" if folder is not None else f"the PATH, {', '.join(map(str, USUAL_FOLDERS))}"
    )
    raise EnvironmentBroken(
        f"{program} of nccl-tests is not in {searched}; build it (make MPI=1 for several nodes) and name its folder: "
        "--binaries DIR"
    )


def writes_json(program: Path) -> bool:
    """Return whether a program can write its results as JSON, by its usage text."""
    try:
        usage = subprocess.run(
            [program, "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_HELP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return _JSON_OPTION.encode() in usage.stdout


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """Exit code and output of a program; ``code`` is None where it timed out after ``within_seconds``."""

    code: int | None
    text: str
    within_seconds: float

    def problem(self, command: str) -> EnvironmentBroken:
        """Return the error for its exit, with its last lines of output."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        last = one_line(" | ".join(lines[-3:]), _QUOTED) or "nothing"
        command = one_line(command, _QUOTED)
        if self.code is None:
            return EnvironmentBroken(
                f"`{command}` timed out after {self.within_seconds:g} s and was killed. A collective hangs, or "
                f"--timeout is too short for these sizes. Its last output: {last}"
            )
        gpu = any(sign in self.text for sign in _NO_GPU)
        hint = ". There is no usable GPU here, or fewer than requested: run it on the node of the journal"
        return EnvironmentBroken(
            f"`{command}` ended with exit code {self.code}; its last output: {last}{hint if gpu else ''}"
        )


def run_program(command: Sequence[str], *, within_seconds: float) -> ProgramResult:
    """Run a program with a timeout; its child processes are killed with it, also where this is interrupted.

    Raises:
        EnvironmentBroken: it cannot be started.
    """
    code: int | None = None
    # A file, not a pipe: a process that outlives the program would keep a pipe open.
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            words = one_line(" ".join(command), _QUOTED)
            raise EnvironmentBroken(f"`{words}` cannot be run: {error.strerror or error}") from None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(within_seconds)
        finally:
            _end(process)
        printed.seek(0)
        text = printed.read().decode("utf-8", "backslashreplace")
        return ProgramResult(code=code, text=text, within_seconds=within_seconds)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and its process group: SIGTERM first, so that mpirun can stop its ranks on other nodes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        # A process that is blocked in the driver does not react; it is left to the kernel.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Range:
    """Sizes of which each is ``factor`` times the one before; a single one has the factor 1.

    Source: nccl-tests, README.md, options ``-b``, ``-e`` and ``-f``; bare numbers are bytes.
    """

    first: int
    last: int
    factor: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes in bytes."""
        found = [self.first]
        while self.factor > 1 and found[-1] * self.factor <= self.last:
            found.append(found[-1] * self.factor)
        return tuple(found)

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of nccl-tests."""
        factor = ["-f", str(self.factor)] if self.factor > 1 else []
        return ["-b", str(self.first), "-e", str(self.last), *factor]

    def __str__(self) -> str:
        return " ".join(self.arguments)


def ranges(sizes: Iterable[int]) -> list[Range]:
    """Return few ranges with exactly these sizes: each start of a program costs seconds.

    Greedy: repeatedly the longest range that begins with the smallest remaining size.
    """
    left = sorted(set(sizes))
    found = []
    while left:
        first = left[0]
        best = Range(first=first, last=first)
        for second in left[1:]:
            if second % first:
                continue
            factor = second // first
            last = second
            while last * factor in left:
                last *= factor
            candidate = Range(first=first, last=last, factor=factor)
            if len(candidate.sizes) > len(best.sizes):
                best = candidate
        left = [size for size in left if size not in best.sizes]
        found.append(best)
    return found
