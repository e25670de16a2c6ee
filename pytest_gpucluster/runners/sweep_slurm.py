"""A sweep inside a Slurm allocation: one srun a node, then one srun over the survivors, each with its own deadline."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytest_gpucluster.errors import EnvironmentBroken, LaunchError, OptionError
from pytest_gpucluster.launch.hostlist import compress_hostlist, expand_hostlist
from pytest_gpucluster.runners import sweep
from pytest_gpucluster.runners.sweep import LAUNCHER, Plan, reporting
from pytest_gpucluster.runners.sweep_result import TOGETHER, Ended, Outcome, answer_in, outcome_of

_TAIL_BYTES = 4096


class Step:
    """A process of srun. It has a session of its own, so that Ctrl-C on the terminal reaches the sweep only."""

    def __init__(
        self, command: Sequence[str], *, environ: Mapping[str, str], log: Path, within_seconds: float, grace: float
    ) -> None:
        """Start it.

        Raises:
            EnvironmentBroken: that is impossible.
        """
        self.log = log
        self.stopped = ""
        self._within, self._grace = within_seconds, grace
        self._started = time.monotonic()
        self._told_to_end: float | None = None
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    list(command),
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise EnvironmentBroken(f"{command[0]} cannot be started: {error.strerror or error}") from None

    def look(self) -> Ended | None:
        """Return how it ended, or None while it runs. At its deadline it is told to end, and after a while made to."""
        code = self._process.poll()
        if code is not None:
            return self._ended(code)
        now = time.monotonic()
        if self._told_to_end is None:
            if now - self._started > self._within:
                self.tell_to_end(f"no answer within {self._within:g} s")
        elif now - self._told_to_end > self._grace:
            self.kill()
            return self._ended(None)
        return None

    def tell_to_end(self, why: str) -> None:
        """Ask srun to end the step: on SIGTERM it ends all tasks.

        Source: https://slurm.schedmd.com/srun.html ("Signals and escape sequences").
        """
        if self._told_to_end is None:
            self.stopped, self._told_to_end = why, time.monotonic()
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End srun itself, at once. Its tasks may stay: they are the scheduler's to end."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ended(self, code: int | None) -> Ended:
        return Ended(
            exit=code,
            seconds=round(time.monotonic() - self._started, 3),
            stopped=self.stopped,
            log=str(self.log),
            hint=_last_words(self.log),
        )


def _last_words(log: Path) -> str:
    """Return the line of an output that most likely says what went wrong, else its last one.

    torchrun ends with a long table of its own, so an error in front of it tells more.
    """
    try:
        with log.open("rb") as read:
            size = read.seek(0, os.SEEK_END)
            read.seek(max(0, size - 16 * _TAIL_BYTES))
            lines = [line.strip() for line in read.read().decode("utf-8", "backslashreplace").splitlines()]
    except OSError as error:
        return f"its output cannot be read: {error.strerror or error}"
    lines = [line for line in lines if line.strip("=- ")]
    telling = [line for line in lines if line.startswith(("ERROR:", "srun: error:", "slurmstepd: error:", "BROKEN"))]
    return (telling or lines or ["it has printed nothing"])[0 if telling else -1]


NAME = "gpucluster-sweep"
"""The name of each step, by which those that stay are found."""
_POLL_SECONDS = 0.1
_ASK_SECONDS = 60.0
# A name that is one process's only, and what a launcher may have left: none of it is of the ranks to be started.
_NOT_PASSED_ON = ("GPUCLUSTER_HOSTNAME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_TORCHRUN = ("PET_", "TORCHELASTIC_")

# The position in the list that was sorted here decides the rank: Slurm numbers its tasks in an order of its own, and
# rank 0 must be on the node that the others look for it on. SLURMD_NODENAME is set in each task. Source:
# https://slurm.schedmd.com/srun.html (OUTPUT ENVIRONMENT VARIABLES).
_RANKED = """\
node_rank=0
for node in {nodes}; do
  [ "$node" = "$SLURMD_NODENAME" ] && exec "$0" -m torch.distributed.run --node-rank="$node_rank" "$@"
  node_rank=$((node_rank + 1))
