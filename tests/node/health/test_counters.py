"""Fault counters of a rank: what is read, and which of their changes are a fault."""

from dataclasses import replace

import pytest
from complaints import in_order
from counted import GPU, PCI, UUID, XID_79, nvml, sources
from each import of_each
from fake_nvml import FakeNvml
from sysfs_ports import add_port, add_roce, write

from pytest_gpucluster.errors import HardwareFault
from pytest_gpucluster.metrics.finding import Identity
from pytest_gpucluster.node import infiniband, kernel_log
from pytest_gpucluster.node.health import counters
from pytest_gpucluster.node.health.counters import QUERIES, Changes, Sources, changes, read
from pytest_gpucluster.node.infiniband import Adapters
from pytest_gpucluster.node.kernel_log import KernelLog
from pytest_gpucluster.node.nvml import NotAvailable


def test_flags_links_and_counts_become_numbers_by_name():
    planted = {"rows.pending": True, "nvlink.errors": {"replay": {0: 0, 17: 3}}, "nvlink.up": {0: True, 1: False}}
    taken = counters.read(sources(nvml=nvml(**planted)))
    assert taken.values["rows.pending"] == 1
    assert taken.values["nvlink.replay[17]"] == 3
    assert (taken.values["nvlink.up[0]"], taken.values["nvlink.up[1]"]) == (1, 0)
    assert taken.values["ecc.uncorrected.volatile"] == 0
    assert taken.values["pcie.replays"] == 0
    assert set(taken.missing) == {"pages.pending", "infiniband"}, "an H100 has no retired pages"


def test_lines_that_are_alike_are_different_xids():
    taken = counters.read(sources())
    assert [(xid.pci, xid.code) for xid in taken.log.xids.values()] == [("0000:3b:00.0", 79)] * 2
    log = KernelLog(lines=(XID_79 * 2,), source="/dev/kmsg", numbers=(5,))
    taken = counters.read(sources(kernel_log=lambda: log))
    assert list(taken.log.xids) == ["5 #1", "5 #2"], "two on one line"
    log = KernelLog(lines=("a", XID_79, "b"), source="/dev/kmsg", numbers=(7, 8, 9))
    taken = counters.read(sources(kernel_log=lambda: log))
    assert (list(taken.log.xids), taken.log.numbers) == (["8 #1"], (7, 9)), "where the kernel numbers its records"


def test_a_rank_that_is_not_the_first_of_its_node_looks_at_its_gpu_only():
    def not_read():
        raise AssertionError("asked")

    taken = counters.read(sources(of_node=False, kernel_log=not_read, adapters=not_read))
    assert taken.log is None
    assert set(taken.missing) == {"pages.pending"}
    # A rehearsal.
    taken = counters.read(sources(gpu=Identity(host="gpu-07"), nvml=None, kernel_log=not_read))
    assert (dict(taken.values), dict(taken.missing)) == ({}, {"infiniband": "none here"})
    made = Sources.of([{**who(0), "gpu": None}], rank=0)
    assert (made.has_gpu, dict(made.gpus_of_node)) == (False, {})


def test_what_cannot_be_read_is_missing_by_name_and_the_rest_is_there():
    log = KernelLog(why_not="dmesg: refused")
    taken = counters.read(sources(nvml=nvml(**{"ecc.uncorrected.volatile": NotAvailable("ask root", "no permission")}),
                                  kernel_log=lambda: log))  # fmt: skip
    assert taken.missing["ecc.uncorrected.volatile"] == "ask root"
    assert taken.missing["xid"] == "dmesg: refused"
    assert taken.values["rows.failed"] == 0
    assert taken.lost == ""
    taken = counters.read(sources(nvml=None, why_no_nvml="no driver library"))
    assert {name: taken.missing[name] for name in QUERIES} == dict.fromkeys(QUERIES, "no driver library")
    taken = counters.read(sources(nvml=FakeNvml({UUID: {}}, silent=[UUID])))
    assert "lost" in taken.lost
    assert set(QUERIES) <= set(taken.missing)


