"""The search for the fastest product: what it chooses, what it measures, and what ends it."""

import dataclasses
import math
import re

import pytest
import torch
from device_parts import timed_by
from each import of_each

from pytest_gpucluster.benchmarks import matmul_search
from pytest_gpucluster.benchmarks.dtypes import ARITHMETICS, arithmetic
from pytest_gpucluster.benchmarks.matmul import Buffers, Products, Shape, layouts_of, measure_matmul, prepare_shape
from pytest_gpucluster.benchmarks.matmul_search import Trial, candidates, fastest, first_rank_chooses, search_matmul
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.device.products import scaled_product
from pytest_gpucluster.errors import (
    EnvironmentBroken,
    InconclusiveMeasurement,
    PeerGaveUp,
    StoreError,
    WrongResult,
    kind_of,
)
from pytest_gpucluster.metrics.sampling import Sampling

CPU = torch.device("cpu")
DTYPES = list(ARITHMETICS)
SAMPLING = Sampling(warmup_seconds=0.05, window_seconds=0.8, longest_seconds=2.0, tolerance_ratio=0.01)
LOOK_SECONDS = 0.1
SQUARE, TALL, DEEP = (Shape(m=m, n=n, k=k) for m, n, k in ((64, 64, 64), (128, 32, 64), (32, 16, 256)))
SHAPES = [SQUARE, TALL, DEEP]
FIRSTS = 2
"""Products of each set of operands that are made before anything is timed."""


def shape_of(a, b):
    lies = ["n" if x.stride(1) == 1 else "t" for x in (a, b)]
    return Shape(m=a.shape[0], n=b.shape[1], k=a.shape[1], layout="".join(lies))


class Multiplier:
    """torch's product on a device of which the test says what each shape does, in TFLOPS, by a manual clock.

    ``fault(shape, call, out)`` may change a product; ``call`` counts those of its shape.
    """

    def __init__(self, tflops=lambda shape: 1e-4, fault=None):
        self.clock = ManualClock()
        self.calls = []
        self.seen = []
        self._tflops, self._fault = tflops, fault

    def __call__(self, a, b, out):
        if a.dtype == torch.float8_e4m3fn:
            scaled_product(CPU)(a, b, out)
        else:
            torch.mm(a, b, out=out)
        shape = shape_of(a, b)
        self.clock.advance(shape.flops / 1e12 / self._tflops(shape))
        if self._fault is not None:
            self._fault(shape, self.calls.count(shape), out)
        self.calls.append(shape)
        self.seen.append((shape, a))


def search(multiply, shapes=SHAPES, *, dtype="fp32", **others):
    with timed_by(multiply.clock, product=lambda **of: multiply):
        return search_matmul(CPU, shapes, dtype=dtype, trial_seconds=LOOK_SECONDS, **({"sampling": SAMPLING} | others))


# ---- shapes --------------------------------------------------------------------------------------------------------


def test_every_shape_is_a_candidate_in_every_layout_and_fp8_in_its_own_alone():
    sizes = [(64, 32, 16), (16, 16, 16)]
    assert [str(each) for each in candidates("bf16", sizes, ["nn", "tt"])] == [
        *("64x32x16 nn", "64x32x16 tt", "16x16x16 nn", "16x16x16 tt"),
    ]
    assert [str(each) for each in candidates("fp8", sizes, ["nn", "tt"])] == ["64x32x16 nt", "16x16x16 nt"]


@pytest.mark.parametrize(("sizes", "layouts"), [([], ["nn"]), ([(16, 16, 16)], [])], ids=["no shape", "no layout"])
def test_a_search_among_nothing_is_refused(sizes, layouts):
    with pytest.raises(ValueError, match=r"candidate for the search"):
        candidates("bf16", sizes, layouts)
    with pytest.raises(ValueError, match=r"needs candidates"):
        search(Multiplier(), [])


@of_each("wrong", [{"m": 0}, {"n": -16}, {"layout": "nm"}])
def test_a_shape_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=r"at least 1, and layout"):
        Shape(**({"m": 16, "n": 16, "k": 16} | wrong))


def test_fp8_in_another_layout_or_size_than_its_own_is_refused():
    with pytest.raises(ValueError, match=r"fp8 is multiplied.* 16x16x16 nn"):
        prepare_shape(CPU, Shape.square(16), dtype="fp8")
    with pytest.raises(ValueError, match="multiples of 16 for fp8, not 16x24x16 nt"):
        prepare_shape(CPU, Shape(m=16, n=24, k=16, layout="nt"), dtype="fp8")


@of_each("dtype", DTYPES)
def test_a_product_of_any_shape_is_measured_in_every_layout_that_its_dtype_has(dtype):
    for layout in layouts_of(arithmetic(dtype)):
        shape = Shape(m=48, n=32, k=80, layout=layout)
        multiply = Multiplier()
        quick = dataclasses.replace(SAMPLING, window_seconds=0.2, longest_seconds=0.2)
        with timed_by(multiply.clock, product=lambda multiply=multiply, **of: multiply):
            found = measure_matmul(CPU, shape, dtype=dtype, sampling=quick)
        assert set(multiply.calls) == {shape}
        assert (found.shape, shape.flops) == (shape, 2 * 48 * 32 * 80)
        assert found.tflops.median == pytest.approx(1e-4)