done
echo "srun: error: SLURMD_NODENAME=$SLURMD_NODENAME is none of the nodes {nodes}" >&2
exit 64
"""


def allocated(environ: Mapping[str, str], wanted: str | None) -> tuple[str, ...]:
    """Return the nodes of the allocation that this process is in, or the wanted ones among them.

    Args:
        environ: with ``SLURM_JOB_ID`` and ``SLURM_JOB_NODELIST``.
        wanted: a host list, such as ``gpu-[003,007]``; None for all.

    Raises:
        OptionError: there is no allocation, or a wanted node is not in it.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST", "")
    if not environ.get("SLURM_JOB_ID") or not nodelist:
        raise OptionError(
            "no allocation of Slurm (SLURM_JOB_ID, SLURM_JOB_NODELIST): run the sweep in one, such as"
            " `salloc --nodes=64 --gpus-per-node=8 --exclusive --no-kill gpucluster sweep slurm ...`"
        )
    try:
        nodes = expand_hostlist(nodelist)
        chosen = expand_hostlist(wanted) if wanted is not None else nodes
    except LaunchError as error:
        raise OptionError(str(error)) from None
    strange = [node for node in chosen if node not in nodes]
    if strange:
        raise OptionError(f"--nodes: {compress_hostlist(strange)} not in this job's {nodelist}")
    return tuple(chosen)


def require_programs() -> None:
    """Make sure that Slurm's programs are there.

    Raises:
        OptionError: one is not.
    """
    sweep.require_tool("srun", "squeue", "scancel")


