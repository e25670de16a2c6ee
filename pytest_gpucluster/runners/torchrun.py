"""torchrun as ``gpucluster run`` starts it: its command line, how its agent ended, and the exit code of the run.

torchrun reports failed ranks with a traceback and a block of frames, and ends with 1. So it runs in a process of its
own, ``python -m pytest_gpucluster.runners.torchrun``, which writes how it ended to a file.

The verdict is, in this order: rank 0's note, if rank 0 was on this node; the journal, if rank 0 died without a note;
the notes of the other ranks; and without any of these, the exit code of pytest itself. No result is ever improved:
0 means that every rank of this node reported 0 and exited with it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.files import atomic_write
from pytest_gpucluster.journal.verdict import BROKEN, EXIT_CODES, VARIABLE, ExitNote
from pytest_gpucluster.launch.detached_process import end_with_parent
from pytest_gpucluster.runners.run_result import Conclusion, conclusion
from pytest_gpucluster.text import one_line, rank_ranges

FILE_NAME = "agent.json"
"""An :class:`AgentResult`, in the folder of the ranks' notes."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """A rank whose process did not end with 0. ``code`` is negative for a signal."""

    rank: int
    code: int

    def __str__(self) -> str:
        how = f"killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with {self.code}"
        return f"rank {self.rank} {how}"


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """How torchrun's agent ended.

    Attributes:
        outcome: "done" every rank of this node ended with 0; "ranks failed" some did not; "signal" the agent got one;
            "usage" torchrun refused its options; "error" anything else, such as a failed rendezvous.
        message: more about it; may be empty.
        ranks: those that did not end with 0, in the order of their ends.
    """

    outcome: Literal["done", "ranks failed", "signal", "usage", "error"]
    message: str = ""
    ranks: tuple[RankExit, ...] = ()


def signal_name(number: int) -> str:
    """Return "SIGTERM" for 15.

    >>> signal_name(15), signal_name(99)
    ('SIGTERM', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- the command line

_RANKS = "--nproc-per-node"
_VARIABLES = {
    _RANKS: "PET_NPROC_PER_NODE",
    "--nnodes": "PET_NNODES",
    "--rdzv-endpoint": "PET_RDZV_ENDPOINT",
    "--master-addr": "PET_MASTER_ADDR",
    "--master-port": "PET_MASTER_PORT",
}
"""torchrun reads each of its options from such a variable, too. Source: torch, distributed/argparse_util.py."""
_DEVICE, _DEVICE_VARIABLE = "--gpucluster-device", "GPUCLUSTER_DEVICE"
_PYTEST_VARIABLE = "PYTEST_ADDOPTS"
"""pytest reads arguments from it, before its own. Source: pytest's reference, "Environment Variables"."""
_RENDEZVOUS_OPTIONS = ("--rdzv-endpoint", "--master-addr")
_PROGRAM_OPTIONS = ("-m", "--module", "--no-python", "--run-path")
"""Options of torchrun that select the program, which is pytest here."""
REHEARSAL_RANKS = 2
"""The fewest ranks that communicate."""


