"""The parts of a step are timed under their names, by a manual clock."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from pytest_gpucluster.benchmarks.clock import ManualClock
from pytest_gpucluster.benchmarks.training.step import (
    COMMUNICATION,
    DEFINITIONS,
    IN_ORDER,
    exposed,
    time_parts,
    time_without_exchange,
)


@pytest.fixture
def clock():
    return ManualClock()


def training_of(clock, *, forward, backward, optimizer):
    """A training that takes these seconds, in step after step."""
    forward, backward, optimizer = map(iter, (forward, backward, optimizer))

    def loss(rows):
        clock.advance(next(forward))
        return SimpleNamespace(backward=lambda: clock.advance(next(backward)))

    return SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        optimizer=SimpleNamespace(zero_grad=lambda set_to_none: clock.advance(100)),
        loss=loss,
        clip=lambda: clock.advance(next(optimizer)),
        update=lambda: clock.advance(0.5),
    )


def batches_of(clock, *seconds):
    for each in itertools.cycle(seconds):
        clock.advance(each)
        yield torch.zeros(1)


def test_each_part_is_the_median_of_its_own_time(clock):
    training = training_of(clock, forward=[1, 2, 9], backward=[4, 4, 5], optimizer=[0, 1, 1])
    found = time_parts(training, batches_of(clock, 3, 0, 7), clock, steps=3)
    assert found == {"data_wait": 3, "forward": 2, "backward": 4, "optimizer": 1.5}
    assert tuple(found) == IN_ORDER
    assert {*IN_ORDER, COMMUNICATION} == set(DEFINITIONS)


def test_a_step_without_exchange_is_forward_and_backward_but_for_the_first_one(clock):
    training = training_of(clock, forward=[50, 1, 1, 3], backward=[50, 2, 2, 3], optimizer=[])
    assert time_without_exchange(training, batches_of(clock, 9), clock, steps=3) == 3


@pytest.mark.parametrize(("alone", "expected"), [(2.5, 0.5), (4, 0)], ids=["longer with it", "by chance"])
def test_what_is_exposed_is_what_the_exchange_adds(alone, expected):
    assert exposed({"forward": 1, "backward": 2}, alone) == expected