@of_each("dtype", DTYPES)
@of_each("size", [(64, 64, 64), (64, 16, 128), (16, 48, 32)])
@of_each("cache", [0, 60_000])
def test_what_is_allocated_is_what_was_asked_to_be_free(dtype, size, cache):
    kind = arithmetic(dtype)
    for layout in layouts_of(kind):
        m, n, k = size
        buffers = Buffers(shape=Shape(m=m, n=n, k=k, layout=layout), kind=kind, cache=cache)
        products = Products(CPU, buffers, name="here", seed=0)
        held = {id(each): each.nbytes for each in (*products._results, products._comparison._mask)}
        for turn in (turn for pair in products._sets for turn in pair):
            held |= {id(each): each.nbytes for each in (turn.first, turn.left, turn.right)}
        reference = 4 * (2 * k * n + m * k + 4 * m * n)
        assert sum(held.values()) + reference <= buffers.needed_bytes + 8 * n
        assert buffers.needed_bytes <= 1.5 * (sum(held.values()) + reference) + 64


# ---- what is chosen and measured -----------------------------------------------------------------------------------


@of_each("best", SHAPES)
def test_the_fastest_shape_is_found_and_measured_anew(best):
    multiply = Multiplier(lambda shape: 2e-4 if shape == best else 1e-4)
    found = search(multiply)
    assert found.best.shape == best
    assert found.best.tflops.median == pytest.approx(2e-4)
    assert [look.shape for look in found.trials] == SHAPES
    assert [look.tflops for look in found.trials] == pytest.approx([2e-4 if each == best else 1e-4 for each in SHAPES])
    assert found.trials_text.startswith(f"{best} 0.0002, ")


def test_the_rate_on_record_is_never_the_look():
    """A shape that was lucky in its look is on record with what it does when it is measured."""

    class Lucky(Multiplier):
        def __init__(self):
            super().__init__(lambda shape: 9e-4 if shape == TALL and not self.is_measuring else 1e-4)
            self.is_measuring = False

    multiply = Lucky()

    def choose(looks):
        multiply.is_measuring = True
        return fastest(looks)

    found = search(multiply, choose=choose)
    assert found.best.shape == TALL
    assert found.trials[1].tflops == pytest.approx(9e-4)
    assert found.best.tflops.median == pytest.approx(1e-4)
    assert max(found.best.tflops.samples) == pytest.approx(1e-4)


def test_the_measurement_has_operands_of_its_own_and_the_rules_of_every_other():
    multiply = Multiplier(lambda shape: 2e-4 if shape == SQUARE else 1e-4)
    found = search(multiply)
    alone = Multiplier(lambda shape: 2e-4)
    with timed_by(alone.clock, product=lambda **of: alone):
        same = measure_matmul(CPU, SQUARE, dtype="fp32", sampling=SAMPLING)
    assert found.best.tflops.median == pytest.approx(same.tflops.median)
    assert dataclasses.replace(found.best, tflops=same.tflops) == same
    looked, measured = multiply.seen[0][1], multiply.seen[-len(alone.seen)][1]
    assert not torch.equal(looked, measured)
    assert torch.equal(measured, alone.seen[0][1])


def test_only_the_first_look_has_the_long_warm_up():
    multiply = Multiplier()
    warm = dataclasses.replace(SAMPLING, warmup_seconds=2.0)
    search(multiply, sampling=warm)
    seconds = dict.fromkeys(SHAPES, 0.0)
    until = multiply.calls.index(SHAPES[-1])
    for shape in multiply.calls[:until]:
        seconds[shape] += shape.flops / 1e12 / 1e-4
    assert seconds[SQUARE] >= warm.warmup_seconds + LOOK_SECONDS * 0.9
    assert 1.9 * LOOK_SECONDS <= seconds[TALL] < 0.5 * warm.warmup_seconds


