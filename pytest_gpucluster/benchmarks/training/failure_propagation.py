"""A job of torchrun in which one rank dies: whether it ends, how soon, and which rank is named.

The small training is started from inside another job: in an environment of its own, and all its processes are ended.
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
from pytest_gpucluster.benchmarks.training.dying_rank import DEATHS, EXIT_CODE, Stamp, Stamps, arguments_for
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.step_check import needed_bytes
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

_MARK = "GPUCLUSTER_CHILD_JOB"
"""In the environment of each process of the job: ranks have sessions of their own, so no process group holds them."""

_POLL_SECONDS = 0.02
_ENDING_SECONDS = 10.0
"""How long a process that was killed may take to be gone: it gives back its memory first, on a GPU too."""

_TAIL_BYTES = 4000

_OF_A_LAUNCHER = (
    # What torchrun sets, and the options that it reads.
    *("TORCHELASTIC_", "PET_", "MASTER_", "ROLE_", "GROUP_"),
    # What this suite sets for its own ranks: how they wait, and what NCCL logs.
    *("TORCH_NCCL_", "TORCH_FR_", "NCCL_DEBUG"),
)
_OF_A_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NCCL_COMM_ID"}


def environment_of_its_own(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what makes this process a rank of its job.

    What a site has set for its network, such as NCCL_SOCKET_IFNAME, stays.
    """
    return {
        name: value for name, value in environ.items() if not name.startswith(_OF_A_LAUNCHER) and name not in _OF_A_RANK
    }


class ChildJob:
    """A command and every process that comes of it. To be used as a context manager: at its end nothing is left.

    Args:
        command: what to run.
        environ: its environment; :func:`environment_of_its_own` makes one.
        output: the file that takes all that is printed.
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
        """All that was printed by now."""
        return self._output.read_text(encoding="utf-8", errors="backslashreplace")

    @property
    def last_words(self) -> str:
        """The last of what was printed by now."""
        return self.text[-_TAIL_BYTES:].strip() or "nothing was printed"

    def wait(self, until: Callable[[], bool], *, seconds: float) -> bool:
        """Wait for something, at most so long; return whether it has come."""
        last = time.monotonic() + seconds
        while not until():
            if time.monotonic() > last:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def processes(self) -> list[int]:
        """Return the living processes of the job. One that has ended and was not waited for does not count."""
        mark, found = self._mark.encode(), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            # Other users' processes cannot be looked at, and some end meanwhile.
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
        """Kill every process of the job that still lives, and wait a while for its end."""
        last = time.monotonic() + _ENDING_SECONDS
        while living := self.processes():
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._launcher.poll()
            if time.monotonic() > last:
                break
            time.sleep(_POLL_SECONDS)
        # Also where it has not come as far as to have an environment of its own.
        self._launcher.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(timeout=_ENDING_SECONDS)


def _state(entry: Path) -> str:
    # The name of the command stands in brackets before it, and may hold anything.
    return (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]


CONTEXT_BYTES = 3 * 2**30
"""What a process takes of a GPU's memory before its first tensor: the CUDA context with its kernels, and NCCL's
buffers. Source: this suite's rule, generous."""

LEFT_OVER_SECONDS = 10.0
"""How long a process may outlive its launcher: this suite's rule."""

_FAILURE = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)\n\s*exitcode\s*: (-?\d+) ", re.MULTILINE)
"""How torchrun tells of a rank that has failed. Source: torch/distributed/elastic/multiprocessing/errors, the text of
ChildFailedError."""

_ROOT_CAUSE = "Root Cause (first observed failure):"
"""Source: likewise."""

_CODES = {"exit": EXIT_CODE, "kill": -9}
"""What the launcher must say of a rank that died so; of an exception any code but 0, for the libraries that end with
the interpreter may have the last word."""

_PACKAGE = "pytest_gpucluster"


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What the job is made of. A test puts one that is broken in the place of another."""

    launcher: Sequence[str] = (sys.executable, "-m", "torch.distributed.run")
    module: str = f"{_PACKAGE}.benchmarks.training.dying_rank"


PIECES = Pieces()


@dataclass(frozen=True, kw_only=True)
class Propagation:
    """What was seen of a job of which a rank has died.

    Attributes:
        seconds: from the last that the rank did until no process of the job was left.
        exit_code: of the launcher.
        rank: which one has died.
        rank_exit_code: its own, as the launcher tells.
        is_root_cause: whether the launcher takes it for the first that has failed.
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
    pieces: Pieces | None = None,
) -> Propagation:
    """Start a training by torchrun on this host, let its last rank die, and see how the job ends.

    Not collective: one rank of a node calls this. The job uses no group of this process, and takes the same GPUs, with
    little memory. Whatever it comes to, none of its processes is left.

    Args:
        device: of this process: the job runs on devices of this kind.
        geometry: of the decoder that is trained.
        ranks: of the job, at least 2; on GPUs at most one for each.
        how: the rank dies, one of ``DEATHS``.
        batch: rows of each rank in a step.
        steps: that are taken before.
        folder: for what the job prints and its ranks tell; made here, and it must be new.
        start_seconds: from the start to that death, at most.
        end_seconds: from that death to the end of the job, at most; then it is ended.
        visible: the GPUs of the job, by UUID; by default those that this process sees.
        environ: of this process.
        pieces: what the job is made of; by default ``PIECES`` of this module.

    Raises:
        WrongResult: the job has not ended in time, its exit code is 0, it does not name the rank, or a process is left.
        EnvironmentBroken: the job has not come as far as to that death, or there is too little memory.
        ValueError: an argument is out of its range.
    """
    if ranks < 2 or steps < 1 or how not in DEATHS:
        raise ValueError(f"ranks >= 2, steps >= 1 and one of {', '.join(DEATHS)} are needed: {ranks}, {steps}, {how!r}")
    made = pieces or PIECES
    context = CONTEXT_BYTES if device.type == "cuda" else 0
    require_free(
        device,
        context + needed_bytes(geometry, batch),
        "a second training beside this job",
        instead="choose a smaller one, such as --gpucluster-workload training.width=256",
    )
    folder.mkdir(parents=True)
    arguments = arguments_for(
        geometry,
        device_type=device.type,
        batch=batch,
        steps=steps,
        dies=ranks - 1,
        how=how,
        folder=folder,
        seconds=start_seconds + 2 * end_seconds,
    )
    command = [*made.launcher, "--standalone", f"--nproc-per-node={ranks}", "-m", made.module, *arguments]
    with counted(MEASURING), ChildJob(command, _environment(environ, visible), folder / "output.txt") as job:
        return _Watch(job, folder, ranks=ranks, how=how).run(start_seconds, end_seconds)


