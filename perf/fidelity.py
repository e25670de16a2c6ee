"""Our figures against those of the same work without this suite, in one run.

    python perf/fidelity.py                                # this machine's CPU, some minutes
    python perf/fidelity.py --device cuda                  # one GPU, at the sizes of the criteria
    python perf/fidelity.py --device cuda --only hbm,training --compiled

* matmul: ``measure_matmul``, every product of which is verified, against a loop of the library's product;
* rectangle: the same, as the search over shapes measures, of an n x n/2 x n/4 product;
* hbm: ``measure_hbm``'s copy, verified, against the best of torch's copy, cudaMemcpy and a kernel in Triton;
* training: ``throughput``'s steps against a training loop written by hand, around the same decoder and data.

Both sides are taken in turn, at least 20 times. comparison.py has the ratios, and when they are good. For collectives,
which need ranks: perf/collectives.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

from comparison import LEAST_PAIRS, Conditions, compared, parser_of, row, some_of

SUBJECTS = ("matmul", "rectangle", "hbm", "training")
DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8")
LEAST_N = 64
_ON_CPU = {"n": 512, "mebibytes": 64, "warmup": 0.0, "window": 0.15}
_ON_GPU = {"n": 16384, "mebibytes": 8192, "warmup": 1.0, "window": 2.0}


def makers(arguments: argparse.Namespace) -> Iterator[Callable[[], Any]]:
    """Yield a maker of each subject, so that only one holds memory at a time."""
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


def run(arguments: argparse.Namespace) -> int:
    """Take all pairs and print the table; return 1 if ours is not good somewhere."""
    import torch

    conditions = Conditions()
    print("| what | bare loop | ours | ours to bare (95 %) | A/A (band) | |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    all_good = True
    for make in makers(arguments):
        subject = make()
        taken = [subject.take(number) for number in range(arguments.pairs)]
        bare, ours, cells, good = compared(taken, subject.each, arguments.device)
        print(row([subject.name, f"{bare:.4g} {subject.unit}", f"{ours:.4g} {subject.unit}", *cells]), flush=True)
        if missing := getattr(subject, "missing", ""):
            print(f"| {subject.name} | | | | | NOT WHOLE: {missing} |", flush=True)
            good = False
        all_good = all_good and good
        del subject
    name = torch.cuda.get_device_name(0) if arguments.device == "cuda" else ""
    print(f"\nmedians of {arguments.pairs} pairs; {conditions.line(on=name)}")
    return 0 if all_good else 1


def main() -> int:
    """Read the arguments."""
    parser = parser_of(__doc__)
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
