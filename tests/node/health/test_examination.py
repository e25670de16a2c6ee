"""A GPU in trouble is found by the checks of one snapshot; a fleet is uniform; the page lists every finding."""

import re
from pathlib import Path

import pytest
from complaints import in_order
from each import of_each
from fake_nvml import HEALTHY_H100, FakeNvml
from patient import NAMES, PCI, PID, UUID, examined, nvml, sources, who

from pytest_gpucluster import errors
from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.metrics import datasheets
from pytest_gpucluster.metrics.finding import identity
from pytest_gpucluster.node.health.checks import FINDINGS
from pytest_gpucluster.node.health.snapshot import UNDER_LOAD, collect, require_uniform
from pytest_gpucluster.node.kernel_log import KernelLog
from pytest_gpucluster.node.nvml import NotAvailable, read_values
from pytest_gpucluster.node.nvml_queries import QUERIES
from pytest_gpucluster.node.pci import PciGpu


def codes(findings):
    return {finding.code for finding in findings}


def log(*lines):
    return KernelLog(lines=lines, source="dmesg")


def xid(code, pci="0000:3b:00"):
    return f"NVRM: Xid (PCI:{pci}): {code}, pid=17, something happened"


def links(down=frozenset(), count=18):
    return {link: link not in down for link in range(count)}


def grows(*values):
    """A value that is another one at each reading; the last one stays."""
    rest = iter(values)
    last = []

    def read():
        for value in rest:
            last[:] = [value]
            break
        return last[0]

    return read


def test_nothing_is_wrong_with_a_healthy_gpu():
    found = examined()
    assert codes(found.findings) == set()
    found.require_healthy()
    assert {reading.metric: reading.value for reading in found.readings()} == {
        "gpu.memory.total": pytest.approx(85.520809984),
        "gpu.memory.free": pytest.approx(99.392, abs=0.001),
        "gpu.temperature": 61,
        "gpu.power_limit": 100,
    }


def fabric(state="completed", status="success", health=()):
    return {"fabric": {"state": state, "status": status, "health": health}}


GB = 10**9
FULL = {"memory.used": 5 * GB}
REASONS, ECC, UP, ERRORS = "throttle.reasons", "ecc.uncorrected.volatile", "nvlink.up", "nvlink.errors"
# id: (what is planted, the code, what the finding names)
HARDWARE = {
    "memory too small": ({"memory.total": 79 * GB}, "memory_size", "79.00 GB", "80 GB"),
    "ecc off": ({"ecc.mode": False}, "ecc_off", "nvidia-smi -e 1"),
    "uncorrected errors": ({ECC: 3}, "ecc_uncorrected", "3 ", "dcgmi diag"),
    "row remap failed": ({"rows.failed": True}, "row_remap_failed", "replaced"),
    "row remap pending": ({"rows.pending": True}, "row_remap_pending", "reset"),
    "rows remapped": ({"rows.remapped.corrected": 500, "rows.remapped.uncorrected": 13}, "rows_remapped", "513", "512"),
    "page pending": ({"pages.pending": True}, "page_pending", "retired"),
    "hardware slowdown": ({REASONS: ("hw_slowdown",)}, "throttle", "hw_slowdown", "61 degC"),
    "hardware thermal": ({REASONS: ("hw_thermal",)}, "throttle", "hw_thermal", "airflow"),
    "software thermal": ({REASONS: ("sw_thermal",)}, "throttle", "sw_thermal"),
    "power brake": ({REASONS: ("hw_power_brake",)}, "throttle", "hw_power_brake"),
    # Before the load, once under it, and not any more.
    "slowdown for a moment": ({REASONS: grows((), ("hw_thermal",), ())}, "throttle", "hw_thermal"),
    "at the slowdown temperature": ({"temperature.gpu": 89}, "temperature", "89 degC", "below 89 degC"),
    "no thermal margin": ({"temperature.margin": 0}, "temperature", "0 degC"),
    "power limit lowered": ({"power.limit": 650.0}, "power_limit", "650 W", "700 W", "-pl 700"),
    "pcie generation": ({"pcie.generation": 3}, "pcie_generation", "gen3", "support gen5", "H100 SXM", "reseat"),
    "pcie slot": ({"pcie.generation": 4, "pcie.generation.max": 4}, "pcie_generation", "support gen4", "gen5", "slot"),
    "pcie width": ({"pcie.width": 8}, "pcie_width", "x8", "x16"),
    "nvlink down": ({UP: links({3, 7})}, "nvlink_down", "16 ", "down: 3, 7", "18"),
    "nvlinks missing": ({UP: links(count=12)}, "nvlink_down", "12 "),
    "nvlink replays": ({ERRORS: {"replay": {0: 0, 4: 9}}}, "nvlink_errors", "replay", "link 4: 9"),
    "nvlink recovery": ({ERRORS: {"recovery": {2: 1}}}, "nvlink_errors", "recovery", "link 2: 1"),
    "fabric ended badly": (fabric(status="Not Supported"), "fabric_status", "Not Supported", "fabricmanager"),
    "fabric degraded": (fabric(health=("bandwidth degraded",)), "fabric_health", "bandwidth degraded"),
}