def who(rank, node=0, local_rank=0, pci=PCI):
    gpu = {"index": local_rank, "uuid": f"GPU-{rank}", "serial": "1", "pci_bus_id": pci}
    return {"rank": rank, "host": f"gpu-{node}", "node_rank": node, "local_rank": local_rank, "gpu": gpu}


def test_a_rank_knows_the_gpus_of_its_own_node_by_their_address():
    inventory = [
        who(0),
        who(1, local_rank=1, pci="00000000:5E:00.0"),
        who(2, node=1),
        who(3, node=1, local_rank=1, pci=None),
    ]
    first = Sources.of(inventory, rank=0, nvml=nvml())
    assert {address: gpu.uuid for address, gpu in first.gpus_of_node.items()} == {
        "0000:3b:00.0": "GPU-0",
        "0000:5e:00.0": "GPU-1",
    }
    assert (first.of_node, first.has_gpu, first.gpu.uuid) == (True, True, "GPU-0")
    assert isinstance(first.kernel_log, kernel_log.Reader)
    second = Sources.of(inventory, rank=3, adapters=lambda: Adapters(why_not="none"))
    assert (second.of_node, second.gpu.host, second.nvml) == (False, "gpu-1", None)
    assert second.adapters().why_not == "none"
    assert {gpu.uuid for gpu in second.gpus_of_node.values()} == {"GPU-2"}


QUIET = KernelLog(lines=("NVRM: loading",), source="dmesg")


def compared(before, after, **more):
    """What a test finds on an H100 whose values were ``before`` and are ``after``."""
    both = {"kernel_log": lambda: QUIET, **more}
    return changes(read(sources(nvml=nvml(**before), **both)), read(sources(nvml=nvml(**after), **both)))


def logged(*lines, source="dmesg", numbers=()):
    log = KernelLog(lines=("NVRM: loading", *lines), source=source, numbers=numbers)
    return read(sources(kernel_log=lambda: log))


def on_port(sysfs):
    return read(Sources(gpu=GPU, of_node=True, kernel_log=lambda: QUIET, nvml=nvml(),
                        adapters=lambda: infiniband.read(sysfs, gids=False)))  # fmt: skip


def test_nothing_has_changed_on_a_healthy_node():
    found = compared({}, {})
    assert (found.changed, found.faults, found.notes) == ({}, [], [])
    found.require_no_fault()


FAULTS = {
    "ecc_uncorrected": ({"ecc.uncorrected.volatile": 2}, {"ecc.uncorrected.volatile": 5}, "3 new"),
    "row_remap_failed": ({}, {"rows.failed": True}, "failed remap"),
    "row_remap_pending": ({}, {"rows.pending": True}, "waits for a reset"),
    "row_remapped": ({}, {"rows.remapped.uncorrected": 1}, "uncorrectable errors"),
    "page_pending": ({"pages.pending": False}, {"pages.pending": True}, "waits to be retired"),
    "nvlink_down": ({}, {"nvlink.up": {**dict.fromkeys(range(18), True), 5: False}}, "link 5"),
    "nvlink_errors": ({}, {"nvlink.errors": {"replay": {**dict.fromkeys(range(18), 0), 3: 7}}}, "replay has grown"),
    "nvlink_errors of NVLink 5": (
        {"nvlink.errors": {"received_errors": {0: 5, 1: 5}}},
        {"nvlink.errors": {"received_errors": {0: 5, 1: 8}}},
        "received_errors has grown: link 1: 3",
    ),
}


@pytest.mark.parametrize("code", FAULTS)
def test_new_trouble_of_the_gpu_is_a_fault_that_names_it(code):
    before, after, words = FAULTS[code]
    code = code.partition(" ")[0]
    found = compared(before, after)
    assert [fault.code for fault in found.faults] == [code]
    with pytest.raises(HardwareFault) as caught:
        found.require_no_fault()
    for word in (f"{code} during this test: GPU 0 (GPU-5f2c", "on gpu-07", words, "what to do: "):
        assert word in str(caught.value)


