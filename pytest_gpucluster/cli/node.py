"""``gpucluster node``: the state of this node or of many, read from the nodes themselves; nothing is measured."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from pytest_gpucluster.cli.command import (
    DONE,
    NEGATIVE,
    NO_INPUT,
    NO_OUTPUT,
    UNDECIDED,
    USAGE,
    CommandError,
    Step,
    add_json,
    add_option,
    add_steps,
    columns,
    complain,
    exit_codes,
    explain,
    number,
    run_step,
    write_json_or_table,
)
from pytest_gpucluster.errors import LaunchError

if TYPE_CHECKING:
    from pytest_gpucluster.node.fabric.nccl_advice import NcclAdvice
    from pytest_gpucluster.node.fabric.nccl_facts import Facts
    from pytest_gpucluster.node.health.node_state import Node, NodeState

_INFO = """\
Print what this node has: CPUs, NUMA nodes, memory, GPUs and their topology, NVLink, InfiniBand, driver stack, mounts,
network, and the Slurm job or the pod that this is in. It takes a few seconds, changes nothing, needs no root, and also
works without a GPU: parts that are not available are listed with the reason.
"""

_INFO_EXAMPLES = """\
  gpucluster node info
  gpucluster node info gpu
  gpucluster node info all --json > node.json
"""

_INFO_EXIT_CODES = exit_codes({DONE: "printed, even if parts are not available"})

_VIEWS = {
    "summary": "a few lines on each part (default)",
    "gpu": "driver stack, each GPU, and the topology",
    "ib": "InfiniBand and RoCE ports, and network interfaces",
    "cpu": "system, CPUs, NUMA nodes, memory and limits",
    "all": "everything",
}

_LEAST_COLUMNS = 72
"""Of a table of GPUs without truncated numbers."""


def configure_info(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``node info``."""
    views = "views:\n" + "".join(f"  {name:<8} {what}\n" for name, what in _VIEWS.items())
    explain(parser, f"{_INFO}\n{views}", _INFO_EXAMPLES, _INFO_EXIT_CODES)
    parser.add_argument("view", metavar="VIEW", nargs="?", choices=_VIEWS, default="summary", help="one of these views")
    add_option(parser, "--json", "as one JSON object; docs/nodes.md lists its keys")


def run_info(options: argparse.Namespace) -> int:
    """Print what this node has."""
    from pytest_gpucluster.node.info import Sources, collect_info
    from pytest_gpucluster.node.info_text import render_info

    info = collect_info(options.view, Sources())
    text = json.dumps(info, indent=2, allow_nan=False) + "\n" if options.json else render_info(info, width=_width())
    sys.stdout.write(text)
    return DONE


def _width() -> int:
    """Return the width for tables of GPUs."""
    return columns(_LEAST_COLUMNS)


_NODES = """\
Compare many nodes: CPUs, SMT, NUMA nodes, memory, limits, driver stack, GPUs, MIG, topology, InfiniBand ports, network
and mounts. The folder has a file NODE.json for each node, written there by `gpucluster node info all --json`;
deploy/slurm/discover.sbatch writes them all. Equal does not mean good: the suite checks that.
"""

_DIFF_EXAMPLES = """\
  gpucluster node diff gpucluster-report/discover-4711/nodes
  gpucluster node diff answers/ --nodes 'gpu-[001-064]' --json nodes.json
"""

_DIFF_EXIT_CODES = exit_codes(
    {
        DONE: "all nodes answered, and are equal",
        NEGATIVE: "they differ",
        NO_INPUT: "the folder cannot be read, or no node answered",
        UNDECIDED: "those that answered are equal, but some did not, or there is only one",
    }
)


def configure_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``node diff``."""
    explain(parser, _NODES, _DIFF_EXAMPLES, _DIFF_EXIT_CODES)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="with a file NODE.json for each node")
    add_option(parser, "--nodes HOSTLIST", "the nodes that should have answered: gpu-[001-064]")
    add_json(parser)


def run_diff(options: argparse.Namespace) -> int:
    """Compare nodes and return the exit code."""
    from pytest_gpucluster.launch.hostlist import expand_hostlist
    from pytest_gpucluster.node import diff

    try:
        expected = expand_hostlist(options.nodes) if options.nodes is not None else []
        found = diff.read_answers(options.folder, expected)
    except LaunchError as error:
        raise CommandError(USAGE, f"--nodes: {error}") from error
    except OSError as error:
        raise CommandError(NO_INPUT, f"{options.folder}: {error.strerror or error}") from error
    compared = diff.compare_nodes(found.nodes)
    code = DONE if all(fact.alike for fact in compared) else NEGATIVE
    if code == DONE and (found.missing or (len(found.nodes) < 2 and len(expected) != 1)):
        code = UNDECIDED
    if not found.nodes:
        code = NO_INPUT
    write_json_or_table(
        options.json,
        lambda: diff.diff_document(found, compared, exit_code=code),
        lambda: diff.diff_table(found, compared, width=columns(60)),
    )
    if not found.nodes:
        complain(f"{options.folder}: no node answered: NODE.json, of `gpucluster node info all --json`", code)
    return code


UNKNOWN = 3
SCHEMA_VERSION = 1

_NCCL_ENV = """\
Inspect this node's network cards, interfaces, GPUs, container and job, and print which of NCCL's variables it needs,
and which are set and harmful, each with the reason and its source. All others are best left unset. Nothing is set:
evaluate the printed lines to do so. For an unknown network there is no advice.

