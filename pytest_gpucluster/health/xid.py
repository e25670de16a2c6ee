"""Has the driver reported this GPU in the kernel log of this boot?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pytest_gpucluster.health.finding import Finding
from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.kernel_log import normalised

_IN_THE_FIELD = frozenset({48, 56, 57, 58, 62, 63, 64, 65, 68, 69, 73, 74, 79, 80, 81, 92, 119, 120})
"""Source: Azure/azurehpc-health-checks, azure_gpu_xid.nhc."""
_OF_NEWER_GPUS = frozenset({95, 140, 143, 158})
"""An uncontained memory error, one that could not be recovered from, a GPU that could not be set up, and one that does
not answer any more. For each of them the catalogue asks for a reset, not for a look at the program. Source: NVIDIA,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html."""
TAKE_OUT = _IN_THE_FIELD | _OF_NEWER_GPUS
"""Xids after which a node is taken out of service."""


def check(situation: Situation) -> Iterator[Finding]:
    """Report each Xid of the take-out list, others in a note, and a log that cannot be read."""
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
    own = [xid for xid in log.xids() if xid.pci[:-2] == address[:-2]]
    last = {xid.code: xid.text for xid in own}
    for code, count in sorted(Counter(xid.code for xid in own).items()):
        bad = code in TAKE_OUT
        times = f"{count} times" if count > 1 else "once"
        yield situation.finding(
            f"xid_{code}",
            "hardware" if bad else "note",
            f"Xid {code} {times} in the kernel log of this boot ({log.source}), the last one: {last[code]}",
            allowed="no Xid that takes a node out of service" if bad else "Xids that a program can cause",
            remedy="take the node out of service and run the vendor's diagnostics; see NVIDIA's Xid catalogue"
            if bad
            else "see NVIDIA's Xid catalogue",
        )
