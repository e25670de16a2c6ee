"""How a run begins: settings, the recorder, the roll call, the watcher; or a refusal that every rank understands."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster import __version__
from pytest_gpucluster.agreement import liveness, preflight
from pytest_gpucluster.agreement.exchange import AbortReason, Exchange
from pytest_gpucluster.agreement.rendezvous import Refused, RollCall, join
from pytest_gpucluster.agreement.store import Stores, connect, start_store
from pytest_gpucluster.agreement.watchdog import Watch
from pytest_gpucluster.errors import EnvironmentBroken, GpuClusterError, LaunchError, OptionError, UsageProblem
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.run_directory import new_run_directory
from pytest_gpucluster.journal.test_record import now
from pytest_gpucluster.journal.verdict import BeginNote, write_note
from pytest_gpucluster.launch import detached_process, master_address
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.metrics.measurement import register
from pytest_gpucluster.node import pci
from pytest_gpucluster.node.health.monitor import Place
from pytest_gpucluster.node.health.telemetry import INTERVAL_SECONDS
from pytest_gpucluster.reports.recorder.client import Recorder
from pytest_gpucluster.session import options, rejected_run, shutdown
from pytest_gpucluster.session.cluster import Cluster
from pytest_gpucluster.session.run import Run, name_of_rank
from pytest_gpucluster.session.selection import TrainingInputs
from pytest_gpucluster.session.shutdown import call_verdict_hooks
from pytest_gpucluster.session.start_notes import JOINING, LOST, START, Start
from pytest_gpucluster.text import first_line

_WITHOUT_A_CALL = {"setupplan": "--setup-plan", "setuponly": "--setup-only", "forked": "--forked", "boxed": "--boxed"}
"""Options of pytest and pytest-forked (--boxed: its older name) by which no test body runs in this process."""
_TEXTS_SHOWN = 4
"""Of many ranks' different problems this number is reported in full."""
_RANK_0_SECONDS = 5.0


