"""One rank of a small training in which one rank dies. It is run by a launcher, never inside of the suite:

torchrun --standalone --nproc-per-node=2 -m pytest_gpucluster.benchmarks.training.dying_rank '{"batch": 2, ...}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.step import PARTS, Training, replicate
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.process_group import init_group

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


@dataclass(frozen=True, kw_only=True)
class Job:
    """The training, as each rank gets it on its command line.

    Attributes:
        geometry: of the decoder.
        device: "cuda" or "cpu".
        batch: rows of each rank in a step.
        steps: steps before a rank dies.
        dies: the rank that dies.
        how: one of ``DEATHS``.
        folder: for the stamps.
        seconds: each rank's own alarm ends it after this time, whatever it waits for, also when nothing watches it.
    """

    geometry: Geometry
    device: str
    batch: int
    steps: int
    dies: int
    how: str
    folder: str
    seconds: float

    @property
    def argument(self) -> str:
        """The one argument of :func:`main`: JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, argument: str) -> Job:
        """Read it."""
        fields = json.loads(argument)
        return cls(geometry=Geometry(**fields.pop("geometry")), **fields)


@record
def main(
    arguments: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    death: Callable[[str], None] = die,
) -> None:
    """Train until one rank dies. It does not return."""
    [argument] = sys.argv[1:] if arguments is None else arguments
    job = Job.parse(argument)
    # Its default action ends the process in the kernel, even where Python does not run any more.
    signal.alarm(max(1, round(job.seconds)))
    rank, count = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    stamps = Stamps(Path(job.folder), rank)
    stamps.write("started")
    device = torch.device("cuda", int(environ["LOCAL_RANK"])) if job.device == "cuda" else torch.device("cpu")
    accelerator(device).make_current()
    group = init_group(device)
    training = Training(
        replicate(make_decoder(job.geometry, device, seed=0), device, group), device, precision="bf16", parts=PARTS
    )
    rows = count * job.batch
    data = PackedTokens(rows=rows, sequence=job.geometry.sequence, vocab=job.geometry.vocab, seed=0)
    mine = torch.stack([data[row] for row in range(rank, rows, count)]).to(device)
    for step in range(1, _ENDLESS):
        result = training.step([mine])
        float(result.losses.mean())  # waits for the GPU, as a training that prints its loss does
        stamps.write(f"step-{step}")
        if step == job.steps and rank == job.dies:
            stamps.write("dies")
            sys.stderr.flush()
            death(job.how)


if __name__ == "__main__":
    main()
