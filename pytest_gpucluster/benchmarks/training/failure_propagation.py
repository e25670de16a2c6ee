"""A job in which a rank dies: whether it ends, how soon, and which rank is named.

The small training is started from inside another job: with an environment of its own; all its processes are killed. Its
ranks run this module: ``torchrun --standalone --nproc-per-node=2 -m MODULE '{"batch": 2, ...}'``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from pytest_gpucluster.benchmarks.memory_budget import require_free
from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.step import Training, replicate
from pytest_gpucluster.benchmarks.training.step_check import needed_bytes
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.process_group import init_group
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

# ---- a rank of the job

EXIT_CODE = 43
"""Of a rank that exits: neither Python's own for an exception, nor one that a shell uses."""

_ENDLESS = 10**9
"""More steps than any training takes: a death or the alarm ends it."""


def _stamp(folder: str, rank: int, name: str) -> None:
    """Write how far a rank has come, with the clock that all processes of a host share: it may die at any moment."""
    with Path(folder, f"rank-{rank}.txt").open("a", encoding="ascii") as file:
        file.write(f"{name} {time.monotonic()!r} {os.getpid()}\n")


def stamps_of(folder: Path, rank: int) -> list[tuple[str, float, int]]:
    """Return all whole stamps of a rank, the oldest first: name, seconds of the monotonic clock, PID."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / f"rank-{rank}.txt").read_text(encoding="ascii").splitlines(keepends=True)
        split = [line.split() for line in lines if line.endswith("\n")]
        return [(name, float(at), int(pid)) for name, at, pid in split]
    return []


def _die(how: str) -> None:
    if how == "exit":
        os._exit(EXIT_CODE)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("this rank dies in training, on purpose")


def _train(argument: str) -> None:
    """Train until one rank dies. It does not return.

    Args:
        argument: of the command line, JSON: geometry, device, batch; ``dies``, the rank that does, ``how``, after
            ``steps``; the folder of the stamps; and the seconds after which each rank's own alarm ends it.
    """
    job = SimpleNamespace(**json.loads(argument))
    geometry = Geometry(**job.geometry)
    # Its default action ends the process in the kernel, even where Python does not run any more.
    signal.alarm(max(1, round(job.seconds)))
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _stamp(job.folder, rank, "started")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if job.device == "cuda" else torch.device("cpu")
    accelerator(device).make_current()
    model = replicate(make_decoder(geometry, device, seed=0), device, init_group(device))
    training = Training(model, device, precision="bf16")
    rows = count * job.batch
    data = PackedTokens(rows=rows, sequence=geometry.sequence, vocab=geometry.vocab, seed=0)
    mine = torch.stack([data[row] for row in range(rank, rows, count)]).to(device)
    for step in range(1, _ENDLESS):
        result = training.step([mine])
        float(result.losses.mean())  # waits for the GPU, as a training that prints its loss does
        _stamp(job.folder, rank, f"step-{step}")
        if step == job.steps and rank == job.dies:
            _stamp(job.folder, rank, "dies")
            sys.stderr.flush()
            _die(job.how)


# ---- the job

_MARK = "GPUCLUSTER_CHILD_JOB"
"""In the environment of each process of the job: ranks have sessions of their own, so no process group covers them."""

_POLL_SECONDS = 0.02
_ENDING_SECONDS = 10.0
"""How long a killed process may take to end: it frees its memory first, on a GPU too."""

_TAIL_BYTES = 4000

_LAUNCHER_PREFIXES = (
    # What torchrun sets, and the options that it reads.
    *("TORCHELASTIC_", "PET_", "MASTER_", "ROLE_", "GROUP_"),
    # What this suite sets for its own ranks: how they wait, and what NCCL logs.
    *("TORCH_NCCL_", "TORCH_FR_", "NCCL_DEBUG"),
)
_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NCCL_COMM_ID"}


def child_environment(environ: Mapping[str, str], visible: Sequence[str] = ()) -> dict[str, str]:
    """Return an environment without the variables that make this process a rank of its job.

    A site's settings for its network, such as NCCL_SOCKET_IFNAME, stay.

    Args:
        environ: of this process.
        visible: the GPUs of the job, by UUID; by default those that this process sees.
    """
    own = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _RANK_VARIABLES
    }
    if visible:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    # Where the package is not installed, its processes must find it where this one has.
    root = Path(__file__).parents[3]
    if root.name not in ("site-packages", "dist-packages"):
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), own.get("PYTHONPATH", "")]))
    return own


class ChildJob:
    """A command and all processes that it starts. As a context manager it leaves no process behind.

    Args:
        command: to run.
        environ: its environment; :func:`child_environment` makes one.
        output: the file for all output.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._output = output
        with output.open("wb") as file:
            self._launcher = subprocess.Popen(
                command,
                env={**environ, name: value},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # A signal to the group of this process is not meant for the job.
                start_new_session=True,
            )

    def __enter__(self) -> ChildJob:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill every living process of the job, and wait up to a limit for their end."""

        def killed() -> bool:
            for pid in (living := self.processes()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._launcher.poll()
            return not living

        self.wait(killed, seconds=_ENDING_SECONDS)
        # Also where it does not have its own environment yet.
        self._launcher.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(timeout=_ENDING_SECONDS)

    @property
    def pid(self) -> int:
        """The process of the command itself."""
        return self._launcher.pid

    @property
    def exit_code(self) -> int | None:
        """Of the command; None while it runs."""
        return self._launcher.poll()

    @property
    def text(self) -> str:
        """The output so far."""
        return self._output.read_text(encoding="utf-8", errors="backslashreplace")

    @property
    def output_tail(self) -> str:
        """The end of the output so far."""
        return f"its output:\n{self.text[-_TAIL_BYTES:].strip() or 'nothing was printed'}"

    def wait(self, until: Callable[[], object], *, seconds: float) -> bool:
        """Wait for a condition up to a limit; return whether it holds."""
        last = time.monotonic() + seconds
        while not until():
            if time.monotonic() > last:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def processes(self) -> dict[int, str]:
        """Return the state of each living process of the job, such as S or D, by PID. A zombie does not count.

        Source: proc_pid_stat(5), field 3.
        """
        mark, found = self._mark.encode(), dict[int, str]()
        for entry in Path("/proc").glob("[0-9]*"):
            # Other users' processes cannot be read, and some end during the scan.
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    # The name of the command stands in brackets before it, and may hold anything.
                    state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                    found |= {} if state in "ZX" else {int(entry.name): state}
        return found


CONTEXT_BYTES = 3 * 2**30
"""A process's use of a GPU's memory before its first tensor: the CUDA context with its kernels, and NCCL's buffers.
Source: this suite's rule, generous."""

