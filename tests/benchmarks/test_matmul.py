import math
import re
import weakref
from itertools import pairwise

import pytest
import torch
from device_parts import device_with, timed_by
from each import of_each

from pytest_gpucluster.benchmarks import matmul
from pytest_gpucluster.benchmarks import matmul as matmul_products
from pytest_gpucluster.benchmarks.dtypes import ARITHMETICS, arithmetic
from pytest_gpucluster.benchmarks.matmul import (
    Buffers,
    Products,
    Shape,
    best_square,
    measure_matmul,
    square_shape,
    usual_layout,
)
from pytest_gpucluster.benchmarks.verify import bits_of
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.device.products import scaled_product
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult, kind_of
from pytest_gpucluster.judge.limits import condition
from pytest_gpucluster.metrics.sampling import Sampling, Series

CPU = torch.device("cpu")
N = 64
FLOPS = 2 * N**3
DTYPES = list(ARITHMETICS)
FIRSTS = 2
"""Products that are made before the warm-up: a b and b a."""
WARM_UP = 11
"""Products of the warm-up below: bursts of 1 and 10."""


class Multiplier:
    """torch's product that takes ``seconds`` of a manual clock; ``fault`` changes product ``at``, ``look`` sees all."""

    def __init__(self, *, seconds=0.01, at=None, fault=None, look=lambda a, b, out: None):
        self.clock = ManualClock()
        self.calls = 0
        self.operands, self.outs = [], []
        self._seconds, self._at, self._fault, self._look = seconds, at, fault, look

    def __call__(self, a, b, out):
        self._look(a, b, out)
        if a.dtype == torch.float8_e4m3fn:
            scaled_product(CPU)(a, b, out)
        else:
            torch.mm(a, b, out=out)
        took = self._seconds(self.calls) if callable(self._seconds) else self._seconds
        self.clock.advance(took)
        if self.calls == self._at:
            self._fault(out)
        self.calls += 1
        self.operands.append((weakref.ref(a), weakref.ref(b)))
        self.outs.append(weakref.ref(out))


def sampling(*, warmup=0.05, window=0.8, longest=2.0, tolerance=0.01):
    return Sampling(warmup_seconds=warmup, window_seconds=window, longest_seconds=longest, tolerance_ratio=tolerance)


def measure(multiply, *, dtype="fp32", n=N, chosen=None, cache=0, **others):
    with timed_by(multiply.clock, product=lambda **of: multiply, cache_bytes=lambda: cache):
        return measure_matmul(CPU, square_shape(n, dtype), dtype=dtype, sampling=chosen or sampling(), **others)


def flip_bit(offset, bit=0):
    def fault(out):
        bits_of(out)[offset] ^= 1 << bit

    return fault


@of_each("dtype", DTYPES)
def test_a_healthy_device_is_measured_and_every_product_verified(dtype):
    quick = sampling(warmup=0.005, window=0.02, longest=0.05, tolerance=10)
    result = measure_matmul(CPU, square_shape(48, dtype), dtype=dtype, sampling=quick)
    usual = Shape.square(48, layout="nt" if dtype == "fp8" else "nn")
    assert (result.shape, result.dtype) == (usual, dtype)
    assert len(result.tflops.samples) >= 8
    assert result.tflops.low <= result.tflops.median <= result.tflops.high
    assert result.tflops.median > 0


def test_the_rate_is_operations_over_the_time_of_the_products_alone():
    multiply = Multiplier(seconds=1 / 128)
    result = measure(multiply, chosen=sampling(warmup=2, window=4, longest=10))
    assert result.tflops.samples == pytest.approx([FLOPS * 128 / 1e12] * 16)  # 16 blocks of 0.25 s
    assert result.tflops.inconclusive == ""
    warmed_up = multiply.calls - 16 * 32 - FIRSTS
    assert 256 <= warmed_up <= 256 + 32


PLACES = [FIRSTS, FIRSTS + WARM_UP, FIRSTS + WARM_UP + 40, FIRSTS + WARM_UP + 79]
"""The first of the warm-up, the first that is timed, one amid them and the last one."""