class Slurm:
    """The runs of a sweep as steps of the job that this process is in."""

    grace_seconds = 60.0
    """From the request to end until srun is killed. Slurm itself waits for KillWait in between, 30 s by default.
    Source: https://slurm.schedmd.com/slurm.conf.html."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        *,
        environ: Mapping[str, str],
        options: Sequence[str] = (),
    ) -> None:
        """Take note of what to run; nothing is started.

        Args:
            plan: what to run.
            directory: of the sweep, on a file system that all nodes share.
            environ: of this process.
            options: more options for every srun.
        """
        self._plan, self._directory, self._options = plan, directory, tuple(options)
        self._job = environ["SLURM_JOB_ID"]
        self._environ = {
            name: value
            for name, value in environ.items()
            if name not in _NOT_PASSED_ON and not name.startswith(_OF_TORCHRUN)
        }
        self._running: dict[str, Step] = {}
        self._uncertain = False

    def alone(self, nodes: Sequence[str]) -> Iterator[Outcome]:
        """Run every node for itself, at most ``at_once`` at a time."""
        (self._directory / "nodes").mkdir(exist_ok=True)
        waiting = deque(nodes)
        while waiting or self._running:
            while waiting and len(self._running) < self._plan.at_once:
                self._start_alone(waiting.popleft())
            ended = {node: how for node, step in self._running.items() if (how := step.look())}
            for node, how in ended.items():
                yield self._outcome(node, how, self._directory / "nodes" / node, nnodes=1)
            if not ended:
                time.sleep(_POLL_SECONDS)

    def together(self, nodes: Sequence[str]) -> Outcome:
        """Run these nodes as one cluster, whose first rank is on the first of them."""
        plan = self._plan
        folder = self._directory / TOGETHER
        command = [*plan.command_together(len(nodes), nodes[0]), *reporting(str(folder), f"{folder}.xml")]
        self._start(TOGETHER, nodes, _with_rank_of_node(command, nodes), folder, plan.together_within)
        while (how := self._running[TOGETHER].look()) is None:
            time.sleep(_POLL_SECONDS)
        return self._outcome(TOGETHER, how, folder, nnodes=len(nodes))

    def stop(self) -> Sequence[str]:
        """End all steps that still run, and cancel those that stay."""
        running, self._running = self._running, {}
        for step in running.values():
            step.tell_to_end("the sweep ended")
        until = time.monotonic() + self.grace_seconds
        while any(step.look() is None for step in running.values()) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        left = [step for step in running.values() if step.look() is None]
        for step in left:
            step.kill()
        return self._cancel() if left or self._uncertain else []

    def _start_alone(self, node: str) -> None:
        folder = self._directory / "nodes" / node
        command = [*self._plan.command_alone(), *reporting(str(folder), f"{folder}.xml")]
        self._start(node, [node], command, folder, self._plan.alone_within)

    def _start(self, name: str, nodes: Sequence[str], command: Sequence[str], folder: Path, within: float) -> None:
        # Interrupted in between, there is a step that nobody knows of but Slurm.
        before, self._uncertain = self._uncertain, True
        self._running[name] = Step(
            self._srun(nodes, within, command),
            environ=self._environ,
            log=folder.with_name(f"{name}.log"),
            within_seconds=within,
            grace=self.grace_seconds,
        )
        self._uncertain = before

    def _srun(self, nodes: Sequence[str], within_seconds: float, command: Sequence[str]) -> list[str]:
        """Return an srun of one task a node.

        ``--time`` lets Slurm end the step where this process cannot; it counts in minutes, and comes after the
        sweep's own deadline. ``--cpu-bind=none`` gives a task, which is all ranks of its node, every CPU of the step.
        ``--mpi=none``, whatever the site has as its default: torchrun starts the ranks. Tasks may end one after the
        other: whoever ended the others would cut off the verdict that rank 0 still writes. With ``--no-kill`` the step
        outlives a node that is lost, so that the run can name it; the job does only if it asked for that, too.

        Source: https://slurm.schedmd.com/srun.html.
        """
        minutes = math.ceil((within_seconds + 2 * self.grace_seconds) / 60) + 1
        return [
            *("srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
            *(f"--nodelist={compress_hostlist(nodes)}", f"--job-name={NAME}", f"--time={minutes}"),
            *("--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--export=ALL", "--mpi=none"),
            *self._options,
            *command,
        ]

    def _outcome(self, name: str, how: Ended, folder: Path, *, nnodes: int) -> Outcome:
        del self._running[name]
        if how.exit is None:  # srun was killed: its tasks may still be there
            self._uncertain = True
        answer, why = answer_in(folder)
        if answer is None:
            how = Ended(exit=how.exit, seconds=how.seconds, stopped=how.stopped, log=how.log, hint=why or how.hint)
        return outcome_of(name, answer, how, nnodes=nnodes, world_size=self._plan.world_size(nnodes))

    def _cancel(self) -> Sequence[str]:
        """Cancel this sweep's steps that Slurm still knows.

        Source: https://slurm.schedmd.com/squeue.html (``--steps``, ``%i``, ``%j``).
        """
        try:
            listed = sweep.run_tool(
                ["squeue", "--noheader", "--steps", f"--jobs={self._job}", "--format=%i %j"],
                within_seconds=_ASK_SECONDS,
            )
            pairs = [line.split(maxsplit=1) for line in listed.splitlines()]
            steps = [pair[0] for pair in pairs if len(pair) == 2 and pair[1].strip() == NAME]
            if steps:
                sweep.run_tool(["scancel", "--signal=KILL", *steps], within_seconds=_ASK_SECONDS)
        except EnvironmentBroken as error:
            return [f"steps of this sweep may still run in job {self._job}: {error}"]
        return []


def _with_rank_of_node(command: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Return a joint command that finds out on each node which of them it is."""
    # Plain names, as require_nodes has seen to, so that they need no quotes.
    return ["sh", "-c", _RANKED.format(nodes=" ".join(nodes)), command[0], *command[command.index(LAUNCHER) + 1 :]]


def port_of(environ: Mapping[str, str]) -> int:
    """Return the port where the survivors meet: another for each job, below the ports that Linux gives away.

    Source: Linux, Documentation/networking/ip-sysctl.rst (ip_local_port_range: 32768 to 60999).
    """
    job = environ.get("SLURM_JOB_ID", "0")
    return 20000 + (16 * int(job) if job.isdecimal() else os.getpid()) % 10000
