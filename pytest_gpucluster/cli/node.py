"""``gpucluster node``: what is wrong with a node, from its own records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pytest_gpucluster.cli.command import DONE, complain, explain

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

_NODE = "Judge a node by its own records. Nothing is measured, and no GPU is needed."

_KERNEL_LOG = """\
Print each report of NVIDIA's driver in a kernel log (Xid: of a GPU; SXid: of an NVSwitch) with its PCI address, number,
meaning, action and own words. FILE is any text that holds kernel lines, with or without timestamps: of dmesg, of
journalctl -k, /var/log/messages, of this host or another. Without FILE the standard input is read.

What a program can cause, and what only informs, demands no action on GPU, NVLink or node. An Xid that is not in the
table, a line that is cut off before its number, and an error without a stated severity do.
"""

_EXAMPLES = """\
  gpucluster node kernel-log --host
  gpucluster node kernel-log /var/log/messages
  ssh gpu-017 sudo dmesg | gpucluster node kernel-log
  journalctl -k -b --no-pager | gpucluster node kernel-log
"""

_EXIT_CODES = """\
exit codes:
  0  no report demands action on a GPU, an NVLink or the node
  1  one does
  2  wrong usage
  3  the log cannot be read, is empty, or is no text; reports that were found before that and demand action: 1
  4  the output cannot be written
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add ``node kernel-log``."""
    explain(parser, _NODE, _EXAMPLES, _EXIT_CODES)
    steps = parser.add_subparsers(dest="step", metavar="STEP", required=True)
    log = steps.add_parser("kernel-log", help="tell what the driver has reported in a kernel log, and what to do")
    explain(log, _KERNEL_LOG, _EXAMPLES, _EXIT_CODES)
    log.add_argument("file", metavar="FILE", type=Path, nargs="?", help="default: the standard input, which is also -")
    log.add_argument("--host", action="store_true", help="read this host's log of this boot instead")
    log.set_defaults(refuse=log.error)


def run(options: argparse.Namespace) -> int:
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
