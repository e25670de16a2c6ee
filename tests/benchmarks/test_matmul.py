from __future__ import annotations

import math
import statistics
import weakref

import pytest
import torch

from pytest_gpucluster.benchmarks import matmul
from pytest_gpucluster.benchmarks.clock import ManualClock
from pytest_gpucluster.benchmarks.matmul import KINDS, measure_matmul
from pytest_gpucluster.errors import InconclusiveMeasurement, WrongResult

CPU = torch.device("cpu")
N = 64
FLOPS = 2 * N**3


class Multiplier:
    """``torch.mm`` that takes ``seconds`` of a manual clock; ``fault`` changes product ``at``."""

    def __init__(self, *, seconds=0.01, at=None, fault=None):
        self.clock = ManualClock()
        self.calls = 0
        self.outs = []
        self._seconds, self._at, self._fault = seconds, at, fault

    def __call__(self, a, b, out):
        torch.mm(a, b, out=out)
        took = self._seconds(self.calls) if callable(self._seconds) else self._seconds
        self.clock.advance(took)
        if self.calls == self._at:
            self._fault(out)
        self.calls += 1
        self.outs.append(weakref.ref(out))


def measure(multiply, *, dtype="fp32", n=N, seconds=0.8, warmup_seconds=0.05):
    return measure_matmul(
        CPU,
        n=n,
        dtype=dtype,
        seconds=seconds,
        warmup_seconds=warmup_seconds,
        clock=multiply.clock,
        multiply=multiply,
    )


def flip_bit(offset, bit=0):
    def fault(out):
        out.view({2: torch.int16, 4: torch.int32}[out.itemsize]).flatten()[offset] ^= 1 << bit

    return fault


@pytest.mark.parametrize("dtype", list(KINDS))
def test_a_healthy_device_is_measured_and_every_product_verified(dtype):
    result = measure_matmul(CPU, n=48, dtype=dtype, seconds=0.02, warmup_seconds=0.005)
    assert (result.n, result.dtype, result.flops_per_iter) == (48, dtype, 2 * 48**3)
    assert result.verified_products == result.iters + 2
    assert len(result.samples_tflops) == matmul.MIN_BLOCKS
    assert result.tflops == statistics.median(result.samples_tflops)
    assert result.tflops > 0


def test_the_rate_is_operations_over_the_time_of_the_products_alone():
    multiply = Multiplier(seconds=0.01)
    result = measure(multiply, seconds=4.0, warmup_seconds=2.0)
    assert result.samples_tflops == pytest.approx([FLOPS / 0.01 / 1e12] * 16)  # 16 blocks of 0.25 s
    assert result.iters == 16 * 25
    warmed_up = multiply.calls - result.iters - 2
    assert 200 <= warmed_up <= 225


def test_a_slow_device_has_a_low_rate():
    fast, slow = measure(Multiplier(seconds=0.01)), measure(Multiplier(seconds=0.02))
    assert slow.tflops == pytest.approx(fast.tflops / 2)


def test_a_device_that_slows_down_halfway_shows_it_in_its_samples():
    result = measure(Multiplier(seconds=lambda call: 0.01 if call < 50 else 0.04))
    assert max(result.samples_tflops) == pytest.approx(4 * min(result.samples_tflops))


def test_the_time_of_the_first_product_does_not_decide_the_count():
    result = measure(Multiplier(seconds=lambda call: 5.0 if call < 3 else 0.01), warmup_seconds=5.1)
    assert result.iters == 80


@pytest.mark.parametrize(
    ("dtype", "bit"),
    [("fp32", 0), ("bf16", 0), ("fp16", 15), ("tf32", 30)],
    ids=["fp32 last bit", "bf16 last bit", "fp16 sign", "tf32 exponent"],
)
def test_one_wrong_bit_in_one_timed_product_is_found(dtype, bit):
    with pytest.raises(WrongResult) as caught:
        measure(Multiplier(at=40, fault=flip_bit(3 * N + 5, bit)), dtype=dtype)
    message = str(caught.value)
    assert message.startswith(f"cpu: matmul {dtype} n=64: 1 of 80 timed products are wrong; the first, ")
    assert "in 1 of 4096 elements, first at offset 197 (row 3, column 5): found " in message
    found, expected = (int(part.partition(")")[0], 16) for part in message.split("(0x")[1:])
    assert found ^ expected == 1 << bit
    assert "\n" not in message


def test_a_product_that_was_not_computed_is_found():
    class Lazy(Multiplier):
        def __call__(self, a, b, out):
            if self.calls < 30:
                return super().__call__(a, b, out)
            self.calls += 1
            self.clock.advance(0.01)

    with pytest.raises(WrongResult, match=r"\d+ of 80 timed products are wrong; .* in 4096 of 4096 elements"):
        measure(Lazy())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0], ids=str)
@pytest.mark.parametrize("at", [0, 1, 40], ids=["first product", "second product", "timed product"])
def test_a_value_that_does_not_belong_is_a_wrong_result(value, at):
    def fault(out):
        out[7, 9] = value

    with pytest.raises(WrongResult, match=r"first at offset 457 \(row 7, column 9\): found"):
        measure(Multiplier(at=at, fault=fault))


