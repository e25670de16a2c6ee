import math

import pytest
import torch
from each import of_each
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks import matmul
from pytest_gpucluster.benchmarks.dtypes import ARITHMETICS, arithmetic
from pytest_gpucluster.benchmarks.matmul import wrong_elements


def matrices(rows, depth, columns, dtype, *, seed=0, apart=0.0):
    """Random operands; ``apart`` standard deviations are added to the elements on the diagonal of their product."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, depth, generator=generator)
    right = torch.randn(depth, columns, generator=generator)
    if apart:
        right += apart / math.sqrt(depth) * left[:columns].t()
    kind = arithmetic(dtype)
    left, right = left.to(kind.operands), right.to(kind.operands)
    if kind.cleared_bits:
        for each in (left, right):
            each.view(torch.int32).bitwise_and_(-(1 << kind.cleared_bits))
    return left, right


def product(left, right, dtype):
    return (left.double() @ right.double()).to(arithmetic(dtype).result)


def truncating_sums(left, right, *, step, fraction_bits, kept_bits):
    """What tensor cores make of their operands, in fp64.

    In each step the products and the sum so far are aligned to the largest of them, cut off ``fraction_bits`` below its
    first bit, and added up; of the new sum ``kept_bits`` below its own first bit stay.
    """
    left, right = left.double(), right.double()
    total = torch.zeros(len(left), right.shape[1], dtype=torch.float64)
    for start in range(0, left.shape[1], step):
        products = left[:, start : start + step, None] * right[None, start : start + step, :]
        largest = torch.maximum(products.abs().amax(1), total.abs())
        unit = _last_bit(largest, fraction_bits)
        total = ((products / unit[:, None]).trunc().sum(1) + (total / unit).trunc()) * unit
        unit = _last_bit(total.abs(), kept_bits)
        total = (total / unit).trunc() * unit
    return total


def truncating_product(left, right, *, step, fraction_bits=13):
    """The product of fp8 operands by a short accumulator."""
    return truncating_sums(left, right, step=step, fraction_bits=fraction_bits, kept_bits=fraction_bits).bfloat16()


def _last_bit(largest, fraction_bits):
    return torch.exp2(torch.floor(torch.log2(largest.clamp_min(1e-300))) - fraction_bits)


@pytest.mark.parametrize("dtype", list(ARITHMETICS))
@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 20), depth=st.integers(1, 200), columns=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_correctly_rounded_product_is_right(dtype, rows, depth, columns, seed):
    left, right = matrices(rows, depth, columns, dtype, seed=seed)
    assert wrong_elements(left, right, product(left, right, dtype), arithmetic(dtype)) is None


@of_each("step", [16, 32])
@of_each("depth", [64, 1024, 16384])
@of_each("apart", [0, 6])
def test_fp8_with_the_short_accumulator_of_fast_accumulation_is_right(step, depth, apart):
    left, right = matrices(12, depth, 12, "fp8", apart=apart)
    assert wrong_elements(left, right, truncating_product(left, right, step=step), arithmetic("fp8")) is None


# Steps and bits of Ampere, then of Hopper.
@pytest.mark.parametrize(
    ("dtype", "step", "fraction_bits"),
    [("tf32", 4, 24), ("tf32", 8, 25), ("fp16", 8, 24), ("fp16", 16, 25), ("bf16", 8, 24), ("bf16", 16, 25)],
    ids=str,
)
@pytest.mark.parametrize("depth", [1024, 16384])
@pytest.mark.parametrize("apart", [0, 6], ids=["any", "far out"])
def test_sums_that_are_cut_off_instead_of_rounded_are_right(dtype, step, fraction_bits, depth, apart):
    left, right = matrices(8, depth, 8, dtype, apart=apart)
    sums = truncating_sums(left, right, step=step, fraction_bits=fraction_bits, kept_bits=23)
    found = sums.to(arithmetic(dtype).result)
    assert wrong_elements(left, right, found, arithmetic(dtype)) is None


@of_each("depth", [1024, 16384])
def test_a_tensor_core_that_loses_five_bits_of_the_sum_is_seen(depth):
    left, right = matrices(12, depth, 12, "tf32", apart=6)
    found = truncating_sums(left, right, step=8, fraction_bits=20, kept_bits=18).float()
    assert wrong_elements(left, right, found, arithmetic("tf32")) is not None


@of_each("depth", [1024, 16384])
def test_an_accumulator_of_three_bits_less_is_seen(depth):
    left, right = matrices(12, depth, 12, "fp8", apart=6)
    found = truncating_product(left, right, step=32, fraction_bits=10)
    assert wrong_elements(left, right, found, arithmetic("fp8")) is not None


@pytest.mark.parametrize(
    ("dtype", "share"),
    [("bf16", 0.05), ("fp16", 0.01), ("tf32", 0.003), ("fp32", 0.001), ("fp8", 0.25)],
)
@pytest.mark.parametrize("depth", [1024, 16384])
@settings(max_examples=8, deadline=None)
@given(row=st.integers(0, 29), column=st.integers(0, 19), sign=st.sampled_from([-1, 1]))
def test_one_element_that_is_off_by_a_share_of_its_standard_deviation_is_found(dtype, share, depth, row, column, sign):
    left, right = matrices(30, depth, 20, dtype)
    found = product(left, right, dtype)
    found[row, column] += sign * share * math.sqrt(depth)
    [wrong, _] = wrong_elements(left, right, found, arithmetic(dtype))
    assert (wrong.count, wrong.offset) == (1, 20 * row + column)


@of_each("dtype", list(ARITHMETICS))
def test_a_flipped_bit_of_an_exponent_is_found_in_any_element(dtype):
    left, right = matrices(16, 1024, 16, dtype)
    good = product(left, right, dtype)
    bits = {2: torch.int16, 4: torch.int32}[good.itemsize]
    exponent = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[good.dtype]
    for offset in range(0, 256, 5):
        found = good.clone()
        found.view(bits).view(-1)[offset] ^= 1 << exponent
        wrong = wrong_elements(left, right, found, arithmetic(dtype))
        small = abs(float(good.view(-1)[offset])) < 0.1 * math.sqrt(1024)
        assert wrong is not None or (dtype == "fp8" and small)


def test_a_lost_part_of_the_sum_is_found_in_fp8():
    # What a tile of 128 terms adds to an element is 0.09 of its standard deviation at this depth: of a whole tile of
    # elements, some are off by enough.
    left, right = matrices(64, 16384, 64, "fp8")
    without = (left[:, 128:].double() @ right[128:].double()).bfloat16()
    wrong, _ = wrong_elements(left, right, without, arithmetic("fp8"))
    assert wrong.count > 100


@of_each("value", [math.nan, math.inf, -math.inf])
@of_each("dtype", list(ARITHMETICS))
def test_what_is_no_number_is_wrong(dtype, value):
    left, right = matrices(8, 32, 8, dtype)
    found = product(left, right, dtype)
    found[3, 4] = value
    wrong, what = wrong_elements(left, right, found, arithmetic(dtype))
    assert (wrong.count, wrong.offset) == (1, 8 * 3 + 4)
    assert what.startswith(f"found {value}, the fp32 reference is ")


def test_operands_that_are_no_numbers_have_no_right_product():
    left, right = matrices(8, 32, 8, "fp32")
    left[2, 2] = math.nan
    wrong, _ = wrong_elements(left, right, left @ right, arithmetic("fp32"))
    assert (wrong.count, wrong.offset) == (8, 8 * 2)


def test_the_reference_is_made_in_parts_and_the_rows_count_through(monkeypatch):
    monkeypatch.setattr(matmul, "_PART_ELEMENTS", 70)
    left, right = matrices(33, 50, 20, "bf16")
    found = product(left, right, "bf16")
    assert wrong_elements(left, right, found, arithmetic("bf16")) is None
    found[31, 3] = found[32, 0] = 1e6
    wrong, _ = wrong_elements(left, right, found, arithmetic("bf16"))
    assert (wrong.count, wrong.offset) == (2, 20 * 31 + 3)
