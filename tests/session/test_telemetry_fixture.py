"""The fixture ``telemetry``: from the node's sampler to the journal and the JUnit file, and nothing of it on cpu."""

from watched_gpus import pretend

from pytest_gpucluster.node import nvml
from pytest_gpucluster.node.health import telemetry

SUITE = """
    import pytest

    @pytest.mark.criterion("watched")
    def test_watched(telemetry, measure):
        window = telemetry()
        with window:
            pass
        measure("matmul.fp32.tflops", 2, unit="GFLOPS", samples=[2, 3], telemetry=window.summary(), n=256)
    """


def test_on_cpu_nothing_is_recorded_and_nothing_is_started(project, monkeypatch):
    def refuse():
        raise AssertionError("asked on cpu")

    monkeypatch.setattr(nvml, "MAKER", refuse)
    monkeypatch.setattr(telemetry, "start_sampler", refuse)
    project.suite(SUITE)
    left = project.run()
    assert left.verdicts == {"test_watched": "passed"}
    [judged] = left.journal.results[0].measurements
    assert judged.telemetry == {}


def test_what_the_gpu_did_reaches_the_journal_and_the_report(project, monkeypatch):
    pretend(monkeypatch.setattr, project.path)
    project.suite(SUITE)
    left = project.run()
    assert left.verdicts == {"test_watched": "passed"}
    [judged] = left.journal.results[0].measurements
    assert judged.telemetry[0]["sm_clock_mhz"] == [1755, 1755, 1755]
    assert judged.telemetry[0]["throttle"] == ["sw_power_cap"]
    assert " 698 W, " in left.measured("test_watched")["matmul.fp32.tflops{n=256}.telemetry"]