# Where a product stands does not depend on its dtype: each place in one dtype, and each dtype in one place.
@of_each("case", [("bf16", at, bit) for at in PLACES for bit in (0, 14)] + [(dtype, 60, 0) for dtype in DTYPES])
def test_one_wrong_bit_in_any_product_is_found(case):
    dtype, at, bit = case
    with pytest.raises(WrongResult) as caught:
        measure(Multiplier(at=at, fault=flip_bit(3 * N + 5, bit)), dtype=dtype)
    message = str(caught.value)
    found = re.fullmatch(
        rf"cpu: matmul {dtype} n=64: product {at - FIRSTS} is wrong in 1 of 4096 elements, first at row 3, column 5:"
        r" found \S+ \((0x[0-9a-f]+)\), expected \S+ \((0x[0-9a-f]+)\); 1 of (\d+) products are wrong",
        message,
    )
    assert found is not None, message
    assert int(found[3]) > at - FIRSTS
    assert int(found[1], 16) ^ int(found[2], 16) == 1 << bit
    assert len(found[1]) == 2 + 2 * arithmetic(dtype).result.itemsize


@of_each("case", [("bf16", first) for first in (FIRSTS, FIRSTS + 1, 40)] + [(dtype, 40) for dtype in DTYPES])
def test_products_that_are_not_computed_are_found(case):
    dtype, first = case

    class Lazy(Multiplier):
        def __call__(self, a, b, out):
            if self.calls < first:
                return super().__call__(a, b, out)
            self.calls += 1
            self.clock.advance(0.01)

    with pytest.raises(WrongResult, match=r"is wrong in 40\d\d of 4096 elements, .*; \d+ of \d+ products are wrong$"):
        measure(Lazy(), dtype=dtype)


class Skipping(Multiplier):
    """Leaves product ``skipped`` out, in the time that it would have taken."""

    def __init__(self, skipped):
        super().__init__()
        self._skipped = skipped

    def __call__(self, a, b, out):
        before = out.clone()
        super().__call__(a, b, out)
        if self.calls == self._skipped + 1:
            out.copy_(before)


@of_each("at", [FIRSTS, 30, 31, 50])
def test_a_single_product_that_is_not_computed_is_found(at):
    with pytest.raises(WrongResult, match=rf"product {at - FIRSTS} is wrong in 4096 of 4096 elements"):
        measure(Skipping(at))


VALUES = (math.nan, math.inf, -math.inf, 0.0)


@of_each(
    "case", [("bf16", value, at) for value in VALUES for at in (0, 1, 40)] + [(dtype, math.nan, 40) for dtype in DTYPES]
)
def test_a_value_that_does_not_belong_is_a_wrong_result(case):
    dtype, value, at = case

    def fault(out):
        out[7, 9] = value

    with pytest.raises(WrongResult, match="first at row 7, column 9: found"):
        measure(Multiplier(at=at, fault=fault), dtype=dtype)


@of_each("dtype", DTYPES)
def test_an_element_that_is_never_written_is_a_wrong_result(dtype):
    class Gap(Multiplier):
        def __call__(self, a, b, out):
            super().__call__(a, b, kept := out.clone())
            kept[2, 2] = out[2, 2]
            out.copy_(kept)

    with pytest.raises(WrongResult, match=r"1 of 4096 elements, first.* 2, column 2: found nan"):
        measure(Gap(), dtype=dtype)


@of_each("dtype", DTYPES)
def test_a_small_error_in_every_product_is_held_against_the_reference(dtype):
    class Offset(Multiplier):
        def __call__(self, a, b, out):
            super().__call__(a, b, out)
            out[1, 0] += 0.05 * math.sqrt(N)  # a twentieth of an element's standard deviation

    with pytest.raises(WrongResult, match=r"first product.* 1 of 4096 elements, first.* 1, column 0:"):
        measure(Offset(), dtype=dtype)


def test_tf32_that_claims_to_be_fp32_is_a_wrong_result():
    class Tf32(Multiplier):
        def __call__(self, a, b, out):
            short_a, short_b = ((x.view(torch.int32) & -(1 << 13)).view(torch.float32) for x in (a, b))
            super().__call__(short_a, short_b, out)

    assert len(measure(Tf32(), dtype="tf32").tflops.samples) == 8
    with pytest.raises(WrongResult, match="the fp32 reference is"):
        measure(Tf32(), dtype="fp32")


@of_each("dtype", DTYPES)
def test_the_operands_are_random_and_depend_on_the_seed_alone(dtype):
    seen = []

    def product(a, b, out):
        seen.append((a.float(), b.float()))
        Multiplier()(a, b, out)

    buffers = Buffers(shape=square_shape(16, dtype), kind=arithmetic(dtype), cache=0)
    starts = []
    for seed in (1, 1, 2):
        starts.append(len(seen))
        with device_with(product=lambda **of: product):
            Products(CPU, buffers, name="here", seed=seed)
    first, again, other = (seen[start] for start in starts)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])
    assert first[0].std() > 0.5
    assert torch.equal(seen[1][0], first[1])  # b a follows a b
    assert torch.equal(seen[1][1], first[0])


