"""The programs of nccl-tests: where they are, one run with a deadline, and the ranges of sizes to ask for.

Sizes become the fewest ranges that nccl-tests can be asked for: ``-b FIRST -e LAST -f FACTOR``.

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
"""As it stands in the usage of programs that can write JSON. Source: nccl-tests, src/common.cu."""

# What CUDA and nccl-tests say where there is no GPU to run on.
_NO_GPU = (
    "no CUDA-capable device",
    "Invalid number of GPUs",
    "CUDA driver version is insufficient",
    "libcuda.so.1: cannot open",
    "invalid device ordinal",
)


def find_program(program: str, folder: Path | None, *, mpi: bool = False) -> Path:
    """Return where a program is: in the folder if one is named, else on the PATH, else where it is usually built.

    Args:
        program: its name.
        folder: where to look, and in its ``build``; None for the usual places.
        mpi: a launcher is going to start it, so that one that was built with ``NAME_SUFFIX=_mpi`` is better.

    Raises:
        EnvironmentBroken: it is in none of these, or not executable.
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
    looked = f"{folder} or {folder}/build" if folder is not None else f"the PATH, {', '.join(map(str, USUAL_FOLDERS))}"
    raise EnvironmentBroken(
        f"{program} of nccl-tests is not in {looked}; build it (make MPI=1 for several nodes) and name its folder: "
        "--binaries DIR"
    )


def writes_json(program: Path) -> bool:
    """Tell whether a program can write its results as JSON. One that does not even say how it is used cannot."""
    try:
        said = subprocess.run(
            [program, "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_HELP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return _JSON_OPTION.encode() in said.stdout


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program has ended, and what it has printed; ``code`` is None where it was given up ``within_seconds``."""

    code: int | None
    text: str
    within_seconds: float

    def problem(self, shown: str) -> EnvironmentBroken:
        """Return the error that tells of its end, with the last that it said."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        last = one_line(" | ".join(lines[-3:]), _QUOTED) or "nothing"
        shown = one_line(shown, _QUOTED)
        if self.code is None:
            return EnvironmentBroken(
                f"`{shown}` has not ended within {self.within_seconds:g} s, and was ended. A collective hangs, or "
                f"--timeout is too short for these sizes. It said: {last}"
            )
        gpu = any(sign in self.text for sign in _NO_GPU)
        hint = ". There is no usable GPU here, or fewer than asked for: run it on the node that the journal is of"
        return EnvironmentBroken(f"`{shown}` ended with exit code {self.code} and said: {last}{hint if gpu else ''}")


def run_program(command: Sequence[str], *, within_seconds: float) -> Ended:
    """Run a program to its end; what it has started itself ends with it, also where this is interrupted.

    Raises:
        EnvironmentBroken: it cannot be started.
    """
    code: int | None = None
    # A file and no pipe: a process that outlives the program would hold a pipe open.
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
            shown = one_line(" ".join(command), _QUOTED)
            raise EnvironmentBroken(f"`{shown}` cannot be run: {error.strerror or error}") from None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(within_seconds)
        finally:
            _end(process)
        printed.seek(0)
        text = printed.read().decode("utf-8", "backslashreplace")
        return Ended(code=code, text=text, within_seconds=within_seconds)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and its group: first so that mpirun can end its ranks on other nodes, then for good."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        # One that waits inside of the driver hears nothing. It is left to the kernel.
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
        """Return what nccl-tests is told."""
        factor = ["-f", str(self.factor)] if self.factor > 1 else []
        return ["-b", str(self.first), "-e", str(self.last), *factor]

    def __str__(self) -> str:
        return " ".join(self.arguments)


def ranges(sizes: Iterable[int]) -> list[Range]:
    """Return ranges that hold these sizes and no others: each start of a program costs seconds.

    The longest range that the smallest size that is left begins is taken first.
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
            tried = Range(first=first, last=last, factor=factor)
            if len(tried.sizes) > len(best.sizes):
                best = tried
        left = [size for size in left if size not in best.sizes]
        found.append(best)
    return found
