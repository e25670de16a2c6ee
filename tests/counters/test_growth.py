from __future__ import annotations

import json
from pathlib import Path

import pytest
from counted import GPU, UUID, XID_79, nvml, sources
from fake_nvml import HEALTHY_H100, FakeNvml
from sysfs_ports import add_port, add_roce, write

from pytest_gpucluster import counters, infiniband
from pytest_gpucluster.counters import Changes, Counters, Sources, changes, take
from pytest_gpucluster.errors import HardwareFault
from pytest_gpucluster.kernel_log import KernelLog
from pytest_gpucluster.nvml import NotAvailable

QUIET = KernelLog(lines=("NVRM: loading",), source="dmesg")


def compared(before: dict[str, object], after: dict[str, object], **more: object) -> Changes:
    """What a test finds on an H100 whose values were ``before`` and are ``after``."""
    both = {"kernel_log": lambda: QUIET, **more}
    return changes(take(sources(nvml=nvml(**before), **both)), take(sources(nvml=nvml(**after), **both)))


def logged(*lines: str, source: str = "dmesg", numbers: tuple[int, ...] = ()) -> Counters:
    log = KernelLog(lines=("NVRM: loading", *lines), source=source, numbers=numbers)
    return take(sources(kernel_log=lambda: log))


def on_port(sysfs: Path) -> Counters:
    return take(Sources(gpu=GPU, of_node=True, kernel_log=lambda: QUIET, nvml=nvml(),
                        adapters=lambda: infiniband.read(sysfs, gids=False)))  # fmt: skip


def test_nothing_has_changed_on_a_healthy_node() -> None:
    found = compared({}, {})
    assert (dict(found.changed), found.faults, found.notes) == ({}, (), ())
    found.require_no_fault()
    assert found.to_json() == {"missing": dict(found.missing)}


FAULTS = {
    "ecc_uncorrected": ({"ecc.uncorrected.volatile": 2}, {"ecc.uncorrected.volatile": 5}, "3 new"),
    "row_remap_failed": ({}, {"rows.failed": True}, "failed remap"),
    "row_remap_pending": ({}, {"rows.pending": True}, "waits for a reset"),
    "row_remapped": ({}, {"rows.remapped.uncorrected": 1}, "uncorrectable errors"),
    "page_pending": ({"pages.pending": False}, {"pages.pending": True}, "waits to be retired"),
    "nvlink_down": ({}, {"nvlink.up": {**dict.fromkeys(range(18), True), 5: False}}, "link 5"),
    "nvlink_errors": ({}, {"nvlink.errors": {"replay": {**dict.fromkeys(range(18), 0), 3: 7}}}, "replay has grown"),
}


@pytest.mark.parametrize("code", FAULTS)
def test_new_trouble_of_the_gpu_is_a_fault_that_names_it(code: str) -> None:
    before, after, words = FAULTS[code]
    found = compared(before, after)
    assert [fault.code for fault in found.faults] == [code]
    with pytest.raises(HardwareFault) as caught:
        found.require_no_fault()
    for word in (f"{code} during this test: GPU 0 (GPU-5f2c", "on gpu-07", words, "what to do: "):
        assert word in str(caught.value)
    json.dumps(found.to_json())


def test_trouble_from_before_the_test_is_no_change() -> None:
    old = {"ecc.uncorrected.volatile": 5, "rows.pending": True, "nvlink.up": {0: False}}
    assert compared(old, old).faults == ()


def test_errors_of_the_card_s_life_are_not_told_twice_and_count_where_the_driver_was_loaded_anew() -> None:
    both = compared({}, {"ecc.uncorrected.volatile": 2, "ecc.uncorrected.aggregate": 2})
    assert [fault.code for fault in both.faults] == ["ecc_uncorrected"]
    reset = compared({"ecc.uncorrected.volatile": 3, "ecc.uncorrected.aggregate": 3}, {"ecc.uncorrected.aggregate": 4})
    assert [fault.code for fault in reset.faults] == ["ecc_uncorrected"]
    assert reset.notes == ("ecc.uncorrected.volatile went from 3 to 0: it was reset, or wrapped",)
    assert dict(reset.changed) == {"ecc.uncorrected.aggregate": 1}


def test_what_a_counter_shows_after_a_reset_has_come_since() -> None:
    found = compared({"ecc.uncorrected.volatile": 9}, {"ecc.uncorrected.volatile": 2})
    assert found.changed["ecc.uncorrected.volatile"] == 2
    assert [fault.code for fault in found.faults] == ["ecc_uncorrected"]
    assert "went from 9 to 2" in found.notes[0]


