import pytest
import torch

from pytest_gpucluster.benchmarks.dtypes import require_fp8
from pytest_gpucluster.device.environment import WORKSPACE
from pytest_gpucluster.device.products import deterministic, scaled_product
from pytest_gpucluster.errors import EnvironmentBroken, kind_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 2)
N = 32


def operands():
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(N, N, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    return a, b.t().contiguous().t()


@pytest.mark.parametrize("name", ["_scaled_mm", "scaled_mm"])
def test_by_either_name_it_is_the_product_of_the_matrices(monkeypatch, name):
    if name == "scaled_mm":
        monkeypatch.delattr(torch, "_scaled_mm")
    a, b = operands()
    out = torch.full((N, N), torch.nan, dtype=torch.bfloat16)
    scaled_product(CPU)(a, b, out)
    torch.testing.assert_close(out, (a.float() @ b.float()).bfloat16(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("name", ["_scaled_mm", "scaled_mm"])
def test_fast_accumulation_is_asked_for(monkeypatch, name):
    asked = []

    def fake(a, b, *scales, use_fast_accum, **others):
        asked.append((use_fast_accum, others.get("out_dtype", others.get("output_dtype"))))
        return torch.zeros(N, N, dtype=torch.bfloat16)

    if name == "scaled_mm":
        monkeypatch.delattr(torch, "_scaled_mm")
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", fake)
    else:
        monkeypatch.setattr(torch, "_scaled_mm", fake)
    scaled_product(CPU)(*operands(), torch.empty(N, N, dtype=torch.bfloat16))
    assert asked == [(True, torch.bfloat16)]


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)], ids=["L40S", "H100", "B200"])
def test_gpus_with_fp8_tensor_cores_are_accepted(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    require_fp8(CUDA)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)], ids=["A100", "A40"])
def test_an_older_gpu_is_an_error_and_no_failure(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(EnvironmentBroken, match=r"cuda:2: fp8 .*compute capability 8\.9 .* has 8\.[06];"):
        require_fp8(CUDA)
    assert kind_of(EnvironmentBroken(), "call") == "error"


def test_the_switch_is_set_inside_and_as_before_outside():
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_algorithm_that_gives_other_bits_each_time_is_refused_inside():
    def act():
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)

    act()
    with deterministic(), pytest.raises(RuntimeError, match=r"deterministic implementation"):
        act()


@pytest.mark.parametrize("chosen", [None, ":4096:2:16:8"])
def test_a_workspace_that_keeps_cublas_from_it_is_an_error_where_a_gpu_is_in_use(monkeypatch, chosen):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv(WORKSPACE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(WORKSPACE, chosen)
    told = f"CUBLAS_WORKSPACE_CONFIG is {chosen!r}, and cuBLAS is reproducible only with :4096:8 or :16:8"
    with pytest.raises(EnvironmentBroken, match=told), deterministic():
        pass
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
