"""The files that the tests of an example run leave in its folder, written by what writes them in a real run."""

import json
import math
import random

from pytest_gpucluster.benchmarks.burn_in import Point as CoursePoint
from pytest_gpucluster.benchmarks.burn_in import TimeSeries
from pytest_gpucluster.isolation.link_matrix import Reading
from pytest_gpucluster.isolation.link_survey import Survey, matrix_of, survey_text, to_json
from pytest_gpucluster.isolation.round_robin import Places
from pytest_gpucluster.metrics.loss_curve import Curve, Point

PAYLOAD_BYTES = 256_000_000
GB = 1e9


def links_within_nodes(run, *, slow=(), seed=5):
    """Return what a survey of all links within nodes has found; those of the ranks in ``slow`` carry 2/5."""
    drawn = random.Random(seed)
    places = Places.of(run.who)
    readings = [
        _reading(sender, receiver, 0.4 if {sender, receiver} & set(slow) else 1.0, drawn)
        for ranks in places.ranks
        for sender in ranks
        for receiver in ranks
        if sender != receiver
    ]
    matrix = matrix_of(readings, "node", places)
    again = [_reading(*pair, 0.4, drawn) for pair in matrix.slow(0.75)]
    return Survey(
        scope="node",
        places=places,
        matrix=matrix,
        alone=matrix_of(again, "node", places),
        below=0.75,
        rounds=run.per_node - 1,
        planned_seconds=7.0,
        seconds=8.4,
    )


def _reading(sender, receiver, share, drawn):
    rate = share * drawn.gauss(372, 2.5) * GB
    return Reading(
        sender=sender,
        receiver=receiver,
        bytes_per_second=rate,
        low=0.99 * rate,
        high=1.01 * rate,
        payload_bytes=PAYLOAD_BYTES,
    )


def write_links(folder, survey):
    """Write a survey as the links criterion does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"links-{survey.scope}.json").write_text(json.dumps(to_json(survey)), encoding="utf-8")
    (folder / f"links-{survey.scope}.txt").write_text(survey_text(survey), encoding="utf-8")


def loss_curve(*, steps=100, final=0.31, seed=6):
    """Return a loss curve that falls to about ``final``."""
    drawn = random.Random(seed)
    points = []
    for step in range(1, steps + 1):
        loss = final + 2.1 * math.exp(-step / 18) + drawn.gauss(0, 0.02)
        points.append(
            Point(
                step=step,
                loss=loss,
                all_token_loss=1.4 * loss,
                gradient_norm=0.4 + 3 * math.exp(-step / 12) + abs(drawn.gauss(0, 0.05)),
                learning_rate=2e-4 * min(1.0, step / 10),
            )
        )
    held_out = tuple((step, final + 0.08 + 2.1 * math.exp(-step / 18)) for step in range(0, steps + 1, 25))
    return Curve(points=tuple(points), held_out=held_out, context={"model": "lora_tiny", "precision": "bf16"})


def write_curve(folder, curve):
    """Write a loss curve as the LoRA criteria do."""
    folder.mkdir(parents=True, exist_ok=True)
    curve.write_csv(folder / "curve-group-0.csv")


def write_courses(folder, ranks, *, slow=(), seconds=600.0, seed=7):
    """Write the course of each rank's burn-in; those in ``slow`` get slower as they get warm."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(seed)
    for rank in ranks:
        course = TimeSeries(seconds, folder / f"burn-in-rank-{rank}.csv")
        for at in range(10, int(seconds) + 1, 10):
            lost = 0.18 * min(1.0, at / 200) if rank in slow else 0.02 * min(1.0, at / 60)
            course.add(
                CoursePoint(
                    at_seconds=float(at),
                    products=680,
                    busy_seconds=9.7,
                    tflops=745 * (1 - lost) + drawn.gauss(0, 1.5),
                )
            )
        course.is_complete = True
