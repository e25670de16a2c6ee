"""torchrun in a process of its own, whose end is written to a file.

torchrun reports failed ranks with a traceback and a block of frames, and ends with 1. Here its end goes into a file
(``runners.torchrun.AgentResult``), and the parent process reports it in one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from pytest_gpucluster.journal.verdict import VARIABLE
from pytest_gpucluster.runners.torchrun import AgentResult, RankExit, signal_name

_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), linux/prctl.h."""
_NO_GPU = (
    " torch finds no GPU here: rehearse with --gpucluster-device=cpu, or set the number of ranks (--nproc-per-node)"
)

_LOG_OPTIONS = ("redirects", "tee", "duplicate_stdout_filters", "duplicate_stderr_filters", "logs_specs")
"""Options of torchrun that use its folder of logs."""
_UNSET: tuple[object, ...] = (None, "", "0", [])
"""Their values if they were not given."""


def main(arguments: list[str]) -> None:
    """Run torchrun, and write how it ended."""
    parent = os.getppid()
    _end_with_parent(parent)
    try:
        result = run(arguments)
    except KeyboardInterrupt:  # while torch is being imported, which takes seconds
        result = AgentResult(outcome="signal", message="SIGINT")
    result.write(Path(os.environ[VARIABLE]))


def _end_with_parent(parent: int) -> None:
    """Let the kernel send SIGTERM when the parent ends for any reason: the ranks must not go on without it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), signal.SIGTERM)


def run(arguments: list[str]) -> AgentResult:
    """Run torchrun to its end."""
    from torch.distributed import run as torchrun_module
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchrun: Any = torchrun_module  # it has no types
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            options = torchrun.parse_args(arguments)
    except SystemExit:
        # Thirty lines of usage, then the error.
        last = (stderr.getvalue().strip().splitlines() or ["no message"])[-1]
        return AgentResult(
            outcome="usage", message=f"torchrun refuses its options: {last.partition('error: ')[2] or last}"
        )
    if not options.module or options.training_script != "pytest":
        return AgentResult(
            outcome="usage",
            message=f"torchrun would run {options.training_script!r} and not pytest: write pytest's arguments after --",
        )
    _redirect_logs(options)
    if "LOGLEVEL" not in os.environ:  # torchrun's own variable for it
        # "failed (exitcode: 1) local_rank: 0 ...": the last line of this command has more.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        return AgentResult(outcome="ranks failed", ranks=_rank_exits(error.failures))
    except SignalException as error:
        return AgentResult(outcome="signal", message=signal_name(int(error.sigval)))
    except ValueError as error:  # torchrun reads some of its options only now
        hint = _NO_GPU if "cuda is not available" in str(error).lower() else ""
        return AgentResult(outcome="usage", message=f"torchrun refuses its options: {error}{hint}")
    except Exception as error:  # of many types: a failed rendezvous, a port in use
        return AgentResult(outcome="error", message=f"{type(error).__name__}: {str(error) or _raised_at(error)}")
    return AgentResult(outcome="done")


def _redirect_logs(options: Any) -> None:
    """Put torchrun's folder of logs where the result goes, which is removed at the end.

    torchrun always makes one, for the ranks' error files, and leaves it in TMPDIR. If a log was asked for, the folder
    is left as it is.
    """
    folder = os.environ.get(VARIABLE)
    values = (options.log_dir, *(getattr(options, name, "") for name in _LOG_OPTIONS))
    if folder is not None and all(value in _UNSET for value in values):
        options.log_dir = os.path.join(folder, "torchrun")


def _raised_at(error: Exception) -> str:
    """Return where an error without a message was raised, such as torch's own for ``--nproc-per-node=0``."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _rank_exits(failures: dict[int, Any]) -> tuple[RankExit, ...]:
    """Return the ranks of ``ChildFailedError.failures``, the one that failed first at the front.

    Times are whole seconds, and within one the agent ends the other ranks with SIGTERM: those come last.
    """
    ordered = sorted(failures.items(), key=lambda one: (one[1].exitcode == -signal.SIGTERM, one[1].timestamp, one[0]))
    return tuple(RankExit(rank=int(rank), code=int(failure.exitcode)) for rank, failure in ordered)


if __name__ == "__main__":
    main(sys.argv[1:])
