"""torchrun in a process of its own: as ``torchrun``, but for how its end is reported.

torchrun shows ranks that failed as a traceback and a block of frames, and ends with 1. Here its end goes into a file
(``runners.torchrun.Account``), and the process that has started this reports it in one line. All else is torchrun's
own.
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
from pytest_gpucluster.runners.torchrun import Account, RankEnd, signal_name

_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), linux/prctl.h."""
_NO_GPU = (
    " Here torch finds no GPU to count: rehearse with --gpucluster-device=cpu, or say how many ranks to start "
    "(--nproc-per-node)"
)

_LOGS = ("redirects", "tee", "duplicate_stdout_filters", "duplicate_stderr_filters", "logs_specs")
"""Options of torchrun that write files into its folder of logs, or give that to somebody else who may."""
_NOTHING: tuple[object, ...] = (None, "", "0", [])
"""What they are where nothing was asked for."""


def main(arguments: list[str]) -> None:
    """Run torchrun, and leave word of how it ended."""
    starter = os.getppid()
    _end_with(starter)
    try:
        account = run(arguments)
    except KeyboardInterrupt:  # while torch is still being loaded, which takes seconds
        account = Account(how="signal", message="SIGINT")
    account.write(Path(os.environ[VARIABLE]))


def _end_with(starter: int) -> None:
    """Let the kernel send SIGTERM when the starter is gone, however it went: the ranks must not stay alone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:  # it was gone before
        os.kill(os.getpid(), signal.SIGTERM)


def run(arguments: list[str]) -> Account:
    """Run torchrun to its end."""
    from torch.distributed import run as its_module
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchrun: Any = its_module  # which has no types
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            told = torchrun.parse_args(arguments)
    except SystemExit:
        # All of its usage, thirty lines of it, and then what is wrong.
        last = (said.getvalue().strip().splitlines() or ["no word of it"])[-1]
        return Account(how="usage", message=f"torchrun refuses its options: {last.partition('error: ')[2] or last}")
    if not told.module or told.training_script != "pytest":
        return Account(
            how="usage",
            message=f"torchrun would run {told.training_script!r} and not pytest: what pytest gets stands after --",
        )
    _keep_no_logs(told)
    if "LOGLEVEL" not in os.environ:  # torchrun's own variable for it
        # "failed (exitcode: 1) local_rank: 0 ...": what is told of it in the end says more.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun.run(told)
    except ChildFailedError as error:
        return Account(how="ranks failed", ranks=_ends(error.failures))
    except SignalException as error:
        return Account(how="signal", message=signal_name(int(error.sigval)))
    except ValueError as error:  # torchrun reads some of its options only now
        hint = _NO_GPU if "cuda is not available" in str(error).lower() else ""
        return Account(how="usage", message=f"torchrun refuses its options: {error}{hint}")
    except Exception as error:  # of many types, torch's own among them: ranks that do not meet, a port that is taken
        return Account(how="error", message=f"{type(error).__name__}: {str(error) or _place(error)}")
    return Account(how="done")


def _keep_no_logs(told: Any) -> None:
    """Let torchrun's folder of logs lie where the account goes, which is taken away at the end.

    torchrun makes one in any case, for the ranks' error files, and leaves it in TMPDIR for good. Where a log was asked
    for, the folder stays torchrun's matter.
    """
    folder = os.environ.get(VARIABLE)
    asked = (told.log_dir, *(getattr(told, name, "") for name in _LOGS))
    if folder is not None and all(value in _NOTHING for value in asked):
        told.log_dir = os.path.join(folder, "torchrun")


def _place(error: Exception) -> str:
    """Return where an error was raised that says nothing, as torch's own of ``--nproc-per-node=0``."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _ends(failures: dict[int, Any]) -> tuple[RankEnd, ...]:
    """Return the ranks of ``ChildFailedError.failures``, the one that failed first at the front.

    The times are whole seconds, in which the agent has already ended the other ranks with SIGTERM: those come last.
    """
    ordered = sorted(failures.items(), key=lambda one: (one[1].exitcode == -signal.SIGTERM, one[1].timestamp, one[0]))
    return tuple(RankEnd(rank=int(rank), code=int(failure.exitcode)) for rank, failure in ordered)


if __name__ == "__main__":
    main(sys.argv[1:])
