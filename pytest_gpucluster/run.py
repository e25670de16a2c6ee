"""One rank's run from the first variable read to the last word: launch, roll call, watch, verdict.

Rank 0 alone speaks to the operator and to the recorder.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster import options, provenance, verdict
from pytest_gpucluster.accompaniment import Accompaniment
from pytest_gpucluster.agreement import preflight
from pytest_gpucluster.agreement.ending import Ending
from pytest_gpucluster.agreement.exchange import Exchange
from pytest_gpucluster.agreement.fault_file import FaultFile
from pytest_gpucluster.agreement.join import Joined, roll
from pytest_gpucluster.agreement.store import Stores
from pytest_gpucluster.agreement.vitals import start_time
from pytest_gpucluster.agreement.watch import Watch
from pytest_gpucluster.cluster import Cluster
from pytest_gpucluster.errors import EnvironmentBroken, ThresholdsError
from pytest_gpucluster.launch import RankFacts, detect
from pytest_gpucluster.record import TestName, TestRecord, now
from pytest_gpucluster.recorder import Recorder, wait_for_end
from pytest_gpucluster.reports.terminal import measurement_table
from pytest_gpucluster.run_directory import ARTIFACTS
from pytest_gpucluster.selection import Room
from pytest_gpucluster.units import did_you_mean
from pytest_gpucluster.wording import first_line

if TYPE_CHECKING:
    from pytest_gpucluster.hardware import Sku
    from pytest_gpucluster.limits import Thresholds
    from pytest_gpucluster.workloads import Workload, WorkloadRecord

_REPORTS_WRITTEN_SECONDS = 10.0
_FINISH_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """Which of how many local workers this process is: worker I is rank I on GPU I."""

    index: int
    count: int
    directory: str = ""
    """The run's folder, which the controller has made."""


