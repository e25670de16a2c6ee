"""A sweep inside a Slurm allocation: one srun for each node, then one over the survivors, each with a deadline."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_gpucluster.errors import EnvironmentBroken, OptionError
from pytest_gpucluster.launch.hostlist import compress_hostlist
from pytest_gpucluster.runners.hosts import expand_nodes
from pytest_gpucluster.runners.plan import LAUNCHER, SweepPlan, random_port, report_arguments
from pytest_gpucluster.runners.sweep import JobScheduler, require_tool, run_tool
from pytest_gpucluster.runners.sweep_outcome import LauncherExit

_TAIL_BYTES = 65536


class Step:
    """A process of srun. It has a session of its own, so that Ctrl-C on the terminal reaches the sweep only."""

    def __init__(self, slurm: Slurm, command: Sequence[str], *, reports: Path, within_seconds: float) -> None:
        """Start it; its output goes to a file next to its reports. ``slurm`` is uncertain once srun had to be killed.

        Raises:
            EnvironmentBroken: it cannot be started.
        """
        self.reports, self._log = reports, reports.with_name(f"{reports.name}.log")
        self._slurm, self._within = slurm, within_seconds
        self._stop_reason = ""
        self._started = time.monotonic()
        self._stop_sent_at: float | None = None
        try:
            with self._log.open("wb") as output:
                self._process = subprocess.Popen(
                    list(command),
                    env=dict(slurm.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise EnvironmentBroken(f"{command[0]} cannot be started: {error.strerror or error}") from None

    def poll(self) -> LauncherExit | None:
        """Return how it ended; None while it runs. After its deadline it is asked to end, later killed."""
        code, now = self._process.poll(), time.monotonic()
        if code is None:
            if self._stop_sent_at is None and now - self._started > self._within:
                self.stop(f"no answer within {self._within:g} s")
            if self._stop_sent_at is None or now - self._stop_sent_at <= self._slurm.grace_seconds:
                return None
            self.abandon()
        return LauncherExit(
            exit=code,
            seconds=round(now - self._started, 3),
            stop_reason=self._stop_reason,
            log=str(self._log),
            hint=_error_line(self._log),
        )

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
        self._slurm.is_uncertain = True  # its tasks may still run
        return f"{self.reports.name}: srun was killed"


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
    nodes = expand_nodes("SLURM_JOB_NODELIST", nodelist)
    return tuple(nodes if wanted is None else expand_nodes("--nodes", wanted, nodes, f"this job's {nodelist}"))


class Slurm(JobScheduler):
    """The runs of a sweep as steps of the job that this process is in. All nodes share their report directory."""

    grace_seconds = 60.0
    """Slurm itself waits for KillWait in between, 30 s by default. Source: https://slurm.schedmd.com/slurm.conf.html."""

    def __init__(self, environ: Mapping[str, str], *, wanted: str | None = None, options: Sequence[str] = ()) -> None:
        """Start nothing yet.

        Args:
            environ: of this process.
            wanted: the nodes, as of :func:`allocated_nodes`.
            options: more options for every srun.

        Raises:
            OptionError: there is no allocation, a wanted node is not in it, or a program of Slurm is missing.
        """
        super().__init__()
        self.nodes, self.python, self.port = allocated_nodes(environ, wanted), sys.executable, random_port()
        require_tool("srun", "squeue", "scancel")
        self._job, self._options = environ["SLURM_JOB_ID"], tuple(options)
        self.environ = {
            name: value
            for name, value in environ.items()
            if name not in _NOT_FORWARDED and not name.startswith(_TORCHRUN_PREFIXES)
        }

    def start(self, plan: SweepPlan, nodes: Sequence[str], folder: Path) -> Step:
        """Start the step of these nodes."""
        arguments = [*plan.arguments(len(nodes), nodes[0]), *report_arguments(str(folder), f"{folder}.xml")]
        # require_nodes has checked the names, so they need no quotes.
        script = ["sh", "-c", _NODE_RANK_SCRIPT.format(nodes=" ".join(nodes)), plan.python]
        alone = [plan.python, "-m", LAUNCHER]
        within_seconds = plan.seconds(len(nodes))
        command = self._srun(nodes, within_seconds, [*(script if len(nodes) > 1 else alone), *arguments])
        return Step(self, command, reports=folder, within_seconds=within_seconds)

    def stop(self) -> Sequence[str]:
        """End all steps that still run, and cancel those of this sweep that Slurm still knows.

        Source: https://slurm.schedmd.com/squeue.html (``--steps``, ``%i``, ``%j``).
        """
        super().stop()
        if not self.is_uncertain:
            return []
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
