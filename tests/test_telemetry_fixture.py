"""The fixture ``telemetry``: from NVML to the journal and the JUnit file, and nothing of it on cpu."""

from __future__ import annotations

import threading

import pytest
from fake_nvml import FakeNvml
from sessions import Project

from pytest_gpucluster import nvml
from pytest_gpucluster.errors import EnvironmentBroken

GPU = "GPU-1f2e3d4c"
VALUES = {
    "clock.sm": 1755,
    "clock.memory": 2619,
    "power.draw": 698.25,
    "temperature.gpu": 67,
    "utilization.gpu": 99,
    "throttle.reasons": ("gpu_idle", "sw_power_cap"),
}

SUITE = """
    import pytest

    @pytest.mark.criterion("watched")
    def test_watched(telemetry, measure):
        window = telemetry()
        with window:
            pass
        measure("matmul.fp32.tflops", 2, unit="GFLOPS", samples=[2, 3], telemetry=window.summary(), n=256)
    """
WITH_A_GPU = f"""
    import pytest
    from pytest_gpucluster.fixtures import Gpu

    @pytest.fixture(scope="session")
    def gpu():
        return Gpu(index=0, name="fake", uuid={GPU!r}, pci_bus_id=None, sku=None, peaks=None)
    """


def test_on_cpu_nothing_is_recorded_and_nvml_is_not_touched(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("NVML on cpu")

    monkeypatch.setattr(nvml, "PyNvml", refuse)
    project.suite(SUITE)
    left = project.run()
    assert left.verdicts == {"test_watched": "passed"}
    [judged] = left.journal.results[0].measurements
    assert judged.telemetry == {}


def test_what_the_gpu_did_reaches_the_journal_and_the_report(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "PyNvml", lambda: FakeNvml({GPU: VALUES}))
    project.suite(SUITE, conftest=WITH_A_GPU)
    left = project.run()
    assert left.verdicts == {"test_watched": "passed"}
    [judged] = left.journal.results[0].measurements
    assert judged.telemetry[0]["sm_clock_mhz"] == [1755, 1755, 1755]
    assert judged.telemetry[0]["throttle"] == ["sw_power_cap"]
    assert left.properties["test_it.test_watched[matmul.fp32.tflops{n=256}.telemetry]"] == (
        "rank 0: sm clock 1755 MHz, memory clock 2619 MHz, 698 W, 67 degC, utilisation 99 %, throttle: sw_power_cap"
    )
    assert [thread.name for thread in threading.enumerate()].count("gpucluster-telemetry") == 0


def test_without_nvml_the_test_goes_on_and_the_report_says_why(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise EnvironmentBroken("NVML is not available: no driver library")

    monkeypatch.setattr(nvml, "PyNvml", refuse)
    project.suite(SUITE, conftest=WITH_A_GPU)
    left = project.run()
    assert left.verdicts == {"test_watched": "passed"}
    told = left.properties["test_it.test_watched[matmul.fp32.tflops{n=256}.telemetry]"]
    assert told.startswith("rank 0: not available: sm clock, ")
    assert told.endswith("(NVML is not available: no driver library)")