class Run:
    """What one process holds for the whole session."""

    def __init__(self, config: pytest.Config, *, place: WorkerPlace | None = None) -> None:
        self.place = place
        self.config = config
        self.environ = os.environ
        # For last words when the main thread cannot speak: pytest's capture takes descriptor 2 for itself later.
        self._stderr = os.dup(2)
        hostname = self.environ.get("GPUCLUSTER_HOSTNAME") or socket.gethostname()
        self.facts: RankFacts = detect(self.environ, hostname)
        self.settings: options.Settings | None = None
        self.timeouts = options.Timeouts()
        self.recorder: Recorder | None = None
        self.directory: Path | None = None
        self.junit_path: Path | None = None
        self.thresholds: Thresholds | None = None
        self.workload: Workload | None = None
        self.workload_record: WorkloadRecord | None = None
        self.expectation: preflight.Expectation | None = None
        self.stores: Stores | None = None
        self.exchange: Exchange | None = None
        self.watch: Watch | None = None
        self.cluster: Cluster | None = None
        self.joined: Joined | None = None
        self.accompaniment = Accompaniment()
        self.names: dict[int, str] = {0: "rank 0"}
        self.selection = False
        self.collected: list[TestName] = []
        self.records: dict[str, TestRecord] = {}
        self.problems: list[str] = []
        self.verdict: verdict.Verdict | None = None
        self.fault_file = FaultFile()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.facts.rank

    @property
    def device(self) -> str:
        """ "cuda" or "cpu"."""
        return str(self.settings.device) if self.settings else "cuda"

    @property
    def rehearsal(self) -> bool:
        """Tell whether this run says nothing about hardware."""
        return self.device == "cpu"

    @property
    def profile(self) -> str:
        """Return the profile of the workload in force: on cpu always that of a rehearsal."""
        return "cpu" if self.rehearsal or self.settings is None else str(self.settings.profile)

    def header(self) -> list[str]:
        """Return what the operator should see before the first test."""
        facts, settings = self.facts, self.settings
        if settings is None or self.joined is None:
            return []
        shape = f"{facts.world_size} rank{'s' * (facts.world_size != 1)} on {facts.nnodes} node"
        lines = [f"gpucluster: {shape}{'s' * (facts.nnodes != 1)} ({facts.launcher}), device {self.device}"]
        if self.rehearsal:
            lines[0] += ", REHEARSAL: says nothing about hardware"
        chosen = settings.chosen()
        if chosen:
            lines.append(f"gpucluster settings: {', '.join(chosen)}")
        if self.rehearsal and settings.settings["profile"].origin != "default":
            lines.append(f"gpucluster profile: cpu, and not {settings.profile}: a rehearsal on cpu takes no other")
        lines.append(f"gpucluster report: {self.directory}")
        return lines

    def closing_lines(self) -> list[tuple[str, dict[str, bool]]]:
        """Return the last lines that the operator sees, with pytest's markup: where the reports lie, the verdict."""
        assert self.verdict is not None
        good = self.verdict.exit == 0
        return [
            *((line, {}) for line in self._measured()),
            *((problem, {"red": True}) for problem in self.problems if problem != self.verdict.reason),
            (f"journal: {self.directory}/journal.jsonl", {}),
            (f"JUnit:   {self.junit_path}", {}),
            (
                f"{self._headline(self.verdict)}, exit code {self.verdict.exit}: {self.verdict.reason}",
                {"bold": True, "green": good, "red": not good},
            ),
        ]

    def _headline(self, decided: verdict.Verdict) -> str:
        """Return the verdict's word; a rehearsal never stands alone as a verdict about hardware."""
        return f"{decided.word}{' (a REHEARSAL on cpu, which says nothing about hardware)' if self.rehearsal else ''}"

    def _measured(self) -> list[str]:
        """Return what was measured as a table, unless pytest is to be quiet."""
        measured = [judged for record in self.records.values() for judged in record.measurements]
        if not measured or self.config.option.verbose < 0:
            return []
        return measurement_table(measured).splitlines()

    def load_thresholds(self) -> None:
        """Read the limits in force.

        Raises:
            ThresholdsError: a file is malformed, and the message lists every problem; or the SKU that was asked for is
                in none of them.
        """
        from pytest_gpucluster import thresholds

        assert self.settings is not None
        found = thresholds.load(*self._limit_files())
        asked = self.settings.sku
        if asked is not None and asked not in found.skus:  # told now, and not after all has been measured
            origin = self.settings.settings["sku"].origin
            raise ThresholdsError(
                f"--gpucluster-sku is {asked!r} ({origin}), and no limits are known for it;"
                f" known are {', '.join(found.skus)}, and what a file for --gpucluster-thresholds adds"
                f"{did_you_mean(asked, found.skus)}"
            )
        self.thresholds = found

    def _limit_files(self) -> list[Path]:
        from pytest_gpucluster import thresholds

        overlay = self.settings.thresholds if self.settings is not None else None
        return [thresholds.shipped_path(), *([overlay] if overlay is not None else [])]

    @property
    def limits(self) -> Thresholds:
        """The limits in force. Rank 0 has read them before the first test; other ranks read them when asked."""
        if self.thresholds is None:
            self.load_thresholds()
        assert self.thresholds is not None
        return self.thresholds

    def take_worker(self, rank: int, who: Mapping[str, Any]) -> None:
        """Note what a local worker says of itself."""
        assert self.joined is not None
        self.joined = replace(self.joined, who={**self.joined.who, rank: who})
        self.names[rank] = name_of_rank(who)

    # ---- during the run --------------------------------------------------------------------------------------

    def inventory(self) -> list[Mapping[str, Any]]:
        """Return what every rank reported of itself, in the order of ranks."""
        assert self.stores is not None
        assert self.joined is not None
        if len(self.joined.who) < self.facts.world_size:
            who = roll(self.stores.main, range(self.facts.world_size))
        else:
            who = dict(self.joined.who)
        return [who[rank] for rank in sorted(who)]

    def send_cluster(self, who: Mapping[int, Mapping[str, Any]], problems: Collection[str] = ()) -> None:
        """Put on record what every rank said of itself, the limits in force and the environment."""
        keys = ("rank", "host", "local_rank", "node_rank", "pid", "gpu", "versions")
        ranks = [{key: facts[key] for key in keys} for _, facts in sorted(who.items())]
        self.send({"type": "cluster", "ranks": ranks, "problems": list(problems)})
        if self.recorder is None:
            return
        name = next((str(rank["gpu"]["name"]) for rank in ranks if rank["gpu"]), None)
        try:
            sku = self.sku(name)
        except ThresholdsError:  # unreadable, or two SKUs claim this GPU: who judges says so
            sku = None
        self.send(provenance.limits_line(sku=sku, gpu_name=name, files=self._limit_files()))
        self.send(provenance.environment_line(self.environ, self.facts.hostname))

    def sku(self, gpu_name: str | None) -> str | None:
        """Return the SKU whose limits apply, or None for an unknown GPU."""
        if self.settings is not None and self.settings.sku is not None:
            return str(self.settings.sku)
        if self.rehearsal:
            return "cpu-rehearsal"
        return None if gpu_name is None else self.limits.sku_for(gpu_name)

    def gpu_name(self) -> str | None:
        """Return NVML's name of the GPUs, or None on cpu. The preflight has made sure that all have the same."""
        ranks = self.joined.who.values() if self.joined else ()
        return next((str(who["gpu"]["name"]) for who in ranks if who.get("gpu")), None)

    def node_of(self) -> dict[int, int]:
        """Return rank -> node_rank. Rank 0 knows all ranks."""
        return {rank: int(who["node_rank"]) for rank, who in self.joined.who.items()} if self.joined else {}

    def room(self) -> Room:
        """Return what there is to run tests on, as launched."""
        return Room(
            ranks=self.facts.world_size,
            nodes=self.facts.nnodes,
            ranks_per_node=self.facts.world_size // self.facts.nnodes,
            on_cpu=self.rehearsal,
            data_sheet=self._data_sheet,
            data=frozenset(data.key for data in self.settings.data) if self.settings is not None else frozenset(),
            scheduler=self.facts.scheduler.name,
        )

    def _data_sheet(self) -> Sku | None:
        name = None if self.rehearsal else self.sku(self.gpu_name())
        return None if name is None else self.limits.skus.get(name)

    def declared_room(self) -> Room:
        """Return what was ordered to run tests on: as expected, else as allocated, else as launched."""
        room, allocated = self.room(), self.facts.scheduler
        if self.expectation is not None:
            nodes, per_node = self.expectation.nodes, self.expectation.gpus_per_node
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
        shared = self.joined.shared.get("directory") if self.joined else None
        return Path(shared or tempfile.gettempdir()) / ARTIFACTS

    def send(self, line: Mapping[str, Any]) -> None:
        """Put a line on record. Rank 0 only; on other ranks nothing happens."""
        if self.recorder is not None:
            self.recorder.send(dict(line))

    def problem(self, name: str, message: str, text: str) -> None:
        """Put something on record that is outside any test, once."""
        message = first_line(message)
        if message in self.problems:
            return
        self.problems.append(message)
        self.send({"type": "problem", "name": name, "outcome": "error", "message": message, "text": text})

    def beat(self) -> None:
        if self.recorder is not None:
            self.recorder.beat()

    def note_ending(self, ending: Ending) -> None:
        """Called by the watcher, maybe seconds before a SIGKILL: what is known goes on record at once."""
        self.problem(ending.name, first_line(ending.message), ending.text or ending.message)

    def overtime(self, ending: Ending) -> None:
        """The main thread did not come back in time: the watcher ends the process with the reports written."""
        if self.verdict is None:
            self.verdict = self.decide(pytest_exit=ending.exit, ending=ending)
            self.write_end()
        text = f"\n{self._headline(self.verdict)}: {self.verdict.reason}\n"
        if self.rank == 0:
            os.write(self._stderr, text.encode("utf-8", "backslashreplace"))
        self._wait_for_reports()
        os._exit(self.verdict.exit)

    # ---- closing ---------------------------------------------------------------------------------------------

    def decide(self, *, pytest_exit: int, ending: Ending | None) -> verdict.Verdict:
        """Return the verdict on what is on record. Rank 0 has everything; other ranks only know the ending."""
        results = [
            verdict.TestResult(
                nodeid=record.test.nodeid,
                criterion=record.test.criterion,
                outcome=record.outcome,
                message=record.message,
                applicable=record.applicable,
                unjudged=record.unjudged,
                attempts=record.attempts,
            )
            for record in self.records.values()
        ]
        return verdict.decide(
            results,
            pytest_exit=pytest_exit,
            ending=None if ending is None else (ending.exit, ending.message),
            problems=self.problems if ending is None else (),
            not_run=self._not_run() if pytest_exit == 0 else (),
            required=self.settings.require if self.settings else (),
            rehearsal=self.rehearsal,
            selection=self.selection,
            topology="; ".join([self._topology(), *self._remarks()]),
        )

    def take_workload(self, record: WorkloadRecord) -> None:
        """Put on record what is going to be run."""
        self.workload_record = record
        self.send(record.line())

    def _not_run(self) -> list[str]:
        return [test.nodeid for test in self.collected if test.nodeid not in self.records]

    def _topology(self) -> str:
        shape = f"{self.facts.nnodes} node{'s' * (self.facts.nnodes != 1)}, {self.facts.world_size} rank"
        shape += "s" * (self.facts.world_size != 1)
        if self.expectation is not None and self.settings is not None:
            return f"{shape}, as expected ({self.settings.expect})"
        if self.facts.scheduler.nnodes is not None:
            return f"{shape}, as allocated by {self.facts.scheduler.name}"
        return f"{shape}, as launched (nothing was declared by --gpucluster-expect)"

    def _remarks(self) -> list[str]:
        """Return in what this run was less, or other, than the whole suite with the shipped limits."""
        said = self.workload_record.remarks if self.workload_record is not None else []
        if self.settings is None:
            return said
        if self.settings.sku is not None:
            said = [*said, f"judged as {self.settings.sku} (--gpucluster-sku)"]
        if self.settings.thresholds is not None:
            said = [*said, f"limits overlaid by {self.settings.thresholds}"]
        return said

    def finish_for_workers(
        self, pytest_exit: int, *, why: str | None = None, refused: str | None = None, cut_short: Collection[str] = ()
    ) -> int:
        """Close the record of a run whose ranks are local workers; returns the exit code.

        ``why`` no test has run, if what was to be collected could not be collected by any worker; ``refused`` if they
        were, and could not be run; ``cut_short`` the tests whose error is the interruption itself.
        """
        who = self.joined.who if self.joined else {}
        self.send_cluster(who)
        ending = None
        if refused is not None:
            ending = Ending(name="usage", message=first_line(refused), exit=4, text=refused)
        elif why is not None:
            ending = Ending(name="collection", message=first_line(why), exit=2)
        elif pytest_exit == pytest.ExitCode.INTERRUPTED and not self._has_gone_wrong(cut_short):
            ending = Ending(name="interrupted", message="interrupted before every worker had run every test", exit=2)
            self.note_ending(ending)
        self.verdict = self.decide(pytest_exit=pytest_exit, ending=ending)
        self.write_end()
        return self.verdict.exit

    def _has_gone_wrong(self, cut_short: Collection[str]) -> bool:
        """Tell whether something is on record that explains why pytest has stopped."""
        return bool(self.problems) or any(
            record.outcome == "failed" or (record.outcome == "error" and nodeid not in cut_short)
            for nodeid, record in self.records.items()
        )

    def finish(self, pytest_exit: int, *, why: str | None = None) -> int:
        """Agree on the verdict and close the record. Every rank must call this; returns the exit code.

        ``why`` pytest has interrupted itself, if it has and that is known.
        """
        if self.watch is None or self.exchange is None:
            return pytest_exit
        watch = self.watch
        if watch.ending is None and pytest_exit in (2, 3):
            name = {2: "interrupted", 3: "internal error"}[pytest_exit]
            message = first_line(why or f"{name} on {self.names[self.rank]}")
            watch.end(Ending(name=name, message=message, exit=pytest_exit))
        agreed: Mapping[str, Any] = {}
        if watch.ending is None:
            agreed = self._agree_on_finish(pytest_exit)
        if self.rank == 0 and self.verdict is None:
            self.verdict = self.decide(pytest_exit=pytest_exit, ending=watch.ending)
        elif self.rank != 0:
            self.verdict = _told(agreed) or self.decide(pytest_exit=pytest_exit, ending=watch.ending)
        assert self.verdict is not None
        self.write_end()
        return self.verdict.exit

    def _agree_on_finish(self, pytest_exit: int) -> Mapping[str, Any]:
        assert self.watch is not None
        assert self.exchange is not None

        def decide(bodies: dict[int, Mapping[str, Any]]) -> Mapping[str, Any]:
            if self.recorder is not None and self.recorder.failure:
                self.problems.append(self.recorder.failure)  # now, so that every rank ends with the same exit code
            worst = max((body.get("exit", 11) for body in bodies.values()), default=pytest_exit)
            ending = self.watch.ending if self.watch else None
            self.verdict = self.decide(pytest_exit=worst, ending=ending)
            return {"word": self.verdict.word, "exit": self.verdict.exit, "reason": self.verdict.reason}

        self.watch.enter("the end of the session", _FINISH_DEADLINE_SECONDS)
        self.watch.leave()
        try:
            return self.exchange.run({"exit": pytest_exit}, decide, deadline_seconds=_FINISH_DEADLINE_SECONDS)
        except EnvironmentBroken as error:
            self.watch.end(Ending(name="store lost", message=str(error), exit=11))
            return {}

    def write_end(self) -> None:
        if self.recorder is None or self.verdict is None:
            return
        outcomes = [record.outcome for record in self.records.values()]
        error = self.recorder.finish(
            {
                "type": "end",
                "at": now(),
                "verdict": self.verdict.word,
                "exit": self.verdict.exit,
                "reason": self.verdict.reason,
                "counts": {kind: outcomes.count(kind) for kind in ("passed", "failed", "error", "skipped")},
                "not_run": self._not_run(),
                "by": "rank 0",
            },
            timeout=_REPORTS_WRITTEN_SECONDS,
        )
        if error is not None:
            self.problems.append(error)
            if self.verdict.exit in (0, 10):
                self.verdict = verdict.Verdict(word=verdict.BROKEN, exit=11, reason=f"no complete report: {error}")

    def close(self) -> None:
        """Leave: no rank is called lost after this."""
        self.accompaniment.close()
        if self.watch is None:
            return
        watch = self.watch
        watch.goodbye("finished")
        ending = watch.ending
        if ending is not None and ending.name in ("rank stuck", "rank lost") and self.rank not in ending.culprits:
            watch.kill_stuck([rank for rank in ending.culprits if rank != self.rank])
        # After that: the recorder lives as long as rank 0, which may be the one that is stuck.
        self._wait_for_reports()
        watch.close()
        if self.cluster is not None and ending is None:
            self.cluster.close()
        self.tell_launcher()
        self.fault_file.close()

    def _wait_for_reports(self) -> None:
        """Keep the launcher's agent alive until the recorder has ended: its end takes every process with it."""
        if self.joined is None or self.rank == 0 or self.joined.hosts[0] != self.facts.hostname:
            return
        pid = self.joined.shared.get("recorder_pid")
        # The same host name may hide another pid namespace, where that number is somebody else's.
        if pid is not None and start_time(int(pid)) == self.joined.shared["recorder_started"]:
            wait_for_end(int(pid), _REPORTS_WRITTEN_SECONDS)

    def tell_launcher(self) -> None:
        """Put one readable line into torchrun's summary of failures."""
        path, result = self.environ.get("TORCHELASTIC_ERROR_FILE"), self.verdict
        if path is None or result is None or result.exit == 0:
            return
        rehearsal = "REHEARSAL, " if self.rehearsal else ""
        text = f"{rehearsal}{result.word} (exit code {result.exit}): {result.reason}"
        body = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        try:
            Path(path).write_text(json.dumps(body), encoding="utf-8")
        except OSError as error:
            print(f"cannot write {path}: {error}", file=sys.stderr)


def _told(agreed: Mapping[str, Any]) -> verdict.Verdict | None:
    if "word" not in agreed:
        return None
    return verdict.Verdict(word=agreed["word"], exit=agreed["exit"], reason=agreed["reason"])


def name_of_rank(who: Mapping[str, Any]) -> str:
    gpu = who.get("gpu")
    if not gpu:
        return f"rank {who['rank']} ({who['host']})"
    return f"rank {who['rank']} ({who['host']}, GPU {gpu['index']} {gpu['uuid'][:12]}…)"
