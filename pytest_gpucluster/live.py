"""The live line: which test runs, how far it is, how long it takes, and what the GPUs of this node are doing.

It is for whoever sits before rank 0's terminal. It is never in a file, a pipe or the log of a CI system, and nothing of
it is left on the terminal: pytest's own lines are the same with and without it. A thread of rank 0 draws it once a
second; NVML is asked by a process of its own (``dashboard.reader``), every other second and for a few figures only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pytest_gpucluster.footer import Footer
from pytest_gpucluster.node.health.node_reader import NodeReader
from pytest_gpucluster.node.health.node_state import Node, NodeState, Part
from pytest_gpucluster.step_file import StepFile
from pytest_gpucluster.text import MESSAGE_CHARACTERS, duration, one_line, printable

TICK_SECONDS = 1.0
SOON_SECONDS = 0.2
"""After something was written, so that lines which come at once do not flicker."""
GLANCE_SECONDS = 2.0
_NAME_CHARACTERS = 40
"""A longer name would leave no room for what is said of the test."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class _Running:
    """What is known of the test that runs. It is replaced whole: another thread reads it at any moment."""

    name: str
    began: float
    ends_by: float | None = None
    """When the deadline of its phase is over."""
    step: str = ""


class Live:
    """What is shown, from the first test to the last.

    Args:
        footer: where.
        now: seconds of the monotonic clock.
    """

    def __init__(self, footer: Footer, *, now: Callable[[], float] = time.monotonic) -> None:
        self.footer = footer
        self._now = now
        self._file: StepFile | None = None
        self._wake = threading.Condition()
        self._is_closed = False
        self._running: _Running | None = None
        self._gpus: NodeState | None = None
        self._reader: NodeReader | None = None
        self._thread: threading.Thread | None = None
        self.problem = ""
        """Why it has ended before its time."""

    # ---- what is to be shown ---------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """A test begins."""
        self._running = _Running(name=printable(name), began=self._now())

    def phase(self, deadline_seconds: float) -> None:
        """A phase of it begins, and is given so long."""
        if self._running is not None:
            self._running = replace(self._running, ends_by=self._now() + deadline_seconds)

    def end(self) -> None:
        """It has ended."""
        self._running = None
        self.footer.erase()

    def rewrite(self, text: str, *, ends: bool) -> None:
        """Say how far the test is, until the next step is told; what ends it is told by a line."""
        if self._running is not None:
            self._running = replace(self._running, step="" if ends else text)

    def follow(self, file: StepFile) -> None:
        """Show what another process says of its steps."""
        self._file = file

    def lines(self) -> list[str]:
        """Return what is to be shown now."""
        running, now = self._running, self._now()
        if running is None:
            return []
        said = running.step if self._file is None else printable(self._file.read())
        begin = f"{running.name}: "
        step = said.removeprefix(begin) if said.startswith(begin) else ""  # else it is of another test
        taken = f"{duration(now - running.began)} so far"
        if step:
            told = f"{step} ({taken})"
        elif running.ends_by is None:
            told = taken
        else:
            told = f"{taken}, at most {duration(max(0.0, running.ends_by - now))} left"
        first = f"{one_line(running.name, _NAME_CHARACTERS)}: {told}"
        gpus = describe_gpus(self._gpus.node()) if self._gpus is not None else ""
        return [first, *([gpus] if gpus else [])]

    # ---- the thread ------------------------------------------------------------------------------------------

    def start(self, *, gpus: Sequence[str] | None, reads_gpus: bool) -> None:
        """Show it from now on.

        Args:
            gpus: UUIDs of those to tell of; None: all of this node.
            reads_gpus: whether to tell of GPUs at all.
        """
        if reads_gpus:
            self._gpus = NodeState(GLANCE_SECONDS, uuids=gpus)
            with suppress(OSError):  # no further process can be started: the line tells of the test alone
                self._reader = NodeReader(self._gpus.take, GLANCE_SECONDS, few=True)
        thread = threading.Thread(target=self._draw, name="gpucluster-live", daemon=True)
        with suppress(RuntimeError):  # no more threads here: the run goes on without the line
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Take it away for good."""
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(TICK_SECONDS)
        self.footer.close()
        if self._file is not None:
            self._file.remove()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _draw(self) -> None:
        try:
            while self._goes_on():
                self.footer.show(self.lines())
        except Exception as error:  # whatever it is: pytest would make a warning of it, and maybe a failure of that
            self.problem = one_line(f"{type(error).__name__}: {error}", MESSAGE_CHARACTERS)
            self.footer.hold()

    def _goes_on(self) -> bool:
        with self._wake:
            self._wake.wait(TICK_SECONDS if self.footer.is_shown else SOON_SECONDS)
            return not self._is_closed


def describe_gpus(node: Node) -> str:
    """Put the GPUs of a node in words: for several the least and the most of each figure, with who stands out."""
    if node.silent_seconds is not None or not node.gpus:
        return ""
    if all(gpu.is_stale for gpu in node.gpus):
        ages = [gpu.age_seconds for gpu in node.gpus if gpu.age_seconds is not None]
        return f"GPUs: NVML has not answered{f' for {min(ages):.0f} s' if ages else ''}"
    lost = [str(gpu.told.get("index")) for gpu in node.gpus if gpu.told.get("lost")]
    read = [gpu for gpu in node.gpus if gpu.age_seconds is not None and not gpu.told.get("lost")]
    head = f"GPU {node.gpus[0].told.get('index')}" if len(node.gpus) == 1 else f"{len(node.gpus)} GPUs"
    parts = [
        _span(read, "utilization_percent", "%", outlier=min),
        _span(read, "memory_used_bytes", "GiB", scale=_GIB),
        _span(read, "temperature_celsius", "°C", outlier=max),
        _span(read, "power_watts", "W"),
        "" if not lost else "LOST" if len(node.gpus) == 1 else f"LOST: {', '.join(lost)}",
    ]
    told = ", ".join(filter(None, parts))
    return f"{head}: {told}" if told else ""


def _span(
    gpus: Sequence[Part], key: str, unit: str, *, scale: float = 1, outlier: Callable[..., Part] | None = None
) -> str:
    known = [gpu for gpu in gpus if gpu.told.get(key) is not None]
    if not known:
        return ""
    least, most = (round(which(gpu.told[key] for gpu in known) / scale) for which in (min, max))
    if least == most:
        return f"{most} {unit}"
    who = "" if outlier is None else f" (GPU {outlier(known, key=lambda gpu: gpu.told[key]).told.get('index')})"
    first, second = (who, "") if outlier is min else ("", who)
    return f"{least}{first}-{most} {unit}{second}"
