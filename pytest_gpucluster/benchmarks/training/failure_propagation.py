"""A torchrun job in which one rank dies: whether it ends, how soon, and which rank is named.

The small training is started from inside another job: with an environment of its own; all its processes are killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pytest_gpucluster.benchmarks.memory_budget import require_free
from pytest_gpucluster.benchmarks.training.dying_rank import DEATHS, EXIT_CODE, Job, Stamp, Stamps
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.step_check import needed_bytes
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

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


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that make this process a rank of its job.

    A site's settings for its network, such as NCCL_SOCKET_IFNAME, stay.
    """
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _RANK_VARIABLES
    }


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
        self.end()

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
        return self.text[-_TAIL_BYTES:].strip() or "nothing was printed"

    def wait(self, until: Callable[[], bool], *, seconds: float) -> bool:
        """Wait for a condition up to a limit; return whether it holds."""
        last = time.monotonic() + seconds
        while not until():
            if time.monotonic() > last:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def processes(self) -> list[int]:
        """Return the living processes of the job. A zombie does not count."""
        mark, found = self._mark.encode(), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            # Other users' processes cannot be read, and some end during the scan.
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and _state(entry) not in "ZX":
                    found.append(int(entry.name))
        return sorted(found)

    def state_of(self, pid: int) -> str:
        """Return the letter of a process's state, such as S or D; "" if there is no such process.

        Source: proc_pid_stat(5), field 3.
        """
        with contextlib.suppress(OSError):
            return _state(Path("/proc") / str(pid))
        return ""

    def end(self) -> None:
        """Kill every living process of the job, and wait up to a limit for their end."""
        last = time.monotonic() + _ENDING_SECONDS
        while living := self.processes():
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._launcher.poll()
            if time.monotonic() > last:
                break
            time.sleep(_POLL_SECONDS)
        # Also where it does not have its own environment yet.
        self._launcher.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(timeout=_ENDING_SECONDS)


def _state(entry: Path) -> str:
    # The name of the command stands in brackets before it, and may hold anything.
    return (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]


CONTEXT_BYTES = 3 * 2**30
"""A process's use of a GPU's memory before its first tensor: the CUDA context with its kernels, and NCCL's buffers.
Source: this suite's rule, generous."""

LEFT_OVER_SECONDS = 10.0
"""How long a process may outlive its launcher: this suite's rule."""

_FAILURE = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)\n\s*exitcode\s*: (-?\d+) ", re.MULTILINE)
"""How torchrun reports a rank that has failed. Source: torch/distributed/elastic/multiprocessing/errors, the text of
ChildFailedError."""

_ROOT_CAUSE = "Root Cause (first observed failure):"
"""Source: as above."""

_CODES = {"exit": EXIT_CODE, "kill": -9}
"""The exit code that the launcher must report of a rank that died so; of an exception any code but 0, for a library
may replace it when the interpreter ends."""


@dataclass(frozen=True, kw_only=True)
class Components:
    """The replaceable parts of the job: tests inject a faulty one."""

    launcher: Sequence[str] = (sys.executable, "-m", "torch.distributed.run")
    module: str = f"{__package__}.dying_rank"


COMPONENTS = Components()


@dataclass(frozen=True, kw_only=True)
class Propagation:
    """The result of a job in which a rank has died.

    Attributes:
        seconds: from the rank's last stamp until no process of the job was left.
        exit_code: of the launcher.
        rank: the rank that died.
        rank_exit_code: its exit code as the launcher reports it.
        is_root_cause: whether the launcher reports it as the first failure.
    """

    seconds: float
    exit_code: int
    rank: int
    rank_exit_code: int
    is_root_cause: bool


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
    environ: Mapping[str, str] = os.environ,
    components: Components | None = None,
) -> Propagation:
    """Start a training by torchrun on this host in which the last rank dies, and check how the job ends.

    Not collective: one rank of a node calls this. The job uses no group of this process, and uses the same GPUs, with
    little memory. None of its processes is left, whatever the result.

    Args:
        device: of this process: the job runs on devices of this kind.
        geometry: of the decoder to train.
        ranks: of the job, at least 2; on GPUs at most one for each.
        how: the rank dies, one of ``DEATHS``.
        batch: rows of each rank in a step.
        steps: number of steps before.
        folder: for the job's output and its ranks' stamps; created here, and it must be new.
        start_seconds: from the start to that death, at most.
        end_seconds: from that death to the end of the job, at most; then it is ended.
        visible: the GPUs of the job, by UUID; by default those that this process sees.
        environ: of this process.
        components: of the job; by default ``COMPONENTS`` of this module.

    Raises:
        WrongResult: the job has not ended in time, its exit code is 0, it does not name the rank, or a process is left.
        EnvironmentBroken: the job has not reached that death, or there is too little memory.
        ValueError: an argument is out of its range.
    """
    if ranks < 2 or steps < 1 or how not in DEATHS:
        raise ValueError(f"ranks >= 2, steps >= 1 and one of {', '.join(DEATHS)} are needed: {ranks}, {steps}, {how!r}")
    used = components or COMPONENTS
    context = CONTEXT_BYTES if device.type == "cuda" else 0
    require_free(
        device,
        context + needed_bytes(geometry, batch),
        "a second training next to this job",
        instead="choose a smaller one, such as --gpucluster-workload training.width=256",
    )
    folder.mkdir(parents=True)
    job = Job(
        geometry=geometry,
        device=device.type,
        batch=batch,
        steps=steps,
        dies=ranks - 1,
        how=how,
        folder=str(folder),
        seconds=start_seconds + 2 * end_seconds,
    )
    command = [*used.launcher, "--standalone", f"--nproc-per-node={ranks}", "-m", used.module, job.argument]
    with counted(MEASURING), ChildJob(command, _environment(environ, visible), folder / "output.txt") as child:
        return _Watch(child, folder, ranks=ranks, how=how).run(start_seconds, end_seconds)