Run it where the job will run: on a compute node, in the job's container.
"""

_NCCL_ENV_EXAMPLES = """\
  gpucluster node nccl-env
  eval "$(gpucluster node nccl-env --format shell)"
  srun --ntasks-per-node=1 gpucluster node nccl-env --check
"""

_NCCL_ENV_EXIT_CODES = exit_codes(
    {
        DONE: "printed; with --check: the variables are as advised",
        NEGATIVE: "with --check: a variable should be set, or is set and harmful",
        UNKNOWN: "with --check: neither, but something is unknown",
    }
)

_FORMATS = {
    "text": "for people (default)",
    "shell": "lines for eval or source: export and unset",
    "json": "everything, for programs; docs/network.md lists the keys",
}


def configure_nccl_env(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``node nccl-env``."""
    formats = "formats:\n" + "".join(f"  {name:<6} {what}\n" for name, what in _FORMATS.items())
    explain(parser, f"{_NCCL_ENV}\n{formats}", _NCCL_ENV_EXAMPLES, _NCCL_ENV_EXIT_CODES)
    parser.add_argument("--format", choices=_FORMATS, default="text", help="one of these formats")
    add_option(parser, "--check", "exit with 1 for a difference, 3 for something unknown")


def run_nccl_env(options: argparse.Namespace) -> int:
    """Print which of NCCL's variables this node needs."""
    from pytest_gpucluster.node.fabric.nccl_advice import advise
    from pytest_gpucluster.node.fabric.nccl_probe import Sources, collect_facts

    facts = collect_facts(Sources())
    advice = advise(facts)
    sys.stdout.write(_render_advice(options.format, facts, advice))
    if not options.check:
        return DONE
    return NEGATIVE if advice.differs else UNKNOWN if advice.unknown else DONE