def test_an_element_that_is_never_written_is_a_wrong_result():
    class Gap(Multiplier):
        def __call__(self, a, b, out):
            super().__call__(a, b, kept := out.clone())
            kept[2, 2] = out[2, 2]
            out.copy_(kept)

    with pytest.raises(WrongResult, match=r"1 of 4096 elements, .* \(row 2, column 2\): found nan"):
        measure(Gap())


@pytest.mark.parametrize("dtype", list(KINDS))
def test_a_small_error_in_every_product_is_held_against_the_reference(dtype):
    class Offset(Multiplier):
        def __call__(self, a, b, out):
            super().__call__(a, b, out)
            out[1, 0] += 0.05 * math.sqrt(N)  # a twentieth of an element's standard deviation

    with pytest.raises(WrongResult, match="wrong in 1 of 4096 elements, first at offset 64 "):
        measure(Offset(), dtype=dtype)


def test_tf32_that_claims_to_be_fp32_is_a_wrong_result():
    class Tf32(Multiplier):
        def __call__(self, a, b, out):
            short_a, short_b = ((x.view(torch.int32) & -(1 << 13)).view(torch.float32) for x in (a, b))
            super().__call__(short_a, short_b, out)

    assert measure(Tf32(), dtype="tf32").verified_products == 82
    with pytest.raises(WrongResult, match="the fp32 reference is"):
        measure(Tf32(), dtype="fp32")


def test_the_reference_is_made_in_parts_and_the_offset_counts_through(monkeypatch):
    monkeypatch.setattr(matmul, "_REFERENCE_ELEMENTS", 10 * N)
    assert measure(Multiplier()).verified_products == 82

    def fault(out):
        out[61, 3] = out[63, 0] = 1e6

    with pytest.raises(WrongResult, match=r"2 of 4096 elements, first at offset 3907 \(row 61, column 3\)"):
        measure(Multiplier(at=0, fault=fault))


def test_the_operands_depend_on_the_seed_alone():
    seen = []

    def multiply(a, b, out):
        seen.append((a.clone(), b.clone()))
        torch.mm(a, b, out=out)

    for seed in (1, 1, 2):
        seen.append(None)
        measure_matmul(CPU, n=8, dtype="fp32", seconds=1e-4, warmup_seconds=0, seed=seed, multiply=multiply)
    starts = [index + 1 for index, each in enumerate(seen) if each is None]
    first, again, other = (seen[start] for start in starts)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])
    assert first[0].std() > 0.5


def test_a_clock_that_stands_still_is_inconclusive():
    with pytest.raises(InconclusiveMeasurement, match="the clock did not advance"):
        measure(Multiplier(seconds=0.0))


def switches():
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    return (
        cuda.fp32_precision,
        cpu.fp32_precision,
        *torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        *torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        cuda.allow_fp16_accumulation,
    )


@pytest.fixture
def torch_switches():
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    yield
    torch.set_float32_matmul_precision("highest")
    cuda.fp32_precision = cpu.fp32_precision = "none"
    cuda.allow_fp16_accumulation = False


@pytest.mark.parametrize("way", ["unset", "older switch", "newer switch"])
@pytest.mark.parametrize("outcome", ["measured", "wrong"])
def test_torch_is_left_as_it_was_found(torch_switches, way, outcome):
    if way == "older switch":
        torch.set_float32_matmul_precision("medium")
    if way == "newer switch":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    before = switches()
    inside = []

    class Look(Multiplier):
        def __call__(self, a, b, out):
            inside.append(switches())
            super().__call__(a, b, out)

    if outcome == "wrong":
        with pytest.raises(WrongResult):
            measure(Look(at=1, fault=flip_bit(0, 30)))
    else:
        measure(Look())
    assert set(inside) == {("ieee", "ieee", False, True, False, True, False)}
    assert switches() == before
    if way == "older switch":
        assert torch.get_float32_matmul_precision() == "medium"


def test_tf32_is_allowed_only_where_it_is_measured(torch_switches):
    inside = []

    class Look(Multiplier):
        def __call__(self, a, b, out):
            inside.append(torch.backends.cuda.matmul.fp32_precision)
            super().__call__(a, b, out)

    measure(Look(), dtype="tf32")
    assert set(inside) == {"tf32"}


@pytest.mark.parametrize("at", [None, 1, 40], ids=["measured", "wrong reference", "wrong bit"])
def test_no_tensor_is_left_behind(at):
    multiply = Multiplier(at=at, fault=flip_bit(0, 30))
    error = None
    try:
        measure(multiply)
    except WrongResult as caught:
        error = caught  # kept, as a report keeps it
    assert (error is None) == (at is None)
    assert all(out() is None for out in multiply.outs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bf-16"}, "dtype is one of bf16, fp16, tf32, fp32, not 'bf-16'; did you mean 'bf16'"),
        ({"n": 0}, "n must be at least 1"),
        ({"seconds": 0}, "seconds positive"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"seconds": math.inf}, "seconds=inf"),
        ({"warmup_seconds": -1}, "warmup_seconds=-1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_out_of_range_is_refused(arguments, message):
    good = {"n": 8, "dtype": "fp32", "seconds": 0.1, "warmup_seconds": 0}
    with pytest.raises(ValueError, match=message):
        measure_matmul(CPU, **(good | arguments))