class _Watch:
    """Watches one job until its end."""

    def __init__(self, job: ChildJob, folder: Path, *, ranks: int, how: str) -> None:
        self._job, self._how, self._rank = job, how, ranks - 1
        self._stamps = [Stamps(folder, rank) for rank in range(ranks)]

    def run(self, start_seconds: float, end_seconds: float) -> Propagation:
        job = self._job
        job.wait(lambda: self._death() is not None or job.exit_code is not None, seconds=start_seconds)
        death = self._death()
        if death is None:
            raise EnvironmentBroken(self._not_started(start_seconds))
        waited = death.at + end_seconds - time.monotonic()
        if not job.wait(lambda: job.exit_code is not None, seconds=waited):
            raise WrongResult(
                f"{self._dead} and {end_seconds:g} s later the job has not ended: {self._living()}. A job of many "
                "nodes would occupy all of them. Check the versions of torch and NCCL, and what those processes "
                f"wait for; their output:\n{job.output_tail}"
            )
        if not job.wait(lambda: not job.processes(), seconds=LEFT_OVER_SECONDS):
            raise WrongResult(
                f"{self._dead} the launcher has ended, and {LEFT_OVER_SECONDS:g} s later this is left: "
                f"{self._living()}. It would occupy its GPU in the next job"
            )
        seconds = time.monotonic() - death.at
        exit_code = job.exit_code
        if not exit_code:
            raise WrongResult(
                f"{self._dead} and the launcher ended with exit code 0: a scheduler would treat the job as completed; "
                f"its output:\n{job.output_tail}"
            )
        return self._propagation(exit_code, seconds)

    def _propagation(self, exit_code: int, seconds: float) -> Propagation:
        text = self._job.text
        reported = {int(rank): int(code) for rank, code in _FAILURE.findall(text)}
        code, expected = reported.get(self._rank), _CODES.get(self._how)
        if not code or (expected is not None and code != expected):
            wanted = "another exit code than 0" if expected is None else f"the exit code {expected}"
            found = ", ".join(f"rank {rank} with {its}" for rank, its in sorted(reported.items())) or "no rank"
            raise WrongResult(
                f"{self._dead} and the launcher does not report it: it names {found}, and rank {self._rank} with "
                f"{wanted} is expected. The bad GPU could not be found; its output:\n{self._job.output_tail}"
            )
        first = _FAILURE.search(text, max(0, text.rfind(_ROOT_CAUSE)))
        return Propagation(
            seconds=seconds,
            exit_code=exit_code,
            rank=self._rank,
            rank_exit_code=code,
            is_root_cause=_ROOT_CAUSE in text and first is not None and int(first[1]) == self._rank,
        )

    def _death(self) -> Stamp | None:
        return next((stamp for stamp in self._stamps[self._rank].read() if stamp.name == "dies"), None)

    @property
    def _dead(self) -> str:
        return f"rank {self._rank} of a training on this node has died ({self._how}),"

    def _not_started(self, start_seconds: float) -> str:
        reached = [[stamp.name for stamp in stamps.read()] or ["not started"] for stamps in self._stamps]
        progress = ", ".join(f"rank {rank}: {names[-1]}" for rank, names in enumerate(reached))
        code = self._job.exit_code
        how = f"did not reach that after {start_seconds:g} s" if code is None else f"has ended with {code}"
        return (
            f"a training on this node, of which rank {self._rank} should die, {how} ({progress}). For the cause see "
            f"its output:\n{self._job.output_tail}"
        )

    def _living(self) -> str:
        """Describe the processes that still run."""
        names = {self._job.pid: "the launcher"}
        for rank, stamps in enumerate(self._stamps):
            names |= {stamp.pid: f"rank {rank}, last seen at {stamp.name}" for stamp in stamps.read()}
        living = [(pid, self._job.state_of(pid)) for pid in self._job.processes()]
        texts = [f"{names.get(pid, 'another process')} (pid {pid}, state {state})" for pid, state in living if state]
        return "; ".join(texts) or "no process of it is left"


def _environment(environ: Mapping[str, str], visible: Sequence[str]) -> dict[str, str]:
    own = child_environment(environ)
    if visible:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    # Where the package is not installed, its processes must find it where this one has.
    root = Path(__file__).parents[3]
    if root.name not in ("site-packages", "dist-packages"):
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), own.get("PYTHONPATH", "")]))
    return own
