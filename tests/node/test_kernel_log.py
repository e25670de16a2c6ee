import errno
import os
import sys
from pathlib import Path

import pytest
from complaints import in_order
from each import of_each

from pytest_gpucluster.node import kernel_log
from pytest_gpucluster.node.kernel_log import parse, read
from pytest_gpucluster.node.sysfs import pci_address

FALLEN = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@of_each(
    "case",
    [
        (f"[12345.678901] {FALLEN}", ("0000:3b:00.0", 79, FALLEN.partition(": 79, ")[2])),
        ("NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper", ("0000:10:1c.0", 63, "pid=1896, Row Remapper")),
        ("NVRM: GPU at PCI:0000:3b:00: Xid (PCI:0000:3B:00): 119", ("0000:3b:00.0", 119, "")),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, Contained", ("0000:01:00.0", 94, "Contained")),
        # Old drivers; a log with colours; one whose addresses somebody has taken out.
        ("NVRM: Xid (0001:00): 8, Channel 00000002", ("0000:01:00.0", 8, "Channel 00000002")),
        ("[...] NVRM: Xid (0000:03:00): 14, Channel 00000001", ("0000:03:00.0", 14, "Channel 00000001")),
        ("\x1b[33mNVRM: \x1b[0mXid (PCI:0000:3b:00): 63, Row\x1b[0m\n", ("0000:3b:00.0", 63, "Row")),
        ("kernel: NVRM: Xid (PCI:...): 145, RLW_RXPIPE Nonfatal", ("...", 145, "RLW_RXPIPE Nonfatal")),
        # Torn: at the beginning, and before the number.
        ("RM: Xid (PCI:0000:3b:00): 95, Uncontained", ("0000:3b:00.0", 95, "Uncontained")),
        ("\0\0\0NVRM: Xid (PCI:0000:3b:00): 48", ("0000:3b:00.0", 48, "")),
        ("NVRM: Xid (PCI:0000:3b", ("0000:3b", 0, "")),
        ("NVRM: Xid (PCI:0000:3b:00): ", ("0000:3b:00.0", 0, "")),
        ("NVRM: GPU at PCI:0000:3b:00: GPU-aa", None),
        ("NVRM: Xid (PCI:0000:3b:00): many", None),
        ("usb 1-1: Xid (PCI:0000:3b:00): 79", None),
        ("", None),
    ],
)
def test_xids_are_found_in_lines_of_the_log(case):
    line, xid = case
    assert [(one.pci, one.code, one.text) for one in parse([line])] == ([] if xid is None else [xid])


SWITCH = "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, "


def test_reports_of_switches_are_distinguished_from_those_of_gpus_also_on_one_line():
    lines = [
        f"[ 38.1] {SWITCH}Data {{0x0000002b, 0x0000002b}}",
        f"[ 38.2] {SWITCH}Non-fatal, Link 44 Minion Link DLREQ interrupt",
        f"[ 38.3] {SWITCH}Severity 0 Engine instance 44 Sub-engine instance 00",
        f"[ 38.4] {FALLEN.partition(' GPU has')[0]} {SWITCH}Fatal, Link 1{FALLEN}",
        # Of a GPU that did not answer when the driver was loaded, which gets no Xid.
        "NVRM: fallen off the bus and is not responding to commands.",
    ]
    found = [(one.name, one.pci, one.text.partition(",")[0]) for one in parse(lines)]
    assert found == [
        ("SXid 22013", "0000:04:00.0", "Non-fatal"),
        ("Xid 79", "0000:3b:00.0", "pid='<unknown>'"),
        ("SXid 22013", "0000:04:00.0", "Fatal"),
        ("Xid 79", "0000:3b:00.0", "pid='<unknown>'"),
        ("Xid 79", "", "NVRM: fallen off the bus and is not responding to commands."),
    ]