class Startup:
    """Opens one process's :class:`Run`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._start: Start | None = run.config.pluginmanager.get_plugin(START)

    def open(self) -> None:
        """Read the settings, start the recorder, call the roll and start the watcher.

        Every rank must call this. On a problem, of this rank or another, the session ends here on every rank, and
        rank 0 reports it.
        """
        self._refuse_restart()
        if self._start is not None:
            self._start.update(phase=JOINING)
            if self._run.rank == 0:
                self._start.report = self._report_lost
        marked = pytest.MonkeyPatch()
        marked.setenv(detached_process.VARIABLE, str(self._run.fault_file.path))
        self._run.while_open.callback(marked.undo)
        problem = self._prepare()
        if self._run.facts.world_size == 1 and problem is not None:
            self._refuse(problem)
        if problem is None or self._run.facts.world_size > 1:
            try:
                self._join(problem)
            except Refused as error:
                if self._run.rank == 0:
                    self._refuse(error.refusal)
                self._leave(error.refusal)
            except GpuClusterError as error:
                self._refuse(_refusal(error))

    def _refuse_restart(self) -> None:
        if self._run.facts.restart_count == 0:
            return
        message = (
            f"this is restart {self._run.facts.restart_count} of a run that has already broken; its verdict stands and "
            "its reports are left as they are. Run torchrun with --max-restarts=0"
        )
        if self._run.rank != 0:
            self._silence_stderr()
            time.sleep(_RANK_0_SECONDS)  # torchrun ends all ranks once one has left, and rank 0 has something to report
        pytest.exit(message, returncode=11)

    def _prepare(self) -> AbortReason | None:
        """Do what needs no other rank. Return what went wrong instead of raising, so that all ranks can report it."""
        run, problem = self._run, None
        is_writer = run.rank == 0 and run.place is None
        try:
            for found in run.config.hook.pytest_gpucluster_metrics():
                for metric in found:
                    register(metric)
            run.settings, run.has_settings = options.resolve(run.config, run.environ), True
            _refuse_conflicts(run.config, run.facts)
            _refuse_unasked_rehearsal(run.settings, run.facts.hostname)
            if run.simulated:
                from pytest_gpucluster.simulation.install import install

                host = install(run.settings.simulate, self._on_its_gpu(), run.environ).hostname
                run.facts = replace(run.facts, hostname=host)
        except GpuClusterError as error:
            problem = _refusal(error)
        if is_writer:
            for step in (self._require_junit, self._start_recorder):
                try:
                    step()
                except GpuClusterError as error:
                    problem = problem or _refusal(error)
                except OSError as error:  # no further process can be started
                    problem = problem or _refusal(EnvironmentBroken(f"the recorder cannot be started: {error}"))
        try:
            if is_writer and run.has_settings:
                _ = run.limits  # read now: a malformed file ends the run before its first test
                if run.settings.baseline is not None:
                    from pytest_gpucluster.analysis.baseline import Baseline

                    allowed = run.settings.baseline_fail
                    run.baseline = Baseline.read(run.settings.baseline, allowed=allowed, kind=run.kind)
                    run.send(run.baseline.line())
        except GpuClusterError as error:
            problem = problem or _refusal(error)
        return problem

    def _require_junit(self) -> None:
        path = self._run.junit_path
        if path is None:
            return
        try:
            rejected_run.require_file(path)
            self._run.claimed = rejected_run.claim(path)
            if self._run.claimed is None:
                raise OptionError(
                    f"--junitxml {path}: another run on this host is writing it; name another file, or wait for its end"
                )
        except OptionError:
            self._run.junit_path = None  # the one in the report directory must do
            raise

    def _start_recorder(self) -> None:
        report_dir = options.report_directory(self._run.config, self._run.environ)
        self._run.directory = new_run_directory(report_dir)
        self._run.junit_path = self._run.junit_path or self._run.directory / "junit.xml"
        self._run.recorder = Recorder.start(self._run.directory, self._run.junit_path)
        self._run.send(self._first_line())
        directory = str(self._run.directory.resolve())
        begun = BeginNote(launcher=self._run.launcher, directory=directory, recorder=self._run.recorder.pid)
        if (wrong := write_note(self._run.environ, begun)) is not None:
            print(wrong, file=sys.stderr)

    def _first_line(self) -> dict[str, Any]:
        """Return the journal's first line."""
        run, facts = self._run, self._run.facts
        return {
            "type": "run",
            "schema_version": 1,
            "run_id": facts.run_id,
            "started_at": now(),
            "argv": [str(arg) for arg in run.config.invocation_params.args],
            "hostname": facts.hostname,
            "versions": {"python": platform.python_version(), "pytest": pytest.__version__},
            "plugin_version": __version__,
            "junit": _junit_options(run.config, run.junit_path),
            "device": run.device,
            "rehearsal": run.rehearsal,
            "selection": run.selection,
            "launcher": facts.launcher,
            "world_size": facts.world_size,
            "nnodes": facts.nnodes,
            "options": run.settings.to_json() if run.has_settings else {},
        }

    def _join(self, problem: AbortReason | None) -> None:
        run, facts, start = self._run, self._run.facts, self._start
        master_address.require_known(facts)
        if facts.world_size > 1 and not facts.agent_store and facts.rank == 0:
            start_store(facts)
        stores = connect(facts, timeout_seconds=run.timeouts.join)
        me = self._describe_me(problem)
        if me.get("gpu") and me["local_rank"] == 0 and run.place is None:  # a worker's was started by its controller
            me["sampler"] = run.monitor.start()
        recorder_pid = run.recorder.pid if run.recorder else None
        run.roll = join(
            stores.main,
            facts,
            me,
            timeout_seconds=run.timeouts.join,
            check=self._check,
            is_hopeless=lambda: bool(self._lost()[0]) if run.rank == 0 else bool(start and start.rank_0_is_lost()),
            shared={
                "recorder_pid": recorder_pid,
                "recorder_started": None if recorder_pid is None else liveness.start_time(recorder_pid),
                "directory": str(run.directory.resolve()) if run.directory else None,
            },
        )
        run.names = {rank: f"rank {rank} ({host})" for rank, host in enumerate(run.roll.hosts)}
        run.names.update({rank: name_of_rank(who) for rank, who in run.roll.who.items()})
        self._take_place(me)
        if run.place is not None:
            run.names = {0: name_of_rank({**me, "rank": run.place.index})}
        self._connect(stores, cuda_index=me.get("cuda_index") or 0)
        if start is not None:
            start.is_over = True

    def _connect(self, stores: Stores, *, cuda_index: int) -> None:
        run, facts = self._run, self._run.facts
        exchange = run.exchange = Exchange(stores, facts.rank, facts.world_size)
        watch = run.watch = Watch(
            facts=facts,
            side=stores.side,
            numbers=exchange,
            who=run.roll.who,
            names=run.names,
            timeouts=run.timeouts,
            fault_file=run.fault_file.open(),
            on_abort=run.record_abort,
            on_beat=run.recorder.beat if run.recorder is not None else lambda: None,
            on_overtime=partial(shutdown.overtime, run),
            rehearsal=run.rehearsal,
        )
        cluster = run.cluster = Cluster(
            facts,
            hosts=list(run.roll.hosts),
            has_gpus=not run.rehearsal,
            device_type="cuda" if run.device == "cuda" else "cpu",
            device_index=cuda_index,
            store_for_group=stores.for_group,
            after_abort=stores.after_abort,
            guard=watch.guard,
            deadline_seconds=float(run.settings.deadline),
        )
        run.stores, run.has_joined = stores, True
        cluster.take_device()
        if run.recorder is not None:
            run.recorder.fault_file(str(run.fault_file.path))
        watch.start()

    def _describe_me(self, problem: AbortReason | None) -> dict[str, Any]:
        from pytest_gpucluster.node.inventory import identify

        inputs = TrainingInputs.of(self._run.settings)
        plain = {
            "rank": self._run.facts.rank,
            "host": self._run.facts.hostname,
            "node_rank": self._run.facts.node_rank,
            "local_rank": self._run.facts.local_rank,
            "pid": os.getpid(),
            "start_time": liveness.start_time(os.getpid()),
            "fault_file": str(self._run.fault_file.path),
            "inputs": {"values": inputs.values(), "problems": inputs.problems()},
            # It chooses GPUs: the others are left out on purpose.
            "chosen": bool(self._run.environ.get("CUDA_VISIBLE_DEVICES")),
        }
        if problem is None:
            try:
                return {**identify(self._on_its_gpu(), "cpu" if self._run.rehearsal else "cuda"), **plain}
            except GpuClusterError as error:
                problem = _refusal(error)
        return {**plain, "problem": problem.text, "exit": problem.exit}

    def _take_place(self, me: Mapping[str, Any]) -> None:
        run = self._run
        here = (me["host"], me["node_rank"])
        node = [who for who in run.roll.who.values() if (who["host"], who["node_rank"]) == here]
        if run.place is None:
            run.monitor.use_sampler(next((who["sampler"] for who in node if who.get("sampler")), None))
        run.monitor.join(
            Place(
                node=node,
                rank=me["rank"],
                sku=lambda: run.sku(me["gpu"]["name"] if me["gpu"] else None),
                interval_seconds=lambda: (
                    run.workload.telemetry.interval_seconds if run.loaded_workload else INTERVAL_SECONDS
                ),
                reads_ports=run.place is None or run.place.index == 0,
            )
        )

    def _on_its_gpu(self) -> RankFacts:
        """Return the facts by which the GPU is chosen: a local worker takes the one of its own number."""
        if self._run.place is None:
            return self._run.facts
        return replace(self._run.facts, local_rank=self._run.place.index, local_world_size=self._run.place.count)

    def open_for_workers(self, workers: int) -> None:
        """Start the record of a run whose ranks are local workers."""
        self._run.facts = replace(self._run.facts, world_size=workers, local_world_size=workers)
        problem = self._prepare()
        if problem is None and (missing := TrainingInputs.of(self._run.settings).problems()):
            problem = _refusal(OptionError("\n".join(missing)))
        if problem is None and not self._run.rehearsal:
            problem = self._too_few_gpus(workers)
        if problem is not None:
            self._refuse(problem)
        self._run.roll = RollCall(
            hosts=[self._run.facts.hostname] * workers, who={}, shared={"directory": str(self._run.directory)}
        )

    def _too_few_gpus(self, workers: int) -> AbortReason | None:
        me = self._describe_me(None)
        if "problem" in me:
            return _reason(me["problem"], me["exit"])
        visible = int(me["visible_gpus"])
        if workers <= visible:
            whole_node = dict.fromkeys(range(workers), me)
            self._run.uncovered = preflight.gpus_without_a_rank(whole_node, self._run.facts, self._run.settings.expect)
            return None
        return _refusal(
            LaunchError(
                f"-n {workers} starts more workers than {self._run.facts.hostname} shows GPUs ({visible}), and each "
                f"worker needs one of its own. Use -n {visible}, or show more GPUs to this process"
            )
        )

    def _check(self, who: Mapping[int, Mapping[str, Any]]) -> AbortReason | None:
        unable = [facts for facts in who.values() if "problem" in facts]
        if unable:
            texts = list(dict.fromkeys(facts["problem"] for facts in unable))
            more = [f"and {len(texts) - _TEXTS_SHOWN} other problems"] if len(texts) > _TEXTS_SHOWN else []
            return _reason("\n".join([*texts[:_TEXTS_SHOWN], *more]), unable[0]["exit"])
        run, expected = self._run, self._run.settings.expect
        message, text = self._lost() if len(who) < run.facts.world_size else ("", "")
        if message:
            return AbortReason(name=LOST, message=message, text=text, exit=11)
        found = preflight.problems(
            who,
            run.facts,
            expectation=expected,
            device="cpu" if run.rehearsal else "cuda",
            sku_of=run.limits.sku_for,
        )
        run.send_cluster(who, [problem.text for problem in found])
        run.uncovered = preflight.gpus_without_a_rank(who, run.facts, expected)
        if found:
            return _reason("\n".join(problem.text for problem in found), max(problem.exit for problem in found))
        why = run.baseline.incompatibility(run.conditions(who)) if run.baseline is not None else ""
        wrong = f"--gpucluster-baseline: nothing of this run can be compared with it: {why}"
        return _refusal(OptionError(wrong)) if why else None

    def _lost(self) -> tuple[str, str]:
        """Return which ranks of this node have failed before they reported: in one line, and in full."""
        return self._start.failures() if self._start is not None else ("", "")

    def _report_lost(self, message: str, text: str) -> None:
        if self._run.verdict is None:
            self._put_on_record(AbortReason(name=LOST, message=message, text=text, exit=11))

    def _put_on_record(self, refusal: AbortReason) -> None:
        if self._start is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, while the report is being written
        if self._lost()[0]:
            refusal = replace(refusal, name=LOST)
        self._run.record_abort(refusal)
        self._run.verdict = verdict.Verdict(word=verdict.BROKEN, exit=refusal.exit, reason=refusal.message)
        shutdown.write_end(self._run)
        if self._run.recorder is None and self._run.rank == 0 and self._run.junit_path is not None:
            lost = rejected_run.write_junit(self._run.junit_path, self._first_line(), refusal)
            if lost is not None:
                print(f"ERROR: {lost}", file=sys.stderr)
        call_verdict_hooks(self._run)
        shutdown.report_to_launcher(self._run)

    def _refuse(self, refusal: AbortReason) -> None:
        self._put_on_record(refusal)
        text = refusal.text
        if self._run.recorder is not None:
            text += f"\nJUnit: {self._run.junit_path}"
        if refusal.exit == 4:
            raise pytest.UsageError(text)
        print(f"ERROR: {text}", file=sys.stderr)
        pytest.exit(f"{verdict.BROKEN}, exit code {refusal.exit}: the run was not started", returncode=refusal.exit)

    def _leave(self, refusal: AbortReason) -> None:
        """End the session of a rank above 0 silently: rank 0 reports for all."""
        self._run.verdict = verdict.Verdict(word=verdict.BROKEN, exit=refusal.exit, reason=refusal.message)
        shutdown.report_to_launcher(self._run)
        self._silence_stderr()
        # The agent waits for every rank; one exit code a node is enough, and gives one block in its summary.
        is_quiet = self._run.facts.agent_store and self._run.facts.local_rank != 0
        pytest.exit(f"{verdict.BROKEN}: {refusal.message}", returncode=0 if is_quiet else refusal.exit)

    def _silence_stderr(self) -> None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the process ends


