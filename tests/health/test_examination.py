from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_nvml import HEALTHY_H100, FakeNvml
from patient import NAMES, PCI, PID, UUID, examined, nvml, who

from pytest_gpucluster import cause, hardware
from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.health.finding import Finding
from pytest_gpucluster.health.xid import TAKE_OUT
from pytest_gpucluster.kernel_log import KernelLog
from pytest_gpucluster.nvml import NotAvailable
from pytest_gpucluster.pci_bus import PciGpu

ALWAYS = {"not_available"}  # retired pages do not exist on this card


def codes(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.code for finding in findings} - ALWAYS


def log(*lines: str) -> KernelLog:
    return KernelLog(lines=lines, source="dmesg")


def xid(code: int, pci: str = "0000:3b:00") -> str:
    return f"NVRM: Xid (PCI:{pci}): {code}, pid=17, something happened"


def links(down: set[int] = frozenset(), count: int = 18) -> dict[int, bool]:
    return {link: link not in down for link in range(count)}


def grows(*values: Any) -> Any:
    """A value that is another one at each reading; the last one stays."""
    rest: Iterator[Any] = iter(values)
    last: list[Any] = []

    def read() -> Any:
        for value in rest:
            last[:] = [value]
            break
        return last[0]

    return read


def test_nothing_is_wrong_with_a_healthy_gpu() -> None:
    found = examined()
    assert codes(found.findings) == set()
    found.require_healthy()
    assert {reading.metric: reading.value for reading in found.readings()} == {
        "gpu.memory.total": pytest.approx(85.520809984),
        "gpu.memory.free": pytest.approx(99.392, abs=0.001),
        "gpu.temperature": 61,
        "gpu.power_limit": 100,
    }


def test_what_this_card_does_not_have_is_named_in_a_note_and_fails_nothing() -> None:
    (note,) = examined().findings
    assert (note.code, note.kind) == ("not_available", "note")
    assert "pages.pending (not supported by this GPU or driver" in note.found


GB = 10**9
FULL = {"memory.used": 5 * GB}
# id: (what is planted, the code, words of the finding)
HARDWARE: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "memory too small": ({"memory.total": 79 * GB}, "memory_size", ("79.00 GB", "at least 80 GB")),
    "ecc off": ({"ecc.mode": False}, "ecc_off", ("ECC is off", "nvidia-smi -e 1")),
    "uncorrected errors": ({"ecc.uncorrected.volatile": 3}, "ecc_uncorrected", ("3 uncorrected", "dcgmi diag")),
    "uncorrected errors under load": (
        {"ecc.uncorrected.volatile": grows(1, 4)},
        "ecc_uncorrected",
        ("4 uncorrected", "3 of them under this test's load"),
    ),
    "row remap failed": ({"rows.failed": True}, "row_remap_failed", ("has failed", "replaced")),
    "row remap pending": ({"rows.pending": True}, "row_remap_pending", ("waits for a reset",)),
    "rows remapped": (
        {"rows.remapped.corrected": 500, "rows.remapped.uncorrected": 13},
        "rows_remapped",
        ("513 rows", "at most 512"),
    ),
    "page pending": ({"pages.pending": True}, "page_pending", ("waits to be retired",)),
    "hardware slowdown": ({"throttle.reasons": ("hw_slowdown",)}, "throttle", ("hw_slowdown", "61 degC")),
    "hardware thermal": ({"throttle.reasons": ("hw_thermal",)}, "throttle", ("hw_thermal", "airflow")),
    "software thermal": ({"throttle.reasons": ("sw_thermal",)}, "throttle", ("sw_thermal",)),
    "power brake": ({"throttle.reasons": ("hw_power_brake",)}, "throttle", ("hw_power_brake",)),
    # Before the load, once under it, and not any more.
    "slowdown for a moment": (
        {"throttle.reasons": grows((), ("hw_thermal",), ())},
        "throttle",
        ("hw_thermal",),
    ),
    "at the slowdown temperature": ({"temperature.gpu": 89}, "temperature", ("89 degC", "below 89 degC")),
    "no thermal margin": ({"temperature.margin": 0}, "temperature", ("0 degC away",)),
    "power limit lowered": ({"power.limit": 650.0}, "power_limit", ("650 W", "default of 700 W", "-pl 700")),
    "pcie generation": (
        {"pcie.generation": 3},
        "pcie_generation",
        ("PCIe gen3 under load", "card and slot can do gen5", "gen5, as the H100 SXM promises", "reseat"),
    ),
    "pcie slot": (
        {"pcie.generation": 4, "pcie.generation.max": 4},
        "pcie_generation",
        ("PCIe gen4 under load", "can do gen4", "gen5", "look at the slot"),
    ),
    "pcie width": ({"pcie.width": 8}, "pcie_width", ("PCIe x8 under load", "x16")),
    "nvlink down": ({"nvlink.up": links({3, 7})}, "nvlink_down", ("16 NVLinks are up", "down: 3, 7", "18")),
    "nvlink down under load": (
        {"nvlink.up": grows(links(), links({5}))},
        "nvlink_down",
        ("17 NVLinks are up", "down: 5"),
    ),
    "nvlinks missing": ({"nvlink.up": links(count=12)}, "nvlink_down", ("12 NVLinks are up",)),
    "nvlinks gone under load": (
        {"nvlink.up": grows(links(), {})},
        "nvlink_down",
        ("0 NVLinks are up",),
    ),
    "nvlink replays": ({"nvlink.errors": {"replay": {0: 0, 4: 9}}}, "nvlink_errors", ("replay", "link 4: 9")),
    "nvlink recovery": ({"nvlink.errors": {"recovery": {2: 1}}}, "nvlink_errors", ("recovery", "link 2: 1")),
    "nvlink 5 errors grow": (
        {"nvlink.errors": grows({"received_errors": {0: 5, 1: 5}}, {"received_errors": {0: 5, 1: 8}})},
        "nvlink_errors",
        ("received_errors has grown", "link 1: 3"),
    ),
    "fabric ended badly": (
        {"fabric": {"state": "completed", "status": "Not Supported", "health": ()}},
        "fabric_status",
        ("ended with: Not Supported", "fabricmanager"),
    ),
    "fabric degraded": (
        {"fabric": {"state": "completed", "status": "success", "health": ("bandwidth degraded",)}},
        "fabric_health",
        ("bandwidth degraded",),
    ),
}


