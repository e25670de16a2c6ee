"""``gpucluster run``: torchrun with pytest, with pytest's own exit code and one line about the result."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.verdict import EXIT_CODES, VARIABLE, ExitNote
from pytest_gpucluster.launch.forks import Forked
from pytest_gpucluster.text import paragraph, printable, shortened

if TYPE_CHECKING:
    from pytest_gpucluster.runners.run_result import Conclusion


def run_exit_codes(more: Mapping[int, str]) -> dict[int, str]:
    """Return the exit codes of a run, with more about some of them."""
    return {code: "; ".join(filter(None, (EXIT_CODES.get(code), more.get(code)))) for code in {*EXIT_CODES, *more}}


_REACHABLE = "Give the address at which the other nodes reach the first one, the same on every node"
AGENT = "pytest_gpucluster.runners.torchrun"
FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGQUIT: signal.SIGTERM,
}
"""Signal -> what torchrun gets. Ranks end in order after SIGINT and SIGTERM; the others, which a closed terminal sends,
would end them without a report."""
_NEXT = {
    0: "`gpucluster certificate create DIR` where it is ACCEPTED; `gpucluster runs compare` with an earlier run",
    1: "do what stands above, then run what failed again with `-k`",
    10: "`gpucluster doctor` with the same arguments lists what cannot run, and what to type",
    11: "look for the message below in docs/troubleshooting.md",
    12: "run again without the deviations: without weaker limits or sizes, and without reruns",
}
"""Exit code -> what to do next, where the verdict's reason does not say it."""
_ON_GPUS = "on GPUs `gpucluster node selftest`, then `gpucluster run -- --gpucluster-expect=1x8xH100`"
_REST = " " * 4
"""Before the second line of a text."""
_RECORDER_SECONDS = 20.0
"""How long the recorder may take after rank 0's death to write the end of the journal."""


@cli.command(
    examples="""\
        gpucluster run -- --gpucluster-device=cpu
        gpucluster run -- --gpucluster-expect=1x8xH100 --junitxml=report.xml
        gpucluster run --nnodes=2 --node-rank=$NODE_RANK --master-addr=$HEAD --master-port=29500 -- -k nccl
        """,
    codes=run_exit_codes(
        {
            2: "also wrong usage of this command or of torchrun",
            11: "also: torchrun failed, or no rank has left a verdict",
        }
    ),
    usage="gpucluster run [torchrun options] -- [pytest options]\n"
    "       gpucluster run --hosts HOSTS [options] -- [pytest options]   (over ssh: --hosts HOSTS --help)",
)
def _run(options: argparse.Namespace) -> int:
    """Run torchrun with pytest. Arguments before -- go to torchrun, those after it to pytest.

    Without a path pytest runs the acceptance suite: acceptance/ of this folder or of the package's checkout, else the
    one inside the package.

    On every node this command ends with pytest's own exit code, where torchrun ends with 1 for every code but 0, and
    with one line that states why, where torchrun prints a traceback. Without --nproc-per-node a node gets one rank per
    GPU, or two with --gpucluster-device=cpu. Ctrl-C and SIGTERM are forwarded, and the reports are written.
    """
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.launch.master_address import why_unknown
    from pytest_gpucluster.runners.ssh_job import handling
    from pytest_gpucluster.runners.torchrun import command_line, rendezvous_host

    arguments = command_line(options.for_torchrun, options.forwarded, os.environ)
    place = rendezvous_host(options.for_torchrun, os.environ)
    # torchrun would retry for minutes. DNS knows a pod's name only some time after its address.
    why = why_unknown(place[1], may_come="KUBERNETES_SERVICE_HOST" in os.environ) if place is not None else None
    if place is not None and why is not None:
        raise cli.CommandError(cli.USAGE, f"{place[0]}: {place[1]} does not resolve on this host: {why}. {_REACHABLE}")
    with tempfile.TemporaryDirectory(prefix="gpucluster-run-", ignore_cleanup_errors=True) as name:
        forwarder = SignalForwarder()
        with handling(list(FORWARDED), forwarder.handle):
            agent = subprocess.Popen(
                [sys.executable, "-m", AGENT, *arguments],
                env={**os.environ, VARIABLE: name},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # it must not get the terminal's Ctrl-C twice
            )
            forwarder.add(agent)
            code = agent.wait()
            found, note = conclude_node(Path(name), agent.pid, code, forwarder.signals)
    if note is not None:
        print_next(note.directory, found.exit, note.kind)
    print_line(found.line, is_fitted=True)
    return found.exit