# Operands and result of one fp32 product are 12 n^2 bytes, of fp8 4 n^2.
@pytest.mark.parametrize(
    ("dtype", "cache", "sets"),
    [("fp32", 0, 1), ("fp32", 4 * N**2, 1), ("fp32", 4 * N**2 + 1, 2), ("fp32", 16 * N**2, 4), ("bf16", 4 * N**2, 2)],
    ids=str,
)
def test_operands_that_fit_the_cache_are_used_in_turn_with_others(dtype, cache, sets):
    left, results = [], []

    def look(a, b, out):
        left.append(a.data_ptr())
        results.append(out.data_ptr())

    multiply = Multiplier(seconds=1 / 512, look=look)  # so many products that each result comes to its turn again
    measure(multiply, dtype=dtype, cache=cache)
    fp8 = Buffers(shape=Shape.square(N, layout="nt"), kind=arithmetic("fp8"), cache=4 * N**2)
    assert fp8.sets == 3
    steady, outs = left[FIRSTS * sets :], results[FIRSTS * sets :]
    assert len(set(steady)) == 2 * sets
    for index in range(len(steady) - sets + 1):
        assert len(set(steady[index : index + sets])) == sets
    # Each result always belongs to one set, and holds the two products of it in turn.
    for place in set(outs):
        products = [operand for operand, out in zip(steady, outs, strict=True) if out == place]
        assert len(set(products)) == 2
        assert all(one != other for one, other in pairwise(products))


@of_each("sets", [1, 2, 3])
@of_each("at", [2, 7, 33, 60])
def test_a_wrong_product_of_any_set_is_found(sets, at):
    cache = (sets - 1) * 12 * N**2 // 3 + 1
    fault = Multiplier(at=FIRSTS * sets + at, fault=flip_bit(9, 3))
    with pytest.raises(WrongResult, match=rf"product {at} is wrong in 1 of 4096 elements, first.* 0, column 9:"):
        measure(fault, cache=cache)


def test_results_are_as_many_as_their_memory_allows(monkeypatch):
    outs = set()

    monkeypatch.setattr(matmul_products, "RESULTS_BYTES", 3 * 4 * N**2)
    multiply = Multiplier(look=lambda a, b, out: outs.add(out.data_ptr()))
    measure(multiply)
    assert len(outs) == 3
    assert max(launches for launches, _ in multiply.clock.prepared) == 3


def test_one_result_alone_still_shows_what_was_not_written(monkeypatch):
    monkeypatch.setattr(matmul_products, "RESULTS_BYTES", 1)
    assert len(measure(Multiplier()).tflops.samples) == 8
    with pytest.raises(WrongResult, match="in 4096 of 4096 elements"):
        measure(Skipping(30))


def test_the_judged_size_fits_into_the_memory_of_a_small_data_centre_gpu():
    for dtype in DTYPES:
        shape = Shape.square(16384, layout=usual_layout(arithmetic(dtype)))
        assert Buffers(shape=shape, kind=arithmetic(dtype), cache=60 * 2**20).needed_bytes < 14e9


