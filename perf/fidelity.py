"""How close our figures are to what the same work gives without this suite around it, in one run.

    python perf/fidelity.py                                # this machine's CPU, some minutes
    python perf/fidelity.py --device cuda                  # one GPU, at the sizes of the criteria
    python perf/fidelity.py --device cuda --only hbm,training --compiled

* matmul: ``measure_matmul``, every product of which is verified, beside a loop of the library's product;
* rectangle: the same of ``measure_shape``, with which the search over shapes measures, of an n x n/2 x n/4 product;
* hbm: ``measure_hbm``'s copy, verified, beside the best of torch's copy, cudaMemcpy and a kernel in Triton;
* training: ``throughput``'s steps beside a training loop written by hand, around the same decoder and data.

``perf/collectives.py`` does the same for collectives, which need ranks.

Both sides are taken in turn, at least 20 times, the bare loop twice in each pair. The ratio is of rates, ours to the
bare loop's, with the 95 % interval of its median; A/A is that of the bare loop to itself. On cpu the median ratio must
lie inside of the A/A band, the smallest to the largest; on a GPU the lower end of the interval must be 0.98 or more.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pairs import LEAST_PAIRS, judged, rates, ratio_cells

SUBJECTS = ("matmul", "rectangle", "hbm", "training")
DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8")
LEAST_N = 64
_ON_CPU = {"n": 512, "mebibytes": 64, "warmup": 0.0, "window": 0.15}
_ON_GPU = {"n": 16384, "mebibytes": 8192, "warmup": 1.0, "window": 2.0}


def makers(arguments: argparse.Namespace) -> Iterator[Callable[[], Any]]:
    """Yield what makes each subject, so that only one holds memory at a time."""
    import torch
    from fidelity_subjects import HbmCopy, Matmul, TrainingStep, sampling_of

    from pytest_gpucluster.benchmarks.dtypes import arithmetic
    from pytest_gpucluster.benchmarks.matmul import Shape, usual_layout
    from pytest_gpucluster.benchmarks.training.model import Geometry

    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    sampling = sampling_of(arguments.warmup, arguments.window)
    for dtype in arguments.dtypes if "matmul" in arguments.only else ():
        shape = Shape.square(arguments.n, layout=usual_layout(arithmetic(dtype)))
        yield lambda shape=shape, dtype=dtype: Matmul(device, shape, dtype=dtype, sampling=sampling)
    if "rectangle" in arguments.only:
        shape = Shape(m=arguments.n, n=arguments.n // 2, k=arguments.n // 4, layout="nt")
        yield lambda shape=shape: Matmul(device, shape, dtype="bf16", sampling=sampling)
    if "hbm" in arguments.only:
        yield lambda: HbmCopy(device, payload_bytes=arguments.mebibytes * 2**20, sampling=sampling)
    if "training" in arguments.only:
        if device.type == "cuda":
            geometry, batch = Geometry(layers=12, width=768, heads=12, vocab=50257, sequence=512), 8
        else:
            geometry, batch = Geometry(layers=2, width=128, heads=4, vocab=512, sequence=64), 4
        compiled = arguments.compiled
        yield lambda: TrainingStep(device, geometry=geometry, batch=batch, compiled=compiled, sampling=sampling)


def row(name: str, unit: str, each: float, pairs: list[dict[str, float]], device: str) -> tuple[str, bool]:
    """Return a row of the table, and whether ours is good."""
    bare, ours = rates(pairs, each)
    seen = judged(pairs, device)
    cells = (name, f"{bare:.4g} {unit}", f"{ours:.4g} {unit}", *ratio_cells(seen))
    return f"| {' | '.join(cells)} |", bool(seen["good"])


def run(arguments: argparse.Namespace) -> int:
    """Take all pairs and print the table; return 1 if ours is not good somewhere."""
    import torch

    load = [os.getloadavg()[0]]
    print("| what | bare loop | ours | ours to bare (95 %) | A/A (band) | |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    all_good = True
    for make in makers(arguments):
        subject = make()
        taken = [subject.take(number) for number in range(arguments.pairs)]
        text, good = row(subject.name, subject.unit, subject.each, taken, arguments.device)
        print(text, flush=True)
        if missing := getattr(subject, "missing", ""):
            print(f"| {subject.name} | | | | | NOT WHOLE: {missing} |", flush=True)
            good = False
        all_good = all_good and good
        del subject
    load.append(os.getloadavg()[0])
    name = torch.cuda.get_device_name(0) if arguments.device == "cuda" else f"{os.cpu_count()} cores"
    print(
        f"\nmedians of {arguments.pairs} pairs; {name}, load average {min(load):.1f} to {max(load):.1f}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
    return 0 if all_good else 1


def some_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return what reads some of these names, separated by commas."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r} is not some of {', '.join(known)}")
        return names

    return read


def main() -> int:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", type=some_of(SUBJECTS), default=list(SUBJECTS), help="(default: all)")
    parser.add_argument("--dtypes", type=some_of(DTYPES), help="of matmul (default: all; on cpu bf16,fp32)")
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS, help=f"at least {LEAST_PAIRS}, which is the default")
    parser.add_argument("--n", type=int, help="rows of the matrices (default: 512 on cpu, 16384)")
    parser.add_argument("--mebibytes", type=int, help="of a buffer (default: 64 on cpu, 8192)")
    parser.add_argument("--warmup", type=float, help="seconds before each figure (default: 0 on cpu, 1)")
    parser.add_argument("--window", type=float, help="seconds of each figure (default: 0.15 on cpu, 2)")
    parser.add_argument("--compiled", action="store_true", help="compile the blocks of the training, on both sides")
    arguments = parser.parse_args()
    if arguments.pairs < LEAST_PAIRS:
        parser.error(f"at least {LEAST_PAIRS} pairs are needed")
    for setting, value in (_ON_GPU if arguments.device == "cuda" else _ON_CPU).items():
        if getattr(arguments, setting) is None:
            setattr(arguments, setting, value)
    if arguments.n < LEAST_N:
        parser.error(f"--n {arguments.n}: {LEAST_N} rows or more are needed, for the rectangle has a quarter of them")
    arguments.dtypes = arguments.dtypes or list(DTYPES if arguments.device == "cuda" else ("bf16", "fp32"))
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
