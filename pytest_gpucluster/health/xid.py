"""What does the driver say of this GPU: NVML's recovery action, and its reports in the kernel log of this boot?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.health.xid_table import lookup, recovery_action
from pytest_gpucluster.kernel_log import Xid, normalised
from pytest_gpucluster.metrics.finding import Finding, Identity

_AGAIN = "Keep the log (`nvidia-bug-report.sh`), and reboot before you run again: this boot's log keeps the report"


def check(situation: Situation) -> Iterator[Finding]:
    """Report NVML's recovery action, each Xid of this GPU, on one rank of a node each SXid of its NVSwitches, and a log
    that cannot be read. What demands action on GPU, NVLink or node rejects; the rest is a note."""
    wanted = situation.worst("recovery.action")
    if wanted:
        entry = recovery_action(wanted)
        yield situation.finding(
            "recovery_action",
            "hardware",
            f"NVML's recovery action of this GPU is {wanted:#x}: {entry.meaning}",
            allowed="none",
            remedy=entry.advice,
        )
    log = situation.kernel_log
    if log.why_not:
        yield situation.finding(
            "kernel_log",
            "note",
            f"kernel log of {situation.gpu.host} not readable, so Xids are not judged: {log.why_not}",
            allowed="a log that this job may read",
            remedy="look for Xids as root: `dmesg | grep -i xid`",
        )
        return
    if log.lost_records:
        yield situation.finding(
            "kernel_log",
            "note",
            f"kernel log of {situation.gpu.host} begins late: {log.lost_records} older records of {log.source} are"
            " overwritten, so Xids among them are not seen",
            allowed="a log that reaches back to the boot",
            remedy="look for older Xids as root: `journalctl -k -b | grep -i xid`",
        )
    reports = log.xids()
    if situation.node is not None:
        yield from _judged(situation, [one for one in reports if one.is_switch], Identity(host=situation.gpu.host))
    address = normalised(situation.gpu.pci or "")
    if address is None:
        yield situation.finding(
            "pci_unknown",
            "environment",
            f"NVML does not tell this GPU's PCI address ({situation.gpu.pci!r}), so no Xid can be told to be its own",
            allowed="an address",
            remedy="look at `nvidia-smi -q` on this host and run again",
        )
        return
    # The log leaves the function number out, which is always 0.
    own = [one for one in reports if not one.is_switch and one.pci[:-2] == address[:-2]]
    yield from _judged(situation, own, situation.gpu)


def _judged(situation: Situation, reports: Sequence[Xid], gpu: Identity) -> Iterator[Finding]:
    """Yield one finding for each number, by the last one of its reports that rejects, or the last one."""
    for code in sorted({report.code for report in reports}):
        same = [report for report in reports if report.code == code]
        entries = [lookup(report) for report in same]
        at = max(range(len(same)), key=lambda i: (entries[i].rejects, i))
        report, entry = same[at], entries[at]
        kind = "sxid" if report.is_switch else "xid"
        times = f"{len(same)} times" if len(same) > 1 else "once"
        where = f" of {report.pci}" if report.is_switch else ""
        yield situation.finding(
            f"{kind}_{code}",
            "hardware" if entry.rejects else "note",
            f"{report.name}{where} {times} in the kernel log of this boot ({situation.kernel_log.source}):"
            f" {entry.meaning}; action: {entry.action}; the {'last' if at == len(same) - 1 else 'worst'} one:"
            f" {report.text}",
            allowed="no report that demands action on GPU, NVLink or node",
            remedy=f"{entry.advice}. {_AGAIN}" if entry.rejects else entry.advice,
            gpu=gpu,
        )
