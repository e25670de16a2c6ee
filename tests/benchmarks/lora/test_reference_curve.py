from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.lora import reference_curve
from pytest_gpucluster.benchmarks.lora.reference_curve import deviation, read, reference_curve_of, write
from pytest_gpucluster.errors import CurveError
from pytest_gpucluster.metrics.loss_curve import Curve, Point

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
    reference = reference_curve_of([curve(6.0, 1.0, 0.0)])
    assert (reference.loss, reference.runs, reference.context) == ((6.0, 1.0, 0.0), 1, CONTEXT)
    assert reference.band == pytest.approx((0.12, 0.02, 0.001))


def test_of_several_runs_the_band_is_their_spread_where_that_is_wider() -> None:
    reference = reference_curve_of([curve(6.0, 1.0, 0.2), curve(6.0, 1.04, 0.2), curve(6.0, 1.02, 0.2)])
    assert reference.loss == pytest.approx((6.0, 1.02, 0.2))
    assert reference.band == pytest.approx((0.12, 3 * 0.02, 0.004))


def test_a_reference_curve_is_read_back_exactly(tmp_path: Path) -> None:
    made = write(tmp_path / "g.json", [curve(1 / 3, 0.1, 5e-5), curve(0.33, 0.101, 5e-5)])
    assert read(tmp_path / "g.json") == made


@of_each(
    "rejected",
    [
        ([curve()], "the curve has no points"),
        ([curve(1, math.nan)], "run 1 has a loss of nan at step 2"),
        ([curve(1.0), curve(math.inf)], "run 2 has a loss of inf at step 1"),
        ([curve(1, 2), curve(1)], "run 2 has the steps 1, expected are 1, 2"),
        ([curve(1), curve(1, 2)], "run 2 has the steps 1, 2, expected are 1"),
        ([curve(1), curve(1, first=2)], "run 2 has the steps 2, expected are 1"),
        ([curve(1, 1), curve(1, 1.06)], "the band at step 2 would be 0.127 nats, 12% of the loss"),
        ([curve(1), curve(1, seed="8")], "not the same experiment: seed is 8 in run 2 and 7 in run 1"),
    ],
)
def test_what_no_reference_curve_can_be_made_of(tmp_path: Path, rejected: tuple[list[Curve], str]) -> None:
    curves, message = rejected
    with pytest.raises(CurveError) as caught:
        write(tmp_path / "g.json", curves)
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "g.json").exists()


@of_each(
    "rejected",
    [
        ({"format": "x"}, "no reference curve: its format"),
        ({"version": 2}, "its version is 2, and this version of pytest-gpucluster reads 1"),
        ({"band": 1}, "band must be a list"),
        ({"loss": ...}, "loss must be a list"),
        ({"loss": [1, 2]}, "3 steps, 2 losses and 3 bands"),
        ({"steps": [], "loss": [], "band": []}, "0 steps, 0 losses and 0 bands"),
        ({"loss": [1, "NaN", 2]}, "a loss or band is no finite number"),
        ({"loss": [1, True, 2]}, "loss[1] must be a number, found True"),
        ({"steps": [1, 1, 2]}, "the steps do not rise"),
        ({"steps": [1, 1.5, 2]}, "steps[1] must be an integer"),
        ({"band": [1, 0, 1]}, "a band of 0.0 allows nothing"),
        ({"context": {"model": 1}}, "context.model must be text"),
        ({"runs": 0}, "runs must be a number from 1"),
    ],
)
def test_a_file_that_is_not_quite_one_is_refused(tmp_path: Path, rejected: tuple[dict[str, Any], str]) -> None:
    path, (change, message) = tmp_path / "g.json", rejected
    write(path, [curve(6.0, 1.0, 0.5)])
    changed = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not ...}))
    with pytest.raises(CurveError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@of_each(
    "rejected",
    [
        ("", "no reference curve: "),
        ("[]", "no reference curve: its format"),
        ("[" * 100_000, "no reference curve: "),
        ("\udcff", "cannot be read: "),
    ],
)
def test_what_is_no_json_of_ours_is_refused(tmp_path: Path, rejected: tuple[str, str]) -> None:
    path, (text, message) = tmp_path / "g.json", rejected
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CurveError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {message}")


REFERENCE = reference_curve_of([curve(6.0, 1.0, 0.5)])


@of_each(
    "found",
    [
        ((6.0, 1.0, 0.5), 0.0, 1),
        ((6.06, 1.0, 0.5), 0.5, 1),
        ((6.0, 1.03, 0.5), 1.5, 2),
        ((6.0, 1.0, 0.47), 3.0, 3),
        ((6.1, 0.9, 0.499), 5.0, 2),
    ],
)
def test_the_largest_deviation_counts_in_bands(found: tuple[tuple[float, ...], float, int]) -> None:
    losses, largest, step = found
    value, message = deviation(REFERENCE, curve(*losses), steps=3)
    assert value == pytest.approx(largest)
    assert message.startswith(f"{largest:.3g} bands at step {step}: loss {losses[step - 1]:.6g}, reference ")


@of_each("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_no_agreement(value: float) -> None:
    largest, message = deviation(REFERENCE, curve(9.0, value, 0.5), steps=3)
    assert not math.isfinite(largest)
    assert " bands at step 2: " in message


@of_each("key", [*CONTEXT])
def test_another_experiment_is_refused_with_both_values(key: str) -> None:
    other = curve(6.0, 1.0, 0.5, **{key: "other", "rank": "16"})
    message = rf"{key} is other in this run and {CONTEXT[key]} in .*rank is 16 .*not given"
    with pytest.raises(CurveError, match=message):
        deviation(REFERENCE, other, steps=3)
    with pytest.raises(CurveError, match=message):
        reference_curve.require_same_experiment(REFERENCE, other.context, steps=3)


def test_a_curve_of_other_steps_is_refused() -> None:
    with pytest.raises(CurveError, match=r"this run has the steps 1, 2, expected are 1, 2, 3"):
        deviation(REFERENCE, curve(6.0, 1.0), steps=3)
    assert deviation(REFERENCE, curve(6.0, 1.03), steps=2)[0] == pytest.approx(1.5)
    with pytest.raises(CurveError, match=r"has 3 steps, and this run takes 4"):
        reference_curve.require_same_experiment(REFERENCE, REFERENCE.context, steps=4)
    swapped = replace(curve(6.0, 1.0, 0.5), points=())
    with pytest.raises(CurveError, match=r"this run has the steps none, expected are 1"):
        deviation(REFERENCE, swapped, steps=3)
