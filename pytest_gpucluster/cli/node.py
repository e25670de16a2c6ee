"""``gpucluster node``: the state of this node or of many, read from the nodes themselves; nothing is measured."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from pytest_gpucluster.cli.command import (
    DONE,
    NO_JOURNAL,
    NO_OUTPUT,
    REGRESSED,
    USAGE,
    Step,
    add_steps,
    complain,
    explain,
    run_step,
    write_text,
)
from pytest_gpucluster.errors import LaunchError

if TYPE_CHECKING:
    from pytest_gpucluster.node.fabric.nccl_advice import NcclAdvice
    from pytest_gpucluster.node.fabric.nccl_facts import Facts
    from pytest_gpucluster.node.health.node_state import Node, NodeState

_INFO = """\
Tell what this node is: CPUs, NUMA nodes, memory, GPUs and what connects them, NVLink, InfiniBand, driver stack, mounts,
network, and the Slurm job or the pod that this is in. It takes some seconds at most, changes nothing, needs no root,
and also works where there is no GPU: what is not there is said.
"""

_INFO_EXAMPLES = """\
  gpucluster node info
  gpucluster node info gpu
  gpucluster node info all --json > node.json
"""

_INFO_EXIT_CODES = """\
exit codes:
  0  told, also where something is not available
  2  wrong usage
  4  the output cannot be written
"""

_VIEWS = {
    "summary": "a few lines on each part (default)",
    "gpu": "driver stack, each GPU, and the topology",
    "ib": "InfiniBand and RoCE ports, and network interfaces",
    "cpu": "system, CPUs, NUMA nodes, memory and limits",
    "all": "everything",
}

_LEAST_COLUMNS = 72
"""A table of GPUs cannot be narrower without cutting its numbers; a terminal that is breaks its lines."""


def configure_info(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``node info``."""
    views = "views:\n" + "".join(f"  {name:<8} {what}\n" for name, what in _VIEWS.items())
    explain(parser, f"{_INFO}\n{views}", _INFO_EXAMPLES, _INFO_EXIT_CODES)
    parser.add_argument("view", metavar="VIEW", nargs="?", choices=_VIEWS, default="summary", help="one of these views")
    parser.add_argument("--json", action="store_true", help="as one JSON object, whose keys are in docs/nodes.md")


def run_info(options: argparse.Namespace) -> int:
    """Tell what this node is."""
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.node.info import Sources, collect_info
    from pytest_gpucluster.node.info_text import render_info

    told = collect_info(options.view, Sources())
    text = json.dumps(told, indent=2, allow_nan=False) + "\n" if options.json else render_info(told, width=_width())
    sys.stdout.write(text)
    return DONE


def _width() -> int:
    """Return the columns of the terminal; elsewhere COLUMNS, or 80."""
    if sys.stdout.isatty():
        return max(_LEAST_COLUMNS, shutil.get_terminal_size().columns)
    told = os.environ.get("COLUMNS", "")
    return max(_LEAST_COLUMNS, int(told)) if told.isascii() and told.isdecimal() and len(told) < 6 else 80


UNDECIDED = 5
_DIFF_LEAST_COLUMNS = 60

_NODES = """\
Compare what many nodes are: CPUs, SMT, NUMA nodes, memory, limits, driver stack, GPUs, MIG, topology, InfiniBand ports,
network and mounts. The folder has a file for each node, NODE.json, made there by `gpucluster node info all --json`;
deploy/slurm/discover.sbatch makes them all. Alike does not mean good: that is what the suite is for.
"""

_DIFF_EXAMPLES = """\
  gpucluster node diff gpucluster-report/discover-4711/nodes
  gpucluster node diff answers/ --nodes 'gpu-[001-064]' --json nodes.json
"""

_DIFF_EXIT_CODES = """\
exit codes:
  0  all nodes gave an answer, and are alike
  1  they differ
  2  wrong usage
  3  the folder cannot be read, or no node gave an answer
  4  the output cannot be written
  5  those that gave an answer are alike, but some gave none, or only one was asked
"""


