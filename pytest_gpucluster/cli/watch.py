"""``gpucluster watch``: what this node is doing, on a terminal, as plain text or as JSON."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from pytest_gpucluster.cli.command import DONE, NO_OUTPUT, USAGE, complain, explain

if TYPE_CHECKING:
    from pytest_gpucluster.node.health.node_state import Node, NodeState

NO_GPU = 1
"""What was asked for is not all there."""

LEAST_SECONDS, MOST_SECONDS = 0.2, 3600.0
ANSWER_SECONDS = 5.0
"""How long the first picture waits at most for NVML beside the interval; a driver takes seconds to wake up."""
FRAME_SECONDS = 0.5
"""A terminal is drawn at least so often, so that the age of what is stale goes on."""

_DESCRIPTION = """\
Show what this node is doing: for each GPU utilisation, memory, temperature, power, clocks, NVLink traffic and what
holds its clocks down; traffic of the InfiniBand and RoCE ports; load and memory of the host; the processes that hold
GPU memory. On a terminal it is a display that is drawn over and over (q ends it); elsewhere plain text, one block for
each interval.

NVML is asked by a process of its own. If the driver hangs, the display goes on and calls what it shows stale.
"""

_EXAMPLES = """\
  gpucluster watch
  gpucluster watch --gpus 0,1 --interval 5
  gpucluster watch --once
  gpucluster watch --json --interval 10 >> node.jsonl
  ssh -t gpu-07 gpucluster watch
"""

_EXIT_CODES = """\
exit codes:
  0  ended by q or Ctrl-C; with --once: every GPU that was asked for has answered
  1  with --once: there is no GPU, or one of them has not answered; what there is is shown
  2  wrong usage, or --gpus names a GPU that is not there
  4  the node cannot be read: no process can be started for it; or the output cannot be written
  129, 143  SIGHUP (its terminal was closed) or SIGTERM has ended it
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``watch``."""
    explain(parser, _DESCRIPTION, _EXAMPLES, _EXIT_CODES)
    parser.add_argument(
        "--interval", metavar="SECONDS", type=_interval, default=1.0, help="time between two looks (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="show one picture, after one interval, and end")
    parser.add_argument("--json", action="store_true", help="a JSON object on a line of its own for each interval")
    parser.add_argument(
        "--gpus", metavar="INDEX,...", type=_indices, help="only these GPUs, by their numbers in nvidia-smi"
    )


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is no number of seconds from {LEAST_SECONDS:g} to {MOST_SECONDS:g}"
        )
    return seconds


def _indices(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no list of numbers such as 0,1")
    return tuple(sorted({int(part) for part in parts}))


def run(options: argparse.Namespace) -> int:
    """Show the node until there is enough of it."""
    from pytest_gpucluster.node.health.node_reader import NodeReader
    from pytest_gpucluster.node.health.node_state import NodeState

    state = NodeState(options.interval, only=options.gpus)
    try:
        reader = NodeReader(state.take, options.interval)
    except OSError as error:
        return complain(f"this node cannot be read: {error.strerror or error}", NO_OUTPUT)
    try:
        with _ended_by_signals():
            # Rates need two looks.
            state.wait(2 if options.once else 1, options.interval + ANSWER_SECONDS)
            if unknown := state.unknown():
                there = ", ".join(str(gpu["index"]) for gpu in state.listed()) or "none"
                return complain(
                    f"--gpus {','.join(map(str, unknown))}: this node has no such GPU; it has: {there}", USAGE
                )
            return _show(options, state)
    except KeyboardInterrupt:
        return DONE
    finally:
        reader.close()


def _show(options: argparse.Namespace, state: NodeState) -> int:
    if options.once:
        node = state.node()
        _write(_json(node) if options.json else _plain(node))
        return DONE if is_complete(node) else NO_GPU
    if not options.json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb"):
        return _draw(state, min(FRAME_SECONDS, options.interval))
    first = True
    due = time.monotonic()
    while True:
        node = state.node()
        _write(_json(node) if options.json else ("" if first else "\n") + _plain(node))
        first = False
        due = max(due + options.interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def is_complete(node: Node) -> bool:
    """Tell whether there are GPUs, and every one of them has answered just now."""
    return bool(node.gpus) and not any(
        gpu.is_stale or gpu.age_seconds is None or gpu.told.get("lost") for gpu in node.gpus
    )


def _json(node: Node) -> str:
    from pytest_gpucluster.cli.watch_screen import line

    return line(node, host=socket.gethostname(), at=_now().strftime("%Y-%m-%dT%H:%M:%SZ"))


def _plain(node: Node) -> str:
    from pytest_gpucluster.cli.watch_screen import plain

    width = max(60, shutil.get_terminal_size(fallback=(80, 24)).columns)
    return plain(node, host=socket.gethostname(), clock=f"{_now():%Y-%m-%d %H:%M:%S} UTC", width=width)


def _draw(state: NodeState, frame_seconds: float) -> int:
    """Draw on the terminal's other screen, so that what was on it comes back."""
    from rich.console import Console, ConsoleDimensions
    from rich.live import Live

    from pytest_gpucluster.cli.watch_screen import Screen, keyboard

    console = Console(markup=False, emoji=False, highlight=False)
    host = socket.gethostname()
    with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            hint = "q ends" if keys.is_there else ""
            clock = f"{_now():%H:%M:%S} UTC"
            # The terminal's own word: LINES and COLUMNS may be left over from when it had another size.
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
            console.size = ConsoleDimensions(columns or 80, lines or 24)
            # One line less than there is: a terminal scrolls when its last one is ended.
            screen = Screen(state.node(), host=host, clock=clock, height=console.size.height - 1, keys=hint)
            live.update(screen, refresh=True)
            if keys.wait(frame_seconds):
                return DONE


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let a terminal that is closed, or a scheduler, end the display in order: the screen is put back as it was."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