LEFT_OVER_SECONDS = 10.0
"""How long a process may outlive its launcher: this suite's rule."""

_FAILURE = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)\n\s*exitcode\s*: (-?\d+) ", re.MULTILINE)
"""How torchrun reports a rank that has failed. Source: torch/distributed/elastic/multiprocessing/errors, the text of
ChildFailedError."""

_CODES = {"exit": EXIT_CODE, "kill": -9}
"""The exit code that the launcher must report of a rank that died so; of an exception any code but 0, for a library
may replace it when the interpreter ends."""


LAUNCHER: Sequence[str] = (sys.executable, "-m", "torch.distributed.run")
MODULE = __name__
"""Of a rank. Tests put others in the place of both."""


def check_propagation(
    device: torch.device,
    geometry: Geometry,
    *,
    ranks: int,
    how: str,
    batch: int,
    steps: int,
    folder: Path,
    start_seconds: float,
    end_seconds: float,
    visible: Sequence[str] = (),
) -> float:
    """Start a training by torchrun on this host in which the last rank dies, and check how the job ends.

    Not collective: one rank of a node calls this. The job uses no group of this process, and uses the same GPUs, with
    little memory. None of its processes is left, whatever the result.

    Args:
        device: of this process: the job runs on devices of this kind.
        geometry: of the decoder to train.
        ranks: of the job, at least 2; on GPUs at most one for each.
        how: the rank dies: by ``exit``, where the process ends at once, as where a library calls it; ``raise``, an
            uncaught exception; ``kill``, SIGKILL, as from the kernel when it is out of memory.
        batch: rows of each rank in a step.
        steps: number of steps before.
        folder: for the job's output and its ranks' stamps; created here, and it must be new.
        start_seconds: from the start to that death, at most.
        end_seconds: from that death to the end of the job, at most; then it is ended.
        visible: the GPUs of the job, by UUID; by default those that this process sees.

    Returns: the seconds from the rank's last stamp until no process of the job was left.

    Raises:
        WrongResult: the job has not ended in time, its exit code is 0, it does not name the rank, or a process is left.
        EnvironmentBroken: the job has not reached that death, or there is too little memory.
    """
    context = CONTEXT_BYTES if device.type == "cuda" else 0
    require_free(
        device,
        context + needed_bytes(geometry, batch),
        "a second training next to this job",
        instead="choose a smaller one, such as --gpucluster-workload training.width=256",
    )
    folder.mkdir(parents=True)
    job = {
        "geometry": asdict(geometry),
        "device": device.type,
        "batch": batch,
        "steps": steps,
        "dies": ranks - 1,
        "how": how,
        "folder": str(folder),
        "seconds": start_seconds + 2 * end_seconds,
    }
    options = ["--standalone", f"--nproc-per-node={ranks}", "-m", MODULE]
    command = [*LAUNCHER, *options, json.dumps(job)]
    with counted(MEASURING), ChildJob(command, child_environment(os.environ, visible), folder / "output.txt") as child:
        return _Watch(child, folder, ranks=ranks, how=how).run(start_seconds, end_seconds)