def configure_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``node diff``."""
    explain(parser, _NODES, _DIFF_EXAMPLES, _DIFF_EXIT_CODES)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="with a file NODE.json for each node")
    parser.add_argument("--nodes", metavar="HOSTLIST", help="the nodes that should have answered: gpu-[001-064]")
    parser.add_argument("--json", metavar="FILE", help="write all of it here as JSON; - is the standard output")


def run_diff(options: argparse.Namespace) -> int:
    """Compare nodes and return the exit code."""
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.launch.hostlist import expand_hostlist
    from pytest_gpucluster.node import diff

    try:
        expected = expand_hostlist(options.nodes) if options.nodes is not None else []
        found = diff.read_answers(options.folder, expected)
    except LaunchError as error:
        return complain(f"--nodes: {error}", USAGE)
    except OSError as error:
        return complain(f"{options.folder}: {error.strerror or error}", NO_JOURNAL)
    compared = diff.compare_nodes(found.nodes)
    code = DONE if all(fact.alike for fact in compared) else REGRESSED
    if code == DONE and (found.missing or (len(found.nodes) < 2 and len(expected) != 1)):
        code = UNDECIDED
    if not found.nodes:
        code = NO_JOURNAL
    if options.json is not None:
        try:
            write_text(options.json, diff.diff_document(found, compared, exit_code=code))
        except BrokenPipeError:
            raise  # who reads has had enough, which the command line knows how to take
        except OSError as error:
            return complain(f"--json {options.json}: {error.strerror or error}", NO_OUTPUT)
    if options.json not in ("-", "/dev/stdout"):
        width = max(_DIFF_LEAST_COLUMNS, shutil.get_terminal_size((80, 24)).columns)
        write_text("-", diff.diff_table(found, compared, width=width))
    if not found.nodes:
        return complain(
            f"{options.folder}: no node gave an answer: NODE.json, of `gpucluster node info all --json`", code
        )
    return code


DIFFERS, NOT_KNOWN = 1, 3
SCHEMA_VERSION = 1

_NCCL_ENV = """\
Look at this node's network cards, interfaces, GPUs, container and job, and say which of NCCL's variables it needs,
which are set and hurt, and which are best left alone, each with the reason and its source. Nothing is set: that is done
by whoever runs the lines that are printed. Where the network is not known, nothing is advised.

Run it where the job will run: on a compute node, in the job's container.
"""

_NCCL_ENV_EXAMPLES = """\
  gpucluster node nccl-env
  eval "$(gpucluster node nccl-env --format shell)"
  gpucluster node nccl-env --format yaml
  srun --ntasks-per-node=1 gpucluster node nccl-env --check
"""

_NCCL_ENV_EXIT_CODES = """\
exit codes:
  0  told; with --check: what is set is as advised
  1  with --check: a variable should be set, or is set and hurts
  2  wrong usage
  3  with --check: nothing of that, and something could not be told
  4  the output cannot be written
"""

_FORMATS = {
    "text": "for people (default)",
    "shell": "lines for eval or source: export and unset",
    "slurm": "lines for a batch script, before srun",
    "yaml": "a list for env of a container in Kubernetes",
    "json": "everything, for programs; the keys are in docs/network.md",
}
_NCCL_ENV_LEAST_COLUMNS = 60


def configure_nccl_env(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``node nccl-env``."""
    formats = "formats:\n" + "".join(f"  {name:<6} {what}\n" for name, what in _FORMATS.items())
    explain(parser, f"{_NCCL_ENV}\n{formats}", _NCCL_ENV_EXAMPLES, _NCCL_ENV_EXIT_CODES)
    parser.add_argument("--format", choices=_FORMATS, default="text", help="one of these formats")
    parser.add_argument("--check", action="store_true", help="end with 1 where something differs, with 3 where unknown")


def run_nccl_env(options: argparse.Namespace) -> int:
    """Say what this node needs."""
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.node.fabric.nccl_advice import advise
    from pytest_gpucluster.node.fabric.nccl_probe import Sources, collect_facts

    facts = collect_facts(Sources())
    advised = advise(facts)
    sys.stdout.write(_rendered(options.format, facts, advised))
    if not options.check:
        return DONE
    return DIFFERS if advised.differs else NOT_KNOWN if advised.unknown else DONE