def test_errors_of_the_card_s_life_are_not_reported_twice_and_count_where_the_driver_was_loaded_anew():
    both = compared({}, {"ecc.uncorrected.volatile": 2, "ecc.uncorrected.aggregate": 2})
    assert [fault.code for fault in both.faults] == ["ecc_uncorrected"]
    reset = compared({"ecc.uncorrected.volatile": 3, "ecc.uncorrected.aggregate": 3}, {"ecc.uncorrected.aggregate": 4})
    assert [fault.code for fault in reset.faults] == ["ecc_uncorrected"]
    [note] = reset.notes
    assert in_order(note, "ecc.uncorrected.volatile 3 0")
    assert dict(reset.changed) == {"ecc.uncorrected.aggregate": 1}
    since = compared({"ecc.uncorrected.volatile": 9}, {"ecc.uncorrected.volatile": 2})
    assert since.changed["ecc.uncorrected.volatile"] == 2, "what a counter shows after a reset has come since"
    assert [fault.code for fault in since.faults] == ["ecc_uncorrected"]
    assert in_order(since.notes[0], "9 2")


OLD = {"ecc.uncorrected.volatile": 5, "rows.pending": True, "nvlink.up": {0: False}}
NO_FAULTS = [
    ({}, {"ecc.corrected.volatile": 4}, {"ecc.corrected.volatile": 4}),
    ({}, {"pcie.replays": 4}, {"pcie.replays": 4}),
    ({}, {"rows.remapped.corrected": 4}, {"rows.remapped.corrected": 4}),
    ({}, {"nvlink.errors": {"crc_flit": {**dict.fromkeys(range(18), 0), 0: 2}}}, {"nvlink.crc_flit[0]": 2}),
    ({"nvlink.up": {0: False}}, {"nvlink.up": {0: True}}, {"nvlink.up[0]": 1}),
    (OLD, OLD, {}),
]


@of_each("case", NO_FAULTS)
def test_what_was_corrected_or_there_before_is_no_fault(case):
    before, after, changed = case
    found = compared(before, after)
    assert (dict(found.changed), found.faults) == (changed, [])


def test_a_card_that_shows_no_link_any_more_has_lost_them():
    found = compared({"nvlink.up": {0: True, 1: True, 2: False}}, {"nvlink.up": {}})
    assert [fault.code for fault in found.faults] == ["nvlink_down"]
    assert "link 0, link 1" in found.faults[0].found


def test_a_gpu_that_is_lost_during_the_test_is_a_fault_and_one_lost_before_is_not_again():
    lost = read(sources(nvml=FakeNvml({UUID: {}}, silent=[UUID]), kernel_log=lambda: QUIET))
    healthy = read(sources(kernel_log=lambda: QUIET))
    assert [fault.code for fault in changes(healthy, lost).faults] == ["gpu_lost"]
    assert changes(lost, lost).faults == []
    assert "ecc.uncorrected.volatile" in changes(lost, lost).missing


def test_a_value_that_was_there_once_only_is_missing_and_no_fault():
    gone = {"ecc.uncorrected.volatile": NotAvailable("driver busy", "failed"), "nvlink.errors": {"replay": {0: 0}}}
    found = compared({}, gone)
    assert found.missing["ecc.uncorrected.volatile"] == "driver busy"
    assert in_order(found.missing["nvlink.errors"], "nvlink.replay[1]")
    assert found.faults == []
    back = compared(gone, {})
    assert back.missing["ecc.uncorrected.volatile"] == "driver busy"
    assert in_order(back.missing["nvlink.errors"], "after")


# ---- Xids ------------------------------------------------------------------------------------------------------------