def test_a_buffer_that_may_not_be_opened_or_is_none_is_no_log(monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    log = read(kmsg=Path(os.devnull), commands=())
    assert (log.source, log.why_not.partition(":")[0]) == ("", os.devnull)
    monkeypatch.setattr(kernel_log.os, "open", refuse)
    assert read(kmsg=Path("/kmsg"), commands=()).why_not == "/kmsg: Operation not permitted"


def test_an_address_is_the_same_in_every_form():
    # NVML, sysfs, the kernel log, lspci.
    for address in ("00000000:3B:00.0", "0000:3b:00.0", "0000:3b:00", "3b:00.0"):
        assert pci_address(address) == "0000:3b:00.0"
    # A domain beyond four digits; Azure numbers domains.
    assert (pci_address("00010000:07:00.0"), pci_address("0001:00:00.0")) == ("10000:07:00.0", "0001:00:00.0")
    assert (pci_address("not an address"), pci_address("")) == (None, None)


def records(*texts):
    """What reads of /dev/kmsg give: one record each, then that there is nothing more yet."""
    found = [f"6,{n},{n},-;{text}\n SUBSYSTEM=pci\n".encode() for n, text in enumerate(texts)]
    return [*found, BlockingIOError(errno.EAGAIN, "later")]


def serve(monkeypatch, answers):
    """Let reads of any descriptor give these answers."""
    rest = iter(answers)

    def reads(_, __):
        answer = next(rest)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(kernel_log.os, "read", reads)


def test_the_kernels_buffer_is_read_record_by_record(tmp_path, monkeypatch):
    (tmp_path / "kmsg").touch()
    # An overwritten record in between is an error of one read only.
    first, *rest = records("usb 1-1: new device; fast", FALLEN)
    serve(monkeypatch, [first, OSError(errno.EPIPE, "overwritten"), *rest])
    log = read(kmsg=tmp_path / "kmsg", commands=())
    assert log.lines == ("usb 1-1: new device; fast", FALLEN)
    assert (log.source, log.why_not) == (str(tmp_path / "kmsg"), "")
    assert [xid.code for xid in log.xids()] == [79]


def command(text):
    return (sys.executable, "-c", text)


def test_where_the_buffer_is_refused_commands_are_asked_in_turn(tmp_path):
    refused = command("import sys; print('dmesg: read kernel buffer failed', file=sys.stderr); sys.exit(1)")
    reporting = command(f"print({FALLEN!r})")
    log = read(kmsg=tmp_path / "none", commands=(refused, reporting))
    assert [xid.code for xid in log.xids()] == [79]
    assert log.why_not == ""
    assert log.source.startswith(sys.executable)


def test_a_log_that_cannot_be_read_has_each_reason(tmp_path, monkeypatch):
    # The others are a shell's, for those are done long before it, also on a busy machine.
    monkeypatch.setattr(kernel_log, "COMMAND_SECONDS", 1.0)
    silent = ("true",)
    hangs = ("sleep", "60")
    refused = ("sh", "-c", "echo Operation not permitted >&2; exit 1")
    log = read(kmsg=tmp_path / "none", commands=(silent, hangs, refused, ("no-such-command-here",)))
    assert log.lines == ()
    assert log.xids() == ()
    for reason in ("No such file or directory", "it is empty", "no answer within 1 s", "Operation not permitted"):
        assert reason in log.why_not
    assert in_order(log.why_not, "no-such-command-here No")


def test_records_that_the_kernel_has_overwritten_are_counted(tmp_path, monkeypatch):
    (tmp_path / "kmsg").touch()
    serve(monkeypatch, [b"6,512,9,-;usb 1-1", b"6,513,9,-;usb 1-2", BlockingIOError(errno.EAGAIN, "later")])
    log = read(kmsg=tmp_path / "kmsg", commands=())
    assert (log.lost_records, log.lines, log.numbers) == (512, ("usb 1-1", "usb 1-2"), (512, 513))
    serve(monkeypatch, records("usb 1-1"))
    assert read(kmsg=tmp_path / "kmsg", commands=()).lost_records == 0


def test_the_messages_that_a_sandbox_makes_up_are_no_log(tmp_path, monkeypatch):
    made_up = ("Starting gVisor...", "Feeding the init monster...")
    reporting = command(f"print('[    0.000000] {made_up[0]}'); print('[    0.400000] {made_up[1]}')")
    log = read(kmsg=tmp_path / "none", commands=(reporting,))
    assert log.source == ""
    assert in_order(log.why_not, "gVisor")
    (tmp_path / "kmsg").touch()
    serve(monkeypatch, records(*made_up))
    assert in_order(read(kmsg=tmp_path / "kmsg", commands=()).why_not, "gVisor")


LOADED = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06"


@pytest.mark.parametrize(
    ("lines", "is_read"),
    [
        pytest.param(("Linux version 6.8.0", "usb 1-1: new device"), False, id="a guest kernel without the driver"),
        pytest.param(("Linux version 6.8.0", LOADED), True, id="since boot, with the driver"),
        pytest.param(("Booting Linux on physical CPU 0x0", "Linux version 6.8.0"), False, id="a guest kernel on Arm"),
        pytest.param(("usb 1-1: new device", "usb 1-2: new device"), True, id="the boot is overwritten"),
    ],
)
def test_a_log_since_boot_that_never_names_the_driver_is_another_kernels(tmp_path, monkeypatch, lines, is_read):
    (tmp_path / "kmsg").touch()
    serve(monkeypatch, records(*lines))
    log = read(kmsg=tmp_path / "kmsg", commands=())
    assert (log.lines == lines) is is_read
    assert ("NVIDIA's driver" in log.why_not) is not is_read


def test_a_log_that_cannot_be_read_is_not_read_again():
    asked = []
    refused = kernel_log.KernelLog(why_not="dmesg: Operation not permitted")
    reader = kernel_log.Reader(lambda: asked.append(1) or refused)
    assert [reader().why_not for _ in range(3)] == [refused.why_not] * 3
    assert len(asked) == 1
    logs = [kernel_log.KernelLog(lines=("a",)), kernel_log.KernelLog(lines=("a", "b"))]
    readable = kernel_log.Reader(iter(logs).__next__)
    assert [readable().lines for _ in range(2)] == [("a",), ("a", "b")], "one that can be read is read each time"
