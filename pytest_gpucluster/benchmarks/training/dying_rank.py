"""One rank of a small training in which one rank dies. It is run by a launcher, never inside of the suite:

torchrun --standalone --nproc-per-node=2 -m pytest_gpucluster.benchmarks.training.dying_rank --folder /tmp/job ...
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.ddp import replicate
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.step import PARTS, Training

EXIT_CODE = 43
"""Of a rank that exits: neither Python's own for an exception, nor one that a shell uses."""

DEATHS = ("exit", "raise", "kill")
"""exit: the process ends at once, as where a library calls ``exit``. raise: an uncaught exception. kill: SIGKILL, as
from the kernel when it is out of memory."""

_ENDLESS = 10**9
"""More steps than any training takes: a death or the alarm ends it."""


def die(how: str) -> None:
    """Kill this rank in one of the ``DEATHS``."""
    if how == "exit":
        os._exit(EXIT_CODE)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("this rank dies in training, on purpose")


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """A point that a rank has reached, and when: seconds of the clock that all processes of a host share."""

    name: str
    at: float
    pid: int


class Stamps:
    """A rank's progress on disk: it is read while the rank may die at any moment."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.txt"

    def write(self, name: str) -> None:
        """Add a stamp."""
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"{name} {time.monotonic()!r} {os.getpid()}\n")

    def read(self) -> list[Stamp]:
        """Return all whole stamps, the oldest first."""
        try:
            lines = self._path.read_text(encoding="ascii").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        split = [line.split() for line in lines if line.endswith("\n")]
        return [Stamp(name=name, at=float(at), pid=int(pid)) for name, at, pid in split]


def arguments_for(
    geometry: Geometry, *, device_type: str, batch: int, steps: int, dies: int, how: str, folder: Path, seconds: float
) -> list[str]:
    """Return the command line of :func:`main`.

    Args:
        geometry: of the decoder.
        device_type: "cuda" or "cpu".
        batch: rows of each rank in a step.
        steps: steps before a rank dies.
        dies: the rank that dies.
        how: one of ``DEATHS``.
        folder: for the stamps.
        seconds: each rank's own alarm ends it after this time, whatever it waits for, also when nothing watches it.
    """
    sizes = ",".join(f"{field.name}={getattr(geometry, field.name)}" for field in fields(geometry))
    named = {"geometry": sizes, "device": device_type, "batch": batch, "steps": steps, "dies": dies, "how": how}
    return [f"--{name}={value}" for name, value in {**named, "folder": folder, "seconds": seconds}.items()]


@record
def main(
    arguments: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    death: Callable[[str], None] = die,
) -> None:
    """Train until one rank dies. It does not return."""
    options = _parser().parse_args(arguments)
    # Its default action ends the process in the kernel, even where Python does not run any more.
    signal.alarm(max(1, round(options.seconds)))
    rank, count = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    stamps = Stamps(options.folder, rank)
    stamps.write("started")
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", device_id=_device_id(device))
    group = dist.group.WORLD
    assert group is not None
    training = Training(
        replicate(make_decoder(options.geometry, device, seed=0), device, group), device, precision="bf16", parts=PARTS
    )
    rows = count * options.batch
    data = PackedTokens(rows=rows, sequence=options.geometry.sequence, vocab=options.geometry.vocab, seed=0)
    mine = torch.stack([data[row] for row in range(rank, rows, count)]).to(device)
    for step in range(1, _ENDLESS):
        result = training.step([mine])
        float(result.losses.mean())  # waits for the GPU, as a training that prints its loss does
        stamps.write(f"step-{step}")
        if step == options.steps and rank == options.dies:
            stamps.write("dies")
            sys.stderr.flush()
            death(options.how)


def _device_id(device: torch.device) -> torch.device | None:
    # With it NCCL connects at once, and not at the first collective.
    return device if device.type == "cuda" else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="one rank of a training of which one rank dies")
    parser.add_argument("--geometry", type=_geometry, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    for name in ("batch", "steps", "dies"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--how", choices=DEATHS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    return parser


def _geometry(text: str) -> Geometry:
    return Geometry(**{name: int(value) for name, _, value in (part.partition("=") for part in text.split(","))})


if __name__ == "__main__":
    main()