@pytest.mark.parametrize("case", HARDWARE)
def test_a_hardware_finding_names_its_gpu_and_what_to_do_and_rejects(case: str) -> None:
    planted, code, words = HARDWARE[case]
    found = examined(planted)
    assert codes(found.of_kind("hardware")) == {code}
    assert found.of_kind("environment") == ()
    with pytest.raises(HardwareFault) as caught:
        found.require_healthy()
    text = str(caught.value)
    for word in (*NAMES, code, "allowed: ", "what to do: ", *words):
        assert word in text


ENVIRONMENT: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "memory taken by a leaked process": (
        {"planted": {**FULL, "processes": ((99, 4 * GB + GB // 2), (PID, 5 * GB // 10))}},
        "memory_taken",
        ("4.50 GB are used beside this job", "pid 99 of user alice (python train.py) with 4.50 GB (4500000000 bytes)"),
    ),
    "memory taken by nobody": (
        {"planted": {**FULL, "processes": ()}},
        "memory_taken",
        ("no process that NVML names", "reset the GPU"),
    ),
    "memory of a process without its size": (
        {"planted": {**FULL, "processes": ((99, None),)}},
        "memory_taken",
        ("pid 99 of user alice (python train.py) with an unknown amount",),
    ),
    "a required query missing": (
        {"without": ["ecc.uncorrected.volatile"]},
        "query_missing",
        ("NVML does not tell ecc.uncorrected.volatile: not supported", "update the driver"),
    ),
    "a required query refused": (
        {"planted": {"rows.pending": NotAvailable("no permission for this user or container", "no permission")}},
        "query_missing",
        ("rows.pending", "run as a user, or in a container, that may read it"),
    ),
    "a required query failing": (
        {"planted": {"power.limit": NotAvailable("Unknown Error", "failed")}},
        "query_missing",
        ("power.limit: Unknown Error", "nvidia-smi -q"),
    ),
    "memory taken by a process of another container": (
        {"planted": {**FULL, "processes": ((70001, 4 * GB),)}, "known_pids": False},
        "memory_taken",
        ("pid 70001, which this host or container does not show with 4.00 GB",),
    ),
    "a required query that fails after the load": (
        {"planted": {"ecc.uncorrected.volatile": grows(0, NotAvailable("Unknown Error", "failed"))}},
        "query_missing",
        ("ecc.uncorrected.volatile: Unknown Error",),
    ),
    "throttle reasons not told under load": (
        {"without": ["throttle.reasons"]},
        "query_missing",
        ("throttle.reasons",),
    ),
    "the fabric not started": (
        {"planted": {"fabric": {"state": "not started", "status": "success", "health": ()}}},
        "fabric_state",
        ("is: not started", "systemctl status nvidia-fabricmanager"),
    ),
    "the fabric in progress": (
        {"planted": {"fabric": {"state": "in progress", "status": "success", "health": ()}}},
        "fabric_state",
        ("in progress", "completed"),
    ),
    "a switch whose fabric is not told": (
        {"without": ["fabric"]},
        "fabric_state",
        ("18 NVLinks lead to an NVSwitch", "not supported"),
    ),
    "MIG on, declared off": ({"planted": {"mig.mode": True}}, "mig", ("MIG is on", "off, as the workload declares")),
    "MIG off, declared on": ({"mig": "on"}, "mig", ("MIG is off", "nvidia-smi -mig 1", "health.mig=off")),
}


@pytest.mark.parametrize("case", ENVIRONMENT)
def test_what_cannot_be_judged_or_is_disturbed_is_an_error_and_never_a_pass(case: str) -> None:
    arguments, code, words = ENVIRONMENT[case]
    found = examined(**arguments)
    assert codes(found.of_kind("environment")) == {code}
    assert found.of_kind("hardware") == ()
    with pytest.raises(EnvironmentBroken) as caught:
        found.require_healthy()
    text = str(caught.value)
    for word in (*NAMES, code, *words):
        assert word in text


NOTES: dict[str, tuple[dict[str, Any], str, str]] = {
    "at the power limit": ({"planted": {"throttle.reasons": ("sw_power_cap",)}}, "power_cap", "sw_power_cap"),
    "clocks that somebody has set": (
        {"planted": {"throttle.reasons": ("applications_clocks", "gpu_idle", "unknown_0x1000")}},
        "clocks_held",
        "by: applications_clocks, unknown_0x1000; ",
    ),
    "no limit of temperature": (
        {"planted": {"temperature.slowdown": 0}, "without": ["temperature.margin"]},
        "temperature_limit",
        "61 degC under load, and NVML does not tell",
    ),
    "a kernel log that has overflowed": (
        {"log": KernelLog(source="/dev/kmsg", lost_records=512)},
        "kernel_log",
        "begins late: 512 older records of /dev/kmsg are overwritten",
    ),
    "persistence off": ({"planted": {"persistence.mode": False}}, "persistence", "nvidia-persistenced"),
    "errors of an earlier life": ({"planted": {"ecc.uncorrected.aggregate": 2}}, "ecc_history", "2 uncorrected"),
    "another process that leaves enough": (
        {"planted": {"processes": ((99, 1 * GB),), "memory.used": GB}},
        "stranger",
        "pid 99 of user alice",
    ),
    "CRC errors that NVLink has corrected": (
        {"planted": {"nvlink.errors": {"crc_flit": {0: 12}}}},
        "nvlink_history",
        "crc_flit: link 0: 12",
    ),
    "NVLink 5 errors from before": (
        {"planted": {"nvlink.errors": {"link_recovery": {0: 1}}}},
        "nvlink_history",
        "link_recovery: link 0: 1",
    ),
    "a kernel log that cannot be read": (
        {"log": KernelLog(why_not="dmesg: Operation not permitted")},
        "kernel_log",
        "kernel log of gpu-07 not readable, so Xids are not judged: dmesg: Operation not permitted",
    ),
    "an Xid of a program": ({"log": log(xid(31))}, "xid_31", "Xid 31 once"),
    "fewer ranks than GPUs": (
        {"fake": FakeNvml({UUID: HEALTHY_H100, "GPU-b": {}}, pci={UUID: PCI, "GPU-b": "4:0.0"})},
        "gpus_without_rank",
        "1 ranks on a node of 2 GPUs",
    ),
    "no NVSwitch": ({"without": ["fabric", "nvlink.switch"]}, "fabric_unknown", "no NVLink is known to lead"),
    "links switched off for a single GPU": (
        {"planted": {"nvlink.up": links(set(range(18)))}},
        "nvlink_down",
        "the only GPU of its node",
    ),
    "an unknown kind of GPU": ({"sku": "T4"}, "sku_unknown", "nothing is promised"),
    "a GPU hidden from the job": (
        {"unlisted": (PciGpu(address="0000:5e:00.0", state="hidden", detail="/dev/nvidia4: no such file"),)},
        "gpu_not_listed",
        "/dev/nvidia4",
    ),
    "a bus that cannot be looked at": (
        {"unlisted": PermissionError(13, "Permission denied", "/sys/bus/pci/devices")},
        "pci_bus",
        "Permission denied: '/sys/bus/pci/devices'",
    ),
}


@pytest.mark.parametrize("case", NOTES)
def test_a_note_is_told_and_fails_nothing(case: str) -> None:
    arguments, code, words = NOTES[case]
    found = examined(**arguments)
    assert codes(found.findings) == {code}
    (note,) = (finding for finding in found.findings if finding.code == code)
    assert note.kind == "note"
    assert words in str(note)
    found.require_healthy()


HIDDEN = PciGpu(address="0000:5e:00.0", state="hidden", detail="this container does not show it")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"unlisted": (HIDDEN,)}, id="a container hides the others"),
        pytest.param({"unlisted": PermissionError(13, "Permission denied")}, id="nobody knows of others"),
        pytest.param({"inventory": [{**who(), "local_rank": 3}]}, id="another rank is shown another one"),
        pytest.param({"inventory": [{**who(), "local_world_size": 8}]}, id="each rank is shown its own"),
        pytest.param({"count": 2}, id="there is another one"),
    ],
)
def test_links_that_are_down_are_excused_on_the_only_gpu_of_a_node_alone(arguments: dict[str, Any]) -> None:
    found = examined({"nvlink.up": links(set(range(18)))}, **arguments)
    assert "nvlink_down" in codes(found.of_kind("hardware"))