def _rendered(form: str, facts: Facts, advised: NcclAdvice) -> str:
    from pytest_gpucluster.node.fabric import nccl_advice_text

    if form == "json":
        return json.dumps(_told(facts, advised), indent=2, allow_nan=False) + "\n"
    if form == "text":
        return nccl_advice_text.render_advice(facts, advised, width=_nccl_env_width())
    return {"shell": nccl_advice_text.shell, "slurm": nccl_advice_text.slurm, "yaml": nccl_advice_text.yaml}[form](
        facts, advised
    )


def _told(facts: Facts, advised: NcclAdvice) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "host": facts.host,
        "launcher": facts.launcher or None,
        "scheduler": facts.scheduler,
        "nnodes": facts.nnodes,
        "container": facts.container,
        "provider": facts.provider,
        "machine": facts.machine or None,
        "nccl": facts.nccl,
        "gpus": [{"name": gpu.name, "pci": gpu.pci} for gpu in facts.gpus],
        "nvlink": facts.nvlink,
        "nvls": facts.nvls,
        **advised.to_json(),
    }


def _nccl_env_width() -> int:
    """Return the columns of the terminal; elsewhere 80."""
    return max(_NCCL_ENV_LEAST_COLUMNS, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 80


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

_WATCH_EXAMPLES = """\
  gpucluster node watch
  gpucluster node watch --gpus 0,1 --interval 5
  gpucluster node watch --once
  gpucluster node watch --json --interval 10 >> node.jsonl
  ssh -t gpu-07 gpucluster node watch
"""

_WATCH_EXIT_CODES = """\
exit codes:
  0  ended by q or Ctrl-C; with --once: every GPU that was asked for has answered
  1  with --once: there is no GPU, or one of them has not answered; what there is is shown
  2  wrong usage, or --gpus names a GPU that is not there
  4  the node cannot be read: no process can be started for it; or the output cannot be written
  129, 143  SIGHUP (its terminal was closed) or SIGTERM has ended it
"""


def configure_watch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``node watch``."""
    explain(parser, _DESCRIPTION, _WATCH_EXAMPLES, _WATCH_EXIT_CODES)
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


def run_watch(options: argparse.Namespace) -> int:
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
        gpu.is_stale or gpu.age_seconds is None or gpu.values.get("lost") for gpu in node.gpus
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


DEMANDS_ACTION, UNREADABLE = 1, 3
_LINE_BYTES = 1 << 20
"""Longer lines are no kernel's; what is read at once is bounded by this."""
_NOT_TEXT = {
    b"\x1f\x8b": "zcat FILE",
    b"\xfd7zXZ\0": "xzcat FILE",
    b"BZh": "bzcat FILE",
    b"\x28\xb5\x2f\xfd": "zstdcat FILE",
    b"LPKSHHRH": "journalctl -k --no-pager --file FILE",
}
"""How files begin that hold a log and are no text -> what makes one of them."""

_KERNEL_LOG = """\
Print each report of NVIDIA's driver in a kernel log (Xid: of a GPU; SXid: of an NVSwitch) with its PCI address, number,
meaning, action and own words. FILE is any text that holds kernel lines, with or without timestamps: of dmesg, of
journalctl -k, /var/log/messages, of this host or another. Without FILE the standard input is read.

What a program can cause, and what only informs, demands no action on GPU, NVLink or node. An Xid that is not in the
table, a line that is cut off before its number, and an error without a stated severity do.
"""

_KERNEL_LOG_EXAMPLES = """\
  gpucluster node kernel-log --host
  gpucluster node kernel-log /var/log/messages
  ssh gpu-017 sudo dmesg | gpucluster node kernel-log
  journalctl -k -b --no-pager | gpucluster node kernel-log
"""

_KERNEL_LOG_EXIT_CODES = """\
exit codes:
  0  no report demands action on a GPU, an NVLink or the node
  1  one does
  2  wrong usage
  3  the log cannot be read, is empty, or is no text; reports that were found before that and demand action: 1
  4  the output cannot be written
"""


def configure_kernel_log(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``node kernel-log``."""
    explain(parser, _KERNEL_LOG, _KERNEL_LOG_EXAMPLES, _KERNEL_LOG_EXIT_CODES)
    parser.add_argument(
        "file", metavar="FILE", type=Path, nargs="?", help="default: the standard input, which is also -"
    )
    parser.add_argument("--host", action="store_true", help="read this host's log of this boot instead")


def run_kernel_log(options: argparse.Namespace) -> int:
    """Print the reports, and return the exit code."""
    if options.host and options.file is not None:
        options.refuse("FILE and --host: name one of them")
    return _kernel_log(None if options.host else options.file or Path("-"))


def _kernel_log(file: Path | None) -> int:
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.node.health.xid_table import lookup
    from pytest_gpucluster.node.kernel_log import parse
    from pytest_gpucluster.text import printable

    lines = reports = demanding = 0
    problem = ""
    try:
        for line in _of_host() if file is None else _of_file(file):
            lines += 1
            for report in parse([line]):
                entry = lookup(report)
                reports += 1
                demanding += entry.rejects
                own = f" ({report.text})" if report.text else ""
                print(printable(f"{report.pci or 'PCI ?'} {report.name}: {entry.meaning}; action: {entry.advice}{own}"))
        if not lines:
            problem = f"{_named(file)}: it is empty"
    except _Unreadable as error:
        problem = str(error)
    if not problem:
        what = "demands" if demanding == 1 else "demand"
        of = f"{reports} report{'s' * (reports != 1)} in {lines} line{'s' * (lines != 1)}"
        print(f"{demanding} of {of} {what} action on a GPU, an NVLink or the node")
    else:
        complain(problem, UNREADABLE)
    return DEMANDS_ACTION if demanding else UNREADABLE if problem else DONE


class _Unreadable(Exception):
    """Says what, and why."""


def _of_host() -> Iterator[str]:
    from pytest_gpucluster.node import kernel_log

    log = kernel_log.read()
    if log.why_not:
        raise _Unreadable(f"the kernel log of this host: {log.why_not}")
    if log.lost_records:
        complain(f"{log.source} begins late: {log.lost_records} older records are overwritten", DONE)
    yield from log.lines


def _of_file(file: Path) -> Iterator[str]:
    try:
        if file == Path("-"):
            if sys.stdin is None:
                raise _Unreadable("the standard input is closed")
            yield from _decoded(sys.stdin.buffer, file)
        else:
            with file.open("rb") as stream:
                yield from _decoded(stream, file)
    except OSError as error:
        raise _Unreadable(f"{_named(file)}: {error.strerror or error}") from error


def _decoded(stream: BinaryIO, file: Path) -> Iterator[str]:
    first = True
    for line in iter(lambda: stream.readline(_LINE_BYTES), b""):
        if first:
            for magic, command in _NOT_TEXT.items():
                if line.startswith(magic):
                    raise _Unreadable(f"{_named(file)}: it is no text: `{command} | gpucluster node kernel-log`")
        first = False
        yield line.decode("utf-8", "replace")


def _named(file: Path | None) -> str:
    return "the kernel log of this host" if file is None else "the standard input" if file == Path("-") else str(file)


STEPS = {
    "info": Step(
        help="CPUs, GPUs, topology, ports and driver stack of this node", configure=configure_info, run=run_info
    ),
    "diff": Step(help="in what many nodes differ, by the info of each", configure=configure_diff, run=run_diff),
    "nccl-env": Step(
        help="which of NCCL's variables this node needs, and which hurt it",
        configure=configure_nccl_env,
        run=run_nccl_env,
    ),
    "kernel-log": Step(
        help="errors of GPUs and NVSwitches in a kernel log, and what to do",
        configure=configure_kernel_log,
        run=run_kernel_log,
    ),
    "watch": Step(help="GPUs, links, ports and processes of this node, live", configure=configure_watch, run=run_watch),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``node``."""
    add_steps(parser, "Look at a node. Nothing is measured, and a node without a GPU can be looked at too.", STEPS)


run = run_step
