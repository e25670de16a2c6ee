"""torchrun as ``gpucluster run`` starts it: its command line, how its agent ended, and the exit code of the run.

The agent writes to a file how it ended, and which of its ranks exited with an error or a signal.

The verdict is, in this order: rank 0's note, if rank 0 was on this node; the journal, if rank 0 died without a note;
the notes of the other ranks; and without any of these, the exit code of pytest itself. No result is ever improved:
0 means that every rank of this node reported 0 and exited with it.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.journal.verdict import BROKEN, EXIT_CODES, ExitNote
from pytest_gpucluster.text import one_line, rank_ranges

FILE_NAME = "agent.json"
How = Literal["done", "ranks failed", "signal", "usage", "error"]


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """A rank whose process did not end with 0. ``code`` is negative where a signal has ended it."""

    rank: int
    code: int

    def __str__(self) -> str:
        how = f"killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with {self.code}"
        return f"rank {self.rank} {how}"


@dataclass(frozen=True, kw_only=True)
class Account:
    """How the agent has ended.

    Attributes:
        how: "done" every rank of this node ended with 0; "ranks failed" some did not; "signal" somebody has ended the
            agent; "usage" torchrun has refused its options; "error" anything else, such as ranks that did not meet.
        message: in words; "" where there is nothing more to say.
        ranks: those that have not ended well, the first one first.
    """

    how: How
    message: str = ""
    ranks: tuple[RankEnd, ...] = ()

    def write(self, folder: Path) -> None:
        """Leave it in a folder."""
        beside = folder / f".{FILE_NAME}"
        beside.write_text(json.dumps(asdict(self)), encoding="ascii")
        beside.replace(folder / FILE_NAME)

    @classmethod
    def read(cls, folder: Path) -> Account | None:
        """Read it back; None if the agent has left none, as one that was killed."""
        try:
            told: Mapping[str, Any] = json.loads((folder / FILE_NAME).read_bytes())
            ranks = tuple(RankEnd(rank=int(one["rank"]), code=int(one["code"])) for one in told["ranks"])
            return cls(how=told["how"], message=str(told["message"]), ranks=ranks)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def signal_name(number: int) -> str:
    """Return "SIGTERM" for 15.

    >>> signal_name(15), signal_name(99)
    ('SIGTERM', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_RANKS = "--nproc-per-node"
_RANKS_VARIABLE = "PET_NPROC_PER_NODE"
"""torchrun reads each of its options from such a variable, too. Source: torch, distributed/argparse_util.py."""
_DEVICE, _DEVICE_VARIABLE = "--gpucluster-device", "GPUCLUSTER_DEVICE"
_PYTEST_VARIABLE = "PYTEST_ADDOPTS"
"""pytest takes more arguments from it, and before its own. Source: pytest's reference, "Environment Variables"."""
_MEETING_PLACES = ("--rdzv-endpoint", "--master-addr")
_OURS = ("-m", "--module", "--no-python", "--run-path")
"""Options of torchrun that say what is run, which is pytest here."""
REHEARSING_RANKS = 2
"""The least with which ranks have something to tell each other."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """torchrun's arguments, and a remark on what was chosen for the operator; "" if nothing was."""

    arguments: tuple[str, ...]
    remark: str = ""


def command_line(launch: Sequence[str], pytest: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Return how to start torchrun over pytest.

    Without a number of ranks it is one for each GPU that torch sees, and two where the device is cpu: torchrun's own
    default is one, and one rank alone has nobody to talk to.

    Args:
        launch: options for torchrun.
        pytest: arguments of pytest.
        environ: the environment, in which either may have defaults.

    Raises:
        OptionError: pytest is told nothing or what cannot be read, or torchrun is told to run something else.
    """
    for word in launch:
        option = word.partition("=")[0].replace("_", "-")
        if option in _OURS:
            raise OptionError(f"{word}: what is run is pytest; leave this option of torchrun out")
    if not pytest:
        raise OptionError(
            "nothing says what pytest is to run: write it after two dashes, such as `gpucluster run -- acceptance/` or "
            "`gpucluster run --nproc-per-node=8 -- acceptance/ -k nccl`"
        )
    ranks, remark = _ranks(launch, pytest, environ)
    return CommandLine(arguments=(*ranks, *launch, "-m", "pytest", *pytest), remark=remark)


def meeting_place(launch: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the option by which torchrun is told where its agents meet, and the host in it; None where none is.

    ``--rdzv-endpoint`` takes the place of ``--master-addr``, and ``--standalone`` of both. An endpoint that is no host,
    such as a file or a list of servers, is left to torchrun.

    Args:
        launch: options for torchrun.
        environ: the environment, in which each may have a default.

    Source: torch, distributed/run.py (config_from_args) and distributed/argparse_util.py.
    """
    if "--standalone" in launch or environ.get("PET_STANDALONE") == "1":
        return None
    for option in _MEETING_PLACES:
        given = environ.get(f"PET_{option.removeprefix('--').replace('-', '_').upper()}", "")
        for word, following in zip(launch, [*launch, ""][1:], strict=True):
            key, equals, value = word.partition("=")
            if key.replace("_", "-") == option:
                given = value if equals else following
        if given:
            # host, host:port or [address of IPv6]:port
            bracketed = re.fullmatch(r"\[([^]]*)\](:\d+)?", given)
            host = bracketed[1] if bracketed else given.rpartition(":")[0] if given.count(":") == 1 else given
            return None if re.search("[/,]", host) or not host else (option, host)
    return None


def _ranks(launch: Sequence[str], pytest: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], str]:
    if environ.get(_RANKS_VARIABLE) or any(word.partition("=")[0].replace("_", "-") == _RANKS for word in launch):
        return [], ""
    if _device(pytest, environ) == "cpu":
        return [f"{_RANKS}={REHEARSING_RANKS}"], f"{REHEARSING_RANKS} ranks on this node, to rehearse ({_RANKS})"
    return [f"{_RANKS}=gpu"], f"a rank for each GPU of this node ({_RANKS})"


def _device(pytest: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the device that pytest is told; the last one counts, as everywhere in pytest."""
    device = environ.get(_DEVICE_VARIABLE, "")
    words = [*_from_environment(environ), *pytest]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option == _DEVICE:
            device = value if equals else following
    return device


def _from_environment(environ: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(environ.get(_PYTEST_VARIABLE, ""))
    except ValueError as error:
        raise OptionError(f"{_PYTEST_VARIABLE} cannot be read: {error}") from None


USAGE, BROKE, INTERRUPTED = 2, 11, 2
_REASON_CHARACTERS = 2000
_OF_PYTEST = (2, 3, 4, 5)
"""Codes that are pytest's alone. Its 1 may as well be Python's own, which was never able to start it."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the journal says: verdict, exit code, reason, whether it was a rehearsal, and where the run's folder is."""

    word: str
    exit: int
    reason: str
    rehearsal: bool
    directory: str


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The exit code, and what the operator reads."""

    exit: int
    line: str


def conclude(
    account: Account | None,
    notes: Sequence[ExitNote],
    recorded: Recorded | None,
    *,
    agent_code: int,
    heard: Sequence[int] = (),
) -> Conclusion:
    """Return what a run came to.

    Args:
        account: of the agent; None if it has left none.
        notes: of the ranks of this node.
        recorded: what the journal says, if rank 0 was on this node.
        agent_code: what the process of the agent ended with, negative for a signal.
        heard: the signals that the starter was told to pass on, which need not be those that the agent got.
    """
    told = _told(notes, recorded)
    if told is None:
        return _without_verdict(account, agent_code, heard)
    wrong = _wrong(account, notes, agent_code) if told.exit == 0 else ""
    if wrong:
        reason = f"{wrong}, after the verdict {told.word} ({told.reason})"
        told = Recorded(word=BROKEN, exit=BROKE, reason=reason, rehearsal=told.rehearsal, directory=told.directory)
    rehearsal = "REHEARSAL, " if told.rehearsal else ""
    line = f"{rehearsal}{told.word}, exit code {told.exit}: {told.reason}"
    if told.directory:
        line += f" (reports: {told.directory})"
    return Conclusion(exit=told.exit, line=one_line(line, _REASON_CHARACTERS))


def _told(notes: Sequence[ExitNote], recorded: Recorded | None) -> Recorded | None:
    """Return the verdict of whoever knows most, without making it better than anybody here says."""
    if notes and notes[0].rank == 0:
        chosen = notes[0]
    elif recorded is not None:
        return recorded
    elif notes:
        # All have agreed on it, unless the run broke: then each one knows its own part of it.
        chosen = max(notes, key=lambda note: (_weight(note.exit), -note.rank))
    else:
        return None
    where = f"{chosen.host}:{chosen.directory}" if chosen.rank and chosen.host and chosen.directory else ""
    return Recorded(
        word=chosen.word,
        exit=chosen.exit,
        reason=chosen.reason,
        rehearsal=chosen.rehearsal,
        directory=where or chosen.directory,
    )


def _wrong(account: Account | None, notes: Sequence[ExitNote], agent_code: int) -> str:
    """Return what speaks against an exit code of 0, or an empty text."""
    if account is None:
        return f"torchrun {_ended(agent_code)}"
    if account.how == "ranks failed":
        return "; ".join(map(str, account.ranks[:4]))
    if account.how == "signal":
        return f"torchrun was ended by {account.message}"
    if account.how != "done":
        return f"torchrun failed: {account.message}"
    bad = [note for note in notes if note.exit != 0]
    if bad:
        return f"{rank_ranges(note.rank for note in bad)} left exit code {bad[0].exit}: {bad[0].reason}"
    expected = max((note.local_world_size for note in notes), default=1)
    if len(notes) < expected:
        return f"only {rank_ranges(note.rank for note in notes) if notes else 'no rank'} of {expected} left a verdict"
    return ""


def _weight(code: int) -> int:
    """Return how much an exit code outweighs others: a rejection all, a broken run what is only incomplete."""
    return {0: 0, 12: 1, 10: 2, 1: 4}.get(code, 3)


def _without_verdict(account: Account | None, agent_code: int, heard: Sequence[int]) -> Conclusion:
    """Conclude where no rank has come as far as a verdict."""
    if account is not None and account.how == "usage":
        return Conclusion(exit=USAGE, line=one_line(f"nothing was run: {account.message}", _REASON_CHARACTERS))
    if (account is not None and account.how == "signal") or (account is None and heard):
        by = signal_name(heard[0]) if heard else str(account and account.message)
        return _broken(INTERRUPTED, f"interrupted ({by}) before there was a verdict")
    if account is None:
        return _broken(BROKE, f"torchrun {_ended(agent_code)}")
    if account.how == "error":
        return _broken(BROKE, f"torchrun failed: {account.message}{_hint(account.message)}")
    if account.ranks:
        first = account.ranks[0]
        codes = {end.code for end in account.ranks if end.code >= 0}
        if first.code in _OF_PYTEST and len(codes) == 1:
            return _broken(first.code, f"{EXIT_CODES[first.code].partition(': ')[2]}: {first}, see above")
        return _broken(BROKE, f"{first}, and no rank has left a verdict; see above")
    return _broken(
        BROKE,
        "no rank has left a verdict, although torchrun ended well: either tests were only listed, or the plugin was "
        "not on (`gpucluster = true` in the ini file, or a --gpucluster option, turns it on)",
    )


def _broken(code: int, reason: str) -> Conclusion:
    return Conclusion(exit=code, line=one_line(f"{BROKEN}, exit code {code}: {reason}", _REASON_CHARACTERS))


def _ended(code: int) -> str:
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with {code}, and left no word of it"


_PORT_TAKEN = "; another run has this port: name another one (--master-port, or --rdzv-endpoint)"
_NOT_MET = (
    "; the nodes have not met: give --master-addr, --master-port and --nnodes the same value on each of them and "
    "--node-rank another one, and let no firewall stand between them"
)
_HINTS = {"address already in use": _PORT_TAKEN, "eaddrinuse": _PORT_TAKEN, "timed out": _NOT_MET, "timeout": _NOT_MET}


def _hint(message: str) -> str:
    return next((hint for words, hint in _HINTS.items() if words in message.lower()), "")