@pytest.mark.parametrize("code", sorted(TAKE_OUT))
def test_an_xid_of_the_take_out_list_on_this_gpu_rejects(code: int) -> None:
    found = examined(log=log("usb 1-1: new device", xid(code), xid(code), xid(13)))
    assert codes(found.of_kind("hardware")) == {f"xid_{code}"}
    assert codes(found.of_kind("note")) == {"xid_13"}
    with pytest.raises(HardwareFault) as caught:
        found.require_healthy()
    text = str(caught.value)
    for word in (*NAMES, f"Xid {code} 2 times", "(dmesg)", "pid=17, something happened"):
        assert word in text


def test_the_take_out_list_is_the_field_s_and_what_newer_gpus_have_added() -> None:
    assert sorted(TAKE_OUT) == [
        *(48, 56, 57, 58, 62, 63, 64, 65, 68, 69, 73, 74, 79, 80, 81, 92),
        *(95, 119, 120, 140, 143, 158),
    ]


@pytest.mark.parametrize("pci", ["0000:5e:00", "0001:3b:00", "0000:3b:01"])
def test_an_xid_of_another_gpu_is_not_this_ones(pci: str) -> None:
    assert codes(examined(log=log(xid(79, pci))).findings) == set()


def test_without_an_address_no_xid_is_taken_for_anothers() -> None:
    fake = nvml()
    fake.pci[UUID] = ""
    found = examined(fake=fake, log=log(xid(79)))
    assert codes(found.of_kind("environment")) == {"pci_unknown"}