def test_a_measurement_that_does_not_settle_is_returned_as_inconclusive():
    multiply = Multiplier(lambda shape: 1e-4 if len(multiply.calls) // 50 % 2 else 4e-4)
    found = search(multiply, [SQUARE])
    assert re.search(r"interval of", found.best.tflops.inconclusive)


# ---- what ends it --------------------------------------------------------------------------------------------------


@of_each("dtype", DTYPES)
def test_one_layout_that_multiplies_wrongly_ends_the_search(dtype):
    layouts = layouts_of(arithmetic(dtype))
    shapes = candidates(dtype, [(128, 64, 32)], layouts)

    def fault(shape, call, out):
        if shape.layout == layouts[-1] and call == 0:
            out[5, 7] += 3

    with pytest.raises(WrongResult) as caught:
        search(Multiplier(fault=fault), shapes, dtype=dtype)
    assert re.search(
        rf"of matmul {dtype} 128x64x32 {layouts[-1]}: .*first product.* 1 of 8192 elements, first.* 5, column 7: found",
        str(caught.value),
    )


@of_each("value", [math.nan, math.inf, 0.0])
@of_each("call", [0, 1, FIRSTS, FIRSTS + 5])
def test_a_value_that_does_not_belong_ends_the_search_in_any_product_of_a_look(value, call):
    def fault(shape, number, out):
        if shape == DEEP and number == call:
            out[31, 15] = value

    with pytest.raises(WrongResult, match=r"trial of matmul fp32 32x16x256 nn: .* first at row 31, column 15: found"):
        search(Multiplier(fault=fault))


def test_a_wrong_product_in_the_measurement_is_found_too():
    def fault(shape, call, out):
        if measuring:
            out[0, 1] = math.nan

    measuring = []

    def choose(looks):
        measuring.append(True)
        return fastest(looks)

    with pytest.raises(WrongResult, match=r"^cpu: matmul fp32 n=64: .* first at row 0, column 1: found nan"):
        search(Multiplier(fault=fault), [SQUARE], choose=choose)


def test_a_product_that_is_not_computed_is_found_in_a_rectangle():
    class Lazy(Multiplier):
        def __call__(self, a, b, out):
            before = out.clone()
            super().__call__(a, b, out)
            if self.calls.count(TALL) == 30:
                out.copy_(before)

    with pytest.raises(WrongResult, match=r"128x32x64 nn: product \d+ is wrong in 4096 of 4096 elements"):
        search(Lazy(), [TALL])


def test_a_clock_that_stands_still_ends_the_search():
    with pytest.raises(InconclusiveMeasurement, match=r"not advance"):
        search(Multiplier(lambda shape: math.inf))


def test_a_shape_that_does_not_fit_is_named_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(matmul_search, "Products", lambda *_, **__: pytest.fail("allocated"))
    huge = Shape(m=2**22, n=2**22, k=2**10, layout="tn")
    with pytest.raises(EnvironmentBroken) as caught:
        search(Multiplier(), [SQUARE, huge], dtype="bf16")
    assert str(caught.value).startswith("cpu: matmul bf16 4194304x4194304x1024 tn needs ")
    assert re.search(
        r"choose smaller.* --gpucluster-workload matmul\.search\.shapes=4096x4096x4096$", str(caught.value)
    )
    assert kind_of(caught.value, "call") == "error"


# ---- one shape for all ranks ---------------------------------------------------------------------------------------


class Notices:
    def __init__(self, told=()):
        self.told, self.asked = dict(told), []

    def post(self, name, value):
        self.told[0] = value

    def read(self, name, ranks, *, within_seconds):
        self.asked.append(within_seconds)
        return {rank: self.told[rank] for rank in ranks if rank in self.told}


def looks_of(*tflops):
    return [Trial(shape=shape, tflops=rate) for shape, rate in zip(SHAPES, tflops, strict=True)]


def chosen(board, rank, looks):
    with first_rank_chooses(board, rank, within_seconds=5) as choose:
        return choose(looks)


def test_the_first_rank_chooses_by_its_own_looks_for_all():
    board = Notices()
    assert chosen(board, 0, looks_of(1, 3, 2)) == TALL
    assert chosen(board, 1, looks_of(1, 2, 3)) == TALL
    assert chosen(board, 7, looks_of(3, 2, 1)) == TALL
    assert board.asked == [5, 5, 5]


def test_a_first_rank_that_says_nothing_is_an_error_and_no_rank_chooses_alone():
    with pytest.raises(PeerGaveUp, match=r"rank 0 .*chosen within 5 s which shape") as caught:
        chosen(Notices(), 1, looks_of(1, 2, 3))
    assert kind_of(caught.value, "call") == "error"


def test_a_first_rank_that_fails_says_so_and_its_failure_is_told():
    board = Notices()
    with pytest.raises(WrongResult, match="wrong here"), first_rank_chooses(board, 0, within_seconds=5):
        raise WrongResult("wrong here")
    assert board.told == {0: None}
    with pytest.raises(PeerGaveUp, match=r"rank 0 .*search before"):
        chosen(board, 1, looks_of(1, 2, 3))


def test_a_first_rank_that_fails_after_it_chose_leaves_the_choice_and_another_rank_says_nothing():
    board = Notices()

    def fails_later():
        with first_rank_chooses(board, 0, within_seconds=5) as choose:
            choose(looks_of(1, 2, 3))
            raise WrongResult("later")

    with pytest.raises(WrongResult, match="later"):
        fails_later()
    with pytest.raises(WrongResult), first_rank_chooses(board, 1, within_seconds=5):
        raise WrongResult("there")
    assert board.told == {0: str(DEEP)}


def test_a_store_that_is_gone_does_not_hide_what_went_wrong():
    class Gone(Notices):
        def post(self, name, value):
            raise StoreError("gone")

    with pytest.raises(WrongResult, match="wrong here"), first_rank_chooses(Gone(), 0, within_seconds=5):
        raise WrongResult("wrong here")


def test_a_choice_that_is_no_candidate_here_is_an_error():
    with pytest.raises(EnvironmentBroken, match=r"rank 0 has chosen 16x16x16 .*no candidate .* on rank 1"):
        chosen(Notices({0: "16x16x16 nn"}), 1, looks_of(1, 2, 3))
