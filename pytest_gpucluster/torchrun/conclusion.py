"""One exit code and one line of all that was left when torchrun has ended. Pure.

The verdict is, in this order: rank 0's note, if rank 0 was on this node; the journal, if rank 0 died without a note;
what the other ranks have left; and where nobody has left anything, what pytest ended with on its own. Nothing of it is
ever made better: where it says 0, every rank of this node must have said so, and have ended with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpucluster.journal.verdict import BROKEN, EXIT_CODES, ExitNote
from pytest_gpucluster.text import one_line, rank_ranges
from pytest_gpucluster.torchrun.account import Account, signal_name

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
