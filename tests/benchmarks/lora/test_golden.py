from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.benchmarks.lora.curve import Curve, Point
from pytest_gpucluster.benchmarks.lora.golden import (
    REQUIRED,
    deviation,
    golden_of,
    read,
    require_same_experiment,
    write,
)
from pytest_gpucluster.errors import CurveError

CONTEXT = {
    "model": "tiny",
    "data_sha256": "e9b5",
    "seed": "7",
    "global_batch": "16",
    "sequence": "256",
    "precision": "fp32",
    "steps": "3",
}


def curve(*losses: float, first: int = 1, **context: str) -> Curve:
    points = tuple(
        Point(step=step, loss=loss, all_token_loss=loss, gradient_norm=1.0, learning_rate=1e-3)
        for step, loss in enumerate(losses, start=first)
    )
    return Curve(points=points, context={**CONTEXT, **context})


def test_of_one_run_the_band_is_a_part_of_the_loss_and_never_nothing() -> None:
    golden = golden_of([curve(6.0, 1.0, 0.0)])
    assert golden.loss == (6.0, 1.0, 0.0)
    assert golden.band == pytest.approx((0.12, 0.02, 0.001))
    assert golden.runs == 1
    assert golden.context == CONTEXT


def test_of_several_runs_the_band_is_their_spread_where_that_is_wider() -> None:
    golden = golden_of([curve(6.0, 1.0, 0.2), curve(6.0, 1.2, 0.2), curve(6.0, 1.1, 0.2)])
    assert golden.loss == pytest.approx((6.0, 1.1, 0.2))
    assert golden.band == pytest.approx((0.12, 3 * 0.1, 0.004))
    assert "3 standard deviations of the runs, 2 % of the loss, and 0.001 nats a token" in golden.rule


def test_a_golden_curve_is_read_back_exactly(tmp_path: Path) -> None:
    made = write(tmp_path / "g.json", [curve(1 / 3, 0.1, 5e-5), curve(1 / 7, 0.2, 5e-5)])
    assert read(tmp_path / "g.json") == made


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        pytest.param([], "no curve to make a golden one of", id="none"),
        pytest.param([curve()], "the curve has no points", id="empty"),
        pytest.param(
            [Curve(points=(), context={"model": "x"})], "the curve does not say its data_sha256, seed,", id="context"
        ),
        pytest.param([curve(1, math.nan)], "run 1 has a loss of nan at step 2", id="NaN"),
        pytest.param([curve(1.0), curve(math.inf)], "run 2 has a loss of inf at step 1", id="inf"),
        pytest.param([curve(1, 2), curve(1)], "run 2 has no step 2: 1 steps, and 2 are expected", id="shorter"),
        pytest.param([curve(1), curve(1, 2)], "run 2 has a step 2 too many: 2 steps, and 1 are expected", id="longer"),
        pytest.param([curve(1), curve(1, first=2)], "run 2 has no step 1", id="other steps"),
        pytest.param(
            [curve(1), curve(1, seed="8")],
            "not the same experiment: seed is '8' in run 2 and '7' in run 1",
            id="another seed",
        ),
    ],
)
def test_what_no_golden_curve_can_be_made_of(tmp_path: Path, curves: list[Curve], message: str) -> None:
    with pytest.raises(CurveError) as caught:
        write(tmp_path / "g.json", curves)
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "g.json").exists()