@pytest.mark.parametrize(
    "after",
    [{"ecc.corrected.volatile": 4}, {"pcie.replays": 4}, {"rows.remapped.corrected": 4}],
    ids=["corrected", "replays", "remapped in time"],
)
def test_what_was_corrected_is_a_change_and_no_fault(after: dict[str, object]) -> None:
    found = compared({}, after)
    assert dict(found.changed) == dict.fromkeys(after, 4)
    assert found.faults == ()


def test_a_counter_of_nvlink_that_nobody_judges_is_a_change_only() -> None:
    found = compared({}, {"nvlink.errors": {"crc_flit": {**dict.fromkeys(range(18), 0), 0: 2}}})
    assert found.changed["nvlink.crc_flit[0]"] == 2
    assert found.faults == ()


def test_a_card_that_shows_no_link_any_more_has_lost_them() -> None:
    found = compared({"nvlink.up": {0: True, 1: True, 2: False}}, {"nvlink.up": {}})
    assert [fault.code for fault in found.faults] == ["nvlink_down"]
    assert "link 0, link 1" in found.faults[0].found


def test_a_link_that_has_come_up_is_no_fault() -> None:
    found = compared({"nvlink.up": {0: False}}, {"nvlink.up": {0: True}})
    assert dict(found.changed) == {"nvlink.up[0]": 1}
    assert found.faults == ()


def test_a_gpu_that_is_lost_during_the_test_is_a_fault_and_one_lost_before_is_not_again() -> None:
    lost = take(sources(nvml=FakeNvml({UUID: {}}, silent=[UUID]), kernel_log=lambda: QUIET))
    healthy = take(sources(kernel_log=lambda: QUIET))
    assert [fault.code for fault in changes(healthy, lost).faults] == ["gpu_lost"]
    assert changes(lost, lost).faults == ()
    assert "ecc.uncorrected.volatile" in changes(lost, lost).missing


def test_a_value_that_was_there_once_only_is_missing_and_no_fault() -> None:
    gone = {"ecc.uncorrected.volatile": NotAvailable("driver busy", "failed"), "nvlink.errors": {"replay": {0: 0}}}
    found = compared({}, gone)
    assert found.missing["ecc.uncorrected.volatile"] == "driver busy"
    assert found.missing["nvlink.errors"] == "nvlink.replay[1] was told before the test only"
    assert found.faults == ()
    back = compared(gone, {})
    assert back.missing["ecc.uncorrected.volatile"] == "driver busy"
    assert back.missing["nvlink.errors"].endswith("after the test only")


# ---- Xids ------------------------------------------------------------------------------------------------------------


def test_a_new_xid_of_the_take_out_list_is_a_fault_of_its_gpu() -> None:
    found = changes(logged(), logged(XID_79))
    [fault] = found.faults
    assert (fault.code, fault.gpu) == ("xid_79", GPU)
    assert "fallen off the bus" in fault.found
    assert dict(found.changed) == {"xid.79": 1}


def test_an_xid_from_before_is_not_new_and_the_same_once_more_is() -> None:
    assert changes(logged(XID_79), logged(XID_79)).faults == ()
    again = changes(logged(XID_79), logged(XID_79, XID_79))
    assert [fault.code for fault in again.faults] == ["xid_79"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (XID_79.replace("79,", "13,"), "a program can cause it"),
        (XID_79.replace("0000:3b", "0000:99"), "which is no GPU of this job"),
    ],
    ids=["a program's", "another job's GPU"],
)
def test_other_xids_are_notes(line: str, words: str) -> None:
    found = changes(logged(), logged(line))
    assert found.faults == ()
    assert words in found.notes[0]


def test_records_that_were_overwritten_do_not_make_old_xids_new() -> None:
    before = logged("x", XID_79, source="/dev/kmsg", numbers=(1, 2, 3))
    assert changes(before, logged(XID_79, source="/dev/kmsg", numbers=(2, 3))).faults == ()
    found = changes(before, logged(XID_79, "y", source="/dev/kmsg", numbers=(4, 5, 6)))
    assert [fault.code for fault in found.faults] == ["xid_79"]
    assert "xid" not in found.missing


def test_records_that_nobody_has_read_are_missing() -> None:
    before = logged("x", source="/dev/kmsg", numbers=(1, 2))
    found = changes(before, logged("y", source="/dev/kmsg", numbers=(10, 11)))
    assert found.missing["xid"] == "the kernel has overwritten 7 records before they were read"


