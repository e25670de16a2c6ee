"""The run as one process knows it: who it is, what it was asked for, what connects it to the other ranks, its tests.

Rank 0 alone writes to the terminal and to the recorder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.agreement.exchange import AbortReason, Exchange
from pytest_gpucluster.agreement.hang_diagnosis import FaultFile
from pytest_gpucluster.agreement.rendezvous import RollCall
from pytest_gpucluster.agreement.store import Stores
from pytest_gpucluster.agreement.watchdog import Watch
from pytest_gpucluster.config.criteria_file import Manifest
from pytest_gpucluster.errors import EnvironmentBroken, OutOfStep, ThresholdsError
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.records import KINDS, CollectedTest
from pytest_gpucluster.journal.run_directory import ARTIFACTS
from pytest_gpucluster.journal.test_record import JournalCopy, TestRecord
from pytest_gpucluster.launch.launchers import RankFacts, detect
from pytest_gpucluster.metrics.units import did_you_mean
from pytest_gpucluster.node.health.monitor import RankMonitor
from pytest_gpucluster.reports.recorder.client import Recorder
from pytest_gpucluster.session import options
from pytest_gpucluster.session.cluster import Cluster
from pytest_gpucluster.session.options import Settings, Timeouts
from pytest_gpucluster.session.selection import Room
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    from pytest_gpucluster.analysis.baseline import Baseline
    from pytest_gpucluster.analysis.run_view import Conditions
    from pytest_gpucluster.config.workload import Workload, WorkloadRecord
    from pytest_gpucluster.judge.limits import Limit, Thresholds

RECORDED = ("CUDA_", "GPUCLUSTER_", "NCCL_", "NVSHMEM_", "OMP_", "PYTORCH_", "TORCH_", "UCX_")
"""Beginnings of the names of variables that change what is measured."""

RECORDED_WHOLE = ("CUBLAS_WORKSPACE_CONFIG", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "TZ")
"""More such names. Nothing else is recorded: an environment may hold secrets."""

NOT_RECORDED = ("GPUCLUSTER_EXIT_NOTES",)
"""A folder that is made for one run and changes nothing."""


def limits_line(*, sku: str | None, gpu_name: str | None, files: Sequence[Path]) -> dict[str, Any]:
    """Return the journal's line of the limits in force: for which SKU, and of which files, later ones overlaying.

    A file that cannot be read any more has no digest.
    """
    return {
        "type": "limits",
        "sku": sku,
        "gpu_name": gpu_name,
        "files": [{"path": str(path), "sha256": _digest(path)} for path in files],
    }


def limit_files(settings: Settings) -> list[Path]:
    """Return the files of limits that hold: the shipped one, and the operator's."""
    from pytest_gpucluster.judge import loader

    return [loader.shipped_path(), *([settings.thresholds] if settings.thresholds is not None else [])]


def load_limits(settings: Settings) -> Thresholds:
    """Read the limits that hold.

    Raises: ThresholdsError if a file is malformed, with every problem; or if the SKU that was asked for is in none.
    """
    from pytest_gpucluster.judge import loader

    found = loader.load(*limit_files(settings))
    asked = settings.sku
    if asked is not None and asked not in found.skus:  # reported now, and not after all has been measured
        raise ThresholdsError(
            f"--gpucluster-sku is {asked!r} ({settings.settings['sku'].origin}), and no limits are known for it;"
            f" known are {', '.join(found.skus)}, and what a file for --gpucluster-thresholds adds"
            f"{did_you_mean(asked, found.skus)}"
        )
    return found


def environment_line(environ: Mapping[str, str], hostname: str) -> dict[str, Any]:
    """Return the journal's line of the environment of one process: its system, and variables by name."""
    try:
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME", "an unnamed system")
    except OSError:
        distribution = "an unknown system"
    return {
        "type": "environment",
        "host": hostname,
        "system": f"{distribution}, Linux {platform.release()}, {platform.machine()}",
        "cpus": os.cpu_count(),
        "variables": {
            name: value
            for name, value in sorted(environ.items())
            if name not in NOT_RECORDED and (name.startswith(RECORDED) or name in RECORDED_WHOLE)
        },
    }


