"""What the driver's reports mean. The lines are recorded ones, each with where it was published; what must be done is
what NVIDIA's catalogue, or the Fabric Manager's guide, asks for, read there and not from the product's table."""

import pytest
from each import of_each

from pytest_gpucluster.node.health import xid_table
from pytest_gpucluster.node.health.xid_table import lookup, recovery_action
from pytest_gpucluster.node.kernel_log import parse


def entry_of(line):
    [report] = parse([line])
    return lookup(report)


GPUD = "leptonai/gpud, tests of components/accelerator/nvidia"
DRAIN = "drain, then reset the GPU"
RESTART = "restart the application"
RECORDED = [
    # (source, line, action)
    (
        GPUD,
        "[Sat Aug 31 07:06:03 2024] NVRM: Xid (PCI:0000:cb:00): 31, pid=626486, name=pt_main_thread, Ch 00000008, "
        "intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_14 faulted @ 0x7f2f_cca58000",
        RESTART,
    ),
    (
        "huggingface, ml-engineering",
        "May 19 07:08:57 ip-26-0-146-100 kernel: [680111.646286] NVRM: Xid (PCI:0000:10:1c): 63, pid=1850, Row "
        "Remapper: New row marked for remapping, reset gpu to activate",
        "none",
    ),
    (
        "a desktop of 2011",
        "Sep 20 08:28:06 cutiepie kernel: [17298520.228000] NVRM: Xid (0001:00): 8, Channel 00000002",
        RESTART,
    ),
    # NVLink 5: unit, severity, and what the interrupt and the error status were.
    (
        GPUD,
        "[171167.620236] NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 "
        "0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
        "reset the GPU",
    ),
    (
        GPUD,
        "NVRM: Xid (PCI:0018:01:00): 149, pid=77, name=x, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)",
        "reset the GPU",
    ),
    (
        GPUD,
        "NVRM: Xid (PCI:0019:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x00000000)",
        "reset the GPU",
    ),
    (
        GPUD,
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001 "
        "0x00000000 0x00100000 0x00000004)",
        "none",
    ),
    (
        GPUD,
        "NVRM: Xid (PCI:0000:01:00): 144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008 0x00000000)",
        "none",
    ),
    (
        GPUD,
        "NVRM: Xid (PCI:0000:00:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6 0x00000000)",
        "reset the GPU",
    ),
    # Cause 38: taken down by software or a user, for which the catalogue asks nothing of the GPU.
    (
        GPUD,
        "NVRM: Xid (PCI:0000:00:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000)",
        "none",
    ),
    # Before driver 575, with other brackets.
    (
        "its format before R575",
        "NVRM: Xid (PCI:0000:00:1e): 149, NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]",
        "reset the GPU",
    ),
    # The recovery action: the second value counts, whatever the driver calls it.
    (
        GPUD,
        "[171167.621162] NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 "
        "(Drain and Reset)",
        DRAIN,
    ),
    (
        GPUD,
        "[171167.897562] NVRM: Xid (PCI:0019:01:00): 154, GPU recovery action changed from 0x4 (Drain and Reset) "
        "to 0x1 (GPU Reset Required)",
        "reset the GPU",
    ),
    (
        "a workstation, driver 610",
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)",
        "reboot the node",
    ),
    (
        "a workstation",
        "NVRM: Xid (PCI:0000:0d:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)",
        "reset the GPU",
    ),
    # NVSwitches: the word decides, not the number.
    (
        GPUD,
        "[131453.740743] nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        DRAIN,
    ),
    (
        GPUD,
        "[111111111.111] nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted "
        "PRIV error (First)",
        "none",
    ),
    (
        "NVIDIA/nvtrust, issue 124",
        "[   38.178720] nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion Link DLREQ "
        "interrupt",
        "none",
    ),
    (
        "a DGX H100",
        "[6781753.404848] nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 60 "
        "Sub-engine instance 00",
        DRAIN,
    ),
    (
        "Fabric Manager guide, always fatal",
        "nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 23005, Fatal, Link 03 ingress",
        "reboot the node",
    ),
]


@of_each("case", RECORDED)
def test_a_recorded_line_asks_for_what_the_vendor_asks_for(case):
    _, line, action = case
    found = entry_of(line)
    assert found.action == action
    assert found.rejects == (action not in ("none", RESTART))


# By code, from NVIDIA's catalogue: what it asks for at once.
RESET = (46, 62, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)
PROGRAM = (8, 11, 13, 25, 31, 32, *range(39, 42), 60, *range(68, 73), *range(75, 78), 80, *range(82, 87), 88, 89, 94,
           *range(96, 106), *range(126, 136), 139)  # fmt: skip
NOTHING = (14, 37, 38, 43, 44, 45, 63, 66, 67, 78, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 159, 160, 161)
UNUSED = (1, 7, 9, 12, 18, 30, 42, 51, 56, 57, 58, 65, 73, 81, 87, 111, 118, 125, 138)
INFORMS = (162, 163, 164, 166, 170)
NOT_STATED = (165, 167, 168, 169, 171, 172, 173, 999)


@pytest.mark.parametrize(
    ("codes", "action"),
    [(RESET, "reset the GPU"), (PROGRAM, RESTART), (NOTHING, "none"), (UNUSED, "check or replace hardware"),
     (INFORMS, "none"), (NOT_STATED, "not stated"), ((79, 151), "reboot the node"), ((48,), DRAIN),
     ((54, 142), "check or replace hardware")],
)  # fmt: skip
def test_each_number_has_the_action_of_the_catalogue(codes, action):
    found = {code: entry_of(f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=17, something happened") for code in codes}
    assert {code: entry.action for code, entry in found.items() if entry.action != action} == {}
    assert {entry.rejects for entry in found.values()} == {action not in ("none", RESTART)}


TORN = [
    "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT",
    "NVRM: Xid (PCI:0000:3b:00): 149",
    "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to",
    "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x9 (Something New)",
    "NVRM: Xid (PCI:0000:3b:00",
    "NVRM: Xid (PCI:0000:3b:00): ",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 29002, Module 3 faulty",
    # An error status that the catalogue has as fatal, whatever the word.
    "NVRM: Xid (PCI:0000:04:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000004 0x00000040 0x00000000)",
]


@of_each("line", TORN)
def test_what_is_cut_off_unknown_or_contradictory_rejects(line):
    assert entry_of(line).rejects


def test_a_recovery_action_that_is_over_asks_for_nothing():
    line = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    assert entry_of(line).action == "none"
    # Source: nvidia-ml-py, NVML_GPU_RECOVERY_ACTION_*; what it does not have is never nothing.
    actions = [recovery_action(value).action for value in range(9)]
    assert actions == ["none", "reset the GPU", "reboot the node", "drain", DRAIN, "drain", "reset the GPU",
                       "reboot the node", "not stated"]  # fmt: skip


def test_each_report_of_the_table_is_there_once_with_an_action_that_is_known():
    known = {"none", RESTART, "drain", "reset the GPU", "reboot the node", "check or replace hardware", "not stated"}
    lines = xid_table.TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    keys = [key for report, *_ in rows for key in xid_table._keys(report)]
    assert sorted(keys) == sorted(set(keys)) == sorted(xid_table.table())
    assert {step for _, action, *_ in rows for step in action.split(", then ")} <= known