def lost_after(reads: int) -> FakeNvml:
    """A GPU that answers so many queries, and never again."""
    fake, left = nvml(), [reads]
    read = fake.read

    def answer(uuid: str, query: str) -> Any:
        left[0] -= 1
        if left[0] < 0:
            fake.silent = {uuid}
        return read(uuid, query)

    fake.read = answer  # type: ignore[method-assign]
    return fake


@pytest.mark.parametrize("reads", [0, 5, 34, 35, 36, 38, 55])
def test_a_gpu_that_is_lost_at_any_moment_is_rejected_by_its_names(reads: int) -> None:
    found = examined(fake=lost_after(reads))
    assert "gpu_lost" in codes(found.of_kind("hardware"))
    assert found.of_kind("environment") == ()
    with pytest.raises(HardwareFault) as caught:
        found.require_healthy()
    for word in (*NAMES, "does not answer any more", "fallen off the bus"):
        assert word in str(caught.value)


def test_a_load_that_dies_of_a_lost_gpu_is_the_gpus_fault() -> None:
    fake = nvml()

    def die(look: Any) -> None:
        look()
        fake.silent = {UUID}
        raise RuntimeError("CUDA error: unspecified launch failure")

    found = examined(fake=fake, load=die)
    assert {"gpu_lost"} <= codes(found.of_kind("hardware"))
    assert "the load ended with CUDA error: unspecified launch failure" in str(found.findings[0])


