"""The check of a training step passes a right device, and sees each fault of a wrong one."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_gpucluster.benchmarks.training import model, step, step_check
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.step import Parts, token_mean
from pytest_gpucluster.benchmarks.training.step_check import check_step, needed_bytes
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

# The same arithmetic by another name: faults can tell it from the reference.
DEVICE = torch.device("cpu", 0)
GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)
SIZES = {"batch": 2, "steps": 3}


@pytest.fixture
def check():
    return lambda **more: check_step(DEVICE, GEOMETRY, **(SIZES | more))


@pytest.fixture
def broken(monkeypatch):
    """Put other parts into the steps of the device, and leave those of the reference."""

    def put(parts, precision="fp32"):
        whole = step.Training.__init__

        def init(self, model, device, **arguments):
            faulty = device is DEVICE and arguments["precision"] == precision
            whole(self, model, device, parts=parts if faulty else None, **arguments)

        monkeypatch.setattr(step.Training, "__init__", init)

    return put


def test_a_right_device_agrees_with_itself_and_in_bf16_nearly(check):
    fp32, bf16 = check()
    assert (fp32.loss, fp32.gradient, fp32.weight) == (0, 0, 0)
    assert 0 < bf16.loss < 5e-3
    assert 0 < bf16.gradient < 0.1
    assert 0 < bf16.weight < 0.5


def nudge(model, optimizer):
    """Weights that are off by a part in a thousand of a step."""
    optimizer.step()
    with torch.no_grad():
        model.head.weight += 1e-4


@pytest.mark.parametrize(
    ("parts", "name", "at_least"),
    [
        (Parts(loss=lambda *given: 2 * token_mean(*given)), "loss", 0.9),
        (Parts(loss=lambda *given: 2 * token_mean(*given)), "gradient", 0.9),
        (
            Parts(loss=lambda logits, targets: token_mean(logits, targets) + (logits * 1e-3).sum() * 1e-2),
            "gradient",
            1e-4,
        ),
        (Parts(update=nudge), "weight", 0.01),
    ],
    ids=["loss", "scale of the gradients", "direction of the gradients", "weights"],
)
def test_a_step_that_computes_something_else_is_off_by_more_than_the_limit(check, broken, parts, name, at_least):
    broken(parts)
    assert getattr(check()[0], name) > at_least


def test_bf16_that_computes_something_else_is_off_by_more_than_the_limit(check, broken):
    broken(Parts(loss=lambda *given: 1.2 * token_mean(*given)), "bf16")
    fp32, bf16 = check()
    assert bf16.gradient > 0.1
    assert bf16.loss > 5e-3
    assert fp32.loss == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite_is_wrong_at_once(check, broken, precision):
    broken(Parts(loss=lambda *given: math.nan * token_mean(*given)), precision)
    with pytest.raises(WrongResult, match=rf"cpu:0 in {precision}, step 1: the loss .*be finite"):
        check()


def test_a_gradient_that_is_not_finite_is_wrong_at_once(check, broken):
    def loss(logits, targets):
        logits.register_hook(lambda gradient: gradient * math.inf)
        return token_mean(logits, targets)

    broken(Parts(loss=loss))
    with pytest.raises(WrongResult, match=r"step 1: the gradients' norm is (inf|nan)"):
        check()


def test_weights_that_the_optimizer_leaves_alone_are_named(check, monkeypatch):
    made = model.make_decoder

    def frozen(*arguments, **more):
        model = made(*arguments, **more)
        model.blocks[0].down.requires_grad_(False)
        return model

    monkeypatch.setattr(step_check, "make_decoder", frozen)
    with pytest.raises(WrongResult, match=r"1 of 9 weight tensors.* 3 steps: blocks\.0\.down\.weight"):
        check()


def test_too_little_memory_is_the_environment_s_fault(monkeypatch):
    monkeypatch.setattr("pytest_gpucluster.device.backends.Cpu.free_bytes", lambda device: 1000)
    with pytest.raises(EnvironmentBroken, match=r"training 0\.\d+M parameters needs .* training\.width=256"):
        check_step(DEVICE, GEOMETRY, **SIZES)
    assert needed_bytes(GEOMETRY, 2) > 32 * GEOMETRY.parameters
