"""A sweep inside a Slurm allocation: one srun for each node, then one over the survivors, each with a deadline."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster.errors import EnvironmentBroken, LaunchError, OptionError
from pytest_gpucluster.launch.hostlist import compress_hostlist, expand_hostlist
from pytest_gpucluster.runners.plan import LAUNCHER, SweepPlan, report_arguments
from pytest_gpucluster.runners.run_result import read_result
from pytest_gpucluster.runners.sweep import Job, require_tool, run_each, run_tool, stop_all
from pytest_gpucluster.runners.sweep_outcome import JOINT, LauncherExit, Outcome, judge_run

_TAIL_BYTES = 65536


class Step:
    """A process of srun. It has a session of its own, so that Ctrl-C on the terminal reaches the sweep only."""

    def __init__(
        self, command: Sequence[str], *, environ: Mapping[str, str], log: Path, within_seconds: float, grace: float
    ) -> None:
        """Start it.

        Raises:
            EnvironmentBroken: it cannot be started.
        """
        self.log = log
        self._stop_reason = ""
        self._within, self._grace = within_seconds, grace
        self._started = time.monotonic()
        self._stop_sent_at: float | None = None
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

    def poll(self) -> LauncherExit | None:
        """Return how it ended; None while it runs. After its deadline it is asked to end, later killed."""
        code = self._process.poll()
        if code is not None:
            return self._exit(code)
        now = time.monotonic()
        if self._stop_sent_at is None:
            if now - self._started > self._within:
                self.stop(f"no answer within {self._within:g} s")
        elif now - self._stop_sent_at > self._grace:
            self.abandon()
            return self._exit(None)
        return None

    def stop(self, reason: str) -> None:
        """Ask srun to end the step: on SIGTERM it ends all tasks.

        Source: https://slurm.schedmd.com/srun.html ("Signals and escape sequences").
        """
        if self._stop_sent_at is None:
            self._stop_reason, self._stop_sent_at = reason, time.monotonic()
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGTERM)

    def abandon(self) -> str:
        """Kill srun itself. Its tasks may go on until Slurm ends them."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return f"{self.log.stem}: srun was killed"

    def _exit(self, code: int | None) -> LauncherExit:
        return LauncherExit(
            exit=code,
            seconds=round(time.monotonic() - self._started, 3),
            stop_reason=self._stop_reason,
            log=str(self.log),
            hint=_error_line(self.log),
        )


def _error_line(log: Path) -> str:
    """Return the line of an output that most likely has the error, else its last line.

    torchrun ends with a long table of its own, so an error before it is more useful.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode("utf-8", "backslashreplace").splitlines()]
    except OSError as error:
        return f"its output cannot be read: {error.strerror or error}"
    lines = [line for line in lines if line.strip("=- ")]
    errors = [line for line in lines if line.startswith(("ERROR:", "srun: error:", "slurmstepd: error:", "BROKEN"))]
    return errors[0] if errors else lines[-1] if lines else "it has printed nothing"


NAME = "gpucluster-sweep"
"""Name of each step, by which remaining ones are found."""
_QUERY_SECONDS = 60.0
# One process's own host name, and variables that a launcher may have left: wrong for the ranks to be started.
_NOT_FORWARDED = ("GPUCLUSTER_HOSTNAME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_TORCHRUN_PREFIXES = ("PET_", "TORCHELASTIC_")

# The position in this list is the node rank: Slurm numbers its tasks in an order of its own, but rank 0 must be on the
# master. SLURMD_NODENAME is set in each task. Source:
# https://slurm.schedmd.com/srun.html (OUTPUT ENVIRONMENT VARIABLES).
_NODE_RANK_SCRIPT = """\
node_rank=0
for node in {nodes}; do
  [ "$node" = "$SLURMD_NODENAME" ] && exec "$0" -m torch.distributed.run --node-rank="$node_rank" "$@"
  node_rank=$((node_rank + 1))
done
echo "srun: error: SLURMD_NODENAME=$SLURMD_NODENAME is none of the nodes {nodes}" >&2
exit 64
"""


def allocated_nodes(environ: Mapping[str, str], wanted: str | None) -> tuple[str, ...]:
    """Return the nodes of the allocation that this process is in, or a selection of them.

    Args:
        environ: with ``SLURM_JOB_ID`` and ``SLURM_JOB_NODELIST``.
        wanted: a host list, such as ``gpu-[003,007]``; None for all.

    Raises:
        OptionError: there is no allocation, or a wanted node is not in it.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST", "")
    if not environ.get("SLURM_JOB_ID") or not nodelist:
        raise OptionError(
            "not in a Slurm allocation (SLURM_JOB_ID, SLURM_JOB_NODELIST): run the sweep in one, such as"
            " `salloc --nodes=64 --gpus-per-node=8 --exclusive --no-kill gpucluster sweep slurm ...`"
        )
    try:
        nodes = expand_hostlist(nodelist)
        chosen = expand_hostlist(wanted) if wanted is not None else nodes
    except LaunchError as error:
        raise OptionError(str(error)) from None
    unknown = [node for node in chosen if node not in nodes]
    if unknown:
        raise OptionError(f"--nodes: {compress_hostlist(unknown)} not in this job's {nodelist}")
    return tuple(chosen)


