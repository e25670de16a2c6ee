"""Whatever changes in a tensor changes its fingerprint."""

from __future__ import annotations

import torch
from each import of_each

from pytest_gpucluster.benchmarks.training import fingerprint as module
from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint


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