def test_a_new_xid_that_demands_action_is_a_fault_of_its_gpu():
    found = changes(logged(), logged(XID_79))
    [fault] = found.faults
    assert (fault.code, fault.gpu) == ("xid_79", GPU)
    assert in_order(fault.found, "fallen off")
    assert dict(found.changed) == {"xid.79": 1}
    assert changes(logged(XID_79), logged(XID_79)).faults == [], "it is from before"
    again = changes(logged(XID_79), logged(XID_79, XID_79))
    assert [fault.code for fault in again.faults] == ["xid_79"]
    for rank, ranks in ((7, (7,)), (None, ())):
        with pytest.raises(HardwareFault) as caught:
            Changes(faults=[replace(again.faults[0], gpu=replace(GPU, rank=rank))]).require_no_fault()
        assert (caught.value.ranks, len(caught.value.hosts)) == (ranks, not ranks)


SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:84:00.0): 20034, {}, Link 30 LTSSM Fault Up"
RECOVERY = XID_79.partition("79,")[0] + "154, GPU recovery action changed from 0x0 (None) to 0x{:x} (as it says)"


def test_other_xids_are_notes():
    # A program's, that of another job's GPU, a recovery that is over, and an error that an NVSwitch has corrected.
    remapped = XID_79.replace("79,", "63,")
    for line in (XID_79.replace("79,", "13,"), XID_79.replace("0000:3b", "0000:99"), remapped, RECOVERY.format(0),
                 SWITCH.format("Non-fatal")):  # fmt: skip
        found = changes(logged(), logged(line))
        assert (found.faults, len(found.notes)) == ([], 1)
        assert "action: " in found.notes[0]


def test_the_action_that_the_driver_wants_and_a_switch_s_fatal_error_are_faults():
    [fault] = changes(logged(), logged(RECOVERY.format(2))).faults
    assert (fault.code, fault.gpu, fault.remedy) == ("xid_154", GPU, "reboot the node")
    found = changes(logged(SWITCH.format("Non-fatal")), logged(SWITCH.format("Non-fatal"), SWITCH.format("Fatal")))
    [fault] = found.faults
    assert (fault.code, fault.gpu.host, fault.gpu.uuid) == ("sxid_20034", GPU.host, None)
    assert (dict(found.changed), fault.remedy.split(";")[0]) == ({"sxid.20034": 1}, "drain, then reset the GPU")
    # Of local workers one looks at what is the node's.
    logs = (KernelLog(lines=lines, source="dmesg") for lines in (("a",), ("a", SWITCH.format("Fatal"))))
    others = (sources(kernel_log=lambda log=log: log, of_switches=False) for log in logs)
    assert changes(*map(read, others)).faults == []


def test_a_recovery_action_that_nvml_asks_for_is_a_fault_also_where_no_log_can_be_read():
    refused = {"kernel_log": lambda: KernelLog(why_not="dmesg: not permitted")}
    for before, after, remedies in ((0, 1, ["reset the GPU"]), (1, 2, ["reboot the node"]), (2, 0, []), (2, 2, [])):
        found = compared({"recovery.action": before}, {"recovery.action": after}, **refused)
        assert [fault.remedy.split(";")[0] for fault in found.faults] == remedies
        assert {fault.code for fault in found.faults} <= {"recovery_action"}
        assert found.notes == []


def test_records_that_were_overwritten_do_not_make_old_xids_new():
    before = logged("x", XID_79, source="/dev/kmsg", numbers=(1, 2, 3))
    assert changes(before, logged(XID_79, source="/dev/kmsg", numbers=(2, 3))).faults == []
    found = changes(before, logged(XID_79, "y", source="/dev/kmsg", numbers=(4, 5, 6)))
    assert [fault.code for fault in found.faults] == ["xid_79"]
    assert "xid" not in found.missing


def test_records_that_were_overwritten_unread_are_missing():
    before = logged("x", source="/dev/kmsg", numbers=(1, 2))
    found = changes(before, logged("y", source="/dev/kmsg", numbers=(10, 11)))
    assert in_order(found.missing["xid"], "7 records")
    found = changes(logged(), logged(XID_79, source="/dev/kmsg", numbers=(1, 2)))
    assert found.faults == [], "logs of two sources are not compared"
    assert in_order(found.missing["xid"], "dmesg /dev/kmsg")
    refused = read(sources(kernel_log=lambda: KernelLog(why_not="dmesg: refused")))
    assert changes(logged(), refused).missing["xid"] == "dmesg: refused"


