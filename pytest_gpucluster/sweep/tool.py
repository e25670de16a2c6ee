"""A scheduler's command-line tool, asked something short."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from pytest_gpucluster.errors import EnvironmentBroken, OptionError
from pytest_gpucluster.text import one_line


def require(*names: str) -> None:
    """Make sure that these programs are on the PATH.

    Raises:
        OptionError: one is not.
    """
    for name in names:
        if shutil.which(name) is None:
            raise OptionError(f"{name} is not on the PATH: run the sweep where {name} works, or add its folder to PATH")


def ask(command: Sequence[str], *, given: str = "", within_seconds: float) -> str:
    """Run a program to its end and return its standard output.

    Raises:
        EnvironmentBroken: it cannot be run, does not end in time, or ends with another code than 0.
    """
    shown = one_line(" ".join(command), 200)
    try:
        done = subprocess.run(
            list(command),
            input=given,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=within_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentBroken(f"`{shown}` has not ended within {within_seconds:g} s") from None
    except OSError as error:
        raise EnvironmentBroken(f"`{shown}` cannot be run: {error.strerror or error}") from None
    if done.returncode != 0:
        said = one_line(done.stderr or done.stdout, 400) or "nothing"
        raise EnvironmentBroken(f"`{shown}` ended with exit code {done.returncode} and said: {said}")
    return done.stdout