def print_next(directory: str, code: int, kind: str) -> None:
    """Print what to do after a run with this exit code, if its page is on this node."""
    if code in _NEXT and directory and Path(directory, "report.html").exists():
        print_line(f"next: {_ON_GPUS if kind and code == 0 else _NEXT[code]}")


class SignalForwarder:
    """Forwards each signal once: a second one of a kind would end torchrun before its ranks have ended.

    Attributes:
        signals: that have come, in their order.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._agents: list[subprocess.Popen[bytes] | Forked] = []
        self._sent: list[int] = []

    def add(self, agent: subprocess.Popen[bytes] | Forked) -> None:
        """Forward to one more agent of torchrun, also what came before."""
        self._agents.append(agent)
        for number in self._sent:
            agent.send_signal(number)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.signals.append(number)
        passed = FORWARDED[signal.Signals(number)]
        if passed in self._sent:
            return
        self._sent.append(passed)
        for agent in self._agents:
            agent.send_signal(passed)


def conclude_node(folder: Path, launcher: int, code: int, signals: Sequence[int]) -> tuple[Conclusion, ExitNote | None]:
    """Return the conclusion of one node's torchrun, and the note of its first rank, or the journal's in place of it.

    Args:
        folder: of the notes.
        launcher: torchrun's process id; ``code``: its exit code, negative for a signal.
        signals: that this command has received.
    """
    from pytest_gpucluster.runners.torchrun import FILE_NAME, AgentResult, conclude

    notes, of_journal = _read_notes(folder, launcher)
    result = verdict.read_note(folder / FILE_NAME, AgentResult)
    found = conclude(result, notes, of_journal, agent_code=code, signals=signals)
    return found, next(iter(notes), of_journal)


def _read_notes(folder: Path, launcher: int) -> tuple[Sequence[ExitNote], ExitNote | None]:
    """Return the notes of this node's ranks, and the journal's verdict if rank 0 was here and left no note."""
    from pytest_gpucluster.journal.journal import JOURNAL_FILE, read
    from pytest_gpucluster.reports.recorder.client import wait_for_end

    notes = verdict.read_exit_notes(folder, launcher)
    begun = verdict.read_begin_note(folder, launcher)
    if begun is None or any(note.rank == 0 for note in notes):
        return notes, None
    wait_for_end(begun.recorder, _RECORDER_SECONDS)
    with suppress(OSError):  # the line that rank 0 was writing when it died ends here
        print(file=sys.stderr)
    try:
        journal = read(Path(begun.directory) / JOURNAL_FILE, keep_samples=False)
    except JournalError as error:
        print_line(f"the journal of the run cannot be used: {error}")
        return notes, None
    return notes, ExitNote(
        rank=0,
        local_world_size=1,
        launcher=launcher,
        word=journal.verdict,
        exit=journal.exit,
        reason=journal.reason,
        kind=journal.run.kind,
        directory=begun.directory,
    )


def print_line(line: str, *, is_fitted: bool = False) -> None:
    """Print a line of this command below what the ranks have printed; ``is_fitted``: at most two of a terminal."""
    with suppress(OSError):  # standard error is closed; the exit code is the result all the same
        lines = [f"gpucluster: {printable(line)}"]
        if sys.stderr.isatty():
            width = cli.columns()
            lines = paragraph(lines[0], width, rest=_REST)
            if is_fitted and len(lines) > 2:
                lines[1:] = [shortened(_REST + " ".join(each.strip() for each in lines[1:]), width)]
        print("\n".join(lines), file=sys.stderr, flush=True)


COMMAND = _run
