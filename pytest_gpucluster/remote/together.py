"""One run over many nodes: started on all of them, followed, ended on all of them, and its reports brought."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pytest_gpucluster.remote import frames
from pytest_gpucluster.remote.errand import Brought, Errand
from pytest_gpucluster.remote.plan import Plan
from pytest_gpucluster.remote.ssh_command import Access
from pytest_gpucluster.text import printable

_POLL_SECONDS = 0.05
OTHERS_SECONDS = 360.0
"""How long other nodes may go on when one has ended. Longer than torchrun's own wait for agents that have not ended,
300 s. Source: torch, distributed/elastic/agent/server/api.py (``exit_barrier_timeout``)."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Heard:
    """The signals that have come. The first one ends the run in order; another one says so once more, as SIGTERM, and
    waits no longer for the reports of runs that are over."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.numbers.append(number)

    @property
    def name(self) -> str:
        """The first one."""
        return signal.Signals(self.numbers[0]).name if self.numbers else ""


@contextmanager
def listening() -> Iterator[Heard]:
    """Hear signals instead of ending by them, except for SIGHUP under nohup."""
    heard = Heard()
    # Under nohup the run outlives its terminal.
    mine = [number for number in _ENDING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, heard.take) for number in mine}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def carry_out(
    plan: Plan,
    access: Access,
    directory: Path,
    *,
    within_seconds: float,
    answer_seconds: float,
    others_seconds: float,
    heard: Heard,
    say: Callable[[str, bool], None],
) -> Mapping[str, Brought]:
    """Run a plan on its nodes and return name -> what came of each. Nothing that was started is left alone.

    Args:
        plan: what to run.
        access: how nodes are reached.
        directory: for what the nodes leave: ``NAME.log`` and the folder ``NAME``.
        within_seconds: the longest that a node may take.
        answer_seconds: the longest that one may take until it says its first word.
        others_seconds: how long the others may go on when the first node has ended.
        heard: the signals so far.
        say: shows a line to the operator; True for what came from standard error, or is ours.

    Raises:
        EnvironmentBroken: ssh cannot be started.
        OSError: what the nodes say cannot be kept.
    """
    errands: list[Errand] = []
    try:
        for node_rank, host in enumerate(plan.hosts):
            errands.append(
                Errand(
                    host,
                    access,
                    words=plan.words(node_rank),
                    directory=plan.directory,
                    environ=dict(plan.environ),
                    remote_folder=plan.folder(host),
                    first_folder=plan.folder(plan.hosts[0]),
                    folder=directory / host.name,
                    log=directory / f"{host.name}.log",
                    within_seconds=within_seconds,
                    answer_seconds=answer_seconds,
                    on_line=_teller(host.name if node_rank else "", say),
                )
            )
        return _follow(errands, heard, others_seconds, say)
    except BaseException:  # whatever it is, nothing goes on alone
        for errand in errands:
            left = errand.abandon()
            if left:
                say(left, True)
        raise


def _follow(
    errands: Sequence[Errand], heard: Heard, others_seconds: float, say: Callable[[str, bool], None]
) -> Mapping[str, Brought]:
    brought: dict[str, Brought] = {}
    ended_at: float | None = None
    answered = 0
    while len(brought) < len(errands):
        for errand in errands:
            if errand.host.name not in brought:
                done = errand.look()
                if done is not None:
                    brought[errand.host.name] = done
        if ended_at is None and any(not errand.running for errand in errands):
            ended_at = time.monotonic()
        running = [errand for errand in errands if errand.running]
        if len(heard.numbers) > answered:
            answered += 1
            _interrupt(errands, heard, answered, say)
        elif ended_at is not None and time.monotonic() - ended_at > others_seconds:
            for errand in running:
                errand.tell_to_end(f"no end of it {others_seconds:g} s after that of another node")
        time.sleep(_POLL_SECONDS)
    return brought


def _interrupt(errands: Sequence[Errand], heard: Heard, times: int, say: Callable[[str, bool], None]) -> None:
    number = heard.numbers[times - 1]
    running = [errand for errand in errands if errand.running]
    if times == 1:
        say(f"{heard.name}: {len(running)} nodes are told to end; reports are written and brought", True)
    else:
        for errand in errands:
            errand.leave_reports(f"interrupted by {heard.name} again")
    # Ctrl-C first, as on a terminal; whoever presses it again means it.
    word = frames.INTERRUPT if number == signal.SIGINT and times == 1 else frames.TERMINATE
    for errand in running:
        errand.tell_to_end(f"interrupted by {heard.name}", word)


def _teller(name: str, say: Callable[[str, bool], None]) -> Callable[[str, str], None]:
    """Return what shows a node's lines: with its name in front, and plainly for that of rank 0."""
    front = f"[{name}] " if name else ""

    def tell(kind: str, line: str) -> None:
        say(f"{front}{printable(line)}", kind == frames.ERR)

    return tell
