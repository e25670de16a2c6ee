"""What every back end promises. Those of a GPU run where there is one."""

import math

import pytest
import torch
from each import of_each

from pytest_gpucluster.device.backends import BACKENDS, Cpu, Cuda, accelerator, return_memory
from pytest_gpucluster.device.clock import EventClock, WallClock

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MiB = 2**20
WORDS = 2**17


@pytest.fixture(params=[pytest.param(CPU, id="cpu"), pytest.param(GPU, id="cuda", marks=pytest.mark.cuda)])
def by(request):
    return accelerator(request.param)


OF_A_GPU = (
    "asynchronous synchronize side_stream on fork join cache_bytes reserved_bytes reset_peak peak_bytes pinned"
    " make_current capability"
)


def test_a_gpu_does_not_take_over_what_is_so_on_the_host_only():
    assert set(OF_A_GPU.split()) - set(vars(Cuda)) == set()


def words(by):
    return torch.arange(WORDS, dtype=torch.int64, device=by.place)


def test_a_region_is_as_long_as_its_work_and_one_that_raises_is_not_counted(by):
    clock, n = by.clock(), 256
    a, out = torch.randn(n, n, device=by.place), torch.empty(n, n, device=by.place)
    multiply = by.product(scaled=False)
    multiply(a, a, out)
    for count in (1, 40):
        clock.get_ahead(count, seconds=0.0)
        with clock.region():
            for _ in range(count):
                multiply(a, a, out)
    with pytest.raises(ZeroDivisionError), clock.region():
        1 / 0  # noqa: B018  # what fails does not matter
    short, long = clock.read()
    assert 0 < short < long < math.inf
    assert clock.read() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_written_to_the_given_matrix(by, dtype):
    a, b = (torch.randint(-2, 3, shape, device=by.place).to(dtype) for shape in ((32, 16), (16, 48)))
    out = torch.full((32, 48), math.nan, dtype=dtype, device=by.place)
    by.product(scaled=False)(a, b, out)
    assert torch.equal(out.double().cpu(), a.double().cpu() @ b.double().cpu())


def test_a_scaled_product_is_written_to_the_given_matrix(by):
    if by.capability is not None and by.capability < (8, 9):
        pytest.skip("this GPU has no fp8")
    a, b = (torch.randint(-1, 2, (32, 64), device=by.place).to(torch.float8_e4m3fn) for _ in range(2))
    out = torch.full((32, 32), math.nan, dtype=torch.bfloat16, device=by.place)
    by.product(scaled=True)(a, b.t(), out)
    assert torch.equal(out.double().cpu(), a.double().cpu() @ b.double().cpu().t())


def test_passes_over_memory_do_what_they_say(by):
    source, target, total = words(by), words(by), torch.zeros((), dtype=torch.int64, device=by.place)
    by.write(target, 7)
    assert target.unique().tolist() == [7]
    by.copy(source, target)
    assert torch.equal(source, target)
    by.read(source, total)
    assert int(total) == WORDS * (WORDS - 1) // 2


def test_copies_over_the_link_arrive_from_pinned_memory_and_back(by):
    sent, back, there = torch.arange(WORDS), torch.zeros(WORDS, dtype=torch.int64), torch.zeros_like(words(by))
    with by.pinned(sent), by.pinned(back):
        by.copy_over_link("h2d", sent, there)
        by.copy_over_link("d2h", there, back)
        by.synchronize()
    assert torch.equal(back, torch.arange(WORDS))


def test_work_on_a_side_stream_comes_after_what_was_forked_and_before_what_is_joined(by):
    source, target, total = words(by), words(by), torch.zeros((), dtype=torch.int64, device=by.place)
    side = by.side_stream()
    assert (side is not None) is by.asynchronous
    by.write(source, 3)
    by.fork(side)
    with by.on(side):
        by.copy(source, target)
    by.join(side)
    with by.on(None):
        by.read(target, total)
    by.synchronize()
    assert int(total) == 3 * WORDS


def test_memory_is_counted(by):
    by.make_current()
    free, whole = by.free_bytes(), by.total_bytes()
    assert 0 < free <= whole
    assert by.cache_bytes() >= 0
    before = by.reset_peak()
    kept = torch.empty(8 * MiB, dtype=torch.uint8, device=by.place)
    peak = by.peak_bytes()
    assert (peak is None) is not by.asynchronous
    assert peak is None or peak >= before + kept.nbytes
    assert by.reserved_bytes() >= (before + kept.nbytes if by.asynchronous else 0)
    del kept
    return_memory()


def test_its_kind_names_what_the_bits_depend_on(by):
    assert by.kind == accelerator(by.place).kind
    assert torch.__version__ in by.kind
    if by.capability is None:
        assert by.kind.startswith("cpu (")
        assert f"{torch.get_num_threads()} threads" in by.kind


def test_each_type_of_device_has_its_back_end_and_its_clock():
    assert {"cuda": Cuda, "cpu": Cpu}.items() <= BACKENDS.items()
    assert isinstance(accelerator(CPU).clock(), WallClock)
    assert isinstance(accelerator(GPU).clock(), EventClock)


@of_each("place", ["meta", "mps"])
def test_a_device_without_a_back_end_is_an_error(place):
    with pytest.raises(ValueError, match=f"cuda and cpu devices, not for '{place}'"):
        accelerator(torch.device(place))
