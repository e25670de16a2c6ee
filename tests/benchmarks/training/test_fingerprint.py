"""Whatever changes in a tensor changes its fingerprint; the differences between two runs of steps are measured."""

from __future__ import annotations

import math

import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks.training import fingerprint as module
from pytest_gpucluster.benchmarks.training.fingerprint import distance, fingerprint, relative
from pytest_gpucluster.benchmarks.training.step_check import StepRecord, errors


def numbers(dtype=torch.float32, count=1000):
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


@of_each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_any_flipped_bit_shows(dtype):
    tensor = numbers(dtype, 40) if dtype.is_floating_point else torch.arange(40, dtype=dtype)
    before, seen = fingerprint([tensor]), set()
    for byte in range(tensor.nbytes):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(torch.uint8)[byte] ^= 1 << bit
            seen.add(fingerprint([changed]))
    assert before not in seen


def test_two_elements_that_have_changed_places_show():
    tensor = numbers()
    changed = tensor.clone()
    changed[[3, 700]] = changed[[700, 3]]
    assert fingerprint([changed]) != fingerprint([tensor])


def test_two_tensors_that_have_changed_places_show():
    first, second = numbers(), numbers() + 1
    assert fingerprint([first, second]) != fingerprint([second, first])


def test_minus_zero_is_not_zero():
    assert fingerprint([torch.tensor([-0.0])]) != fingerprint([torch.tensor([0.0])])


def test_parts_and_strides_make_no_difference(monkeypatch):
    tensor = numbers().view(25, 40)
    whole = fingerprint([tensor])
    assert fingerprint([tensor.t().contiguous().t()]) == whole
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    assert fingerprint([tensor]) == whole
    assert 0 <= whole < 2**64


ROW = torch.tensor([3.0, 4.0])


START = torch.zeros(2)


def steps(*seen):
    plain = {"loss": 2.0, "gradient_norm": 5.0, "gradients": ROW, "weights": ROW}
    return [StepRecord(**(plain | one)) for one in seen]


def test_the_same_steps_have_no_error():
    found = errors(steps({}, {}), steps({}, {}), START)
    assert (found.loss, found.gradient, found.weight) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"loss": 2.1}, (0.05, 0, 0)),
        ({"gradient_norm": 10.0}, (0, 1, 0)),
        ({"gradients": -ROW}, (0, 2, 0)),
        ({"weights": ROW * 1.5}, (0, 0, 0.5)),
    ],
    ids=["loss", "norm alone", "direction alone", "weights"],
)
@pytest.mark.parametrize("last", [True, False], ids=["in the last step", "in an earlier one"])
def test_each_kind_of_error_is_the_largest_of_all_steps(changed, expected, last):
    found = errors(steps(*(({}, changed) if last else (changed, {}))), steps({}, {}), START)
    assert (found.loss, found.gradient, found.weight) == pytest.approx(expected, abs=1e-9)


def test_weights_are_held_against_the_way_that_they_have_gone():
    near = steps({"weights": ROW + torch.tensor([0.0, 0.1])})
    assert errors(near, steps({}), torch.tensor((3.0, 3.5))).weight == pytest.approx(0.2)


def test_beside_nothing_every_difference_is_infinite():
    assert relative(1.0, 0.0) == math.inf
    assert distance(ROW, torch.zeros(2)) == math.inf
    assert distance(ROW, ROW, since=ROW) == math.inf