def require_programs() -> None:
    """Require Slurm's programs.

    Raises:
        OptionError: one is missing.
    """
    require_tool("srun", "squeue", "scancel")


class Slurm:
    """The runs of a sweep as steps of the job that this process is in."""

    grace_seconds = 60.0
    """From the request to stop until srun is killed. Slurm itself waits for KillWait in between, 30 s by default.
    Source: https://slurm.schedmd.com/slurm.conf.html."""

    def __init__(
        self,
        plan: SweepPlan,
        directory: Path,
        *,
        environ: Mapping[str, str],
        options: Sequence[str] = (),
    ) -> None:
        """Start nothing yet.

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
            if name not in _NOT_FORWARDED and not name.startswith(_TORCHRUN_PREFIXES)
        }
        self._running: dict[str, Job[LauncherExit]] = {}
        self._uncertain = False

    def run_nodes(self, nodes: Sequence[str]) -> Iterator[Outcome]:
        """Run every node on its own, at most ``at_once`` at a time."""
        folder = self._directory / "nodes"
        folder.mkdir(exist_ok=True)

        def start(node: str) -> None:
            self._start([node], self._plan.node_command(), folder / node, self._plan.node_seconds)

        for node, launcher in run_each(nodes, start, self._running, self._plan.at_once):
            yield self._outcome(launcher, folder / node, nnodes=1)

    def run_joint(self, nodes: Sequence[str]) -> Outcome:
        """Run these nodes as one cluster, with rank 0 on the first."""
        folder = self._directory / JOINT
        command = _with_node_rank(self._plan.joint_command(len(nodes), nodes[0]), nodes)

        def start(name: str) -> None:
            self._start(nodes, command, folder, self._plan.joint_seconds)

        [(_, launcher)] = run_each([JOINT], start, self._running, 1)
        return self._outcome(launcher, folder, nnodes=len(nodes))

    def stop(self) -> Sequence[str]:
        """End all steps that still run, and cancel those that remain."""
        running, self._running = self._running, {}
        left = stop_all(running, self.grace_seconds)
        return self._cancel() if left or self._uncertain else []

    def _start(self, nodes: Sequence[str], command: Sequence[str], folder: Path, within_seconds: float) -> None:
        command = [*command, *report_arguments(str(folder), f"{folder}.xml")]
        # If this is interrupted, a step may exist that only Slurm knows.
        before, self._uncertain = self._uncertain, True
        self._running[folder.name] = Step(
            self._srun(nodes, within_seconds, command),
            environ=self._environ,
            log=folder.with_name(f"{folder.name}.log"),
            within_seconds=within_seconds,
            grace=self.grace_seconds,
        )
        self._uncertain = before

    def _srun(self, nodes: Sequence[str], within_seconds: float, command: Sequence[str]) -> list[str]:
        """Return an srun of one task for each node.

        ``--time`` lets Slurm end the step if this process cannot; it counts in minutes, and is longer than the sweep's
        own deadline. ``--cpu-bind=none`` gives a task, which is all ranks of its node, every CPU of the step.
        ``--mpi=none`` overrules the site's default: torchrun starts the ranks. ``--wait=0`` lets tasks end one after
        the other, because rank 0 may still write the verdict. With ``--no-kill`` the step outlives a lost node, so
        that the run can name it; the job does only if it asked for that too.

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

    def _outcome(self, launcher: LauncherExit, folder: Path, *, nnodes: int) -> Outcome:
        if launcher.exit is None:  # srun was killed: its tasks may still run
            self._uncertain = True
        result, problem = read_result(folder)
        if result is None:
            launcher = replace(launcher, hint=problem or launcher.hint)
        world_size = self._plan.world_size(nnodes)
        return judge_run(folder.name, result, launcher, nnodes=nnodes, world_size=world_size)

    def _cancel(self) -> Sequence[str]:
        """Cancel this sweep's steps that Slurm still knows.

        Source: https://slurm.schedmd.com/squeue.html (``--steps``, ``%i``, ``%j``).
        """
        try:
            listed = run_tool(
                ["squeue", "--noheader", "--steps", f"--jobs={self._job}", "--format=%i %j"],
                within_seconds=_QUERY_SECONDS,
            )
            pairs = [line.split(maxsplit=1) for line in listed.splitlines()]
            steps = [pair[0] for pair in pairs if len(pair) == 2 and pair[1].strip() == NAME]
            if steps:
                run_tool(["scancel", "--signal=KILL", *steps], within_seconds=_QUERY_SECONDS)
        except EnvironmentBroken as error:
            return [f"steps of this sweep may still run in job {self._job}: {error}"]
        return []


def _with_node_rank(command: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Return a joint command that finds its node rank on each node."""
    # require_nodes has checked the names, so they need no quotes.
    return [
        "sh",
        "-c",
        _NODE_RANK_SCRIPT.format(nodes=" ".join(nodes)),
        command[0],
        *command[command.index(LAUNCHER) + 1 :],
    ]


def joint_port(environ: Mapping[str, str]) -> int:
    """Return the rendezvous port of the joint run: another for each job, below Linux's ephemeral ports.

    Source: Linux, Documentation/networking/ip-sysctl.rst (ip_local_port_range: 32768 to 60999).
    """
    job = environ.get("SLURM_JOB_ID", "0")
    return 20000 + (16 * int(job) if job.isdecimal() else os.getpid()) % 10000