@pytest.fixture
def body(tmp_path: Path) -> dict[str, Any]:
    write(tmp_path / "g.json", [curve(6.0, 1.0, 0.5)])
    return json.loads((tmp_path / "g.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"format": "x"}, "no golden curve: its format is not", id="another format"),
        pytest.param({"version": 2}, "its version is 2, and this version of pytest-gpucluster reads 1", id="newer"),
        pytest.param({"band": None}, "band is no list", id="no list"),
        pytest.param({"loss": ...}, "no loss", id="a key missing"),
        pytest.param({"loss": ..., "bnad": []}, "no loss and unknown keys ['bnad']", id="a key misspelt"),
        pytest.param({"loss": [1, 2]}, "3 steps, 2 losses and 3 bands; every step needs one of each", id="length"),
        pytest.param({"steps": [], "loss": [], "band": []}, "0 steps, 0 losses and 0 bands", id="nothing"),
        pytest.param({"loss": [1, math.nan, 2]}, "no golden curve: NaN is no finite number", id="NaN"),
        pytest.param({"loss": [1, 10**400, 2]}, "loss holds 1000", id="too large"),
        pytest.param({"loss": [1, True, 2]}, "loss holds True, which is no finite number", id="no number"),
        pytest.param({"loss": [1, "2", 2]}, "loss holds '2', which is no finite number", id="text"),
        pytest.param({"steps": [1, 1, 2]}, "the steps are not whole numbers that rise", id="a step twice"),
        pytest.param({"steps": [1, 1.5, 2]}, "the steps are not whole numbers that rise", id="half a step"),
        pytest.param({"band": [1, 0, 1]}, "a band of 0.0 allows nothing; it must be above 0", id="no band"),
        pytest.param({"context": {"model": 1}}, "the context is no object of texts", id="context"),
        pytest.param({"context": {"model": "x"}}, "the context lacks data_sha256, seed, ", id="context incomplete"),
        pytest.param({"runs": 0}, "runs must be a number from 1, and rule a text", id="no runs"),
        pytest.param({"rule": None}, "runs must be a number from 1, and rule a text", id="no rule"),
    ],
)
def test_a_file_that_is_not_quite_one_is_refused(
    tmp_path: Path, body: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    changed = {key: value for key, value in {**body, **change}.items() if value is not ...}
    path = tmp_path / "g.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(CurveError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no golden curve: "),
        ("[]", "no golden curve: its format is not"),
        ('{"a": 1, "a": 2}', "no golden curve: 'a' is given 2 times"),
        ("[" * 100_000, "no golden curve: "),
        ("\udcff", "cannot be read: "),
    ],
    ids=["empty", "a list", "a key twice", "endless", "no text"],
)
def test_what_is_no_json_of_ours_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "g.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CurveError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {message}")


GOLDEN = golden_of([curve(6.0, 1.0, 0.5)])


def test_the_same_curve_does_not_deviate() -> None:
    found = deviation(GOLDEN, curve(6.0, 1.0, 0.5))
    assert (found.largest, found.step) == (0.0, 1)


@pytest.mark.parametrize(
    ("losses", "largest", "step"),
    [
        pytest.param((6.06, 1.0, 0.5), 0.5, 1, id="within"),
        pytest.param((6.0, 1.03, 0.5), 1.5, 2, id="above"),
        pytest.param((6.0, 1.0, 0.47), 3.0, 3, id="below is a deviation too"),
        pytest.param((6.1, 0.9, 0.499), 5.0, 2, id="the largest counts"),
    ],
)
def test_the_largest_deviation_counts_in_bands(losses: tuple[float, ...], largest: float, step: int) -> None:
    found = deviation(GOLDEN, curve(*losses))
    assert (found.largest, found.step) == (pytest.approx(largest), step)
    assert str(found).startswith(f"{largest:.3g} bands at step {step}: loss {losses[step - 1]:.6g}, golden ")


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_loss_that_is_no_number_is_no_agreement(value: float) -> None:
    found = deviation(GOLDEN, curve(9.0, value, 0.5))
    assert not found.largest <= 1
    assert not math.isfinite(found.largest)
    assert found.step == 2


@pytest.mark.parametrize("key", REQUIRED)
def test_another_experiment_is_refused_with_both_values(key: str) -> None:
    other = curve(6.0, 1.0, 0.5, **{key: "other"})
    told = f"{key} is 'other' in this run and {CONTEXT[key]!r} in the golden curve"
    with pytest.raises(CurveError, match=f"not the same experiment: {told}"):
        deviation(GOLDEN, other)
    with pytest.raises(CurveError, match=told):
        require_same_experiment(GOLDEN, other.context)


def test_every_difference_is_told_also_what_only_one_says() -> None:
    other = curve(6.0, 1.0, 0.5, seed="8", rank="16")
    with pytest.raises(CurveError) as caught:
        deviation(GOLDEN, other)
    assert str(caught.value) == (
        "not the same experiment: seed is '8' in this run and '7' in the golden curve; rank is '16' in this run and "
        "not given in the golden curve"
    )


def test_a_curve_of_other_steps_is_refused() -> None:
    with pytest.raises(CurveError, match="this run has no step 3: 2 steps, and 3 are expected"):
        deviation(GOLDEN, curve(6.0, 1.0))
    swapped = replace(curve(6.0, 1.0, 0.5), points=())
    with pytest.raises(CurveError, match="this run has no step 1"):
        deviation(GOLDEN, swapped)