def _refusal(error: GpuClusterError) -> AbortReason:
    return _reason(str(error), 4 if isinstance(error, UsageProblem) else 11)


def _reason(text: str, exit: int) -> AbortReason:
    return AbortReason(name=rejected_run.NAMES[exit], message=first_line(text), text=text, exit=exit)


def _refuse_conflicts(config: pytest.Config, facts: RankFacts) -> None:
    """Refuse pytest options that run no test, or run it where the ranks cannot agree on it."""
    for name, option in _WITHOUT_A_CALL.items():
        if getattr(config.option, name, False):
            raise LaunchError(
                f"{option} runs no test in this process, so nothing would be measured. Leave out {option}; to list the "
                "tests use --collect-only, to see the fixtures of a real run --setup-show"
            )
    if facts.launcher == "single":
        return
    if getattr(config.option, "numprocesses", None) or getattr(config.option, "tx", None):
        raise LaunchError(
            f"-n (pytest-xdist) and {facts.launcher} both start processes. Leave out -n: the launcher's ranks are the "
            "processes; or leave out the launcher: pytest -n <GPUs> --dist each --max-worker-restart=0 -m single_gpu"
        )
    if getattr(config.option, "usepdb", False) or getattr(config.option, "trace", False):
        raise LaunchError(
            f"--pdb and --trace need one process with a terminal, but {facts.launcher} started "
            f"{facts.world_size} ranks. Run plain pytest on one GPU to debug, with -m single_gpu"
        )


