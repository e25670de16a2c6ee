from each import of_each

from pytest_gpucluster.metrics import datasheets
from pytest_gpucluster.node.nvml_queries import QUERIES

# Figures of the data sheets: fp32, tf32, bf16, fp8, HBM, link in one direction; memory in GB, PCIe generation, NVLinks.
DATA_SHEETS = {
    "A100 80GB": (19.5, 156, 312, None, 2.0, 300, 80, 4, 12),
    "H100 SXM": (67, 494.5, 989, 1979, 3.35, 450, 80, 5, 18),
    "H100 PCIe": (51, 378, 756, 1513, 2.0, None, 80, 5, None),
    "H100 NVL": (60, 417.5, 835, 1671, 3.9, None, 94, 5, None),
    "H200": (67, 494.5, 989, 1979, 4.8, 450, 141, 5, 18),
    "B200": (80, 1125, 2250, 4500, 8.0, 900, 180, 5, 18),
    "GB200": (80, 1250, 2500, 5000, 8.0, 900, 186, None, 18),
    "H800 PCIe": (51, 378, 756, 1513, 2.0, None, 80, 5, None),
    "H20": (44, 74, 148, 296, 4.0, 450, 96, 5, 18),
    "GH200": (67, 494.5, 989, 1979, 4.9, 450, 96, None, None),
    "A100 40GB": (19.5, 156, 312, None, 1.555, 300, 40, 4, 12),
    "A100 PCIe 40GB": (19.5, 156, 312, None, 1.555, None, 40, 4, None),
    "A100 PCIe 80GB": (19.5, 156, 312, None, 1.935, None, 80, 4, None),
    "B300": (80, 1125, 2250, 4500, 8.0, 900, 270, 5, 18),
    "GB300": (80, 1250, 2500, 5000, 8.0, 900, 278, None, 18),
    "L40S": (91.6, 183, 362, 733, 0.864, 31.5, 48, 4, 0),
}

NVML_NAMES = {
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H200": "H200",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA B200": "B200",
    "NVIDIA L40S": "L40S",
    "NVIDIA H200 NVL": None,
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GH200 144G HBM3e": "GH200",
    "NVIDIA H20": "H20",
    "NVIDIA H800 PCIe": "H800 PCIe",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB300": "GB300",
    "NVIDIA GB200": "GB200",
    "NVIDIA H100": None,
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "B200": None,
    "NVIDIA B200\n": None,
    "": None,
}


def test_a_gpu_is_known_by_its_whole_name_only():
    found = {name: datasheets.matching(datasheets.SKUS.values(), name) for name in NVML_NAMES}
    assert found == {name: [] if sku is None else [sku] for name, sku in NVML_NAMES.items()}


@of_each("name", list(DATA_SHEETS))
def test_peaks_and_promises_are_the_dense_figures_of_the_data_sheet(name):
    peaks, promise = datasheets.SKUS[name].peaks, datasheets.promise_of(name)
    assert promise is not None
    figures = (peaks.fp32_tflops, peaks.tf32_tflops, peaks.bf16_tflops, peaks.fp8_tflops)
    figures += (peaks.hbm_tb_per_second, peaks.link_gb_per_second)
    assert (*figures, promise.memory_gb, promise.pcie_generation, promise.nvlinks) == DATA_SHEETS[name]
    assert peaks.fp16_tflops == peaks.bf16_tflops
    assert promise.pcie_width == (16 if promise.pcie_generation else None)


def test_the_rehearsal_has_no_peaks_and_takes_no_gpu():
    rehearsal = datasheets.SKUS[datasheets.CPU_REHEARSAL]
    assert rehearsal.peaks is None
    assert rehearsal.nvml_names == ()
    assert set(datasheets.SKUS) == {*DATA_SHEETS, datasheets.CPU_REHEARSAL}


@of_each("name", list(DATA_SHEETS))
def test_required_queries_are_those_that_the_sku_can_answer(name):
    promise = datasheets.promise_of(name)
    required = set(promise.required_queries)
    assert required <= set(QUERIES)
    assert required >= set(datasheets.ANY_GPU)
    assert len(required) == len(promise.required_queries)
    # Row remapping took the place of retired pages: asking for both fails every card.
    assert "rows.pending" in required
    assert "pages.pending" not in required
    assert ("pcie.generation" in required) == (promise.pcie_generation is not None)
    for query in ("nvlink.up", "nvlink.errors"):
        assert (query in required) == bool(promise.nvlinks)
    assert ("mig.mode" in required) == (name != "L40S")


@of_each("name", [None, "T4", datasheets.CPU_REHEARSAL])
def test_nothing_is_promised_of_a_gpu_that_is_not_in_the_table(name):
    assert datasheets.promise_of(name) is None