_ORDINARY_PER_SECOND, _CALIBRATION_SECONDS, _MOST_SLOWDOWN = 10_000.0, 0.25, 8.0
"""An ordinary core makes 10,000 products of 128 x 128 in fp32 in a second: 42 GFLOPS. Other processes on a busy CPU
take turns of some milliseconds, of which the time has several."""


def measure_slowdown() -> float:
    """Return how many times slower than an ordinary CPU this process computes now, from 1 to 8."""
    import torch

    square = torch.ones(128, 128)
    begin, done, spent = time.monotonic(), 0, 0.0
    while spent <= _CALIBRATION_SECONDS:
        torch.mm(square, square)
        done, spent = done + 1, time.monotonic() - begin
    return min(max(1.0, _ORDINARY_PER_SECOND * spent / done), _MOST_SLOWDOWN)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """Which of how many local workers this process is: worker I is rank I on GPU I."""

    index: int
    count: int
    directory: str = ""
    """The run's folder, which the controller has made."""


class Run:
    """What one process holds for the whole session.

    Attributes:
        settings: the options of this project; the default ones until they have been read, and where they are wrong.
        stores, exchange, watch, cluster: what connects this rank to the others. They are there once all ranks have
            reported to each other (``has_joined``).
    """

    stores: Stores
    exchange: Exchange
    watch: Watch
    cluster: Cluster

    def __init__(self, config: pytest.Config, *, place: WorkerPlace | None = None) -> None:
        self.config = config
        self.place = place
        self.environ = os.environ
        self.launcher = os.getppid()
        self.facts: RankFacts = detect(self.environ, self.environ.get("GPUCLUSTER_HOSTNAME") or socket.gethostname())
        self.settings = options.defaults()
        self.has_settings = False
        self.has_joined = False
        self.baseline: Baseline | None = None
        """The earlier run that this one is compared with. Rank 0 only."""
        self.tests: Sequence[CollectedTest] = ()
        """What is going to be run, in its order, with what an acceptance needs and is absent."""
        self.manifest: Manifest | None = None
        """The tests that an acceptance needs, where a file next to the collected ones lists them."""
        self.loaded_workload: Workload | None = None
        """The sizes to measure with, where a test asks for them. The controller of local workers has none."""
        self.workload_record: WorkloadRecord | None = None
        self.roll = RollCall()
        """What the ranks have reported of themselves: none before they have joined, or of local workers reported."""
        self.names: dict[int, str] = {0: "rank 0"}
        self.recorder: Recorder | None = None
        """Rank 0 only, as is what lies in the run's folder."""
        self.journal_copy = JournalCopy()
        self.directory: Path | None = None
        self.junit_path: Path | None = None
        self.claimed: socket.socket | None = None
        """It shows other runs on this host that this one writes the JUnit file."""
        self.monitor = RankMonitor()
        self.fault_file = FaultFile()
        self.while_open = contextlib.ExitStack()
        """What is undone when this process leaves the run."""
        self.slowdown = 1.0
        """How many times slower the slowest rank is than an ordinary CPU, in a rehearsal: see measure_slowdown."""
        self.selection = False
        """Only some of the tests were asked for."""
        self.uncovered = ""
        """Which nodes have more GPUs than ranks, where that was not declared."""
        self.records: dict[str, TestRecord] = {}
        self.problems: list[str] = []
        self.deviations: list[str] = []
        """In what limits or workload ask for less than the shipped ones."""
        self.verdict: verdict.Verdict | None = None
        self.stopped = ""
        """Why pytest runs no further test, such as by ``--maxfail``."""
        self._pid = os.getpid()
        # For messages when the main thread cannot write any: pytest's capture takes descriptor 2 for itself later.
        self._stderr = os.dup(2)

    # ---- the state that the run has reached ------------------------------------------------------------------

    @property
    def timeouts(self) -> Timeouts:
        """How long to wait."""
        found: Timeouts = self.settings.timeouts
        return found

    @property
    def workload(self) -> Workload:
        """The sizes to measure with. Raises: RuntimeError: no collected test asks for any."""
        if self.loaded_workload is None:
            raise RuntimeError("this is known only once tests that use a workload have been collected")
        return self.loaded_workload

    @property
    def abort_reason(self) -> AbortReason | None:
        """Why the run ends before its last test; None if it goes on, or has not begun."""
        return self.watch.abort_reason if self.has_joined else None

    # ---- what kind of run it is ------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.facts.rank

    @property
    def device(self) -> str:
        """ "cuda", "cpu" or "simulated"."""
        return str(self.settings.device)

    @property
    def rehearsal(self) -> bool:
        """Return whether there are no GPUs, so that nothing is asked of them. A simulated cluster has some."""
        return self.device == "cpu"

    @property
    def simulated(self) -> bool:
        """Return whether the GPUs are those of a described cluster."""
        return self.device == "simulated"

    @property
    def kind(self) -> str:
        """Return the kind of run: "" where its verdict is about hardware (``KINDS``)."""
        return KINDS[self.device]

    @property
    def profile(self) -> str:
        """Return the profile of the workload in force: on cpu always that of a rehearsal."""
        return "cpu" if self.rehearsal else str(self.settings.profile)

    def conditions(self, who: Mapping[int, Mapping[str, Any]]) -> Conditions:
        """Return under which conditions this run measures, for a comparison with another one."""
        from pytest_gpucluster.analysis.run_view import Conditions
        from pytest_gpucluster.journal.records import RankPlace

        name = next((str(each["gpu"]["name"]) for each in who.values() if each.get("gpu")), None)
        record = self.workload_record
        return Conditions(
            sku=self.sku(name),
            gpu_name=name,
            kind=self.kind,
            world_size=self.facts.world_size,
            nnodes=self.facts.nnodes,
            places={
                rank: RankPlace(rank=rank, host=each["host"], local_rank=each["local_rank"], gpu=each.get("gpu"))
                for rank, each in who.items()
            },
            workload=None if record is None else record.values,
        )

    # ---- limits ----------------------------------------------------------------------------------------------

    @cached_property
    def limits(self) -> Thresholds:
        """The limits in force. Rank 0 has read them before the first test; other ranks read them when asked.

        Raises:
            ThresholdsError: a file is malformed, and the message lists every problem; or the SKU that was asked for is
                in none of them.
        """
        return load_limits(self.settings)

    @cached_property
    def _shipped(self) -> Thresholds:
        from pytest_gpucluster.judge import loader

        return loader.load(loader.shipped_path())

    def shipped_limit(self, metric: str, labels: Mapping[str, str]) -> Limit | None:
        """Return what the shipped limits demand of a metric here; None where they demand nothing."""
        sku = self.sku(self.gpu_name())
        if sku is None or sku not in self._shipped.skus:
            return None
        world = self.facts.world_size
        found = self._shipped.limit(metric, sku=sku, world_size=world, nnodes=self.facts.nnodes, labels=labels)
        return None if found is None or found.record_only else found

    # ---- during the run --------------------------------------------------------------------------------------

    def send_cluster(self, who: Mapping[int, Mapping[str, Any]], problems: Collection[str] = ()) -> None:
        """Record what every rank has reported of itself, the limits in force and the environment."""
        keys = ("rank", "host", "local_rank", "node_rank", "pid", "gpu", "versions")
        ranks = [{key: facts[key] for key in keys} for _, facts in sorted(who.items())]
        self.send({"type": "cluster", "ranks": ranks, "problems": list(problems)})
        if self.recorder is None:
            return
        name = next((str(rank["gpu"]["name"]) for rank in ranks if rank["gpu"]), None)
        try:
            sku = self.sku(name)
        except ThresholdsError:  # unreadable, or two SKUs claim this GPU: reported where values are judged
            sku = None
        self.send(limits_line(sku=sku, gpu_name=name, files=limit_files(self.settings)))
        self.send(environment_line(self.environ, self.facts.hostname))

    def sku(self, gpu_name: str | None) -> str | None:
        """Return the SKU whose limits apply, or None for an unknown GPU."""
        if self.settings.sku is not None:
            return str(self.settings.sku)
        if self.rehearsal:
            return "cpu-rehearsal"
        return None if gpu_name is None else self.limits.sku_for(gpu_name)

    def gpu_name(self) -> str | None:
        """Return NVML's name of the GPUs, or None on cpu. The preflight has made sure that all have the same."""
        return next((str(who["gpu"]["name"]) for who in self.roll.who.values() if who.get("gpu")), None)

    def node_of(self) -> dict[int, int]:
        """Return rank -> node_rank. Rank 0 knows all ranks."""
        return {rank: int(who["node_rank"]) for rank, who in self.roll.who.items()}

    def room(self) -> Room:
        """Return what there is to run tests on, as launched."""
        return Room(
            ranks=self.facts.world_size,
            nodes=self.facts.nnodes,
            ranks_per_node=self.facts.world_size // self.facts.nnodes,
            on_cpu=self.rehearsal,
            is_simulated=self.simulated,
            data_sheet=lambda: None if self.rehearsal else self.limits.skus.get(self.sku(self.gpu_name()) or ""),
            data=frozenset(data.key for data in self.settings.data),
            scheduler=self.facts.scheduler.name,
        )

    def declared_room(self) -> Room:
        """Return what was ordered to run tests on: as expected, else as allocated, else as launched."""
        room, allocated = self.room(), self.facts.scheduler
        expected = self.settings.expect
        if expected is not None:
            nodes, per_node = expected.nodes, expected.gpus_per_node
        elif allocated.nnodes is not None:
            nodes, per_node = allocated.nnodes, allocated.gpus_per_node or self.facts.local_world_size
        else:
            return room
        return replace(room, ranks=nodes * per_node, nodes=nodes, ranks_per_node=per_node)

    def artifacts_directory(self) -> Path:
        """Return where tests put their files: the same path on every host, shared or not."""
        if self.place is not None and self.place.directory:
            # Each local worker is rank 0 of its own world: they would write over each other's files.
            return Path(self.place.directory) / ARTIFACTS / f"rank-{self.place.index}"
        return Path(self.roll.shared.get("directory") or tempfile.gettempdir()) / ARTIFACTS

    def agree(
        self,
        body: Mapping[str, Any],
        decide: Callable[[dict[int, Mapping[str, Any]]], Mapping[str, Any]],
        *,
        deadline_seconds: float,
    ) -> Mapping[str, Any] | None:
        """Post this rank's outcome of the phase in progress; return what rank 0 has decided for all.

        Every rank must call this. ``decide`` runs on rank 0 only, with the bodies of all ranks.

        Returns: the verdict; None if the run has ended, before or by this exchange.
        """
        watch = self.watch
        if watch.abort_reason is not None:
            return None
        try:
            verdict = self.exchange.run(body, decide, deadline_seconds=deadline_seconds)
        except OutOfStep as apart:
            self.problem("out of step", str(apart), str(apart))
            abort = AbortReason(name="out of step", message=first_line(str(apart)), exit=11, culprits=apart.culprits)
            watch.agreed_to_end(abort)
            return None
        except EnvironmentBroken as lost:
            watch.end(AbortReason(name="store lost", message=str(lost), exit=11))
            return None
        if "ended" in verdict:
            reason = verdict["ended"]
            unknown = AbortReason(name="internal error", message="rank 0 could not decide on the verdict", exit=3)
            watch.agreed_to_end(AbortReason.from_json(reason) if isinstance(reason, Mapping) else unknown)
            return None
        return verdict

    def send(self, line: Mapping[str, Any]) -> None:
        """Record a line in the journal. Rank 0 only; on other ranks nothing happens."""
        if self.recorder is not None:
            self.recorder.send(dict(line))
            self.journal_copy.add(line)

    def problem(self, name: str, message: str, text: str) -> None:
        """Record a problem outside any test, once."""
        message = first_line(message)
        if message in self.problems:
            return
        self.problems.append(message)
        self.send({"type": "problem", "name": name, "outcome": "error", "message": message, "text": text})

    def deviate(self, text: str) -> None:
        """Record that limits or workload ask for less than the shipped ones, once. A rehearsal may."""
        if not self.rehearsal and text not in self.deviations:
            self.deviations.append(text)
            self.send({"type": "deviation", "text": text})

    def write_lines(self, lines: Iterable[str], **markup: bool) -> None:
        """Write lines between those of pytest, or to standard error where it writes none."""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            print(*lines, sep="\n", file=sys.stderr)
            return
        reporter.ensure_newline()
        for line in lines:
            reporter.write_line(line, **markup)

    def cry(self, text: str) -> None:
        """Write to the terminal below pytest, when the main thread cannot. May be called from any thread."""
        os.write(self._stderr, text.encode("utf-8", "backslashreplace"))

    @contextlib.contextmanager
    def own_process(self, during: str) -> Iterator[None]:
        """End a process that was forked inside and comes back: it would go on as a second one of this rank."""
        try:
            yield
        finally:
            if os.getpid() != self._pid:
                name = self.names[self.rank]
                self.cry(f"\n{name}: process {os.getpid()}, forked in {during}, has left it, and is ended here\n")
                os._exit(1)

    def close(self) -> None:
        """Close the descriptor of :meth:`cry`, which writes to standard error from here on, and the JUnit file's."""
        self.while_open.close()
        if self.claimed is not None:
            self.claimed.close()
        descriptor, self._stderr = self._stderr, 2
        if descriptor != 2:
            os.close(descriptor)

    def record_abort(self, abort: AbortReason) -> None:
        """Record what is known. Called by the watchdog, maybe seconds before a SIGKILL."""
        self.problem(abort.name, first_line(abort.message), abort.text or abort.message)

    def take_workload(self, record: WorkloadRecord) -> None:
        """Record with what sizes the tests are going to measure."""
        self.workload_record = record
        self.send(record.line())
        for weakened in record.weakened:
            self.deviate(f"workload {weakened}")

    def take_collected(self, collected: Sequence[CollectedTest], *, left_out: Mapping[str, str]) -> None:
        """Record which tests are to run, and as skipped what an acceptance needs and is not there.

        That is tests that were not collected, and ranks for GPUs that were not left out on purpose.

        Args:
            collected: the tests that all ranks have agreed on.
            left_out: file -> why nothing of it was collected, as far as pytest reported it.
        """
        absent: list[TestRecord] = []
        manifest = self.manifest
        if manifest is not None and not self.selection:
            listed = ", ".join(manifest.files)
            for nodeid in manifest.absent(test.nodeid for test in collected):
                file, _, name = nodeid.partition("::")
                why = f"{left_out.get(file, 'was not collected')}; {listed} names it, so an acceptance needs it"
                test = CollectedTest.of(nodeid, (file, None, ""), criterion=name)
                absent.append(
                    TestRecord(test=test, outcome="skipped", phase="setup", message=why, text=why, decided=True)
                )
        if self.uncovered:
            test = CollectedTest.of("a_rank_for_each_gpu", ("", None, ""), criterion="a rank for each GPU")
            record = TestRecord(test=test, outcome="skipped", phase="setup", message=self.uncovered, decided=True)
            absent.append(record)
        tests = (*collected, *(record.test for record in absent))
        self.tests = tests
        self.send({"type": "collected", "tests": [asdict(test) for test in tests], "manifest": manifest is not None})
        for record in absent:
            self.records[record.test.nodeid] = record
            self.send(record.line())

    def not_run(self) -> list[str]:
        """Return the tests that were collected and have not begun."""
        return [test.nodeid for test in self.tests if test.nodeid not in self.records]


def name_of_rank(who: Mapping[str, Any]) -> str:
    gpu = who.get("gpu")
    if not gpu:
        return f"rank {who['rank']} ({who['host']})"
    return f"rank {who['rank']} ({who['host']}, GPU {gpu['index']} {gpu['uuid'][:12]}…)"


RUN = pytest.StashKey[Run]()
"""Where a process keeps its run."""