def test_logs_of_two_sources_are_not_compared() -> None:
    found = changes(logged(), logged(XID_79, source="/dev/kmsg", numbers=(1, 2)))
    assert found.faults == ()
    assert found.missing["xid"] == "the kernel log was read from dmesg before the test and from /dev/kmsg after it"


def test_a_log_that_cannot_be_read_any_more_is_missing() -> None:
    refused = take(sources(kernel_log=lambda: KernelLog(why_not="dmesg: no answer within 5 s")))
    assert changes(logged(), refused).missing["xid"] == "dmesg: no answer within 5 s"


# ---- ports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"counters/link_downed": 3}, "link_down", "port mlx5_0/1 has lost its link 3 times"),
        ({"state": "1: DOWN"}, "port_down", "was Active before"),
        ({"rate": "200 Gb/sec (2X NDR)"}, "port_rate", "from 400 to 200 Gb/s"),
    ],
    ids=["flapped", "down", "slower"],
)
def test_a_port_that_loses_its_link_or_speed_is_a_fault_of_the_host(
    tmp_path: Path, changed: dict[str, object], code: str, words: str
) -> None:
    port = add_port(tmp_path)
    before = on_port(tmp_path)
    for name, value in changed.items():
        write(port / name, value)
    [fault] = changes(before, on_port(tmp_path)).faults
    assert (fault.code, fault.gpu.host, fault.gpu.uuid) == (code, "gpu-07", None)
    assert words in fault.found
    assert "cable" in fault.remedy


def test_a_roce_port_whose_interface_lost_its_carrier_is_a_fault(tmp_path: Path) -> None:
    add_roce(tmp_path)
    before = on_port(tmp_path)
    write(tmp_path / "devices" / "pci0000:16" / "0000:18:00.0" / "net" / "eth2" / "carrier_down_count", 2)
    [fault] = changes(before, on_port(tmp_path)).faults
    assert (fault.code, fault.found) == ("link_down", "port mlx5_0/1 has lost its link 1 times (carrier_down_count)")


def test_what_happens_to_a_port_of_no_fabric_is_a_note(tmp_path: Path) -> None:
    add_port(tmp_path)
    storage = add_port(tmp_path, "mlx5_9", pci="0000:9a:00.0", link_layer="Ethernet")
    before = on_port(tmp_path)
    write(storage / "counters" / "link_downed", 1)
    write(storage / "state", "1: DOWN")
    found = changes(before, on_port(tmp_path))
    assert found.faults == ()
    assert len(found.notes) == 2
    assert all(note.endswith("; it is an Ethernet port beside a fabric of InfiniBand") for note in found.notes)


def test_a_port_that_was_not_active_before_rejects_nothing(tmp_path: Path) -> None:
    add_port(tmp_path)
    unused = add_port(tmp_path, "mlx5_1", pci="0000:9a:00.0", state="1: DOWN")
    before = on_port(tmp_path)
    write(unused / "counters" / "link_downed", 1)
    found = changes(before, on_port(tmp_path))
    assert found.faults == ()
    assert found.notes == (
        "port mlx5_1/1 has lost its link 1 times (link_downed); it was not Active before the test either",
    )


def test_an_hca_that_vanishes_is_a_fault_and_a_port_that_was_down_is_none(tmp_path: Path) -> None:
    add_port(tmp_path)
    add_port(tmp_path, "mlx5_1", state="1: DOWN")
    before = on_port(tmp_path)
    (tmp_path / "class" / "infiniband").rename(tmp_path / "gone")
    found = changes(before, on_port(tmp_path))
    [fault] = found.faults
    assert fault.code == "port_down"
    assert "port mlx5_0/1 was Active before, and its HCA is gone: " in fault.found


def test_bytes_and_errors_of_a_port_are_changes(tmp_path: Path) -> None:
    port = add_port(tmp_path)
    before = on_port(tmp_path)
    write(port / "counters" / "port_xmit_data", 3000)
    write(port / "counters" / "symbol_error", 2)
    found = changes(before, on_port(tmp_path))
    assert dict(found.changed) == {
        "infiniband.mlx5_0/1.port_xmit_bytes": 8000,
        "infiniband.mlx5_0/1.symbol_error": 2,
    }
    assert found.faults == ()
    write(port / "counters" / "port_xmit_data", 10)
    wrapped = changes(before, on_port(tmp_path))
    assert "infiniband.mlx5_0/1.port_xmit_bytes" not in wrapped.changed, "how much came since is not known"
    assert "wrapped" in wrapped.notes[0]


def test_a_second_port_and_a_healthy_gpu_have_all_they_need() -> None:
    assert set(counters.snapshot.QUERIES) - set(HEALTHY_H100) == {"pages.pending"}
