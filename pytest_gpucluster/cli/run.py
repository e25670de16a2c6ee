"""``gpucluster run``: torchrun over pytest, with pytest's own exit code and one line about the end."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pytest_gpucluster.cli.command import USAGE, complain, explain
from pytest_gpucluster.errors import JournalError, OptionError
from pytest_gpucluster.journal.verdict import EXIT_CODES, VARIABLE
from pytest_gpucluster.text import printable

if TYPE_CHECKING:
    from pytest_gpucluster.journal.verdict import ExitNote
    from pytest_gpucluster.runners.torchrun import Recorded

_RUN = """\
Run torchrun over pytest. What stands before -- goes to torchrun, what stands after it to pytest. This command ends with
pytest's own exit code on every node, where torchrun itself ends with 1 for every code but 0; and says in one line why,
where torchrun shows a traceback. Without --nproc-per-node a node has a rank for each GPU, or two ranks with
--gpucluster-device=cpu. Ctrl-C and SIGTERM are passed on, and the reports are written.
"""

_EXAMPLES = """\
  gpucluster run -- acceptance/ --gpucluster-device=cpu
  gpucluster run -- acceptance/ --gpucluster-expect=1x8xH100 --junitxml=report.xml
  gpucluster run --nnodes=2 --node-rank=$NODE_RANK --master-addr=$HEAD --master-port=29500 -- acceptance/
"""

RUN_EXIT_CODES = (
    "exit codes, those of the run:\n"
    + "".join(f"  {code:<2} {what}\n" for code, what in EXIT_CODES.items())
    + "     2 also for wrong usage of this command or of torchrun; 11 also where torchrun failed, or no rank has left\n"
    "     a verdict\n"
)

_REACHABLE = "Give the address of the first node as the other nodes reach it, the same on every node"
_AGENT = "pytest_gpucluster.runners.torchrun_agent"
_PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGQUIT: signal.SIGTERM,
}
"""What is heard -> what torchrun gets. Ranks end in order after Ctrl-C and SIGTERM; the others would end them without a
report, where all that has happened is that a terminal is gone."""
_RECORD_CLOSED_SECONDS = 20.0
"""How long the recorder may take, when rank 0 is gone, to say in the journal how the run ended."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``run``: there are none of its own."""
    explain(parser, _RUN, _EXAMPLES, RUN_EXIT_CODES)
    parser.usage = (
        "gpucluster run [torchrun options] -- [pytest options]\n"
        "       gpucluster run --hosts HOSTS [options] -- [pytest options]   (over ssh: --hosts HOSTS --help)"
    )
    parser.allow_abbrev = False


def run(options: argparse.Namespace) -> int:
    """Run torchrun to its end, and return pytest's exit code."""
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.launch.master_address import why_unknown
    from pytest_gpucluster.runners.torchrun import Account, command_line, conclude, meeting_place

    try:
        line = command_line(options.for_others, options.passed_on, os.environ)
    except OptionError as error:
        return complain(str(error), USAGE)
    place = meeting_place(options.for_others, os.environ)
    # torchrun would try for minutes. A pod's name is unknown at first: DNS learns it some time after its address.
    why = why_unknown(place[1], may_come="KUBERNETES_SERVICE_HOST" in os.environ) if place is not None else None
    if place is not None and why is not None:
        return complain(f"{place[0]}: {place[1]} does not resolve on this host: {why}. {_REACHABLE}", USAGE)
    if line.remark:
        _say(line.remark)
    with tempfile.TemporaryDirectory(prefix="gpucluster-run-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with _passing_on() as passing:
            agent = passing.start(line.arguments, {**os.environ, VARIABLE: name})
            code = agent.wait()
            notes, recorded = _left(folder, agent.pid)
        found = conclude(Account.read(folder), notes, recorded, agent_code=code, heard=passing.heard)
    if recorded is not None:
        _end_line()
    _say(found.line)
    return found.exit


class _Passing:
    """Passes each signal on once: a second one of the same kind would end torchrun before its ranks have ended.

    Attributes:
        heard: the signals that have come, in their order.
    """

    def __init__(self) -> None:
        self.heard: list[int] = []
        self._agent: subprocess.Popen[bytes] | None = None
        self._passed: list[int] = []

    def start(self, arguments: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start torchrun's agent, out of reach of the terminal's Ctrl-C: it must not hear it twice."""
        self._agent = subprocess.Popen(
            [sys.executable, "-m", _AGENT, *arguments],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for number in self._passed:
            self._agent.send_signal(number)
        return self._agent

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.heard.append(number)
        passed = _PASSED_ON[signal.Signals(number)]
        if passed in self._passed:
            return
        self._passed.append(passed)
        if self._agent is not None:
            self._agent.send_signal(passed)


@contextmanager
def _passing_on() -> Iterator[_Passing]:
    passing = _Passing()
    # Under nohup the run outlives its terminal.
    heard = [number for number in _PASSED_ON if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, passing.take) for number in heard}
    try:
        yield passing
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _left(folder: Path, launcher: int) -> tuple[Sequence[ExitNote], Recorded | None]:
    """Return what the ranks of this node have left, and what the journal says if rank 0 was here and left nothing."""
    from pytest_gpucluster.journal import verdict
    from pytest_gpucluster.journal.journal import JOURNAL_FILE, read
    from pytest_gpucluster.recorder.client import wait_for_end
    from pytest_gpucluster.runners.torchrun import Recorded

    notes = verdict.read_exit_notes(folder, launcher)
    begun = verdict.read_begin_note(folder, launcher)
    if begun is None or any(note.rank == 0 for note in notes):
        return notes, None
    wait_for_end(begun.recorder, _RECORD_CLOSED_SECONDS)
    try:
        journal = read(Path(begun.directory) / JOURNAL_FILE, keep_samples=False)
    except JournalError as error:
        _say(f"the record of the run is of no use: {error}")
        return notes, None
    recorded = Recorded(
        word=journal.verdict,
        exit=journal.exit,
        reason=journal.reason,
        rehearsal=journal.run.rehearsal,
        directory=begun.directory,
    )
    return notes, recorded


def _end_line() -> None:
    """Go below what rank 0 was writing when it died: half a line, and on a terminal the live lines under it."""
    with suppress(OSError):
        print("\n\x1b[J" if sys.stderr.isatty() else "\n", end="", file=sys.stderr)


def _say(line: str) -> None:
    with suppress(OSError):  # nobody listens any more: the exit code says it all the same
        print(f"gpucluster: {printable(line)}", file=sys.stderr, flush=True)
