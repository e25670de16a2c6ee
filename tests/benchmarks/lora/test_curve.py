from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.lora.convergence import LiveCurve
from pytest_gpucluster.errors import CurveError
from pytest_gpucluster.metrics.loss_curve import FIRST_LINE, Curve, Point, mean_of_last, read_csv


def point(step: int, loss: float = 6.0) -> Point:
    return Point(step=step, loss=loss, all_token_loss=0.1 + 0.2, gradient_norm=1 / 3, learning_rate=2e-5)


CURVE = Curve(
    points=(point(1), point(2, 5e-324), point(3, 1.7976931348623157e308)),
    held_out=((0, 6.25), (2, 0.1)),
    context={"model": "tiny", "data": 'a, "b"\nc', "seed": "7", "equals": "a=b", "empty": ""},
)
HEADER = "step,loss,all_token_loss,gradient_norm,learning_rate,held_out_loss"


@of_each("curve", [CURVE, Curve(points=())])
def test_a_curve_is_read_back_exactly(tmp_path: Path, curve: Curve) -> None:
    curve.write_csv(tmp_path / "curve.csv")
    assert read_csv(tmp_path / "curve.csv") == curve


def test_the_file_is_plain_csv_below_comments(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    Curve(points=(point(1), point(2)), held_out=((0, 6.5), (2, 5.5)), context={"model": "tiny"}).write_csv(path)
    assert path.read_text().splitlines() == [
        FIRST_LINE,
        '# model="tiny"',
        HEADER,
        "0,,,,,6.5",
        "1,6.0,0.30000000000000004,0.3333333333333333,2e-05,",
        "2,6.0,0.30000000000000004,0.3333333333333333,2e-05,5.5",
    ]


@of_each("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_written_as_it_is(tmp_path: Path, value: float) -> None:
    path = tmp_path / "curve.csv"
    Curve(points=(point(1, value), point(2)), held_out=((1, value),)).write_csv(path)
    found = read_csv(path)
    for read in (found.points[0].loss, found.held_out[0][1]):
        assert read == value or (math.isnan(read) and math.isnan(value))
    assert found.points[1] == point(2)


@of_each("steps", [(2, 1), (1, 1), (-1, 1)])
def test_steps_must_rise(steps: tuple[int, int]) -> None:
    with pytest.raises(CurveError, match=r"the points"):
        Curve(points=tuple(map(point, steps)))
    with pytest.raises(CurveError, match=r"the held-out losses"):
        Curve(points=(), held_out=tuple((step, 1.0) for step in steps))


@of_each(
    "refused",
    [
        ("", ":1: no loss curve of this version: it begins with nothing,"),
        ("step,loss\n1,2\n", ":1: no loss curve of this version: it begins with 'step,loss'"),
        ("# pytest-gpucluster loss curve 2\n", ":1: no loss curve of this version"),
        (f"{FIRST_LINE}\n", ":2: the columns must be step,loss,"),
        (f"{FIRST_LINE}\nstep,loss\n", ":2: the columns must be step,loss,all_token_loss"),
        (f"{FIRST_LINE}\n# model=tiny\n", ":2: 'tiny' is"),
        (f"{FIRST_LINE}\n{HEADER}\n1,2\n", ":3: 2 values, and there are 6 columns"),
        (f"{FIRST_LINE}\n{HEADER}\n1,2,3,4,x,\n", ":3: could not convert"),
        (f"{FIRST_LINE}\n{HEADER}\n1,2,,4,5,\n", ":3: could not convert"),
        (f"{FIRST_LINE}\n{HEADER}\n1.5,2,3,4,5,\n", ":3: invalid literal for int()"),
        (f"{FIRST_LINE}\n{HEADER}\n2,1,1,1,1,\n1,1,1,1,1,\n", ": the points"),
        ("\udcff", ": cannot be read: "),
    ],
)
def test_what_is_no_curve_is_refused_with_its_place(tmp_path: Path, refused: tuple[str, str]) -> None:
    path, (text, message) = tmp_path / "x.csv", refused
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CurveError) as caught:
        read_csv(path)
    assert str(caught.value).startswith(f"{path}{message}")
    with pytest.raises(CurveError, match=r"gone\.csv: cannot"):
        read_csv(tmp_path / "gone.csv")


def test_the_mean_of_the_last_losses() -> None:
    curve = Curve(points=tuple(point(step, float(step)) for step in range(1, 5)))
    assert mean_of_last(curve, 2) == 3.5
    assert math.isnan(mean_of_last(curve, 5)), "too few points must not pass for enough"
    assert math.isnan(mean_of_last(Curve(points=(point(1), point(2, math.nan))), 2))


def test_event_files_hold_every_scalar(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    curve = Curve(points=(point(1, 6.0), point(2, math.nan)), held_out=((0, 6.5),), context=CURVE.context)
    live = LiveCurve(tmp_path, "group-0")
    live.write(replace(curve, points=curve.points[:1]))
    assert read_csv(tmp_path / "curve-group-0.csv").points == curve.points[:1]
    live.write(curve)  # and it is not closed: as a training that is killed leaves it
    assert [one.step for one in read_csv(tmp_path / "curve-group-0.csv").points] == [1, 2]
    [file] = (tmp_path / "tensorboard-group-0").iterdir()
    events = list(loader.RawEventFileLoader(str(file)).Load())
    pb = importlib.import_module("tensorboard.compat.proto.event_pb2")
    found: dict[tuple[str, int], float] = {}
    for event in map(pb.Event.FromString, events):
        for value in event.summary.value:
            found[value.tag, event.step] = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
    assert found["lora/loss", 1] == 6.0
    assert math.isnan(found["lora/loss", 2])
    assert found["lora/held_out_loss", 0] == 6.5
    assert {tag for tag, _ in found} == {
        f"lora/{name}" for name in ("loss", "all_token_loss", "gradient_norm", "learning_rate", "held_out_loss")
    }
    live.close()


def test_without_tensorboard_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    live = LiveCurve(tmp_path, "group-0")
    live.write(CURVE)
    live.close()
    assert [path.name for path in tmp_path.iterdir()] == ["curve-group-0.csv"]