def command_line(launch: Sequence[str], pytest: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments that start torchrun over pytest.

    Without ``--nproc-per-node`` there is one rank for each GPU that torch sees, or two with the device cpu. torchrun's
    own default is a single rank, which communicates with no other.

    Args:
        launch: options for torchrun.
        pytest: arguments of pytest.
        environ: the environment, in which either may have defaults.

    Raises:
        OptionError: unreadable arguments, some of pytest before the dashes, or another program than pytest.
    """
    names = [_option(word) for word in launch]
    for name, word in zip(names, launch, strict=True):
        if name in _PROGRAM_OPTIONS:
            raise OptionError(f"{word}: the program is pytest; leave this option of torchrun out")
    if launch and not launch[0].startswith("-"):
        raise OptionError(f"{launch[0]}: arguments of pytest stand after two dashes: `gpucluster run -- {launch[0]}`")
    arguments = [*launch, "-m", "pytest", *pytest]
    if _RANKS in names or _given((), _RANKS, environ):
        return arguments
    try:
        words = [*shlex.split(environ.get(_PYTEST_VARIABLE, "")), *pytest]
    except ValueError as error:
        raise OptionError(f"{_PYTEST_VARIABLE} cannot be read: {error}") from None
    is_rehearsal = _last_value(words, _DEVICE, environ.get(_DEVICE_VARIABLE, "")) == "cpu"
    return [f"{_RANKS}={REHEARSAL_RANKS if is_rehearsal else 'gpu'}", *arguments]


def rendezvous_host(launch: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return torchrun's option for the rendezvous and the host in it; None if there is none.

    ``--rdzv-endpoint`` overrules ``--master-addr``, and ``--standalone`` both. An endpoint that is no host, such as a
    file or a list of servers, is left to torchrun.

    Args:
        launch: options for torchrun.
        environ: the environment, in which each may have a default.

    Source: torch, distributed/run.py (config_from_args).
    """
    if "--standalone" in launch or environ.get("PET_STANDALONE") == "1":
        return None
    for option in _RENDEZVOUS_OPTIONS:
        if given := _given(launch, option, environ):
            # host, host:port or [address of IPv6]:port
            bracketed = re.fullmatch(r"\[([^]]*)\](:\d+)?", given)
            host = bracketed[1] if bracketed else given.rpartition(":")[0] if given.count(":") == 1 else given
            return None if re.search("[/,]", host) or not host else (option, host)
    return None


def rendezvous_port(launch: Sequence[str], environ: Mapping[str, str]) -> int:
    """Return the port at which torchrun's agents meet; 0 if it is not a number. Arguments as above."""
    port = _given(launch, "--rdzv-endpoint", environ).rpartition(":")[2]
    text = port or _given(launch, "--master-port", environ) or "29500"
    return int(text) if text.isdecimal() else 0


def launched_shape(launch: Sequence[str], environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the numbers of nodes and of ranks on each; 0 ranks: one for each GPU. Arguments as above."""
    nodes, ranks = (_given(launch, option, environ).rpartition(":")[2] for option in ("--nnodes", _RANKS))
    return int(nodes) if nodes.isdecimal() else 1, int(ranks) if ranks.isdecimal() else 0


def _option(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def _given(launch: Sequence[str], option: str, environ: Mapping[str, str]) -> str:
    return _last_value(launch, option, environ.get(_VARIABLES[option], ""))


def _last_value(words: Sequence[str], option: str, default: str) -> str:
    value = default
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if _option(word) == option:
            value = word.partition("=")[2] if "=" in word else following
    return value


# ---- the process of torchrun

_NO_GPU = (
    " torch finds no GPU here: rehearse with --gpucluster-device=cpu, or set the number of ranks (--nproc-per-node)"
)

_LOG_OPTIONS = ("log_dir", "redirects", "tee", "duplicate_stdout_filters", "duplicate_stderr_filters", "logs_specs")
"""Options of torchrun that use its folder of logs."""


def main(arguments: list[str]) -> None:
    """Run torchrun in this process, and write how it ended to the folder that ``VARIABLE`` names."""
    end_with_parent()
    try:
        result = run_torchrun(arguments)
    except KeyboardInterrupt:  # while torch is being imported, which takes seconds
        result = AgentResult(outcome="signal", message="SIGINT")
    atomic_write(Path(os.environ[VARIABLE]) / FILE_NAME, json.dumps(asdict(result)))


def run_torchrun(arguments: list[str]) -> AgentResult:
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
        more = "`torchrun --help` lists them; pytest's, such as --gpucluster-expect, are written after --"
        why = last.partition("error: ")[2] or last
        return AgentResult(outcome="usage", message=f"torchrun refuses its options: {why}. {more}")
    if not options.module or options.training_script != "pytest":
        return AgentResult(
            outcome="usage",
            message=f"torchrun would run {options.training_script!r} and not pytest: write pytest's arguments after --",
        )
    # torchrun always makes a folder of logs, for the ranks' error files, and leaves it in TMPDIR. Where no log was
    # requested, it goes to the folder of the result, which is removed at the end.
    folder = os.environ.get(VARIABLE)
    if folder is not None and all(getattr(options, name, None) in (None, "", "0", []) for name in _LOG_OPTIONS):
        options.log_dir = os.path.join(folder, "torchrun")
    if "LOGLEVEL" not in os.environ:  # torchrun's own variable for it
        # "failed (exitcode: 1) local_rank: 0 ...": the last line of this command has more.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        # The one that failed first at the front. Times are whole seconds, and within one the agent ends the other ranks
        # with SIGTERM: those come last.
        failed = sorted(
            error.failures.items(),
            key=lambda one: (one[1].exitcode == -signal.SIGTERM, one[1].timestamp, one[0]),
        )
        ranks = tuple(RankExit(rank=int(rank), code=int(failure.exitcode)) for rank, failure in failed)
        return AgentResult(outcome="ranks failed", ranks=ranks)
    except SignalException as error:
        return AgentResult(outcome="signal", message=signal_name(int(error.sigval)))
    except ValueError as error:  # torchrun reads some of its options only now
        hint = _NO_GPU if "cuda is not available" in str(error).lower() else ""
        return AgentResult(outcome="usage", message=f"torchrun refuses its options: {error}{hint}")
    except Exception as error:  # of many types: a failed rendezvous, a port in use
        # torch's own for --nproc-per-node=0 has no message.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = str(error) or f"{frame.filename}, line {frame.lineno}"
        return AgentResult(outcome="error", message=f"{type(error).__name__}: {message}")
    return AgentResult(outcome="done")


# ---- the conclusion

USAGE_EXIT, BROKEN_EXIT, INTERRUPTED_EXIT = 2, 11, 2
_PYTEST_CODES = (2, 3, 4, 5)
"""pytest's alone. Its 1 may as well be Python's own, if pytest could not be started."""


def conclude(
    agent: AgentResult | None,
    notes: Sequence[ExitNote],
    journal: ExitNote | None,
    *,
    agent_code: int,
    signals: Sequence[int] = (),
) -> Conclusion:
    """Return exit code and last line of a run.

    Args:
        agent: result of torchrun's agent; None if it has left none.
        notes: of the ranks of this node.
        journal: the journal's verdict as rank 0's note, if rank 0 was on this node and left none.
        agent_code: exit code of the agent's process, negative for a signal.
        signals: that this command has received, which need not be those that the agent got.
    """
    how = f"was killed by {signal_name(-agent_code)}" if agent_code < 0 else f"ended with {agent_code} and no message"
    if not notes and journal is None:
        return _without_verdict(agent, how, signals)
    if notes and notes[0].rank == 0:
        verdict = notes[0]
    elif journal is not None:
        verdict = journal
    else:
        # All ranks have agreed on it, unless the run broke: then each knows only its own part of it. A rejection comes
        # before a broken run, that before an incomplete one.
        weights = {0: 0, 12: 1, 10: 2, 1: 4}
        verdict = max(notes, key=lambda note: (weights.get(note.exit, 3), -note.rank))
    contradiction = _contradiction(agent, notes, how) if verdict.exit == 0 else ""
    if contradiction:
        reason = f"{contradiction}, after the verdict {verdict.word} ({verdict.reason})"
        verdict = replace(verdict, word=BROKEN, exit=BROKEN_EXIT, reason=reason)
    is_remote = verdict.rank and verdict.host and verdict.directory
    reports = f"{verdict.host}:{verdict.directory}" if is_remote else verdict.directory
    return conclusion(verdict.word, verdict.exit, verdict.reason, kind=verdict.kind, reports=reports)


def _contradiction(agent: AgentResult | None, notes: Sequence[ExitNote], how: str) -> str:
    if agent is None:
        return f"torchrun {how}"
    if agent.outcome == "ranks failed":
        return "; ".join(map(str, agent.ranks[:4]))
    if agent.outcome != "done":
        return f"torchrun {'was ended by' if agent.outcome == 'signal' else 'failed:'} {agent.message}"
    bad = [note for note in notes if note.exit != 0]
    if bad:
        return f"{rank_ranges(note.rank for note in bad)} left exit code {bad[0].exit}: {bad[0].reason}"
    expected = max((note.local_world_size for note in notes), default=1)
    if len(notes) < expected:
        return f"only {rank_ranges(note.rank for note in notes) if notes else 'no rank'} of {expected} left a verdict"
    return ""


def _without_verdict(agent: AgentResult | None, how: str, signals: Sequence[int]) -> Conclusion:
    code = BROKEN_EXIT
    if agent is None:
        if signals:
            code, reason = INTERRUPTED_EXIT, f"interrupted ({signal_name(signals[0])}) before there was a verdict"
        else:
            reason = f"torchrun {how}"
    elif agent.outcome == "usage":
        return Conclusion(exit=USAGE_EXIT, line=one_line(f"nothing was run: {agent.message}", 2000))
    elif agent.outcome == "signal":
        by = signal_name(signals[0]) if signals else agent.message
        code, reason = INTERRUPTED_EXIT, f"interrupted ({by}) before there was a verdict"
    elif agent.outcome == "error":
        hint = next((hint for words, hint in _HINTS.items() if words in agent.message.lower()), "")
        reason = f"torchrun failed: {agent.message}{hint}"
    elif agent.ranks:
        first = agent.ranks[0]
        reason = f"{first}, and no rank has left a verdict; see above"
        if first.code in _PYTEST_CODES and {end.code for end in agent.ranks if end.code >= 0} == {first.code}:
            code, reason = first.code, f"{EXIT_CODES[first.code].partition(': ')[2]}: {first}, see above"
    else:
        reason = (
            "no rank has left a verdict, although torchrun ended with 0: either tests were only listed, or the plugin "
            "was off (`gpucluster = true` in the ini file, or a --gpucluster option, turns it on)"
        )
    return conclusion(BROKEN, code, reason)


_PORT_TAKEN = "; another run has this port: set another one (--master-port, or --rdzv-endpoint)"
_NO_RENDEZVOUS = (
    "; the nodes have not met: give --master-addr, --master-port and --nnodes the same value on each of them and "
    "--node-rank another one, and let no firewall block the port"
)
_HINTS = {
    "address already in use": _PORT_TAKEN,
    "eaddrinuse": _PORT_TAKEN,
    "timed out": _NO_RENDEZVOUS,
    "timeout": _NO_RENDEZVOUS,
}


if __name__ == "__main__":
    main(sys.argv[1:])
