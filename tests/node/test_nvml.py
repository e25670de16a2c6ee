from types import SimpleNamespace

import pynvml
import pytest
from each import of_each

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node.nvml import NotAvailable, PyNvml
from pytest_gpucluster.node.nvml_queries import LINK_ENDS, LINK_VERSIONS

GPU = "GPU-aa"


class Library:
    """The driver's library under the real nvidia-ml-py: its functions answer, or fail with NVML's own errors."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.asked = []
        self.answers("nvmlInit", lambda: None)
        self.answers("nvmlDeviceGetHandleByUUID", lambda uuid: f"handle of {uuid}")
        self.answers("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", lambda slice_: "its GPU")

    def answers(self, function, answer):
        assert hasattr(pynvml, function), f"nvidia-ml-py has no {function}"

        def call(*arguments, **named):
            self.asked.append((function, arguments[0] if arguments else None))
            return answer(*arguments, **named) if callable(answer) else answer

        self._monkeypatch.setattr(pynvml, function, call)

    def fails(self, function, error):
        def fail(*_, **__):
            raise pynvml.NVMLError(error)

        self.answers(function, fail)


@pytest.fixture
def library(monkeypatch):
    return Library(monkeypatch)


def given(expected, answer):
    """Answer a call with these arguments behind the handle, and no other."""
    return lambda _, *asked: {expected if isinstance(expected, tuple) else (expected,): answer}[asked]


BAD, MENDED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
SLOWDOWN = given(pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, 89)
SIMPLE = [
    ("ecc.uncorrected.volatile", "nvmlDeviceGetTotalEccErrors", given((BAD, pynvml.NVML_VOLATILE_ECC), 7), 7),
    ("ecc.uncorrected.aggregate", "nvmlDeviceGetTotalEccErrors", given((BAD, pynvml.NVML_AGGREGATE_ECC), 7), 7),
    ("ecc.corrected.volatile", "nvmlDeviceGetTotalEccErrors", given((MENDED, pynvml.NVML_VOLATILE_ECC), 7), 7),
    ("serial", "nvmlDeviceGetSerial", b"165", "165"),
    ("board.part_number", "nvmlDeviceGetBoardPartNumber", "900-2G520-0000-000", "900-2G520-0000-000"),
    ("inforom", "nvmlDeviceGetInforomImageVersion", "G520.0200.00.05", "G520.0200.00.05"),
    # This one comes as bytes also from an nvidia-ml-py that gives text else.
    ("gsp.firmware", "nvmlDeviceGetGspFirmwareVersion", b"580.65.06", "580.65.06"),
    ("vbios", "nvmlDeviceGetVbiosVersion", "96.00", "96.00"),
    ("ecc.mode", "nvmlDeviceGetEccMode", [1, 0], True),
    ("pages.pending", "nvmlDeviceGetRetiredPagesPendingStatus", 0, False),
    ("clock.sm", "nvmlDeviceGetClockInfo", given(pynvml.NVML_CLOCK_SM, 1980), 1980),
    ("clock.sm.max", "nvmlDeviceGetMaxClockInfo", given(pynvml.NVML_CLOCK_SM, 1980), 1980),
    ("clock.memory.max", "nvmlDeviceGetMaxClockInfo", given(pynvml.NVML_CLOCK_MEM, 2620), 2620),
    ("clock.memory", "nvmlDeviceGetClockInfo", given(pynvml.NVML_CLOCK_MEM, 2619), 2619),
    ("power.draw", "nvmlDeviceGetPowerUsage", 690500, 690.5),
    ("power.limit", "nvmlDeviceGetEnforcedPowerLimit", 700000, 700.0),
    ("power.limit.default", "nvmlDeviceGetPowerManagementDefaultLimit", 700000, 700.0),
    ("temperature.gpu", "nvmlDeviceGetTemperature", given(pynvml.NVML_TEMPERATURE_GPU, 61), 61),
    ("temperature.slowdown", "nvmlDeviceGetTemperatureThreshold", SLOWDOWN, 89),
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


@of_each("case", SIMPLE)
def test_a_query_is_one_plain_value_in_its_unit(case, library):
    query, function, answer, value = case
    library.answers(function, answer)
    assert PyNvml().read(GPU, query) == value


def test_processes_come_once_each_also_where_graphics_is_not_supported(library):
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


def test_links_that_are_up_have_a_version_and_another_end(library):
    def of(answers):
        def answer(_, link):
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


def test_the_names_of_versions_and_ends_are_the_librarys():
    named = {value: name for name, value in vars(pynvml).items() if name.startswith("NVML_NVLINK_VERSION_")}
    values = {number: name[20:].replace("_", ".") for number, name in named.items() if number}
    # An nvidia-ml-py of 13.580 does not have the latest one yet; what it has must be ours.
    assert values.items() <= dict(LINK_VERSIONS).items()
    assert len(values) >= len(LINK_VERSIONS) - 2
    kinds = {value: name for name, value in vars(pynvml).items() if name.startswith("NVML_NVLINK_DEVICE_TYPE_")}
    assert {kind: name[24:].lower().removeprefix("ibm") for kind, name in kinds.items()} == dict(LINK_ENDS)


def field_values(answers):
    """Answer as nvmlDeviceGetFieldValues: each field has its own return code and its own type."""

    def values(_, asked):
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


def test_nvlink_errors_are_the_counters_of_the_links_that_are_up(library):
    library.answers("nvmlDeviceGetNvLinkState", lambda _, link: {0: 1, 1: 0, 2: 1}.get(link, 0))

    def counter(_, link, which):
        if which == pynvml.NVML_NVLINK_ERROR_DL_REPLAY:
            return 10 + link
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    library.answers("nvmlDeviceGetNvLinkErrorCounter", counter)
    recovery = pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS
    library.answers("nvmlDeviceGetFieldValues", field_values({recovery: 100}))
    assert PyNvml().read(GPU, "nvlink.errors") == {"replay": {0: 10, 2: 12}, "link_recovery": {0: 100, 2: 102}}


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_DEPRECATED])
def test_a_card_without_the_older_counters_has_the_newer_ones(library, error):
    library.answers("nvmlDeviceGetNvLinkState", lambda _, link: int(link == 0))
    library.fails("nvmlDeviceGetNvLinkErrorCounter", error)
    received = pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS
    library.answers("nvmlDeviceGetFieldValues", field_values({received: 7}))
    assert PyNvml().read(GPU, "nvlink.errors") == {"received_errors": {0: 7}}
    library.answers("nvmlDeviceGetFieldValues", field_values({}))
    with pytest.raises(NotAvailable, match="not supported"):
        PyNvml().read(GPU, "nvlink.errors")


@pytest.mark.parametrize(
    ("query", "field", "answer"),
    [
        ("nvlink.switch", pynvml.NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT, 18),
        ("recovery.action", pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 2),
    ],
)
def test_some_queries_are_a_field_value_that_older_drivers_lack(library, query, field, answer):
    library.answers("nvmlDeviceGetFieldValues", field_values({field: answer}))
    assert PyNvml().read(GPU, query) == answer
    for none, kind in ((field_values({}), "not supported"), (lost, "lost")):
        library.answers("nvmlDeviceGetFieldValues", none)
        with pytest.raises(NotAvailable) as caught:
            PyNvml().read(GPU, query)
        assert caught.value.kind == kind


def lost(_, asked):
    value = pynvml.c_nvmlFieldValue_t()
    value.nvmlReturn = pynvml.NVML_ERROR_GPU_IS_LOST
    return [value for _ in asked]


def fills(structure, refusal=pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, /, **fields):
    """Fill the structure that was handed over by reference, and refuse others."""

    def fill(_, reference):
        info = reference._obj
        if type(info) is not getattr(pynvml, structure):
            raise pynvml.NVMLError(refusal)
        for name, value in fields.items():
            setattr(info, name, value)

    return fill


@pytest.mark.parametrize("structure", ["c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"])
def test_the_fabric_has_state_status_and_health(library, structure):
    library.answers(
        "nvmlDeviceGetGpuFabricInfoV",
        fills(
            structure,
            pynvml.NVML_ERROR_INVALID_ARGUMENT,
            state=pynvml.NVML_GPU_FABRIC_STATE_COMPLETED,
            status=0,
            healthMask=0b10_10,
        ),
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
    library.answers("nvmlDeviceGetGpuFabricInfoV", fills("c_nvmlGpuFabricInfo_v3_t", state=9))
    assert PyNvml().read(GPU, "fabric")["state"] == "unknown (9)", "a future state is no known one"


REASONS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: ("not supported", "not supported by this GPU or driver"),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: ("not supported", "unknown to this driver"),
    pynvml.NVML_ERROR_DEPRECATED: ("not supported", "no longer supported by this driver"),
    pynvml.NVML_ERROR_NO_PERMISSION: ("no permission", "no permission"),
    pynvml.NVML_ERROR_GPU_IS_LOST: ("lost", "the GPU is lost"),
    pynvml.NVML_ERROR_RESET_REQUIRED: ("lost", "requires a reset"),
    pynvml.NVML_ERROR_UNKNOWN: ("failed", "Unknown Error"),
    pynvml.NVML_ERROR_TIMEOUT: ("failed", "Timeout"),
}


@of_each("error", list(REASONS))
def test_each_reason_of_a_missing_value_has_its_kind(library, error):
    library.fails("nvmlDeviceGetPowerUsage", error)
    kind, words = REASONS[error]
    with pytest.raises(NotAvailable, match=f"{words}.*power.draw") as caught:
        PyNvml().read(GPU, "power.draw")
    assert caught.value.kind == kind


def test_a_query_that_package_or_driver_are_too_old_for_is_not_available(library, monkeypatch):
    def mismatch(_):
        raise pynvml.NVMLLibraryMismatchError("driver and package do not match")

    library.answers("nvmlDeviceGetComputeRunningProcesses", mismatch)
    with pytest.raises(NotAvailable, match="do not match"):
        PyNvml().read(GPU, "processes")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetMarginTemperature")
    with pytest.raises(NotAvailable, match=r"nvidia-ml-py .* temperature.margin"):
        PyNvml().read(GPU, "temperature.margin")


def test_a_programming_error_is_not_taken_for_an_old_package(library):
    library.answers("nvmlDeviceGetUtilizationRates", SimpleNamespace())
    with pytest.raises(AttributeError):
        PyNvml().read(GPU, "utilization.gpu")


def test_nvml_that_is_not_there_or_cannot_even_count_is_an_environment_that_is_broken(library):
    library.fails("nvmlDeviceGetCount", pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(EnvironmentBroken, match=r"Unknown Error \(nvmlDeviceGetCount\)"):
        PyNvml().gpus()
    library.fails("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    with pytest.raises(EnvironmentBroken, match="Library Not Found"):
        PyNvml()
