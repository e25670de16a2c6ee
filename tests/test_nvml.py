from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.nvml import COMMON_ANCESTORS, QUERIES, NotAvailable, PyNvml
from pytest_gpucluster.nvml_queries import LINK_ENDS, LINK_VERSIONS

GPU, SLICE, OTHER = "GPU-aa", "MIG-bb", "GPU-cc"


class Library:
    """The driver's library under the real nvidia-ml-py: its functions answer, or fail with NVML's own errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.asked: list[tuple[str, Any]] = []
        self.answers("nvmlInit", lambda: None)
        self.answers("nvmlDeviceGetHandleByUUID", lambda uuid: f"handle of {uuid}")
        self.answers("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", lambda slice_: "handle of its GPU")

    def answers(self, function: str, answer: Any) -> None:
        assert hasattr(pynvml, function), f"nvidia-ml-py has no {function}"

        def call(*arguments: Any, **named: Any) -> Any:
            self.asked.append((function, arguments[0] if arguments else None))
            return answer(*arguments, **named) if callable(answer) else answer

        self._monkeypatch.setattr(pynvml, function, call)

    def fails(self, function: str, error: int) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise pynvml.NVMLError(error)

        self.answers(function, fail)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(monkeypatch)


SIMPLE: list[tuple[str, str, Any, Any]] = [
    ("serial", "nvmlDeviceGetSerial", b"165", "165"),
    ("board.part_number", "nvmlDeviceGetBoardPartNumber", "900-2G520-0000-000", "900-2G520-0000-000"),
    ("inforom", "nvmlDeviceGetInforomImageVersion", "G520.0200.00.05", "G520.0200.00.05"),
    # This one comes as bytes also from an nvidia-ml-py that gives text else.
    ("gsp.firmware", "nvmlDeviceGetGspFirmwareVersion", b"580.65.06", "580.65.06"),
    ("vbios", "nvmlDeviceGetVbiosVersion", "96.00", "96.00"),
    ("ecc.mode", "nvmlDeviceGetEccMode", [1, 0], True),
    ("pages.pending", "nvmlDeviceGetRetiredPagesPendingStatus", 0, False),
    ("clock.sm", "nvmlDeviceGetClockInfo", lambda _, kind: {pynvml.NVML_CLOCK_SM: 1980}[kind], 1980),
    ("clock.sm.max", "nvmlDeviceGetMaxClockInfo", lambda _, kind: {pynvml.NVML_CLOCK_SM: 1980}[kind], 1980),
    ("clock.memory.max", "nvmlDeviceGetMaxClockInfo", lambda _, kind: {pynvml.NVML_CLOCK_MEM: 2620}[kind], 2620),
    ("clock.memory", "nvmlDeviceGetClockInfo", lambda _, kind: {pynvml.NVML_CLOCK_MEM: 2619}[kind], 2619),
    ("power.draw", "nvmlDeviceGetPowerUsage", 690500, 690.5),
    ("power.limit", "nvmlDeviceGetEnforcedPowerLimit", 700000, 700.0),
    ("power.limit.default", "nvmlDeviceGetPowerManagementDefaultLimit", 700000, 700.0),
    ("temperature.gpu", "nvmlDeviceGetTemperature", lambda _, kind: {pynvml.NVML_TEMPERATURE_GPU: 61}[kind], 61),
    (
        "temperature.slowdown",
        "nvmlDeviceGetTemperatureThreshold",
        lambda _, kind: {pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 89}[kind],
        89,
    ),
    ("temperature.margin", "nvmlDeviceGetMarginTemperature", -2, -2),
    ("utilization.gpu", "nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=97, memory=3), 97),
    ("pcie.generation", "nvmlDeviceGetCurrPcieLinkGeneration", 5, 5),
    ("pcie.width", "nvmlDeviceGetCurrPcieLinkWidth", 16, 16),
    ("pcie.generation.max", "nvmlDeviceGetMaxPcieLinkGeneration", 5, 5),
    ("pcie.width.max", "nvmlDeviceGetMaxPcieLinkWidth", 16, 16),
    ("mig.mode", "nvmlDeviceGetMigMode", [0, 1], False),
    ("persistence.mode", "nvmlDeviceGetPersistenceMode", 1, True),
    ("rows.remapped.corrected", "nvmlDeviceGetRemappedRows", (1, 2, 0, 1), 1),
    ("rows.remapped.uncorrected", "nvmlDeviceGetRemappedRows", (1, 2, 0, 1), 2),
    ("rows.pending", "nvmlDeviceGetRemappedRows", (1, 2, 0, 1), False),
    ("rows.failed", "nvmlDeviceGetRemappedRows", (1, 2, 0, 1), True),
    ("throttle.reasons", "nvmlDeviceGetCurrentClocksEventReasons", 0x44, ("sw_power_cap", "hw_thermal")),
    ("throttle.reasons", "nvmlDeviceGetCurrentClocksEventReasons", 0x600, ("board_limit", "reliability")),
    ("throttle.reasons", "nvmlDeviceGetCurrentClocksEventReasons", 0x1001, ("gpu_idle", "unknown_0x1000")),
]


@pytest.mark.parametrize(("query", "function", "answer", "value"), SIMPLE)
def test_a_query_is_one_plain_value_in_its_unit(
    library: Library, query: str, function: str, answer: Any, value: Any
) -> None:
    library.answers(function, answer)
    assert PyNvml().read(GPU, query) == value
    assert QUERIES[query].functions == function


@pytest.mark.parametrize("field", ["total", "reserved", "free", "used"])
def test_memory_tells_what_the_driver_keeps_apart_from_what_is_used(library: Library, field: str) -> None:
    def info(_: object, version: int) -> Any:
        assert version == pynvml.nvmlMemory_v2
        return SimpleNamespace(total=100, reserved=10, free=60, used=30)

    library.answers("nvmlDeviceGetMemoryInfo", info)
    assert PyNvml().read(GPU, f"memory.{field}") == {"total": 100, "reserved": 10, "free": 60, "used": 30}[field]


@pytest.mark.parametrize(
    ("query", "kind", "counter"),
    [
        ("ecc.uncorrected.volatile", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
        ("ecc.uncorrected.aggregate", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC),
        ("ecc.corrected.volatile", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC),
    ],
)
def test_ecc_errors_are_of_their_kind_and_counter(library: Library, query: str, kind: int, counter: int) -> None:
    library.answers("nvmlDeviceGetTotalEccErrors", lambda _, *which: {(kind, counter): 7}[which])
    assert PyNvml().read(GPU, query) == 7


def test_processes_come_once_each_also_where_graphics_is_not_supported(library: Library) -> None:
    library.answers(
        "nvmlDeviceGetComputeRunningProcesses",
        [SimpleNamespace(pid=9, usedGpuMemory=None), SimpleNamespace(pid=7, usedGpuMemory=500)],
    )
    library.fails("nvmlDeviceGetGraphicsRunningProcesses", pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert PyNvml().read(GPU, "processes") == ((7, 500), (9, None))
    library.answers(
        "nvmlDeviceGetGraphicsRunningProcesses",
        [SimpleNamespace(pid=7, usedGpuMemory=1), SimpleNamespace(pid=3, usedGpuMemory=2)],
    )
    assert PyNvml().read(GPU, "processes") == ((3, 2), (7, 500), (9, None))


def test_links_that_are_up_tell_their_version_and_what_is_at_their_other_end(library: Library) -> None:
    def of(answers: dict[int, Any]) -> Any:
        def answer(_: object, link: int) -> Any:
            if link not in answers:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answers[link]

        return answer

    library.answers("nvmlDeviceGetNvLinkState", of({0: 1, 1: 0, 2: 1, 3: 1}))
    library.answers("nvmlDeviceGetNvLinkVersion", of({0: 5, 2: 99}))
    library.answers("nvmlDeviceGetNvLinkRemoteDeviceType", of({0: 0, 2: 2, 3: 7}))
    library.answers("nvmlDeviceGetNvLinkRemotePciInfo", lambda *_: SimpleNamespace(busId=b"00000000:3B:00.0"))
    address = "00000000:3B:00.0"
    assert PyNvml().read(GPU, "nvlink.version") == {0: "3.1", 2: "unknown (99)"}
    assert PyNvml().read(GPU, "nvlink.ends") == {
        0: ("gpu", address),
        2: ("switch", address),
        3: ("unknown (7)", address),
    }


def test_the_names_of_versions_ends_and_ancestors_are_the_librarys() -> None:
    named = {value: name for name, value in vars(pynvml).items() if name.startswith("NVML_NVLINK_VERSION_")}
    told = {number: name[20:].replace("_", ".") for number, name in named.items() if number}
    # An nvidia-ml-py of 13.580 does not have the latest one yet; what it has must be ours.
    assert told.items() <= dict(LINK_VERSIONS).items()
    assert len(told) >= len(LINK_VERSIONS) - 2
    levels = {value: name for name, value in vars(pynvml).items() if name.startswith("NVML_TOPOLOGY_")}
    assert {level: levels[level][14:].lower() for level in COMMON_ANCESTORS} == {
        **COMMON_ANCESTORS,
        40: levels[40][14:].lower(),
    }
    assert pynvml.NVML_TOPOLOGY_NODE == 40
    kinds = {value: name for name, value in vars(pynvml).items() if name.startswith("NVML_NVLINK_DEVICE_TYPE_")}
    assert {kind: name[24:].lower().removeprefix("ibm") for kind, name in kinds.items()} == dict(LINK_ENDS)


def test_the_gpus_that_answer_are_listed_and_the_others_are_left_out(library: Library) -> None:
    def handle(index: int) -> str:
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return f"GPU-{index}"

    library.answers("nvmlDeviceGetCount", 4)
    library.answers("nvmlDeviceGetHandleByIndex", handle)
    library.answers("nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    library.answers("nvmlDeviceGetIndex", lambda gpu: int(gpu[-1]))
    library.answers("nvmlDeviceGetName", b"NVIDIA H100")
    library.answers("nvmlDeviceGetPciInfo", lambda gpu: SimpleNamespace(busId=f"0000000{gpu[-1]}:1B:00.0"))

    def uuid(gpu: str) -> str:
        if gpu == "GPU-3":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return gpu

    library.answers("nvmlDeviceGetUUID", uuid)
    assert [(gpu.index, gpu.uuid, gpu.pci_bus_id) for gpu in PyNvml().listed()] == [
        (0, "GPU-0", "00000000:1B:00.0"),
        (2, "GPU-2", "00000002:1B:00.0"),
    ]


def test_what_two_gpus_have_in_common_has_a_name_or_a_reason(library: Library) -> None:
    for level, name in {20: "multiple", 50: "system", 60: "unknown (60)"}.items():
        library.answers("nvmlDeviceGetTopologyCommonAncestor", level)
        assert PyNvml().between(GPU, OTHER) == name
    library.fails("nvmlDeviceGetTopologyCommonAncestor", pynvml.NVML_ERROR_NOT_SUPPORTED)
    with pytest.raises(NotAvailable, match=r"not supported.*CommonAncestor"):
        PyNvml().between(GPU, OTHER)


def test_nvlinks_are_those_that_the_card_has(library: Library) -> None:
    def state(_: object, link: int) -> int:
        if link < 3:
            return int(link != 1)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT if link < 10 else pynvml.NVML_ERROR_NOT_SUPPORTED)

    library.answers("nvmlDeviceGetNvLinkState", state)
    assert PyNvml().read(GPU, "nvlink.up") == {0: True, 1: False, 2: True}


def field_values(answers: dict[int, int]) -> Any:
    """Answer as nvmlDeviceGetFieldValues: each field has its own return code and its own type."""

    def values(_: object, asked: list[tuple[int, int]]) -> list[Any]:
        found = []
        for field, scope in asked:
            value = pynvml.c_nvmlFieldValue_t()
            value.fieldId, value.scopeId = field, scope
            value.nvmlReturn = pynvml.NVML_SUCCESS if field in answers else pynvml.NVML_ERROR_NOT_SUPPORTED
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            value.value.ullVal = answers.get(field, 99) + scope
            found.append(value)
        return found

    return values


def test_nvlink_errors_are_the_counters_of_the_links_that_are_up(library: Library) -> None:
    library.answers("nvmlDeviceGetNvLinkState", lambda _, link: {0: 1, 1: 0, 2: 1}.get(link, 0))

    def counter(_: object, link: int, which: int) -> int:
        if which == pynvml.NVML_NVLINK_ERROR_DL_REPLAY:
            return 10 + link
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    library.answers("nvmlDeviceGetNvLinkErrorCounter", counter)
    recovery = pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS
    library.answers("nvmlDeviceGetFieldValues", field_values({recovery: 100}))
    assert PyNvml().read(GPU, "nvlink.errors") == {"replay": {0: 10, 2: 12}, "link_recovery": {0: 100, 2: 102}}


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_DEPRECATED])
def test_a_card_without_the_older_counters_tells_the_newer_ones(library: Library, error: int) -> None:
    library.answers("nvmlDeviceGetNvLinkState", lambda _, link: int(link == 0))
    library.fails("nvmlDeviceGetNvLinkErrorCounter", error)
    received = pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS
    library.answers("nvmlDeviceGetFieldValues", field_values({received: 7}))
    assert PyNvml().read(GPU, "nvlink.errors") == {"received_errors": {0: 7}}


def test_nvlink_errors_are_not_available_where_no_counter_is_supported(library: Library) -> None:
    library.answers("nvmlDeviceGetNvLinkState", lambda _, link: int(link == 0))
    library.fails("nvmlDeviceGetNvLinkErrorCounter", pynvml.NVML_ERROR_NOT_SUPPORTED)
    library.answers("nvmlDeviceGetFieldValues", field_values({}))
    with pytest.raises(NotAvailable, match="not supported by this GPU or driver"):
        PyNvml().read(GPU, "nvlink.errors")


def test_a_gpu_that_is_lost_while_field_values_are_read_is_lost(library: Library) -> None:
    def lost(_: object, asked: list[tuple[int, int]]) -> list[Any]:
        value = pynvml.c_nvmlFieldValue_t()
        value.nvmlReturn = pynvml.NVML_ERROR_GPU_IS_LOST
        return [value for _ in asked]

    library.answers("nvmlDeviceGetFieldValues", lost)
    with pytest.raises(NotAvailable) as caught:
        PyNvml().read(GPU, "nvlink.switch")
    assert caught.value.kind == "lost"


def test_nvlink_bytes_are_counted_for_all_links_together(library: Library) -> None:
    sent, received = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
    every = 2**32 - 1  # UINT_MAX, which the fake adds to each answer as the scope
    library.answers("nvmlDeviceGetFieldValues", field_values({sent: 5, received: 7}))
    assert PyNvml().read(GPU, "nvlink.bytes") == {"sent": 1024 * (5 + every), "received": 1024 * (7 + every)}


def test_where_a_card_counts_bytes_by_link_those_that_are_up_are_added(library: Library) -> None:
    library.answers("nvmlDeviceGetNvLinkState", lambda _, link: {0: 1, 1: 0, 2: 1}.get(link, 0))
    sent, received = pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES, pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES
    library.answers("nvmlDeviceGetFieldValues", field_values({sent: 100, received: 1000}))
    assert PyNvml().read(GPU, "nvlink.bytes") == {"sent": 100 + 102, "received": 1000 + 1002}


@pytest.mark.parametrize("known", [[], [pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX]], ids=["none", "one way only"])
def test_nvlink_bytes_are_not_available_where_not_both_ways_are_counted(library: Library, known: list[int]) -> None:
    library.answers("nvmlDeviceGetNvLinkState", lambda _, link: int(link == 0))
    library.answers("nvmlDeviceGetFieldValues", field_values(dict.fromkeys(known, 5)))
    with pytest.raises(NotAvailable, match="not supported by this GPU or driver"):
        PyNvml().read(GPU, "nvlink.bytes")


def test_every_gpu_is_listed_also_one_that_does_not_answer(library: Library) -> None:
    def handle(index: int) -> Any:
        error = {1: pynvml.NVML_ERROR_GPU_IS_LOST, 2: pynvml.NVML_ERROR_NO_PERMISSION}.get(index)
        if error is not None:
            raise pynvml.NVMLError(error)
        return f"handle {index}"

    def uuid(of: str) -> str:
        if of == "handle 3":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return f"GPU of {of}"

    library.answers("nvmlDeviceGetCount", 5)
    library.answers("nvmlDeviceGetHandleByIndex", handle)
    library.answers("nvmlDeviceGetUUID", uuid)
    assert PyNvml().uuids() == ("GPU of handle 0", None, None, "GPU of handle 4"), "what a cgroup hides is not ours"


def test_nvlinks_to_a_switch_are_a_field_value(library: Library) -> None:
    library.answers("nvmlDeviceGetFieldValues", field_values({pynvml.NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT: 18}))
    assert PyNvml().read(GPU, "nvlink.switch") == 18
    library.answers("nvmlDeviceGetFieldValues", field_values({}))
    with pytest.raises(NotAvailable):
        PyNvml().read(GPU, "nvlink.switch")


def fills(structure: str, refusal: int = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, /, **fields: int) -> Any:
    """Fill the structure that was handed over by reference, and refuse others."""

    def fill(_: object, reference: Any) -> None:
        info = reference._obj
        if type(info) is not getattr(pynvml, structure):
            raise pynvml.NVMLError(refusal)
        for name, value in fields.items():
            setattr(info, name, value)

    return fill


@pytest.mark.parametrize("structure", ["c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"])
def test_the_fabric_tells_state_status_and_health(library: Library, structure: str) -> None:
    library.answers(
        "nvmlDeviceGetGpuFabricInfoV",
        fills(structure, state=pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, status=0, healthMask=0b10_10),
    )
    assert PyNvml().read(GPU, "fabric") == {"state": "completed", "status": "success", "health": ()}
    degraded = (1 << pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW) | (
        5 << pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION
    )
    library.answers("nvmlDeviceGetGpuFabricInfoV", fills(structure, state=3, status=999, healthMask=degraded))
    found = PyNvml().read(GPU, "fabric")
    assert found == {
        "state": "completed",
        "status": "Unknown Error",
        "health": ("bandwidth degraded", "incorrect configuration"),
    }


def test_a_driver_that_calls_a_newer_structure_invalid_is_asked_with_an_older_one(library: Library) -> None:
    answer = fills("c_nvmlGpuFabricInfo_v2_t", pynvml.NVML_ERROR_INVALID_ARGUMENT, state=3, status=0, healthMask=1)
    library.answers("nvmlDeviceGetGpuFabricInfoV", answer)
    assert PyNvml().read(GPU, "fabric")["health"] == ("bandwidth degraded",)


def test_an_old_driver_tells_the_fabric_without_health(library: Library) -> None:
    library.fails("nvmlDeviceGetGpuFabricInfoV", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    library.answers("nvmlDeviceGetGpuFabricInfo", fills("c_nvmlGpuFabricInfo_t", state=2, status=0))
    assert PyNvml().read(GPU, "fabric") == {"state": "in progress", "status": "success", "health": ()}


def test_a_future_fabric_state_is_not_taken_for_a_known_one(library: Library) -> None:
    library.answers("nvmlDeviceGetGpuFabricInfoV", fills("c_nvmlGpuFabricInfo_v3_t", state=9))
    assert PyNvml().read(GPU, "fabric")["state"] == "unknown (9)"


REASONS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: ("not supported", "not supported by this GPU or driver"),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: ("not supported", "not known to this driver"),
    pynvml.NVML_ERROR_DEPRECATED: ("not supported", "not supported any more by this driver"),
    pynvml.NVML_ERROR_NO_PERMISSION: ("no permission", "no permission"),
    pynvml.NVML_ERROR_GPU_IS_LOST: ("lost", "the GPU is lost"),
    pynvml.NVML_ERROR_RESET_REQUIRED: ("lost", "requires a reset"),
    pynvml.NVML_ERROR_UNKNOWN: ("failed", "Unknown Error"),
    pynvml.NVML_ERROR_TIMEOUT: ("failed", "Timeout"),
}


@pytest.mark.parametrize("error", REASONS)
def test_why_there_is_no_value_is_told_apart(library: Library, error: int) -> None:
    library.fails("nvmlDeviceGetPowerUsage", error)
    kind, words = REASONS[error]
    with pytest.raises(NotAvailable) as caught:
        PyNvml().read(GPU, "power.draw")
    assert caught.value.kind == kind
    assert words in str(caught.value)
    assert "nvmlDeviceGetPowerUsage" in str(caught.value)


def test_a_query_that_the_package_is_too_old_for_is_not_available(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pynvml, "nvmlDeviceGetMarginTemperature")
    with pytest.raises(NotAvailable, match="the installed nvidia-ml-py is too old for nvmlDeviceGetMarginTemperature"):
        PyNvml().read(GPU, "temperature.margin")


def test_a_query_that_the_driver_is_too_old_for_is_not_available(library: Library) -> None:
    def mismatch(_: object) -> None:
        raise pynvml.NVMLLibraryMismatchError("driver and package do not match")

    library.answers("nvmlDeviceGetComputeRunningProcesses", mismatch)
    with pytest.raises(NotAvailable, match="do not match"):
        PyNvml().read(GPU, "processes")


def test_nvml_that_cannot_even_count_is_no_gpus_fault(library: Library) -> None:
    library.fails("nvmlDeviceGetCount", pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(EnvironmentBroken, match=r"NVML failed: Unknown Error \(nvmlDeviceGetCount\)"):
        PyNvml().count()


def test_a_programming_error_is_not_taken_for_an_old_package(library: Library) -> None:
    library.answers("nvmlDeviceGetUtilizationRates", SimpleNamespace())
    with pytest.raises(AttributeError):
        PyNvml().read(GPU, "utilization.gpu")


def test_an_unknown_query_is_a_mistake(library: Library) -> None:
    with pytest.raises(KeyError):
        PyNvml().read(GPU, "power.drawn")


def test_a_slice_has_its_own_memory_and_its_gpu_has_the_rest(library: Library) -> None:
    handles = {}
    library.answers(
        "nvmlDeviceGetMemoryInfo", lambda handle, version: handles.update(memory=handle) or SimpleNamespace(total=5)
    )
    library.answers("nvmlDeviceGetPowerUsage", lambda handle: handles.update(power=handle) or 5)
    nvml = PyNvml()
    nvml.read(SLICE, "memory.total")
    nvml.read(SLICE, "power.draw")
    assert handles == {"memory": f"handle of {SLICE}", "power": "handle of its GPU"}


def describe(library: Library, uuids: dict[int, str], lost: set[int], refused: frozenset[int] = frozenset()) -> None:
    """A node whose GPUs are numbered; some are lost, some kept from this process."""

    def handle(index: int) -> int:
        if index in refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        if index in lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def by_uuid(uuid: str) -> int:
        if lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return next(index for index, other in uuids.items() if other == uuid)

    library.answers("nvmlDeviceGetCount", len(uuids))
    library.answers("nvmlDeviceGetHandleByIndex", handle)
    library.answers("nvmlDeviceGetHandleByUUID", by_uuid)
    library.answers("nvmlDeviceGetUUID", lambda index: uuids[index])
    library.answers("nvmlDeviceGetIndex", lambda index: index)
    library.answers("nvmlDeviceGetName", "NVIDIA H100 80GB HBM3")
    library.answers("nvmlDeviceGetPciInfo", lambda index: SimpleNamespace(busId=f"00000000:{index:02X}:00.0"))
    library.answers("nvmlDeviceGetPowerUsage", lambda index: 1000 * (index + 1))


def test_a_gpu_is_found_although_another_one_of_its_node_is_lost(library: Library) -> None:
    describe(library, {0: GPU, 1: OTHER}, lost={0})
    nvml = PyNvml()
    found = nvml.find(OTHER)
    assert found is not None
    assert (found.index, found.pci_bus_id) == (1, "00000000:01:00.0")
    assert nvml.read(OTHER, "power.draw") == 2.0
    assert nvml.find(GPU) is None
    with pytest.raises(NotAvailable) as caught:
        nvml.read(GPU, "power.draw")
    assert caught.value.kind == "lost"


def test_a_lost_gpu_is_counted_and_its_address_left_out(library: Library) -> None:
    describe(library, {0: GPU, 1: OTHER}, lost={0})
    nvml = PyNvml()
    assert nvml.count() == 2
    assert nvml.pci_bus_ids() == ("00000000:01:00.0",)


def test_a_gpu_that_a_cgroup_keeps_from_this_process_is_not_counted(library: Library) -> None:
    describe(library, {0: "GPU-dd", 1: GPU, 2: OTHER}, lost={1}, refused=frozenset({0}))
    nvml = PyNvml()
    assert nvml.count() == 2
    assert nvml.pci_bus_ids() == ("00000000:02:00.0",)
    found = nvml.find(OTHER)
    assert found is not None
    assert found.index == 2


def test_every_query_has_a_unit_a_description_and_functions_of_nvml() -> None:
    for name, query in QUERIES.items():
        assert query.name == name
        assert query.unit
        assert query.doc.endswith(".")
        # nvmlDeviceGetMemoryInfo_v2 is NVML's own name; nvidia-ml-py reaches it by an argument.
        assert all(hasattr(pynvml, function.removesuffix("_v2")) for function in query.functions.split(", "))


def test_no_library_is_an_environment_that_is_broken(library: Library) -> None:
    library.fails("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    with pytest.raises(EnvironmentBroken, match="NVML is not available: NVML Shared Library Not Found"):
        PyNvml()


def test_real_nvml_answers_or_says_that_it_is_not_available() -> None:
    try:
        nvml = PyNvml()
    except EnvironmentBroken as error:
        assert str(error).startswith("NVML is not available: ")  # noqa: PT017 - without a driver this is the pass
        return
    assert nvml.driver_version()
    assert nvml.count() >= len(nvml.pci_bus_ids())
    assert nvml.find("GPU-00000000-0000-0000-0000-000000000000") is None


def test_the_fake_answers_as_the_real_one_does() -> None:
    fake = FakeNvml({GPU: {**HEALTHY_H100, "power.draw": NotAvailable("asleep", "failed")}, OTHER: {}}, silent=[OTHER])
    assert fake.read(GPU, "clock.sm") == 1755
    for uuid, query, kind in (
        (GPU, "power.draw", "failed"),
        (GPU, "pages.pending", "not supported"),
        (OTHER, "clock.sm", "lost"),
    ):
        with pytest.raises(NotAvailable) as caught:
            fake.read(uuid, query)
        assert caught.value.kind == kind
    assert fake.count() == 2
    assert len(fake.pci_bus_ids()) == 1
    assert fake.find(OTHER) is None


def test_importing_the_module_loads_no_nvml() -> None:
    code = "import pytest_gpucluster.nvml, sys; print('pynvml' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout.strip() == "False"
