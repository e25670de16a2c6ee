from __future__ import annotations

import dataclasses

import pytest

from pytest_gpucluster import hardware, units

# Figures of the data sheets: fp32, tf32, bf16, fp8, HBM, link in one direction.
DATA_SHEETS = {
    "A100 80GB": (19.5, 156, 312, None, 2.0, 300),
    "H100 SXM": (67, 494.5, 989, 1979, 3.35, 450),
    "H100 PCIe": (51, 378, 756, 1513, 2.0, None),
    "H100 NVL": (60, 417.5, 835, 1671, 3.9, None),
    "H200": (67, 494.5, 989, 1979, 4.8, 450),
    "B200": (80, 1125, 2250, 4500, 8.0, 900),
    "GB200": (80, 1250, 2500, 5000, 8.0, 900),
    "L40S": (91.6, 183, 362, 733, 0.864, 31.5),
}


@pytest.mark.parametrize(
    ("nvml_name", "sku"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA L40", None),
        ("B200", None),
        ("NVIDIA B200\n", None),
        ("nvidia h200", None),
        ("", None),
        ("cpu", None),
    ],
)
def test_a_gpu_is_known_by_its_whole_name_only(nvml_name: str, sku: str | None) -> None:
    assert hardware.matching(hardware.SKUS.values(), nvml_name) == ([] if sku is None else [sku])


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_peaks_are_the_dense_figures_of_the_data_sheet(name: str) -> None:
    peaks = hardware.SKUS[name].peaks
    assert peaks is not None
    figures = (
        peaks.fp32_tflops,
        peaks.tf32_tflops,
        peaks.bf16_tflops,
        peaks.fp8_tflops,
        peaks.hbm_tb_per_second,
        peaks.link_gb_per_second,
    )
    assert figures == DATA_SHEETS[name]
    assert peaks.fp16_tflops == peaks.bf16_tflops
    assert "data sheet" in peaks.source
    assert peaks.link_source


def test_every_peak_has_a_unit() -> None:
    figures = {field.name for field in dataclasses.fields(hardware.Peaks)} - {"source", "link_source"}
    assert set(hardware.PEAK_UNITS) == figures
    assert all(unit in units.UNITS for unit in hardware.PEAK_UNITS.values())
    assert figures >= hardware.LINK_PEAKS


def test_the_rehearsal_has_no_peaks_and_takes_no_gpu() -> None:
    rehearsal = hardware.SKUS[hardware.CPU_REHEARSAL]
    assert rehearsal.peaks is None
    assert rehearsal.nvml_names == ()
    assert set(hardware.SKUS) == {*DATA_SHEETS, hardware.CPU_REHEARSAL}