def test_a_load_that_fails_on_a_gpu_that_answers_is_raised_as_it_is_and_what_nvml_tells_is_said_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = nvml()

    def die(look: Any) -> None:
        look()
        fake.gpus[UUID]["ecc.uncorrected.volatile"] = 1
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    found = examined(fake=fake, load=die)
    assert "gpu_lost" not in codes(found.findings)
    with pytest.raises(RuntimeError, match="uncorrectable ECC error") as caught:
        found.require_healthy()
    assert cause.gpu_died(caught.value) == "hardware"
    said = capsys.readouterr().out
    assert "ecc_uncorrected (hardware): 1 uncorrected memory errors" in said
    assert all(name in said for name in NAMES)


def test_a_load_without_a_look_is_never_a_pass() -> None:
    found = examined(load=lambda look: None)
    assert codes(found.of_kind("environment")) == {"query_missing"}
    assert "throttle.reasons: it was not read under load" in str(found.of_kind("environment"))


def test_links_that_sleep_when_idle_are_judged_by_their_best_under_load() -> None:
    assert codes(examined({"pcie.generation": grows(1, 1, 5, 1)}).findings) == set()


def test_throttling_before_the_load_says_nothing() -> None:
    assert codes(examined({"throttle.reasons": grows(("hw_slowdown",), ())}).findings) == set()


def test_memory_of_this_jobs_ranks_is_no_leak() -> None:
    taken = {"memory.used": 60 * GB, "processes": ((PID, 40 * GB), (PID + 1, 19 * GB))}
    inventory = [who(), {**who(1), "local_rank": 1}]
    assert codes(examined(taken, inventory=inventory).findings) == set()
    other_node = [who(), {**who(1), "node_rank": 1, "host": "gpu-08"}]
    assert codes(examined(taken, inventory=other_node).of_kind("environment")) == {"memory_taken"}


def test_in_a_container_with_numbers_of_its_own_the_allocator_tells_what_is_this_jobs() -> None:
    taken = {"memory.used": 31 * GB, "processes": ((70001, 31 * GB),)}
    found = examined(taken, held_bytes=30 * GB, known_pids=False)
    assert codes(found.findings) == set()
    leaked = {"memory.used": 41 * GB, "processes": ((70001, 31 * GB), (70002, 10 * GB))}
    found = examined(leaked, held_bytes=30 * GB, known_pids=False)
    assert codes(found.of_kind("environment")) == {"memory_taken"}
    assert "pid 70002, which this host or container does not show" in str(found.of_kind("environment"))


@pytest.mark.parametrize(("used", "healthy"), [(5, True), (5.0001, False)])
def test_ninety_five_percent_of_the_memory_must_be_free(used: float, healthy: bool) -> None:
    found = examined({"memory.total": 100 * GB, "memory.used": round(used * GB)})
    assert (codes(found.of_kind("environment")) == set()) is healthy


@pytest.mark.parametrize(("rows", "healthy"), [(512, True), (513, False)])
def test_up_to_512_rows_may_be_remapped(rows: int, healthy: bool) -> None:
    assert (codes(examined({"rows.remapped.uncorrected": rows}).findings) == set()) is healthy


@pytest.mark.parametrize(
    ("state", "kind"),
    [("dead", "hardware"), ("answers", "hardware"), ("no driver", "environment"), ("elsewhere", "note")],
)
def test_a_gpu_that_the_bus_shows_and_nvml_does_not_is_told_by_its_address(state: Any, kind: str) -> None:
    gone = PciGpu(address="0000:5e:00.0", state=state, detail="its PCI configuration reads as all ones")
    found = examined(unlisted=(gone,), log=log(xid(79, "0000:5e:00")))
    (finding,) = (f for f in found.findings if f.code == "gpu_not_listed")
    assert finding.kind == kind
    for word in ("PCI 0000:5e:00.0", "gpu-07", "reads as all ones", "Xids in the kernel log: 79"):
        assert word in str(finding)


def test_a_gpu_that_nvml_counts_and_that_does_not_answer_is_not_forgotten() -> None:
    found = examined(count=2)
    (finding,) = found.of_kind("hardware")
    assert finding.code == "gpu_silent"
    assert "NVML counts 2 GPUs, and 1 of them do not answer" in str(finding)
    named = PciGpu(address="0000:5e:00.0", state="dead", detail="all ones")
    assert codes(examined(count=2, unlisted=(named,)).of_kind("hardware")) == {"gpu_not_listed"}