def _render_advice(form: str, facts: Facts, advice: NcclAdvice) -> str:
    from pytest_gpucluster.node.fabric.nccl_advice import render_advice, shell_lines

    if form == "json":
        document = {
            "schema_version": SCHEMA_VERSION,
            "host": facts.host,
            "launcher": facts.launcher or None,
            "scheduler": facts.scheduler,
            "nnodes": facts.nnodes,
            "container": facts.container,
            "provider": facts.provider,
            "nccl": facts.nccl,
            "gpus": [{"name": gpu.name, "pci": gpu.pci} for gpu in facts.gpus],
            "nvlink": facts.nvlink,
            "nvls": facts.nvls,
            **advice.to_json(),
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"
    if form == "text":
        return render_advice(facts, advice, width=columns(60) if sys.stdout.isatty() else 80)
    return shell_lines(facts, advice)


ANSWER_SECONDS = 5.0
"""How long NVML may take to answer first, in addition to the interval: a driver takes seconds to wake up."""
FRAME_SECONDS = 0.5
"""The longest time between two drawings on a terminal, so that the age of stale values goes on."""

_DESCRIPTION = """\
Show the activity of this node: for each GPU utilisation, memory, temperature, power, clocks, NVLink traffic and
throttle reasons; traffic of the InfiniBand and RoCE ports; load and memory of the host; the processes that use GPU
memory. On a terminal it is a live display (q ends it); elsewhere plain text, one block for each interval.

NVML is queried by a separate process. If the driver hangs, the display goes on and marks its values as stale.
"""

_WATCH_EXAMPLES = """\
  gpucluster node watch
  gpucluster node watch --gpus 0,1 --interval 5
  gpucluster node watch --once
  gpucluster node watch --json --interval 10 >> node.jsonl
  ssh -t gpu-07 gpucluster node watch
"""

_WATCH_EXIT_CODES = exit_codes(
    {
        DONE: "ended by q or Ctrl-C; with --once: every selected GPU has answered",
        NEGATIVE: "with --once: there is no GPU, or one of them has not answered; the others are shown",
        USAGE: "wrong usage, or --gpus names a GPU that does not exist",
        NO_OUTPUT: "no process could be started to read the node; or the output cannot be written",
        129: "ended by SIGHUP, because its terminal was closed",
        143: "ended by SIGTERM",
    },
    common=(),
)


def configure_watch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``node watch``."""
    explain(parser, _DESCRIPTION, _WATCH_EXAMPLES, _WATCH_EXIT_CODES)
    add_option(parser, "--interval SECONDS", "time between two samples", type=number(0.2, 3600), default=1.0)
    add_option(parser, "--once", "print one sample after one interval, and end")
    add_option(parser, "--json", "print one line of JSON for each interval")
    add_option(parser, "--gpus INDEX,...", "only these GPUs, by their numbers in nvidia-smi", type=_indices)


def _indices(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a list of numbers such as 0,1")
    return tuple(sorted({int(part) for part in parts}))


def run_watch(options: argparse.Namespace) -> int:
    """Show the node until it is ended."""
    from pytest_gpucluster.node.health.node_reader import NodeReader
    from pytest_gpucluster.node.health.node_state import NodeState
    from pytest_gpucluster.runners.ssh_job import handling

    state = NodeState(options.interval, only=options.gpus)
    try:
        reader = NodeReader(state.take, options.interval)
    except OSError as error:
        raise CommandError(NO_OUTPUT, f"this node cannot be read: {error.strerror or error}") from error
    try:
        with handling((signal.SIGTERM, signal.SIGHUP), _exit_on_signal):
            # Rates need two samples.
            state.wait(2 if options.once else 1, options.interval + ANSWER_SECONDS)
            if unknown := state.unknown():
                known = ", ".join(str(gpu["index"]) for gpu in state.listed()) or "none"
                raise CommandError(
                    USAGE, f"--gpus {','.join(map(str, unknown))}: this node has no such GPU; it has: {known}"
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
        return DONE if is_complete(node) else NEGATIVE
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
    """Whether there are GPUs, and every one of them has just answered."""
    return bool(node.gpus) and not any(
        gpu.is_stale or gpu.age_seconds is None or gpu.values.get("lost") for gpu in node.gpus
    )


def _json(node: Node) -> str:
    from pytest_gpucluster.cli.watch_screen import json_line

    return json_line(node, host=socket.gethostname(), at=_now().strftime("%Y-%m-%dT%H:%M:%SZ"))


def _plain(node: Node) -> str:
    from pytest_gpucluster.cli.watch_screen import plain

    width = columns(60)
    return plain(node, host=socket.gethostname(), clock=f"{_now():%Y-%m-%d %H:%M:%S} UTC", width=width)


def _draw(state: NodeState, frame_seconds: float) -> int:
    """Draw on the terminal's alternate screen, so that its former content comes back."""
    from rich.console import Console, ConsoleDimensions
    from rich.live import Live

    from pytest_gpucluster.cli.watch_screen import Screen, keyboard

    console = Console(markup=False, emoji=False, highlight=False)
    host = socket.gethostname()
    with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            hint = "q ends" if keys.is_available else ""
            clock = f"{_now():%H:%M:%S} UTC"
            # Not LINES and COLUMNS, which may be of a former size.
            size = os.get_terminal_size(sys.stdout.fileno())
            console.size = ConsoleDimensions(size.columns or 80, size.lines or 24)
            # One line less than the terminal has: it scrolls when the last one ends.
            screen = Screen(state.node(), host=host, clock=clock, height=console.size.height - 1, keys=hint)
            live.update(screen, refresh=True)
            if keys.wait(frame_seconds):
                return DONE


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _exit_on_signal(number: int, frame: object) -> NoReturn:
    """End in order when the terminal is closed, or by a scheduler: the screen is restored."""
    raise SystemExit(128 + number)


_LINE_BYTES = 1 << 20
"""Longer than any line of a kernel; bounds what is read at once."""
_NOT_TEXT = {
    b"\x1f\x8b": "zcat FILE",
    b"\xfd7zXZ\0": "xzcat FILE",
    b"BZh": "bzcat FILE",
    b"\x28\xb5\x2f\xfd": "zstdcat FILE",
    b"LPKSHHRH": "journalctl -k --no-pager --file FILE",
}
"""First bytes of logs that are not text -> the command that converts them."""

_KERNEL_LOG = """\
Print each report of NVIDIA's driver in a kernel log (Xid: of a GPU; SXid: of an NVSwitch) with its PCI address, number,
meaning, action and message. FILE is any text with kernel lines, with or without timestamps: of dmesg, journalctl -k or
/var/log/messages, of this host or another. Without FILE standard input is read.

Reports that a program can cause, or that only inform, demand no action on GPU, NVLink or node. An Xid that is not in
the table, a line that is truncated before its number, and an error without a severity do.
"""

_KERNEL_LOG_EXAMPLES = """\
  gpucluster node kernel-log --host
  gpucluster node kernel-log /var/log/messages
  ssh gpu-017 sudo dmesg | gpucluster node kernel-log
  journalctl -k -b --no-pager | gpucluster node kernel-log
"""

_KERNEL_LOG_EXIT_CODES = exit_codes(
    {
        DONE: "no report demands action on a GPU, an NVLink or the node",
        NEGATIVE: "one does",
        NO_INPUT: "the log cannot be read, is empty, or is not text; 1 if a report before that demands action",
    }
)


def configure_kernel_log(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``node kernel-log``."""
    explain(parser, _KERNEL_LOG, _KERNEL_LOG_EXAMPLES, _KERNEL_LOG_EXIT_CODES)
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="default: standard input, which is also -")
    add_option(parser, "--host", "read this host's log of this boot instead")


def run_kernel_log(options: argparse.Namespace) -> int:
    """Print the reports, and return the exit code."""
    if options.host and options.file is not None:
        options.refuse("FILE and --host: name one of them")
    return _kernel_log(None if options.host else options.file or Path("-"))


def _kernel_log(file: Path | None) -> int:
    from pytest_gpucluster.node.health.xid_table import lookup
    from pytest_gpucluster.node.kernel_log import parse
    from pytest_gpucluster.text import printable

    lines = reports = demanding = 0
    problem = ""
    try:
        for line in _host_lines() if file is None else _file_lines(file):
            lines += 1
            for report in parse([line]):
                entry = lookup(report)
                reports += 1
                demanding += entry.rejects
                message = f" ({report.text})" if report.text else ""
                print(
                    printable(
                        f"{report.pci or 'PCI ?'} {report.name}: {entry.meaning}; action: {entry.advice}{message}"
                    )
                )
        if not lines:
            problem = f"{_log_name(file)}: it is empty"
    except _Unreadable as error:
        problem = str(error)
    if not problem:
        what = "demands" if demanding == 1 else "demand"
        of = f"{reports} report{'s' * (reports != 1)} in {lines} line{'s' * (lines != 1)}"
        print(f"{demanding} of {of} {what} action on a GPU, an NVLink or the node")
    else:
        complain(problem, NO_INPUT)
    return NEGATIVE if demanding else NO_INPUT if problem else DONE


class _Unreadable(Exception):
    """The log cannot be read, and why."""


def _host_lines() -> Iterator[str]:
    from pytest_gpucluster.node import kernel_log

    log = kernel_log.read()
    if log.why_not:
        raise _Unreadable(f"the kernel log of this host: {log.why_not}")
    if log.lost_records:
        complain(f"{log.source} begins late: {log.lost_records} older records are overwritten", DONE)
    yield from log.lines


def _file_lines(file: Path) -> Iterator[str]:
    try:
        if file == Path("-"):
            if sys.stdin is None:
                raise _Unreadable("the standard input is closed")
            yield from _decode(sys.stdin.buffer, file)
        else:
            with file.open("rb") as stream:
                yield from _decode(stream, file)
    except OSError as error:
        raise _Unreadable(f"{_log_name(file)}: {error.strerror or error}") from error


def _decode(stream: BinaryIO, file: Path) -> Iterator[str]:
    first = True
    for line in iter(lambda: stream.readline(_LINE_BYTES), b""):
        if first:
            for magic, command in _NOT_TEXT.items():
                if line.startswith(magic):
                    raise _Unreadable(f"{_log_name(file)}: not a text file: `{command} | gpucluster node kernel-log`")
        first = False
        yield line.decode("utf-8", "replace")


def _log_name(file: Path | None) -> str:
    return "the kernel log of this host" if file is None else "the standard input" if file == Path("-") else str(file)


STEPS = {
    "info": Step(
        help="CPUs, GPUs, topology, ports and driver stack of this node", configure=configure_info, run=run_info
    ),
    "diff": Step(help="differences between many nodes, from the info of each", configure=configure_diff, run=run_diff),
    "nccl-env": Step(
        help="which of NCCL's variables this node needs, and which are harmful",
        configure=configure_nccl_env,
        run=run_nccl_env,
    ),
    "kernel-log": Step(
        help="errors of GPUs and NVSwitches in a kernel log, with actions",
        configure=configure_kernel_log,
        run=run_kernel_log,
    ),
    "watch": Step(help="GPUs, links, ports and processes of this node, live", configure=configure_watch, run=run_watch),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``node``."""
    add_steps(parser, "Inspect nodes. Nothing is measured, and no GPU is needed.", STEPS)


run = run_step