def test_too_little_memory_is_an_error_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(matmul, "Products", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(EnvironmentBroken) as caught:
        measure(Multiplier(), n=2**24)
    message = str(caught.value)
    assert message.startswith("cpu: matmul fp32 n=16777216 needs ")
    assert re.search(r"choose smaller.* --gpucluster-workload matmul\.sizes=4096,8192$", message)
    assert kind_of(caught.value, "call") == "error"


def test_a_gpu_without_fp8_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(EnvironmentBroken, match=r"fp8 .*compute capability 8\.9"):
        measure_matmul(torch.device("cuda", 0), square_shape(16, "fp8"), dtype="fp8", sampling=sampling())


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

    def look(a, b, out):
        inside.append(switches())

    if outcome == "wrong":
        with pytest.raises(WrongResult):
            measure(Multiplier(at=1, fault=flip_bit(0, 30), look=look))
    else:
        measure(Multiplier(look=look))
    assert set(inside) == {("ieee", "ieee", False, True, False, True, False)}
    assert switches() == before
    if way == "older switch":
        assert torch.get_float32_matmul_precision() == "medium"


def test_tf32_is_allowed_only_where_it_is_measured(torch_switches):
    inside = []

    def look(a, b, out):
        inside.append(torch.backends.cuda.matmul.fp32_precision)

    measure(Multiplier(look=look), dtype="tf32")
    assert set(inside) == {"tf32"}


@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
@pytest.mark.parametrize("at", [None, 1, 40], ids=["measured", "wrong reference", "wrong bit"])
def test_no_tensor_is_held_when_the_memory_is_given_back_or_later(monkeypatch, dtype, at):
    multiply = Multiplier(at=at, fault=flip_bit(0, 14 if dtype == "fp8" else 30))
    given_back = []

    def alive():
        operands = [ref for pair in multiply.operands for ref in pair]
        return [ref() is not None for ref in multiply.outs + operands]

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(any(alive())))
    error = None
    try:
        measure(multiply, dtype=dtype)
    except WrongResult as caught:
        error = caught  # kept, as a report keeps it
    assert (error is None) == (at is None)
    assert given_back == [False]
    assert not any(alive())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bf-16"}, "dtype is one of bf16, fp16, tf32, fp32, fp8, not 'bf-16'; did you mean 'bf16'"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": -16, "dtype": "fp8"}, "n must be at least 1"),
        ({"n": 40, "dtype": "fp8"}, "for fp8 a multiple of 16, not 40"),
    ],
    ids=["dtype", "n", "negative", "fp8"],
)
def test_an_argument_out_of_range_is_refused(arguments, message):
    good = {"n": 8, "dtype": "fp32"}
    with pytest.raises(ValueError, match=message):
        square_shape(**(good | arguments))


# The best of several sizes -----------------------------------------------------------------------------------------


def rate(low, median, *, why=""):
    return Series(samples=(low, median), median=median, low=low, high=2 * median - low, inconclusive=why)


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        # drmysore/nebius-h100-8gpu-benchmark, benchmark_single.json: bf16 on one H100 SXM
        ({4096: rate(725, 725.96), 8192: rate(681, 682.09), 16384: rate(668, 669.24)}, 4096),
        ({4096: rate(700, 706), 8192: rate(729, 730.97), 16384: rate(668, 670.05)}, 8192),
        ({4096: rate(690, 740), 8192: rate(720, 725)}, 8192),
        ({4096: rate(500, 800, why="it scatters"), 8192: rate(700, 710), 16384: rate(650, 660)}, 8192),
        ({4096: rate(690, 740, why="a"), 8192: rate(720, 725, why="b")}, 4096),
        ({4096: rate(720, 725), 8192: rate(720, 730)}, 4096),
    ],
    ids=["the smallest", "the middle one", "lower end, not median", "conclusive first", "none is conclusive", "equals"],
)
def test_the_best_size_is_that_with_the_highest_sure_rate(rates, best):
    assert best_square(rates).n == best
    assert best_square(dict(reversed(rates.items()))) == best_square(rates), "the order of measuring decides nothing"


def test_where_no_size_is_conclusive_the_best_one_is_not_either():
    rates = {4096: rate(690, 740, why="it scatters"), 8192: rate(720, 725, why="so does this")}
    assert rates[best_square(rates).n].inconclusive == "it scatters"


@pytest.mark.parametrize(
    ("sizes", "best", "label"),
    [
        ([16384, 8192, 4096, 2048], 4096, "4096, 8192, 16384"),
        ([32768, 16384], 16384, "16384"),
        ([128, 256], 128, "128, 256"),
        ([10240], 10240, "10240"),
    ],
)
def test_the_three_sizes_are_chosen_from_and_without_them_all(sizes, best, label):
    # What is not among the three is the fastest, or else the smaller the faster.
    rates = {n: rate(1e6 / n + (n in (2048, 32768)) * 1e6, 1e7) for n in sizes}
    found = best_square(rates)
    assert (found.n, found.label) == (best, label)


def test_ranks_with_different_best_sizes_have_the_same_label():
    one = best_square({4096: rate(700, 710), 8192: rate(720, 730), 16384: rate(650, 660)})
    other = best_square({4096: rate(740, 750), 8192: rate(720, 730), 16384: rate(650, 660)})
    assert one.n != other.n
    assert one.label == other.label == "4096, 8192, 16384"
    assert condition("best_of", one.label).dimension is None, "it is compared as text"
    assert condition("best_of", one.label).holds(other.label)


def test_without_any_size_nothing_is_the_best():
    with pytest.raises(ValueError, match=r"was measured"):
        best_square({})
