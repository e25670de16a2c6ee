"""One training step is what it says, and its parts are timed under their names."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks.training import step
from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.fingerprint import gradients_of, weights_of
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.step import (
    IN_ORDER,
    Parts,
    Training,
    time_parts,
    time_without_exchange,
    token_mean,
)
from pytest_gpucluster.device.clock import ManualClock

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=2, width=64, heads=4, vocab=96, sequence=16)


def training(precision="fp32", **arguments):
    return Training(make_decoder(GEOMETRY, CPU, seed=0), CPU, precision=precision, **arguments)


def rows(count=8, seed=0):
    data = PackedTokens(rows=count, sequence=GEOMETRY.sequence, vocab=GEOMETRY.vocab, seed=seed)
    return torch.stack([data[row] for row in range(count)])


def test_the_loss_is_the_mean_over_all_tokens():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    chances = logits.softmax(-1)
    each = [-math.log(chances[row, at, targets[row, at]]) for row in range(2) for at in range(3)]
    assert float(token_mean(logits, targets)) == pytest.approx(sum(each) / 6)


def test_the_target_of_a_token_is_the_next_one():
    seen = {}

    def loss(logits, targets):
        seen["shapes"], seen["targets"] = (logits.shape, targets.shape), targets
        return token_mean(logits, targets)

    batch = rows()
    training(parts=Parts(loss=loss)).loss(batch)
    assert seen["shapes"] == ((8, 16, 96), (8, 16))
    assert torch.equal(seen["targets"], batch[:, 1:])


@of_each("precision", list(step.PRECISIONS))
def test_steps_lower_the_loss(precision):
    trained, batch = training(precision), rows()
    losses = [float(trained.step([batch]).losses) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1


def test_weights_gradients_and_loss_are_fp32_in_bf16_too():
    trained = training("bf16")
    taken = trained.step([rows()])
    kept = [
        taken.losses,
        taken.gradient_norm,
        *trained.model.parameters(),
        *(w.grad for w in trained.model.parameters()),
    ]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert not torch.equal(training("fp32").loss(rows()), training("bf16").loss(rows()))


def test_the_norm_is_that_of_the_gradients_before_they_are_clipped():
    plain, doubled = training(), training(parts=Parts(loss=lambda *given: 2 * token_mean(*given)))
    norm, twice = (float(one.backward([rows()]).gradient_norm) for one in (plain, doubled))
    assert norm > step.LARGEST_NORM
    assert twice == pytest.approx(2 * norm)
    assert float(gradients_of(plain.model).norm()) == pytest.approx(step.LARGEST_NORM, rel=1e-4)
    assert torch.allclose(gradients_of(plain.model), gradients_of(doubled.model), atol=1e-6)


def test_micro_batches_make_the_gradients_of_the_whole_batch():
    whole, parts = training(), training()
    one, four = whole.backward([rows()]), parts.backward(rows().chunk(4))
    assert four.losses.shape == (4,)
    assert float(four.losses.mean()) == pytest.approx(float(one.losses))
    assert float(four.gradient_norm) == pytest.approx(float(one.gradient_norm), rel=1e-5)
    assert torch.allclose(gradients_of(parts.model), gradients_of(whole.model), atol=1e-6)


def test_a_step_forgets_the_gradients_of_the_one_before():
    trained = training(learning_rate=0.0)
    first, again = trained.step([rows()]), trained.step([rows()])
    assert torch.equal(first.gradient_norm, again.gradient_norm)


def test_the_learning_rate_and_the_update_decide_how_far_weights_move():
    still, trained = training(learning_rate=0.0), training()
    nowhere = training(parts=Parts(update=lambda model, optimizer: None))
    start = weights_of(trained.model)
    for one in (still, trained, nowhere):
        one.step([rows()])
    assert torch.equal(weights_of(still.model), start)
    assert torch.equal(weights_of(nowhere.model), start)
    # AdamW's first step is the learning rate, up or down.
    assert float((weights_of(trained.model) - start).abs().max()) == pytest.approx(step.LEARNING_RATE, rel=1e-3)


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


def test_each_part_is_the_median_of_its_own_time(clock, monkeypatch):
    monkeypatch.setattr(step, "PARTS_STEPS", 3)
    training = training_of(clock, forward=[1, 2, 9], backward=[4, 4, 5], optimizer=[0, 1, 1])
    found = time_parts(training, batches_of(clock, 3, 0, 7), clock)
    assert found == {"data_wait": 3, "forward": 2, "backward": 4, "optimizer": 1.5}
    assert tuple(found) == IN_ORDER


def test_a_step_without_exchange_is_forward_and_backward_but_for_the_first_one(clock, monkeypatch):
    monkeypatch.setattr(step, "PARTS_STEPS", 3)
    training = training_of(clock, forward=[50, 1, 1, 3], backward=[50, 2, 2, 3], optimizer=[])
    assert time_without_exchange(training, batches_of(clock, 9), clock) == 3