# ---- ports -----------------------------------------------------------------------------------------------------------


@of_each(
    "case",
    [
        ({"counters/link_downed": 3}, "link_down", "mlx5_0/1 3 times"),
        ({"state": "1: DOWN"}, "port_down", "Active"),
        ({"rate": "200 Gb/sec (2X NDR)"}, "port_rate", "400 200 Gb/s"),
    ],
)
def test_a_port_that_loses_its_link_or_speed_is_a_fault_of_the_host(tmp_path, case):
    changed, code, words = case
    port = add_port(tmp_path / code)
    before = on_port(tmp_path / code)
    for name, value in changed.items():
        write(port / name, value)
    found = changes(before, on_port(tmp_path / code))
    [fault] = found.faults
    assert (fault.code, fault.gpu.host, fault.gpu.uuid) == (code, "gpu-07", None)
    assert in_order(fault.found, words)
    with pytest.raises(HardwareFault) as raised:
        found.require_no_fault()
    assert (raised.value.ranks, raised.value.hosts) == ((), ("gpu-07",)), "not the GPU of who has looked"
    assert in_order(str(raised.value).splitlines()[0], f"{code} gpu-07 mlx5_0/1")
    assert "cable" in fault.remedy


def test_what_happens_to_a_port_of_no_fabric_or_one_that_was_not_active_is_a_note(tmp_path):
    add_port(tmp_path)
    storage = add_port(tmp_path, "mlx5_9", pci="0000:9a:00.0", link_layer="Ethernet")
    unused = add_port(tmp_path, "mlx5_1", pci="0000:9b:00.0", state="1: DOWN")
    before = on_port(tmp_path)
    write(storage / "counters" / "link_downed", 1)
    write(storage / "state", "1: DOWN")
    write(unused / "counters" / "link_downed", 1)
    found = changes(before, on_port(tmp_path))
    assert found.faults == []
    notes = sorted(found.notes)
    assert in_order(notes[0], "mlx5_1/1 1 (link_downed) not Active")
    assert [in_order(note, "mlx5_9/1 Ethernet InfiniBand") for note in notes[1:]] == [True, True]


def test_a_roce_port_whose_interface_lost_its_carrier_is_a_fault(tmp_path):
    add_roce(tmp_path)
    before = on_port(tmp_path)
    write(tmp_path / "devices" / "pci0000:16" / "0000:18:00.0" / "net" / "eth2" / "carrier_down_count", 2)
    [fault] = changes(before, on_port(tmp_path)).faults
    assert (fault.code, in_order(fault.found, "mlx5_0/1 1 (carrier_down_count)")) == ("link_down", True)


def test_an_hca_that_vanishes_is_a_fault_and_a_port_that_was_down_is_none(tmp_path):
    add_port(tmp_path)
    add_port(tmp_path, "mlx5_1", state="1: DOWN")
    before = on_port(tmp_path)
    (tmp_path / "class" / "infiniband").rename(tmp_path / "gone")
    found = changes(before, on_port(tmp_path))
    [fault] = found.faults
    assert fault.code == "port_down"
    assert in_order(fault.found, "mlx5_0/1 Active HCA")


def test_bytes_and_errors_of_a_port_are_changes(tmp_path):
    port = add_port(tmp_path)
    before = on_port(tmp_path)
    write(port / "counters" / "port_xmit_data", 3000)
    write(port / "counters" / "symbol_error", 2)
    found = changes(before, on_port(tmp_path))
    assert dict(found.changed) == {
        "infiniband.mlx5_0/1.port_xmit_bytes": 8000,
        "infiniband.mlx5_0/1.symbol_error": 2,
    }
    assert found.faults == []
    write(port / "counters" / "port_xmit_data", 10)
    wrapped = changes(before, on_port(tmp_path))
    assert "infiniband.mlx5_0/1.port_xmit_bytes" not in wrapped.changed, "how much came since is not known"
    assert "wrapped" in wrapped.notes[0]
