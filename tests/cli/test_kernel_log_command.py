"""``gpucluster node kernel-log``: logs of any host, torn, coloured, binary, or none at all."""

import gzip
import io
import sys
from types import SimpleNamespace

import pytest
from each import of_each

from pytest_gpucluster.cli import main
from pytest_gpucluster.node import kernel_log
from pytest_gpucluster.node.kernel_log import KernelLog

FALLEN = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
PROGRAM = "NVRM: Xid (PCI:0000:cb:00): 31, pid=626486, name=pt_main_thread, Ch 00000008, intr 00000000. MMU Fault"
CORRECTED = "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion Link DLREQ interrupt"
FATAL = "nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
# How the same line stands in dmesg, dmesg -T -x, dmesg -r, /dev/kmsg, journalctl, journalctl -o short-iso, -o json,
# /var/log/messages, and what rsyslog makes of repetitions.
DRESSED = (
    "{}",
    "[12345.678901] {}",
    "kern  :err   : [Fri Aug 30 11:43:14 2024] {}",
    "<3>[12345.678901] {}",
    "4,9921,9370042162,-;{}",
    "Aug 30 11:43:14 gpu-017 kernel: {}",
    "2024-08-30T11:43:14+0000 gpu-017 kernel: {}",
    '{{"_TRANSPORT":"kernel","MESSAGE":"{}","PRIORITY":"3"}}',
    "May 19 07:08:57 ip-26-0-146-100 kernel: [680111.646286] {}",
    "Aug 30 11:43:14 gpu-017 kernel: message repeated 2 times: [ {}]",
)


def ends(capsys, *arguments):
    """Exit code, what was printed, and what was complained of."""
    code = main.main(["node", "kernel-log", *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def given(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


@of_each("form", DRESSED)
def test_a_log_of_any_form_is_read_and_its_reports_judged(form, tmp_path, monkeypatch, capsys):
    noise = "usb 1-1: new high-speed USB device number 2 using xhci_hcd"
    healthy = "\n".join(form.format(line) for line in (noise, PROGRAM, CORRECTED))
    (tmp_path / "messages").write_text(healthy, encoding="utf-8")
    code, out, err = ends(capsys, str(tmp_path / "messages"))
    assert (code, len(out), err) == (0, 3, "")
    assert out[0].startswith("0000:cb:00.0 Xid 31: ")
    assert "action: restart the application" in out[0]
    assert out[1].startswith("0000:04:00.0 SXid 22013: ")
    for bad, place, action in (
        (FALLEN, "0000:3b:00.0 Xid 79: ", "action: reboot the node"),
        (FATAL, "0000:00:00.0 SXid 20034: ", "action: drain, then reset the GPU"),
    ):
        given(monkeypatch, f"{healthy}\n{form.format(bad)}\n".encode())
        code, out, err = ends(capsys)
        assert (code, len(out), err) == (1, 4, "")
        assert out[2].startswith(place)
        assert action in out[2]
        assert out[3].startswith("1 of 3 reports in 4 lines ")


def test_torn_lines_and_garbage_hide_no_report(monkeypatch, capsys):
    garbage = bytes(range(256)) * 40
    given(monkeypatch, garbage + b"\n" + garbage + FALLEN.encode() + b"\0\0\xff\n" + garbage)
    code, out, _ = ends(capsys, "-")
    assert (code, len(out)) == (1, 2)
    assert out[0].isprintable()
    given(monkeypatch, garbage)
    assert ends(capsys)[0] == 0
    # No number at all; torn before its number, torn at the beginning, two on one line.
    given(monkeypatch, FALLEN.replace("79", "9" * 5000).encode())
    assert ends(capsys)[0] == 1
    given(monkeypatch, FALLEN.encode())
    assert ends(capsys)[1][1].startswith("1 of 1 report in 1 line demands ")
    for text, reports in ((FALLEN[:23], 1), (FALLEN[3:], 1), (PROGRAM + FALLEN, 2), (f"{PROGRAM}\r\n{FALLEN}", 2)):
        given(monkeypatch, text.encode())
        code, out, _ = ends(capsys)
        assert (code, len(out)) == (1, reports + 1), text


def test_a_log_that_cannot_be_read_is_never_a_pass(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").touch()
    (tmp_path / "messages.gz").write_bytes(gzip.compress(FALLEN.encode()))
    (tmp_path / "system.journal").write_bytes(b"LPKSHHRH" + bytes(200))
    for name in ("empty", "missing", "messages.gz", "system.journal", "."):
        code, out, err = ends(capsys, str(tmp_path / name))
        assert (code, out, str(tmp_path / name) in err) == (3, [], True)
    given(monkeypatch, b"")
    assert ends(capsys)[0] == 3, "as of a dmesg that may not read the log"
    monkeypatch.setattr(sys, "stdin", None)
    assert ends(capsys)[0] == 3

    class Breaking(io.BytesIO):
        def readline(self, size=-1, /):
            line = super().readline(size)
            if not line:
                raise OSError(5, "Input/output error")
            return line

    for first, expected in ((PROGRAM, 3), (FALLEN, 1)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Breaking(first.encode())))
        code, out, err = ends(capsys)
        assert (code, len(out), "Input/output error" in err) == (expected, 1, True)


def test_the_log_of_this_host_is_judged_and_what_it_has_lost_is_reported(monkeypatch, capsys):
    def log(**values):
        monkeypatch.setattr(kernel_log, "read", lambda: KernelLog(**values))

    log(lines=("NVRM: loading", f"[ 1.0] {FALLEN}"), source="/dev/kmsg")
    assert ends(capsys, "--host")[0] == 1
    log(lines=("NVRM: loading", f"[ 1.0] {PROGRAM}"), source="/dev/kmsg", lost_records=7)
    code, _, err = ends(capsys, "--host")
    assert (code, "7 older" in err) == (0, True)
    log(why_not="dmesg: not permitted")
    code, out, err = ends(capsys, "--host")
    assert (code, out, "not permitted" in err) == (3, [], True)
    with pytest.raises(SystemExit) as caught:
        ends(capsys, "messages", "--host")
    assert caught.value.code == 2
