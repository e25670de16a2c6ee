"""Keep a device at its highest power for as long as is asked for, and verify every product on the way.

What a device does in its first seconds says little of the hour after it: heat comes slowly, and a unit that is right
a million times may be wrong once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from pytest_gpucluster.benchmarks.arithmetic import numerics
from pytest_gpucluster.benchmarks.blocks import NOTHING, Bursts
from pytest_gpucluster.benchmarks.burn_in_course import Course, Point
from pytest_gpucluster.benchmarks.clock import Clock, clock_for
from pytest_gpucluster.benchmarks.footprint import memory_returned
from pytest_gpucluster.benchmarks.matmul import multiplier, prepare
from pytest_gpucluster.benchmarks.matmul_products import Buffers, Multiply, Products
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

Progress = Callable[..., None]
"""``progress(step, of, **figures)``: shown to whoever waits. A step is a second."""

SHOWN_SECONDS = 5.0
"""Nobody waits for what takes less."""


def burn_in(
    device: torch.device,
    course: Course,
    *,
    n: int,
    dtype: str,
    interval_seconds: float,
    seed: int = 0,
    during: AbstractContextManager[object] = NOTHING,
    progress: Progress | None = None,
    clock: Clock | None = None,
    multiply: Multiply | None = None,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Multiply random n x n matrices without a pause for ``course.seconds``, and verify every product.

    The first products are held against a true fp32 reference, element by element, and each later one is compared on
    the device with the first of its kind, bit by bit: see ``matmul``. The comparisons keep the memory busy while the
    multipliers rest, some 3 % of the time.

    The course belongs to the caller, who has it however this ends. ``course.is_complete`` only if it ends well.

    Args:
        device: what to burn in.
        course: takes the points as they come.
        n, dtype, seed: what is multiplied: as in ``matmul.measure_matmul``.
        interval_seconds: about how long the products of one point of the course take.
        during: held open meanwhile.
        progress: called about once a second, in a burn-in of ``SHOWN_SECONDS`` or more, with the seconds gone, those
            asked for, and the figure ``tflops``.
        clock: takes the time of the products; by default the device's own.
        multiply: ``multiply(a, b, out)``; by default as ``matmul.multiplier``.
        now: the time that ``course.seconds`` is of; seconds that only grow.

    Raises:
        WrongResult: a product is wrong; names it and its first wrong element, and says when it was.
        EnvironmentBroken: the run was ended meanwhile; says how far the burn-in was. Or too little memory is free, the
            device has no fp8, or the environment forbids to choose between fp32 and TF32.
        InconclusiveMeasurement: the clock did not advance.
        KeyboardInterrupt: of the operator; says how far the burn-in was.
        ValueError: an argument is out of its range.
    """
    for what, value in (("course.seconds", course.seconds), ("interval_seconds", interval_seconds)):
        if not 0 < value < math.inf:
            raise ValueError(f"{what} must be positive and finite, not {value}")
    instead = "choose smaller matrices, such as --gpucluster-workload burn_in.n=8192"
    buffers = prepare(device, n=n, dtype=dtype, instead=instead)
    try:
        with memory_returned(), numerics(buffers.kind.float32_precision):
            _burn(
                device,
                course,
                buffers,
                f"{device}: burn-in {dtype} n={n}",
                seed,
                multiply or multiplier(device, buffers.kind),
                clock or clock_for(device),
                interval_seconds,
                during,
                progress,
                now,
            )
    except WrongResult as error:
        raise WrongResult(f"{error}; {course.reached}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"burn-in stopped {course.reached}") from None
    except Exception:
        raise  # what it says of the device is looked for in its type and text
    except BaseException as stop:  # by which a run that is over, or past its deadline, gets a rank out of here
        raise EnvironmentBroken(f"{stop}; burn-in stopped {course.reached}") from stop
    course.is_complete = True


def _burn(
    device: torch.device,
    course: Course,
    buffers: Buffers,
    name: str,
    seed: int,
    multiply: Multiply,
    clock: Clock,
    interval_seconds: float,
    during: AbstractContextManager[object],
    progress: Progress | None,
    now: Callable[[], float],
) -> None:
    # A function of its own, for its frame holds all tensors: see memory_returned.
    products = Products(device, buffers, name=name, seed=seed, multiply=multiply)
    bursts = Bursts(products, clock)
    total, told = math.ceil(course.seconds), 0
    begin, gone = now(), 0.0
    with counted(MEASURING), during:
        while gone < course.seconds:
            before, busy = bursts.done, 0.0
            until = min(gone + interval_seconds, course.seconds)
            while gone < until:
                busy += bursts.burst(products.most_at_once)
                gone = now() - begin
            done = bursts.done - before
            tflops = done * buffers.shape.flops / busy / 1e12
            point = Point(at_seconds=gone, products=done, busy_seconds=busy, tflops=tflops)
            course.add(point)
            step = int(gone) if gone < course.seconds else total
            if progress is not None and step > told and course.seconds >= SHOWN_SECONDS:
                told = step
                progress(step, total, tflops=point.tflops)
