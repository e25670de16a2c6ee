"""The driver's reports on GPUs and NVSwitches in the kernel log of this boot, each with its PCI address.

A log that cannot be read is no pass: it is reported with the reason. Most distributions restrict it to root
(``kernel.dmesg_restrict``), and a container may have none.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.node.processes import run_program
from pytest_gpucluster.node.sysfs import pci_address

KMSG = Path("/dev/kmsg")
COMMANDS = (("dmesg",), ("journalctl", "-k", "-b", "--no-pager", "-o", "cat"))
"""Run in turn where /dev/kmsg cannot be read."""
COMMAND_SECONDS = 5.0
_FIRST = "Linux version"
"""In the first line of a kernel's log."""
_RECORD_BYTES = 8192
_MOST_RECORDS = 1_000_000
"""Far more than a kernel buffer holds: a bound for a log that grows while it is read."""

# NVRM: Xid (PCI:0000:3b:00): 79, pid=1896, GPU has fallen off the bus. The function number is mostly left out. Under
# MIG the instance follows: (PCI:0000:01:00 GPU-I:05). Old drivers leave "PCI:" out, and the domain: (0001:00). A report
# may be cut off before its number, by the end of the log, or lose the beginning of its line. An NVSwitch's:
# nvidia-nvswitch3: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up.
_REPORT = re.compile(
    r"(?:NVRM:(?:(?!NVRM:).)*?\b|^\W*(?:[NVR]*M:)? ?|\b(?P<switch>S))Xid "
    r"\((?:PCI:)?(?P<pci>[0-9a-fA-F:.]*)(?:[^()]*\):? *(?:(?P<code>[0-9]{1,9})|$)|[^()]*$)"
)
FALLEN_OFF = 79
_GONE = "fallen off the bus and is not responding"
"""Of a GPU that does not answer when the driver is loaded: it has no Xid, and the line has no address.
Source: NVIDIA/open-gpu-kernel-modules, src/nvidia/arch/nvalloc/unix/src/osinit.c."""
_CONTINUATION = re.compile(r"Severity 0|Data \{")
"""Start of the further lines of an SXid, which add nothing to the first."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One report of the driver. Source: NVIDIA, https://docs.nvidia.com/deploy/xid-errors/

    Attributes:
        pci: of the GPU or NVSwitch, as the kernel writes it, where it is valid.
        code: the number; 0 where the line is cut off before it.
        text: the rest of the line.
        is_switch: whether it is an SXid, of an NVSwitch.
    """

    pci: str
    code: int
    text: str
    is_switch: bool = False

    @property
    def name(self) -> str:
        """Return "Xid 79", or "SXid 20034"."""
        return f"{'SXid' if self.is_switch else 'Xid'} {self.code or '?'}"


@dataclass(frozen=True, kw_only=True)
class KernelLog:
    """Lines of this boot and their source.

    ``why_not``: why nothing could be read, or empty. ``lost_records``: the number of records that the kernel has
    overwritten. ``numbers``: the kernel's record number of each line, where the source has it.
    """

    lines: tuple[str, ...] = ()
    source: str = ""
    why_not: str = ""
    lost_records: int = 0
    numbers: tuple[int, ...] = ()

    def xids(self) -> tuple[Xid, ...]:
        """Return the driver's reports in the order of the log."""
        return parse(self.lines)


def read(*, kmsg: Path = KMSG, commands: Sequence[Sequence[str]] = COMMANDS) -> KernelLog:
    """Read this boot's kernel log from the first source that works, within a few seconds."""
    problems = []
    for source in (None, *commands):
        name = str(kmsg) if source is None else source[0]
        try:
            log = _records(kmsg) if source is None else _output(source)
            _require_kernel(log.lines)
            return log
        except OSError as error:
            problems.append(f"{name}: {error.strerror or error}")
    return KernelLog(why_not="; ".join(problems))


class Reader:
    """Reads the log at each call. After a failure it is not tried again: permissions do not change during a run, and a
    command that fails may take seconds."""

    def __init__(self, read: Callable[[], KernelLog] = read) -> None:
        self._read, self._failed = read, KernelLog()

    def __call__(self) -> KernelLog:
        """Return the log as it is now, or why it cannot be read."""
        if self._failed.why_not:
            return self._failed
        log = self._read()
        if log.why_not:
            self._failed = log
        return log