class _Watch:
    def __init__(self, job: ChildJob, folder: Path, *, ranks: int, how: str) -> None:
        self._job, self._folder, self._how, self._rank = job, folder, how, ranks - 1

    def run(self, start_seconds: float, end_seconds: float) -> float:
        job = self._job
        job.wait(lambda: self._died() or job.exit_code is not None, seconds=start_seconds)
        died = self._died()
        if died is None:
            reached = [["not started", *(name for name, *_ in its)][-1] for its in self._stamps()]
            progress = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(reached))
            code = job.exit_code
            how = f"did not reach that after {start_seconds:g} s" if code is None else f"has ended with {code}"
            raise EnvironmentBroken(
                f"a training on this node, of which rank {self._rank} should die, {how} ({progress}). For the cause "
                f"see {job.output_tail}"
            )
        if not job.wait(lambda: job.exit_code is not None, seconds=died + end_seconds - time.monotonic()):
            raise self._wrong(
                f"{end_seconds:g} s later the job has not ended: {self._living()}. A job of many nodes would occupy "
                "all of them. Check the versions of torch and NCCL, and what those processes wait for; "
                + job.output_tail
            )
        if not job.wait(lambda: not job.processes(), seconds=LEFT_OVER_SECONDS):
            raise self._wrong(
                f"the launcher has ended, and {LEFT_OVER_SECONDS:g} s later this is left: {self._living()}. It would "
                "occupy its GPU in the next job"
            )
        seconds = time.monotonic() - died
        if not job.exit_code:
            raise self._wrong(
                "the launcher ended with exit code 0: a scheduler would treat the job as completed; " + job.output_tail
            )
        reported = {int(rank): int(code) for rank, code in _FAILURE.findall(job.text)}
        code, expected = reported.get(self._rank), _CODES.get(self._how)
        if not code or (expected is not None and code != expected):
            wanted = "another exit code than 0" if expected is None else f"the exit code {expected}"
            found = ", ".join(f"rank {rank} with {its}" for rank, its in sorted(reported.items())) or "no rank"
            raise self._wrong(
                f"the launcher does not report it: it names {found}, and rank {self._rank} with {wanted} is expected. "
                f"The bad GPU could not be found; {job.output_tail}"
            )
        return seconds

    def _died(self) -> float | None:
        return next((at for name, at, _ in self._stamps()[self._rank] if name == "dies"), None)

    def _stamps(self) -> list[list[tuple[str, float, int]]]:
        return [stamps_of(self._folder, rank) for rank in range(self._rank + 1)]

    def _wrong(self, text: str) -> WrongResult:
        return WrongResult(f"rank {self._rank} of a training on this node has died ({self._how}), and {text}")

    def _living(self) -> str:
        names = {self._job.pid: "the launcher"}
        for rank, its in enumerate(self._stamps()):
            names |= {pid: f"rank {rank}, last seen at {name}" for name, _, pid in its}
        texts = [
            f"{names.get(pid, 'another process')} (pid {pid}, state {state})"
            for pid, state in sorted(self._job.processes().items())
        ]
        return "; ".join(texts) or "no process of it is left"


if __name__ == "__main__":
    record(_train)(sys.argv[1])