@pytest.mark.parametrize("case", HARDWARE)
def test_a_hardware_finding_names_its_gpu_and_what_to_do_and_rejects(case):
    planted, code, *words = HARDWARE[case]
    found = examined(planted)
    assert codes(found.of_kind("hardware")) == {code}
    assert found.of_kind("environment") == ()
    with pytest.raises(HardwareFault) as caught:
        found.require_healthy()
    text = str(caught.value)
    for word in (*NAMES, code, "allowed: ", "what to do: ", *words):
        assert word in text


TAKER = "pid 99 of user alice (python train.py)"
REFUSED, FAILED = NotAvailable("no permission", "no permission"), NotAvailable("Unknown Error", "failed")
LEAK = {**FULL, "processes": ((99, 4 * GB + GB // 2), (PID, 5 * GB // 10))}
HIDDEN_LEAK = {**FULL, "processes": ((70001, 4 * GB),)}
ENVIRONMENT = {
    "memory taken by a leaked process": ({"planted": LEAK}, "memory_taken", "4.50 GB", f"{TAKER} with 4.50 GB"),
    "memory taken by no process": ({"planted": {**FULL, "processes": ()}}, "memory_taken", "reset the GPU"),
    "memory of a process without its size": ({"planted": {**FULL, "processes": ((99, None),)}}, "memory_taken", TAKER),
    "of another container": ({"planted": HIDDEN_LEAK, "known_pids": False}, "memory_taken", "pid 70001,", "4.00 GB"),
    "a required query missing": ({"without": [ECC]}, "query_missing", f"{ECC}: not supported", "driver"),
    "a required query refused": ({"planted": {"rows.pending": REFUSED}}, "query_missing", "rows.pending", "user"),
    "a required query failing": ({"planted": {"power.limit": FAILED}}, "query_missing", "power.limit: Unknown Error"),
    "throttle reasons missing under load": ({"without": [REASONS]}, "query_missing", REASONS),
    "the fabric not started": ({"planted": fabric("not started")}, "fabric_state", "not started", "fabricmanager"),
    "the fabric in progress": ({"planted": fabric("in progress")}, "fabric_state", "in progress", "completed"),
    "a switch without the fabric's state": ({"without": ["fabric"]}, "fabric_state", "18 NVLinks", "not supported"),
    "MIG on, declared off": ({"planted": {"mig.mode": True}}, "mig", "MIG is on", "allowed: off"),
    "MIG off, declared on": ({"mig": "on"}, "mig", "MIG is off", "nvidia-smi -mig 1", "health.mig=off"),
}


@pytest.mark.parametrize("case", ENVIRONMENT)
def test_what_cannot_be_judged_or_is_disturbed_is_an_error_and_never_a_pass(case):
    arguments, code, *words = ENVIRONMENT[case]
    found = examined(**arguments)
    assert codes(found.of_kind("environment")) == {code}
    assert found.of_kind("hardware") == ()
    with pytest.raises(EnvironmentBroken) as caught:
        found.require_healthy()
    text = str(caught.value)
    for word in (*NAMES, code, *words):
        assert word in text


CLOCKS = ("applications_clocks", "gpu_idle", "unknown_0x1000")
HIDDEN = PciGpu(address="0000:5e:00.0", state="hidden", detail="/dev/nvidia4: no such file")
NO_BUS = PermissionError(13, "Permission denied", "/sys/bus/pci/devices")
NOTES = [
    ({"planted": {REASONS: CLOCKS}}, "clocks_held", "applications_clocks, unknown_0x1000;"),
    ({"log": KernelLog(source="/dev/kmsg", lost_records=512)}, "kernel_log", "512 older records of /dev/kmsg"),
    ({"log": KernelLog(why_not="dmesg: not permitted")}, "kernel_log", "dmesg: not permitted"),
    ({"planted": {"persistence.mode": False}}, "persistence", "nvidia-persistenced"),
    ({"planted": {"ecc.uncorrected.aggregate": 2}}, "ecc_history", "2 uncorrected"),
    # Another process, which leaves enough.
    ({"planted": {"processes": ((99, 1 * GB),), "memory.used": GB}}, "stranger", "pid 99 of user alice"),
    ({"planted": {ERRORS: {"crc_flit": {0: 12}}}}, "nvlink_history", "crc_flit: link 0: 12"),
    ({"planted": {ERRORS: {"link_recovery": {0: 1}}}}, "nvlink_history", "link_recovery: link 0: 1"),
    ({"log": log(xid(31))}, "xid_31", "Xid 31 once"),
    # Bridges are optional on this card.
    (
        {"planted": {UP: {0: True, 1: False}}, "without": ["fabric", "nvlink.switch"], "sku": "H100 PCIe"},
        "nvlink_down",
        "down: 1; allowed: any number",
    ),
    # Links that are switched off for a single GPU.
    ({"planted": {UP: links(set(range(18)))}}, "nvlink_down", "only GPU"),
    ({"sku": "T4"}, "sku_unknown", "data sheet"),
    ({"unlisted": (HIDDEN,)}, "gpu_not_listed", "/dev/nvidia4"),
    ({"unlisted": NO_BUS}, "pci_bus", "Permission denied: '/sys/bus/pci/devices'"),
]


@of_each("case", NOTES)
def test_a_note_is_reported_and_fails_nothing(case):
    arguments, code, words = case
    found = examined(**arguments)
    assert codes(found.findings) == {code}
    (note,) = (finding for finding in found.findings if finding.code == code)
    assert note.kind == "note"
    assert words in str(note)
    found.require_healthy()


ONLY_GPU_DOUBTED = [
    {"unlisted": (HIDDEN,)},
    {"unlisted": NO_BUS},
    # Another rank is shown another GPU; each rank is shown its own; there is another one.
    {"inventory": [{**who(), "local_rank": 3}]},
    {"inventory": [{**who(), "local_world_size": 8}]},
    {"count": 2},
]


@of_each("arguments", ONLY_GPU_DOUBTED)
def test_links_that_are_down_are_excused_on_the_only_gpu_of_a_node_alone(arguments):
    found = examined({"nvlink.up": links(set(range(18)))}, **arguments)
    assert "nvlink_down" in codes(found.of_kind("hardware"))


@of_each("code", [48, 79])  # test_xid_table has all
def test_an_xid_after_which_the_gpu_is_out_of_service_rejects(code):
    found = examined(log=log("usb 1-1: new device", xid(code), xid(code), xid(13)))
    assert codes(found.of_kind("hardware")) == {f"xid_{code}"}
    assert codes(found.of_kind("note")) == {"xid_13"}
    with pytest.raises(HardwareFault) as caught:
        found.require_healthy()
    for word in (*NAMES, f"Xid {code} 2 times", "(dmesg)", "pid=17, something happened", "what to do: "):
        assert word in str(caught.value)


@of_each("code", [31, 63])
def test_an_xid_that_a_program_can_cause_is_a_note(code):
    found = examined(log=log(xid(code)))
    assert codes(found.findings) == codes(found.of_kind("note")) == {f"xid_{code}"}
    found.require_healthy()


ACTION = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from {} to {}"
LINK = "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT  {}   XC0 i0 Link 01 (0x021425c6 0x00000000)"
SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:84:00.0): 20034, {}, Link 30 LTSSM Fault Up"


def test_the_line_itself_decides_where_it_says_what_to_do():
    harmless = (ACTION.format("0x1 (GPU Reset Required)", "0x0 (None)"), LINK.format("Nonfatal"))
    for bad, code, action in (
        (ACTION.format("0x0 (None)", "0x4 (Drain and Reset)"), "xid_154", "drain, then reset the GPU"),
        (LINK.format("Fatal"), "xid_149", "reset the GPU"),
        (SWITCH.format("Fatal"), "sxid_20034", "drain, then reset the GPU"),
    ):
        # The worst report of a number is shown, whatever came after it.
        found = examined(log=log(bad, *harmless, SWITCH.format("Non-fatal")))
        [finding] = found.of_kind("hardware")
        assert (finding.code, f"action: {action}; the worst one: " in finding.found) == (code, True)
        assert finding.remedy.startswith(action)
        assert (finding.gpu.index is None) == code.startswith("sxid"), "a switch is the node's"
    found = examined(log=log(*harmless, SWITCH.format("Non-fatal")))
    assert codes(found.findings) == codes(found.of_kind("note")) == {"xid_154", "xid_149", "sxid_20034"}
    found.require_healthy()


def test_what_nvml_wants_collected_the_gpu_rejects_it_also_without_a_log():
    for value, action in ((1, "reset the GPU"), (2, "reboot the node"), (3, "drain"), (99, "not stated")):
        found = examined({"recovery.action": value}, log=KernelLog(why_not="dmesg: not permitted"))
        [finding] = found.of_kind("hardware")
        assert (finding.code, finding.remedy.startswith(action)) == ("recovery_action", True)


HEALTHY = [
    {"planted": {REASONS: ("sw_power_cap", "gpu_idle")}},
    # A card without a limit of its own: one that slows down has a throttle reason.
    {"planted": {"temperature.slowdown": 0}, "without": ["temperature.margin"]},
    {"fake": FakeNvml({UUID: HEALTHY_H100, "GPU-b": {}}, pci={UUID: PCI, "GPU-b": "4:0.0"})},
    {"planted": {"memory.total": 100 * GB, "memory.used": 5 * GB}},
    {"planted": {"rows.remapped.uncorrected": 512}},
    # Links that sleep when idle are judged by their best under load, and throttling before it says nothing.
    {"planted": {"pcie.generation": grows(1, 1, 5, 1)}},
    {"planted": {REASONS: grows(("hw_slowdown",), ())}},
    # Xids of other GPUs.
    *({"log": log(xid(79, pci))} for pci in ("0000:5e:00", "0001:3b:00", "0000:3b:01")),
]


@of_each("arguments", HEALTHY)
def test_what_is_just_good_enough_and_what_is_another_s_is_healthy(arguments):
    assert codes(examined(**arguments).findings) == set()


def test_what_is_just_not_good_enough_is_found():
    taken = examined({"memory.total": 100 * GB, "memory.used": round(5.0001 * GB)})
    assert codes(taken.of_kind("environment")) == {"memory_taken"}
    assert codes(examined({"rows.remapped.uncorrected": 513}).of_kind("hardware")) == {"rows_remapped"}


def test_without_an_address_no_xid_is_taken_for_anothers():
    fake = nvml()
    fake.pci[UUID] = ""
    found = examined(fake=fake, log=log(xid(79)))
    assert codes(found.of_kind("environment")) == {"pci_unknown"}


def lost_after(reads):
    """A GPU that answers a number of queries, and then none."""
    fake, left = nvml(), [reads]
    read = fake.read

    def answer(uuid, query):
        left[0] -= 1
        if left[0] < 0:
            fake.silent = {uuid}
        return read(uuid, query)

    fake.read = answer
    return fake


@of_each("reads", [0, 5, len(QUERIES) - 1, len(QUERIES), len(QUERIES) + 1, len(QUERIES) + len(UNDER_LOAD) - 1])
def test_a_gpu_that_is_lost_at_any_moment_is_rejected_by_its_names(reads):
    found = examined(fake=lost_after(reads))
    assert "gpu_lost" in codes(found.of_kind("hardware"))
    assert found.of_kind("environment") == ()
    with pytest.raises(HardwareFault) as caught:
        found.require_healthy()
    for word in (*NAMES, "fallen off the bus"):
        assert word in str(caught.value)


def test_a_load_that_dies_of_a_lost_gpu_is_the_gpus_fault():
    fake = nvml()

    def die(look):
        look()
        fake.silent = {UUID}
        raise RuntimeError("CUDA error: unspecified launch failure")

    found = examined(fake=fake, load=die)
    assert {"gpu_lost"} <= codes(found.of_kind("hardware"))
    assert "unspecified launch failure" in str(found.findings[0])


def test_a_load_that_fails_on_a_gpu_that_answers_is_raised_as_it_is_after_the_findings_are_printed(capsys):
    def die(look):
        look()
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    found = examined({"ecc.uncorrected.volatile": 1}, load=die)
    assert "gpu_lost" not in codes(found.findings)
    with pytest.raises(RuntimeError, match="uncorrectable ECC error") as caught:
        found.require_healthy()
    assert errors.gpu_died(caught.value) == "hardware"
    output = capsys.readouterr().out
    assert "ecc_uncorrected (hardware): 1 " in output
    assert all(name in output for name in NAMES)


def test_a_load_without_a_look_is_never_a_pass():
    found = examined(load=lambda look: None)
    assert codes(found.of_kind("environment")) == {"query_missing"}
    assert REASONS in str(found.of_kind("environment"))


def test_memory_of_this_jobs_ranks_is_no_leak():
    taken = {"memory.used": 60 * GB, "processes": ((PID, 40 * GB), (PID + 1, 19 * GB))}
    inventory = [who(), {**who(1), "local_rank": 1}]
    assert codes(examined(taken, inventory=inventory).findings) == set()
    other_node = [who(), {**who(1), "node_rank": 1, "host": "gpu-08"}]
    assert codes(examined(taken, inventory=other_node).of_kind("environment")) == {"memory_taken"}


def test_in_a_container_with_pids_of_its_own_the_allocator_counts_as_this_jobs():
    taken = {"memory.used": 31 * GB, "processes": ((70001, 31 * GB),)}
    found = examined(taken, held_bytes=30 * GB, known_pids=False)
    assert codes(found.findings) == set()
    leaked = {"memory.used": 41 * GB, "processes": ((70001, 31 * GB), (70002, 10 * GB))}
    found = examined(leaked, held_bytes=30 * GB, known_pids=False)
    assert codes(found.of_kind("environment")) == {"memory_taken"}
    assert "pid 70002, " in str(found.of_kind("environment"))


@pytest.mark.parametrize(
    ("state", "kind"),
    [("dead", "hardware"), ("answers", "hardware"), ("no driver", "environment"), ("elsewhere", "note")],
)
def test_a_gpu_that_the_bus_shows_and_nvml_does_not_is_reported_by_its_address(state, kind):
    gone = PciGpu(address="0000:5e:00.0", state=state, detail="its PCI configuration reads as all ones")
    found = examined(unlisted=(gone,), log=log(xid(79, "0000:5e:00")))
    (finding,) = (f for f in found.findings if f.code == "gpu_not_listed")
    assert finding.kind == kind
    for word in ("PCI 0000:5e:00.0", "gpu-07", "reads as all ones", "log: 79"):
        assert word in str(finding)
    known = {**who(1, pci_bus_id="00000000:5E:00.0"), "pid": 9}
    (finding,) = (f for f in examined(unlisted=(gone,), inventory=[who(), known]).findings if f.code == finding.code)
    assert finding.gpu.uuid == "GPU-1", "a rank had it at the start"


def test_a_gpu_that_nvml_counts_and_that_does_not_answer_is_not_forgotten():
    found = examined(count=2)
    (finding,) = found.of_kind("hardware")
    assert finding.code == "gpu_silent"
    assert "2 GPUs, and 1 of them" in str(finding)
    named = PciGpu(address="0000:5e:00.0", state="dead", detail="all ones")
    second = [{**who(), "local_rank": 1, "local_world_size": 2}]
    assert codes(examined(unlisted=(named,), inventory=second).findings) == set(), "one rank speaks for its node"
    assert codes(examined(count=2, unlisted=(named,)).of_kind("hardware")) == {"gpu_not_listed"}


def test_a_slice_is_judged_by_its_gpu_but_for_memory_and_links():
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
OTHER_CARDS = {
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
    "H800 PCIe": ({}, WITHOUT_LINKS),
    "H20": ({"memory.total": 102_625_181_696}, ()),
    "GH200": (
        {"memory.total": 102_625_181_696},
        (*WITHOUT_LINKS, "pcie.generation", "pcie.width", "pcie.generation.max", "pcie.width.max"),
    ),
    "A100 40GB": (
        {"memory.total": 42_949_672_960, "nvlink.up": links(count=12), "pcie.generation": 4, "pcie.generation.max": 4},
        ("fabric", "temperature.margin"),
    ),
    "A100 PCIe 40GB": (
        {"memory.total": 42_949_672_960, "pcie.generation": 4, "pcie.generation.max": 4},
        (*WITHOUT_LINKS, "temperature.margin"),
    ),
    "A100 PCIe 80GB": (
        {"memory.total": 85_899_345_920, "pcie.generation": 4, "pcie.generation.max": 4},
        (*WITHOUT_LINKS, "temperature.margin"),
    ),
    "B300": ({"memory.total": 288_400_343_040, "nvlink.errors": {"received_errors": dict.fromkeys(range(18), 0)}}, ()),
    "GB300": (
        {"memory.total": 298_013_687_808},
        ("pcie.generation", "pcie.width", "pcie.generation.max", "pcie.width.max"),
    ),
    "L40S": (
        {"memory.total": 48_305_799_168, "pcie.generation": 4, "pcie.generation.max": 4},
        (*WITHOUT_LINKS, "mig.mode"),
    ),
}


@of_each("sku", list(OTHER_CARDS))
def test_a_healthy_card_of_another_kind_is_healthy_without_what_it_does_not_have(sku):
    planted, without = OTHER_CARDS[sku]
    found = examined(planted, without=without, sku=sku)
    assert {f.code for f in found.findings if f.kind != "note"} == set()
    assert set(OTHER_CARDS) == {name for name, of in datasheets.SKUS.items() if of.promise} - {"H100 SXM"}


@of_each("sku", [*OTHER_CARDS, "H100 SXM"])
def test_each_required_query_is_required(sku):
    planted, without = OTHER_CARDS.get(sku, ({}, ()))
    promise = datasheets.promise_of(sku)
    for query in promise.required_queries:
        found = examined(planted, without=(*without, query), sku=sku)
        missing = [f for f in found.of_kind("environment") if f.code == "query_missing"]
        assert [f" {query}: " in f.found for f in missing] == [True]


def test_an_unknown_gpu_is_still_judged_by_its_own_word():
    found = examined({"pcie.width": 8, "ecc.uncorrected.volatile": 1, "power.limit": 600.0}, sku=None)
    assert codes(found.of_kind("hardware")) == {"pcie_width", "ecc_uncorrected", "power_limit"}
    found = examined(without=["temperature.gpu"], sku=None)
    assert codes(found.of_kind("environment")) == {"query_missing"}


def test_an_optional_query_that_fails_is_noted_and_one_that_is_not_supported_is_not():
    denied = NotAvailable("no permission for this user or container", "no permission")
    for planted, noted in (({"pcie.replays": denied}, True), ({}, False)):
        notes = [one for one in examined(planted, without=("pages.pending",)).findings if one.code == "not_available"]
        assert ["pcie.replays" in note.found and "pages" not in note.found for note in notes] == [True] * noted


def test_a_snapshot_has_each_query_as_a_value_or_as_missing():
    snapshot = read_values(nvml({"power.draw": NotAvailable("asleep", "failed")}), UUID)
    assert set(snapshot.values) | set(snapshot.missing) == set(QUERIES)
    assert not set(snapshot.values) & set(snapshot.missing)
    assert (snapshot.missing["power.draw"].reason, snapshot.missing["power.draw"].kind) == ("asleep", "failed")
    assert snapshot.get("power.draw") is None


def test_a_lost_gpu_is_not_asked_again():
    asked = []
    fake = nvml(silent=[UUID])
    read = fake.read
    fake.read = lambda uuid, query: asked.append(query) or read(uuid, query)
    snapshot = read_values(fake, UUID)
    assert len(asked) == 1
    assert {missing.kind for missing in snapshot.missing.values()} == {"lost"}
    assert set(snapshot.missing) == set(QUERIES)
    assert examined(fake=nvml(silent=[UUID])).snapshot.gpu == identity(who()), "it keeps its names"


def test_what_means_something_under_load_only_is_read_under_load():
    fake, asked = nvml(), []
    read = fake.read
    fake.read = lambda uuid, query: asked.append(query) or read(uuid, query)

    def load(look):
        asked.clear()
        look()
        assert asked == list(UNDER_LOAD)

    snapshot = examined(fake=fake, load=load).snapshot
    assert len(snapshot.under_load) == 1
    assert snapshot.loaded("clock.sm") == [1755]


def test_the_rank_that_asks_finds_itself_and_the_ranks_of_its_node():
    others = [{**who(rank), "host": "gpu-08" if rank == 2 else "gpu-07", "node_rank": rank // 2} for rank in (1, 2)]
    snapshot = collect(
        sources(nvml()),
        [*others, {**who(), "rank": 7}],
        rank=7,
        sku="H100 SXM",
        mig="off",
        load=lambda look: look(),
        held_bytes=5,
    )
    assert snapshot.gpu.uuid == UUID
    assert snapshot.own_pids == {PID, PID + 1}
    assert snapshot.held_bytes == 5
    assert snapshot.promise is not None


PAGE = Path(__file__).parents[3] / "docs" / "single-node.md"


def test_every_finding_is_documented_with_its_kind_and_none_is_invented():
    _, _, table = PAGE.read_text(encoding="utf-8").partition("| finding | kind | raised when |")
    rows = [line.split("|")[1:3] for line in table.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    documented = {code: kinds for names, kinds in rows for code in re.findall(r"`(\w+)`", names)}
    assert set(documented) == set(FINDINGS)
    for code, (kind, _, _) in FINDINGS.items():
        assert kind in documented[code], code


def fleet(*changes):
    """One GPU on each of several hosts."""
    return [{**who(rank, **change), "host": f"gpu-{rank:02}"} for rank, change in enumerate(changes)]


def test_equal_gpus_are_a_fleet():
    require_uniform(fleet({}, {}, {}))
    # A card that cannot be cut into slices does not say whether it is.
    require_uniform(fleet({"mig": None}, {"mig": None}))


def test_the_odd_ranks_are_named_with_their_values_and_hosts():
    odd = {"vbios": "96.00.30", "memory_bytes": 79 * 10**9, "power_limit_watts": 650.0, "ecc": False, "mig": True}
    for key, value in odd.items():
        with pytest.raises(HardwareFault, match=rf"{value} on rank 2 \(gpu-02\)"):
            require_uniform(fleet({}, {}, {key: value}, {}))
    with pytest.raises(HardwareFault) as caught:
        require_uniform(fleet({}, {}, odd, {}))
    assert caught.value.ranks == (2,)
    with pytest.raises(HardwareFault) as tie:
        require_uniform(fleet({"vbios": "x"}, {"vbios": "y"}))
    assert tie.value.ranks == (0, 1), "which is right is unknown"
    first, *rest = str(caught.value).splitlines()
    assert in_order(first, "VBIOS: 96.00.30 rank 2 (gpu-02); 96.00.74.00.01 ranks 0-1, 3 (gpu-00")
    assert "ECC" in "".join([first, *rest]), "all differences at once"
    with pytest.raises(HardwareFault):  # a difference weighs more than what is not known
        require_uniform(fleet({"vbios": None}, {"vbios": "x"}, {"vbios": "y"}))


def test_the_odd_gpus_are_reported_by_all_their_names_and_no_others():
    with pytest.raises(HardwareFault) as caught:
        require_uniform(fleet({}, {}, {"vbios": "x", "serial": "odd"}, {}))
    names = [line for line in str(caught.value).splitlines() if line.startswith("- ")]
    assert names == ["- rank 2: GPU 2 (GPU-2, serial odd, PCI 00000000:3B:00.0) on gpu-02"]


def test_what_is_not_known_is_never_taken_for_equal():
    for changes, words in (
        ([{"vbios": None}, {"vbios": None}], "VBIOS: ranks 0-1"),
        ([{}, {"power_limit_watts": None}], "power limit rank 1"),
        ([{}, {"mig": None}], "MIG: rank 1"),
    ):
        with pytest.raises(EnvironmentBroken) as caught:
            require_uniform(fleet(*changes))
        assert in_order(str(caught.value), words)
