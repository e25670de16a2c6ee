import pytest
import torch
from device_parts import device_with
from each import of_each

from pytest_gpucluster.benchmarks import matmul
from pytest_gpucluster.benchmarks.dtypes import ARITHMETICS, K, arithmetic, check_product, dtypes_of, require_switches
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult, kind_of
from pytest_gpucluster.metrics.sampling import Sampling

CPU = torch.device("cpu")
WHERE = "GPU 3 (GPU-a, serial 165, PCI 0000:3b:00.0) on gpu-07"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_fp8_is_expected_of_gpus_that_have_it(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ("fp8" in dtypes_of(torch.device("cuda:0"))) is (capability >= (8, 9))


@of_each("dtype", [*dtypes_of(CPU), "fp8"])
def test_a_right_product_passes(dtype):
    check_product(CPU, dtype, n=64)


@of_each("dtype", [*dtypes_of(CPU), "fp8"])
@of_each("value", [1000.0, float("nan"), float("inf")])
def test_one_wrong_element_names_the_gpu_and_the_dtype(dtype, value):
    def multiply(a, b, out):
        out.copy_(a.float() @ b.float())
        out[5, 7] = value

    with pytest.raises(WrongResult) as caught, device_with(product=lambda **of: multiply):
        check_product(CPU, dtype, n=64, where=WHERE)
    text = str(caught.value)
    for word in (
        f"the {dtype} product of 64 x {K}",
        WHERE,
        f"wrong in 1 of {64 * 64} elements",
        "[5, 7]",
        f"{value:g} instead of",
    ):
        assert word in text


@of_each("dtype", list(dtypes_of(CPU)))
def test_the_lowest_bit_of_one_element_is_seen(dtype):
    def multiply(a, b, out):
        torch.mm(a, b, out=out)
        bits = out.view(torch.int16 if out.element_size() == 2 else torch.int32)
        bits[0, 0] ^= 1

    found = pytest.raises(WrongResult, match=r"1 of 4096 elements; the.* \[0, 0\]")
    with found, device_with(product=lambda **of: multiply):
        check_product(CPU, dtype, n=64)


def test_the_precision_of_fp32_products_is_left_as_it_was():
    before = torch.get_float32_matmul_precision()
    seen = []

    def multiply(a, b, out):
        seen.append(torch.get_float32_matmul_precision())
        raise RuntimeError("CUDA error: misaligned address")

    for dtype in ("tf32", "fp32"):
        with pytest.raises(RuntimeError, match="misaligned"), device_with(product=lambda **of: multiply):
            check_product(CPU, dtype, n=64)
    assert seen == ["high", "highest"]
    assert torch.get_float32_matmul_precision() == before


def test_a_product_is_checked_although_only_the_newer_switches_of_precision_were_set():
    cuda = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), cuda.fp32_precision
    try:
        # From then on torch refuses to tell the precision in the words of the older switch.
        cuda.fp32_precision = "tf32"
        check_product(CPU, "fp32", n=64)
        assert cuda.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before[0])
        cuda.fp32_precision = before[1]


def test_an_unknown_dtype_is_a_mistake():
    with pytest.raises(ValueError, match="did you mean 'bf16'"):
        check_product(CPU, "bf61", n=64)


CUDA = torch.device("cuda", 2)


def test_an_unknown_dtype_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"dtype is.* bf16, fp16, tf32, fp32, fp8, not 'fp-8'; did you mean 'fp8'"):
        arithmetic("fp-8")


@pytest.mark.parametrize("value", ["0", "1"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_a_variable_that_overrides_torchs_switch_is_an_error_and_no_failure(monkeypatch, dtype, value):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    with pytest.raises(EnvironmentBroken, match=f"cuda:2: NVIDIA_TF32_OVERRIDE={value} is set .*; unset it"):
        require_switches(CUDA, arithmetic(dtype))
    assert kind_of(EnvironmentBroken(), "call") == "error"


def test_where_there_is_nothing_to_override_the_variable_does_not_matter(monkeypatch):
    for dtype in ARITHMETICS:
        require_switches(CUDA, arithmetic(dtype))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    for dtype in ("bf16", "fp16", "fp8"):
        require_switches(CUDA, arithmetic(dtype))
    require_switches(CPU, arithmetic("fp32"))


def test_products_are_not_measured_where_a_variable_overrides_the_switch(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setattr(matmul, "accelerator", lambda device: pytest.fail("it went on"))
    with pytest.raises(EnvironmentBroken, match="NVIDIA_TF32_OVERRIDE"):
        matmul.measure_matmul(
            CUDA,
            matmul.Shape.square(64),
            dtype="fp32",
            sampling=Sampling(warmup_seconds=0, window_seconds=1, longest_seconds=1, tolerance_ratio=1),
        )