def parse(lines: Iterable[str]) -> tuple[Xid, ...]:
    """Find the driver's reports in kernel log lines with any prefix.

    >>> parse(["[ 9.1] NVRM: Xid (PCI:0000:3B:00): 79, pid=1896, GPU has fallen off the bus."])
    (Xid(pci='0000:3b:00.0', code=79, text='pid=1896, GPU has fallen off the bus.', is_switch=False),)
    """
    return tuple(report for line in lines if "Xid" in line or _GONE in line for report in _reports(line))


def _reports(line: str) -> Iterator[Xid]:
    line = _COLOUR.sub("", line).rstrip()
    matches = list(_REPORT.finditer(line))
    if not matches and _GONE in line and "NVRM:" in line:
        yield Xid(pci="", code=FALLEN_OFF, text=line[line.index("NVRM:") :])
    ends = [*(match.start() for match in matches[1:]), len(line)]
    for match, end in zip(matches, ends, strict=False):
        text = line[match.end() : end].strip(" ,")
        if match["switch"] and _CONTINUATION.match(text):
            continue
        pci = pci_address(match["pci"]) or match["pci"]
        yield Xid(pci=pci, code=int(match["code"] or 0), text=text, is_switch=bool(match["switch"]))


def _require_kernel(lines: Sequence[str]) -> None:
    """Reject a log that cannot have the Xids of this node's GPUs.

    A container may have /dev/null for /dev/kmsg, a gVisor sandbox invents its messages, and a micro virtual machine
    around a container has a kernel without the driver, which runs outside. The driver logs its name when it is loaded,
    so a log that reaches back to the boot without it is another kernel's.
    Source: gVisor's documentation on detecting it by dmesg.
    """
    if not any(lines):
        raise OSError(errno.ENODATA, "it is empty")
    if "Starting gVisor" in lines[0]:
        raise OSError(errno.ENODATA, "it is gVisor's and not the host's")
    if any(_FIRST in line for line in lines[:3]) and not any("NVRM:" in line for line in lines):
        raise OSError(errno.ENODATA, "its kernel has not loaded NVIDIA's driver, so it is not the host's")


def _records(kmsg: Path) -> KernelLog:
    """Read the kernel's buffer. The number of its first record is 0 until the buffer overflows.

    One read returns one record: ``priority,sequence,time,flags;text``.
    Source: Linux, Documentation/ABI/testing/dev-kmsg.
    """
    lines: list[str] = []
    numbers: list[int] = []
    for record in RECORDS(kmsg):
        fields = record.partition(b";")[0].split(b",")
        number = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0
        for line in record.decode("utf-8", "replace").splitlines():
            # The lines after a record's first are its fields, and begin with a blank.
            if line and not line.startswith(" "):
                lines.append(line.partition(";")[2] or line)
                numbers.append(number)
    lost = numbers[0] if numbers else 0
    return KernelLog(lines=tuple(lines), source=str(kmsg), lost_records=lost, numbers=tuple(numbers))


def device_records(kmsg: Path) -> Iterator[bytes]:
    """Yield the records of the kernel's buffer, as one read of the device returns each.

    Raises: OSError if it cannot be read.
    """
    descriptor = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                break  # the end of the buffer
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # the oldest records were overwritten; the next read continues behind them
                raise
            if not record:
                break
            yield record
    finally:
        os.close(descriptor)


RECORDS: Callable[[Path], Iterable[bytes]] = device_records
"""The records of a kernel's buffer. The simulation replaces it."""


def _output(command: Sequence[str]) -> KernelLog:
    output = run_program(command, COMMAND_SECONDS)
    if output.why_not:
        raise OSError(errno.ENODATA, output.why_not.removeprefix(f"{command[0]}: "))
    if not output.text.strip() and output.errors.strip():
        # Without permission, journalctl exits with 0 and prints nothing.
        raise OSError(errno.ENODATA, output.errors.strip().splitlines()[-1])
    return KernelLog(lines=tuple(output.text.splitlines()), source=" ".join(command))