class _Watch:
    """Sees one job to its end."""

    def __init__(self, job: ChildJob, folder: Path, *, ranks: int, how: str) -> None:
        self._job, self._how, self._rank = job, how, ranks - 1
        self._stamps = [Stamps(folder, rank) for rank in range(ranks)]

    def run(self, start_seconds: float, end_seconds: float) -> Propagation:
        job = self._job
        job.wait(lambda: self._death() is not None or job.exit_code is not None, seconds=start_seconds)
        death = self._death()
        if death is None:
            raise EnvironmentBroken(self._not_begun(start_seconds))
        waited = death.at + end_seconds - time.monotonic()
        if not job.wait(lambda: job.exit_code is not None, seconds=waited):
            raise WrongResult(
                f"{self._dead} and {end_seconds:g} s later the job has not ended: {self._living()}. A job of many "
                "nodes would hold all of them. Look at the versions of torch and NCCL, and at what those processes "
                f"wait for; their output:\n{job.last_words}"
            )
        if not job.wait(lambda: not job.processes(), seconds=LEFT_OVER_SECONDS):
            raise WrongResult(
                f"{self._dead} the launcher has ended, and {LEFT_OVER_SECONDS:g} s later this is left over: "
                f"{self._living()}. It would hold its GPU against the next job"
            )
        seconds = time.monotonic() - death.at
        exit_code = job.exit_code
        if not exit_code:
            raise WrongResult(
                f"{self._dead} and the launcher ended with exit code 0: a scheduler would take the job for done; its "
                f"output:\n{job.last_words}"
            )
        return self._named(exit_code, seconds)

    def _named(self, exit_code: int, seconds: float) -> Propagation:
        text = self._job.text
        told = {int(rank): int(code) for rank, code in _FAILURE.findall(text)}
        code, expected = told.get(self._rank), _CODES.get(self._how)
        if not code or (expected is not None and code != expected):
            wanted = "another exit code than 0" if expected is None else f"the exit code {expected}"
            found = ", ".join(f"rank {rank} with {its}" for rank, its in sorted(told.items())) or "no rank"
            raise WrongResult(
                f"{self._dead} and the launcher does not say so: it names {found}, and rank {self._rank} with {wanted} "
                f"is meant. Nobody would find the bad GPU; its output:\n{self._job.last_words}"
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

    def _not_begun(self, start_seconds: float) -> str:
        how_far = ", ".join(f"rank {rank}: {self._last(stamps)}" for rank, stamps in enumerate(self._stamps))
        ended = f"has ended with {self._job.exit_code}"
        how = ended if self._job.exit_code is not None else f"was not so far after {start_seconds:g} s"
        return (
            f"a training on this node, of which rank {self._rank} should die, {how} ({how_far}). See why in its "
            f"output:\n{self._job.last_words}"
        )

    def _last(self, stamps: Stamps) -> str:
        found = stamps.read()
        return found[-1].name if found else "not started"

    def _living(self) -> str:
        """Name the processes that still run by what they are."""
        names = {self._job.pid: "the launcher"}
        for rank, stamps in enumerate(self._stamps):
            names |= {stamp.pid: f"rank {rank}, last seen at {stamp.name}" for stamp in stamps.read()}
        living = [(pid, self._job.state_of(pid)) for pid in self._job.processes()]
        told = [f"{names.get(pid, 'another process')} (pid {pid}, state {state})" for pid, state in living if state]
        return "; ".join(told) or "no process of it is left"


def _environment(environ: Mapping[str, str], visible: Sequence[str]) -> dict[str, str]:
    own = environment_of_its_own(environ)
    if visible:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    # Where the package is not installed, its processes must find it where this one has.
    root = Path(__file__).parents[3]
    if root.name not in ("site-packages", "dist-packages"):
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), own.get("PYTHONPATH", "")]))
    return own