def test_one_rank_speaks_for_its_node() -> None:
    gone = PciGpu(address="0000:5e:00.0", state="dead", detail="all ones")
    second = [{**who(), "local_rank": 1, "local_world_size": 2}]
    assert codes(examined(unlisted=(gone,), inventory=second).findings) == set()


def test_a_slice_is_judged_by_its_gpu_but_for_memory_and_links() -> None:
    uuid = "MIG-aa"
    values = {**HEALTHY_H100, "memory.total": 10 * GB, "memory.used": 0, "mig.mode": True, "nvlink.up": links({0, 1})}
    fake = FakeNvml({uuid: values}, pci={uuid: PCI})
    found = examined(fake=fake, inventory=[who(uuid=uuid)], mig="on")
    assert codes(found.findings) == set()
    assert {reading.metric: reading.record_only for reading in found.readings()}["gpu.memory.total"] is True
    found = examined(
        fake=FakeNvml({uuid: {**values, "ecc.uncorrected.volatile": 1}}, pci={uuid: PCI}),
        mig="on",
        inventory=[who(uuid=uuid)],
    )
    assert codes(found.of_kind("hardware")) == {"ecc_uncorrected"}


WITHOUT_LINKS = ("nvlink.up", "nvlink.switch", "nvlink.errors", "fabric")
OTHER_CARDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "H200": ({"memory.total": 150_754_820_096}, ()),
    "H100 PCIe": ({}, WITHOUT_LINKS),
    "H100 NVL": ({"memory.total": 100_485_038_080}, WITHOUT_LINKS),
    "A100 80GB": (
        {"memory.total": 85_899_345_920, "nvlink.up": links(count=12), "pcie.generation": 4, "pcie.generation.max": 4},
        ("fabric", "temperature.margin"),
    ),
    "B200": ({"memory.total": 192_265_846_784, "nvlink.errors": {"received_errors": dict.fromkeys(range(18), 0)}}, ()),
    "GB200": (
        {"memory.total": 198_674_743_296},
        ("pcie.generation", "pcie.width", "pcie.generation.max", "pcie.width.max"),
    ),
    "L40S": (
        {"memory.total": 48_305_799_168, "pcie.generation": 4, "pcie.generation.max": 4},
        (*WITHOUT_LINKS, "mig.mode"),
    ),
}


@pytest.mark.parametrize("sku", OTHER_CARDS)
def test_a_healthy_card_of_another_kind_is_healthy_without_what_it_does_not_have(sku: str) -> None:
    planted, without = OTHER_CARDS[sku]
    found = examined(planted, without=without, sku=sku)
    assert {f.code for f in found.findings if f.kind != "note"} == set()
    assert set(OTHER_CARDS) == {name for name, of in hardware.SKUS.items() if of.promise} - {"H100 SXM"}


@pytest.mark.parametrize("sku", [*OTHER_CARDS, "H100 SXM"])
def test_each_required_query_is_required(sku: str) -> None:
    planted, without = OTHER_CARDS.get(sku, ({}, ()))
    promise = hardware.promise_of(sku)
    assert promise is not None
    for query in promise.required_queries:
        found = examined(planted, without=(*without, query), sku=sku)
        missing = [f for f in found.of_kind("environment") if f.code == "query_missing"]
        assert [f"NVML does not tell {query}: " in f.found for f in missing] == [True]


def test_an_unknown_gpu_is_still_judged_by_its_own_word() -> None:
    found = examined({"pcie.width": 8, "ecc.uncorrected.volatile": 1, "power.limit": 600.0}, sku=None)
    assert codes(found.of_kind("hardware")) == {"pcie_width", "ecc_uncorrected", "power_limit"}
    found = examined(without=["temperature.gpu"], sku=None)
    assert codes(found.of_kind("environment")) == {"query_missing"}


def test_the_first_line_of_the_failure_names_all_codes_and_the_gpu() -> None:
    found = examined({"ecc.uncorrected.volatile": 1, "rows.pending": True, "mig.mode": True, "persistence.mode": False})
    with pytest.raises(HardwareFault) as caught:
        found.require_healthy()
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("ecc_uncorrected, row_remap_pending, mig: GPU 0 (")
    assert [line.split(": ")[1].split(" ")[0] for line in rest if line.startswith("- ")] != []
    assert sum("persistence" in line for line in rest) == 1
