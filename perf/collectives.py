"""The busbw of our measurement of collectives against that of a bare loop of the same calls, in one run.

    python perf/collectives.py                             # two CPU ranks over gloo
    python perf/collectives.py --device cuda --ranks 8 --sizes 1MiB,64MiB,1GiB

In each pair both are taken in turn on the same group. The bare loop makes a number of calls between two readings of the
host's clock, behind a barrier; of 8 such loops the median counts, and of each the slowest rank. Ours is
``measure_collective`` as the criteria use it, with its windows, its clock and its verification. comparison.py has the
ratios, and when they are good.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from comparison import LEAST_PAIRS, Conditions, compared, in_turn, parser_of, row, run_child, some_of

LEAST_BYTES = 2**20
_LOOPS = 8
_DTYPE = "fp32"
_DEADLINE_SECONDS = 1800


# ---- on each rank


def child(arguments: argparse.Namespace) -> None:
    """Take all pairs; rank 0 writes the seconds of each call."""
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if arguments.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    found = []
    for collective in arguments.collectives:
        for size in arguments.sizes:
            pairs = Pairs(collective, size, device, window_seconds=arguments.window)
            taken = [pairs.take(number) for number in range(arguments.pairs)]
            found.append({"collective": collective, "bytes": size, "pairs": taken})
            if rank == 0:
                print(f"{collective} {size} B: done", file=sys.stderr, flush=True)
    if rank == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
        results = {"found": found, "ranks": ranks, "on": name}
        Path(arguments.result).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process that still refers to a group at its end may be aborted by gloo


class Pairs:
    """One collective and size: ours and the bare loop, in turns."""

    def __init__(self, collective: str, payload_bytes: int, device: Any, *, window_seconds: float) -> None:
        import torch
        import torch.distributed as dist

        from pytest_gpucluster.benchmarks.collective_payload import shape_of
        from pytest_gpucluster.benchmarks.collectives import CALLS
        from pytest_gpucluster.metrics.sampling import Sampling

        group = dist.group.WORLD
        assert group is not None
        self._group, self._device, self._collective, self._bytes = group, device, collective, payload_bytes
        shape = shape_of(collective, payload_bytes, itemsize=4, ranks=dist.get_world_size(group))
        # Random, as ours, where nothing is summed in place: there only zeros stay what they are.
        self._sent = torch.zeros(shape.sent, device=device) if shape.in_place else torch.rand(shape.sent, device=device)
        self._received = self._sent if shape.in_place else torch.zeros(shape.received, device=device)
        self._call = CALLS[collective]
        self._sampling = Sampling(
            warmup_seconds=0.0, window_seconds=window_seconds, longest_seconds=window_seconds, tolerance_ratio=3.0
        )
        self._calls = 1
        for _ in range(3):  # the first loops connect
            seconds = self._loop()
            self._calls = int(self._of_first(max(1.0, min(1000.0, window_seconds / _LOOPS / seconds))))

    def take(self, number: int) -> dict[str, float]:
        """Return the seconds of one call: of ours, and twice of the bare loop."""
        return in_turn(number, self._ours, self._bare)

    def _ours(self) -> float:
        from pytest_gpucluster.benchmarks.collectives import measure_collective

        result = measure_collective(
            self._collective,
            self._group,
            self._device,
            payload_bytes=self._bytes,
            dtype=_DTYPE,
            sampling=self._sampling,
        )
        return result.slowest_latency.median

    def _bare(self) -> float:
        return statistics.median(self._loop() for _ in range(_LOOPS))

    def _loop(self) -> float:
        """Return the seconds of a call on the slowest rank."""
        import torch
        import torch.distributed as dist

        dist.barrier(group=self._group)
        self._wait()
        begin = time.perf_counter()
        for _ in range(self._calls):
            self._call(self._sent, self._received, self._group)
        self._wait()
        mine = torch.tensor([(time.perf_counter() - begin) / self._calls], dtype=torch.float64, device=self._device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group)
        return float(mine)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)

    def _of_first(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        shared = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.broadcast(shared, src=0, group=self._group)
        return float(shared)


# ---- what is printed


def run(arguments: argparse.Namespace) -> int:
    """Let the ranks take the pairs, and print the table; return 1 if ours is not good somewhere."""
    from pytest_gpucluster.benchmarks.collectives import busbw_factor

    conditions = Conditions()
    results = run_child(__file__, sys.argv[1:], ranks=arguments.ranks, deadline_seconds=_DEADLINE_SECONDS)
    print("| collective | size | bare loop, GB/s | ours, GB/s | ours to bare (95 %) | A/A (band) | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    all_good = True
    for found in results["found"]:
        each = found["bytes"] * busbw_factor(results["ranks"], found["collective"]) / 1e9
        bare, ours, cells, good = compared(found["pairs"], each, arguments.device)
        print(row([found["collective"], f"{found['bytes'] / 2**20:g} MiB", f"{bare:.3f}", f"{ours:.3f}", *cells]))
        all_good = all_good and good
    print(
        f"\nbusbw over {results['ranks']} ranks, medians of {arguments.pairs} pairs; "
        f"{conditions.line(on=results['on'])}"
    )
    return 0 if all_good else 1


def sizes(text: str) -> list[int]:
    """Read sizes with their units, in bytes."""
    from pytest_gpucluster.errors import UnitError
    from pytest_gpucluster.metrics.units import parse

    try:
        found = [round(parse(size, like="B").to("B")) for size in text.split(",")]
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if min(found) < LEAST_BYTES:
        raise argparse.ArgumentTypeError("below 1 MiB a call is all latency, and the host's clock adds its own")
    return found


def main() -> int:
    """Read the arguments."""
    from pytest_gpucluster.benchmarks.collective_payload import COLLECTIVES

    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="processes, on this host (default: 2)")
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS, help=f"at least {LEAST_PAIRS}, which is the default")
    parser.add_argument("--sizes", type=sizes, default="1 MiB,8 MiB", help="1 MiB and more (default: 1 MiB,8 MiB)")
    parser.add_argument(
        "--collectives",
        type=some_of(COLLECTIVES),
        default="all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,send_recv",
        help="(default: all of them)",
    )
    parser.add_argument("--window", type=float, default=0.2, help="seconds of each figure (default: 0.2)")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pairs < LEAST_PAIRS or arguments.ranks < 2:
        parser.error(f"at least {LEAST_PAIRS} pairs and 2 ranks are needed")
    if arguments.result:
        child(arguments)
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
