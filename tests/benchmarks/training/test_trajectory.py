"""The differences between two runs of steps are measured."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_gpucluster.benchmarks.training.fingerprint import StepRecord, Trajectory, distance, errors, relative

ROW = torch.tensor([3.0, 4.0])


def trajectory(*seen, start=(0.0, 0.0)):
    plain = {"loss": 2.0, "gradient_norm": 5.0, "gradients": ROW, "weights": ROW}
    return Trajectory(start=torch.tensor(start), steps=tuple(StepRecord(**(plain | one)) for one in seen))


def test_the_same_steps_have_no_error():
    found = errors(trajectory({}, {}), trajectory({}, {}))
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
    steps = ({}, changed) if last else (changed, {})
    found = errors(trajectory(*steps), trajectory({}, {}))
    assert (found.loss, found.gradient, found.weight) == pytest.approx(expected, abs=1e-9)


def test_weights_are_held_against_the_way_that_they_have_gone():
    near = trajectory({"weights": ROW + torch.tensor([0.0, 0.1])}, start=(3.0, 3.5))
    assert errors(near, trajectory({}, start=(3.0, 3.5))).weight == pytest.approx(0.2)


def test_beside_nothing_every_difference_is_infinite():
    assert relative(1.0, 0.0) == math.inf
    assert distance(ROW, torch.zeros(2)) == math.inf
    assert distance(ROW, ROW, since=ROW) == math.inf