def _refuse_unasked_rehearsal(settings: options.Settings, hostname: str) -> None:
    """Refuse a rehearsal or simulation on a node with GPUs that only a variable asks for: left over in a shell, it
    would pass a gate."""
    device = settings.settings["device"]
    if device.value == "cuda" or device.origin != "environment":
        return
    gpus = [gpu.address for gpu in pci.unlisted_gpus(()) if gpu.state not in ("hidden", "elsewhere")]
    if gpus:
        raise OptionError(
            f"GPUCLUSTER_DEVICE={device.value} is set, and {hostname} has {len(gpus)} GPUs, the first at PCI {gpus[0]}"
            f": such a run says nothing about them. Unset it; or give --gpucluster-device={device.value}"
        )


def _junit_options(config: pytest.Config, path: Path | None) -> dict[str, Any]:
    def ini(name: str, default: Any) -> Any:
        try:
            return config.getini(name)
        except (KeyError, ValueError):  # -p no:junitxml
            return default

    return {
        "path": None if path is None else str(path),
        "family": ini("junit_family", "xunit2"),
        "suite_name": ini("junit_suite_name", "pytest"),
        "prefix": getattr(config.option, "junitprefix", None) or "",
        "logging": ini("junit_logging", "no"),
        "log_passing": bool(ini("junit_log_passing_tests", True)),
        "duration_report": ini("junit_duration_report", "total"),
    }
