"""A cluster that does not exist, whose run is recorded by this project's own code: the ranks' values are made up, and
all else is as in a real run: they are merged, judged, isolated and put into lines by what does so there.

Times and values are fixed: the same run has the same lines each time.
"""

import hashlib
import math
import random
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest_gpucluster.agreement.exchange import RankOutcome, merge
from pytest_gpucluster.config.workload import WorkloadRecord
from pytest_gpucluster.isolation.finding import Outcome
from pytest_gpucluster.isolation.planner import Planner
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.records import KINDS, CollectedTest, TestResult
from pytest_gpucluster.journal.test_record import TestRecord
from pytest_gpucluster.judge import loader
from pytest_gpucluster.metrics.measurement import measurement
from pytest_gpucluster.metrics.sampling import Sampling, is_settled, series
from pytest_gpucluster.node.health.telemetry import summary
from pytest_gpucluster.session import isolation
from pytest_gpucluster.session.judging import judge_merged
from pytest_gpucluster.session.run import environment_line, limits_line
from pytest_gpucluster.text import first_line

LIMITS_FILE = Path(__file__).with_name("example_limits.yaml")
FOLDER = "gpucluster-report/20261121-090000"
"""Where the example runs say that they lie."""

_LIMITS = loader.load(LIMITS_FILE)
_LIMITS_NAME = "site/limits.yaml"
_BEGIN = datetime(2026, 11, 21, 9, 0, tzinfo=timezone.utc)
_SAMPLING = Sampling(warmup_seconds=2, window_seconds=3, longest_seconds=60, tolerance_ratio=0.05)
_UNNAMED = uuid.UUID("6c1f3a52-8b5e-4d0c-9a37-2f7f5c1f0e11")
_CARD = {"sm_clock_max_mhz": 1980.0, "slowdown_celsius": 92.0}
_VERSIONS = {"python": "3.11.7", "pytest_gpucluster": "0.1.0"}
CPU_VERSIONS = {**_VERSIONS, "torch": "2.13.0+cpu", "cuda": None, "nccl": None, "driver": None}
GPU_VERSIONS = {**_VERSIONS, "torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "driver": "580.95.05"}


@dataclass(kw_only=True)
class ExampleRun:
    """A run while it is made: each method appends the lines that such a run would.

    Attributes:
        hosts: of the nodes, in order.
        per_node: ranks on each.
        device: of the run. Unless it is cpu, each rank has an H100.
        seed: of all that is drawn.
        lines: so far.
    """

    hosts: Sequence[str]
    per_node: int
    device: str = "cuda"
    seed: int = 1
    lines: list[dict[str, Any]] = field(default_factory=list)
    results: list[TestResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    tests: list[CollectedTest] = field(default_factory=list)
    _at: datetime = _BEGIN

    def __post_init__(self):
        self.has_gpus = self.device != "cpu"
        self.random = random.Random(self.seed)
        self.ranks = range(len(self.hosts) * self.per_node)
        self.who = [self._identity(rank) for rank in self.ranks]
        self.names = {rank: self._name(rank) for rank in self.ranks}

    # ---- the ranks -------------------------------------------------------------------------------------------

    def _identity(self, rank):
        node, local = divmod(rank, self.per_node)
        gpu = None
        if self.has_gpus:
            digits = int(hashlib.sha256(f"{self.hosts[node]}/{local}".encode()).hexdigest()[:12], 16)
            gpu = {
                "index": local,
                "uuid": f"GPU-{uuid.uuid5(_UNNAMED, f'{self.hosts[node]}/{local}')}",
                "pci_bus_id": f"00000000:{0x19 + 0x12 * local:02X}:00.0",
                "name": "NVIDIA H100 80GB HBM3",
                "memory_bytes": 85_520_809_984,
                "serial": str(1_650_000_000_000 + digits % 900_000_000),
                "vbios": "96.00.89.00.01",
                "power_limit_watts": 700.0,
                "ecc": True,
                "mig": False,
            }
        return {
            "rank": rank,
            "host": self.hosts[node],
            "local_rank": local,
            "node_rank": node,
            "pid": 41_000 + 7 * rank,
            "gpu": gpu,
            "versions": dict(GPU_VERSIONS if self.has_gpus else CPU_VERSIONS),
        }

    def _name(self, rank):
        who = self.who[rank]
        gpu = f", GPU {who['gpu']['index']} {who['gpu']['uuid'][:12]}…" if who["gpu"] else ""
        return f"rank {rank} ({who['host']}{gpu})"

    def ranks_of(self, node):
        """Return the ranks of a node."""
        return range(node * self.per_node, (node + 1) * self.per_node)

    # ---- values ----------------------------------------------------------------------------------------------

    def series_of(self, center):
        """Return samples around a value as a benchmark takes them."""
        samples = [self.random.gauss(center, 0.006 * abs(center)) for _ in range(12)]
        settled = is_settled(samples, _SAMPLING)
        spent = _SAMPLING.window_seconds if settled else _SAMPLING.at_most_seconds
        return series(samples, _SAMPLING, spent_seconds=spent)

    def values(self, metric, center, *, unit, others=None, telemetry=None, record_only=False, exact=False, **labels):
        """Return a metric's value of each rank, near ``center`` but for ``others``; ``exact``: just that, unsampled."""
        found = {}
        for rank in self.ranks:
            own = (others or {}).get(rank, center)
            value = own if exact or not math.isfinite(own) else self.series_of(own)
            seen = (telemetry or {}).get(rank, {})
            one = measurement(metric, value, unit=unit, labels=labels, telemetry=seen, record_only=record_only)
            found[rank] = [one]
        return found

    def watched(self, *, seconds=3.2, watts=690.0, hot=None):
        """Return what each rank's GPU did during a window; ``hot``: how long heat has slowed some of them, in s."""
        if not self.has_gpus:
            return {}
        found = {}
        for rank in self.ranks:
            slowed = (hot or {}).get(rank, 0.0)
            clock, celsius = (1290.0, 91.0) if slowed else (1755.0, 64.0)
            readings = {
                "sm_clock_mhz": [1980.0, *(clock + 15 * self.random.randint(-2, 2) for _ in range(4))],
                "memory_clock_mhz": [2619.0] * 5,
                "power_watts": [(0.72 if slowed else 1.0) * watts + self.random.uniform(-9, 9) for _ in range(5)],
                "temperature_celsius": [celsius + self.random.randint(-2, 1) for _ in range(5)],
                "utilization_percent": [100.0] * 5,
                "throttle": [("hw_thermal",) * bool(slowed) + ("sw_power_cap",) * (watts > 600)],
            }
            spent = {"hw_thermal": slowed, "sw_power_cap": 0.9 * seconds}
            found[rank] = summary(readings, seconds=seconds, not_available={}, throttle_seconds=spent, card=_CARD)
        return found

    # ---- lines -----------------------------------------------------------------------------------------------

    def begin(self, *, workload=None):
        """The first lines: the run, the cluster, limits, environment and workload."""
        nodes = len(self.hosts)
        expect = f"{nodes}x{self.per_node}xH100" if self.has_gpus else None
        options = {
            "device": (self.device, "default" if self.device == "cuda" else "command line"),
            "expect": (expect, "command line" if expect else "default"),
            "thresholds": (_LIMITS_NAME, "ini file"),
            "profile": ("full", "default"),
            "report_dir": ("gpucluster-report", "default"),
        }
        self.lines.append(
            {
                "type": "run",
                "schema_version": 1,
                "run_id": f"example-{self.seed}",
                "started_at": self._now(),
                "argv": ["acceptance/", f"--gpucluster-device={self.device}", "--junitxml=report.xml"],
                "hostname": self.hosts[0],
                "versions": {"python": "3.11.7", "pytest": "9.2.0"},
                "plugin_version": "0.1.0",
                "junit": {
                    "path": f"{FOLDER}/report.xml",
                    "family": "xunit2",
                    "suite_name": "pytest",
                    "prefix": "",
                    "logging": "no",
                    "log_passing": True,
                    "duration_report": "total",
                },
                "device": self.device,
                "rehearsal": not self.has_gpus,
                "selection": False,
                "launcher": "torchrun",
                "world_size": len(self.ranks),
                "nnodes": nodes,
                "options": {name: {"value": value, "origin": origin} for name, (value, origin) in options.items()},
            }
        )
        self.lines.append({"type": "cluster", "ranks": self.who, "problems": []})
        in_force = limits_line(
            sku="H100 SXM" if self.has_gpus else "cpu-rehearsal",
            gpu_name="NVIDIA H100 80GB HBM3" if self.has_gpus else None,
            files=[LIMITS_FILE],
        )
        self.lines.append({**in_force, "files": [{**in_force["files"][0], "path": _LIMITS_NAME}]})
        variables = {"OMP_NUM_THREADS": "1", "PATH": "/never/recorded"}
        if self.has_gpus:
            variables |= {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "SLURM_JOB_ID": "4242"}
        environment = environment_line(variables, self.hosts[0])
        system = "Ubuntu 24.04.3 LTS, Linux 6.8.0-85-generic, x86_64"
        self.lines.append({**environment, "system": system, "cpus": 224 if self.has_gpus else 2})
        sizes = workload or {"matmul.sizes": "8192, 16384", "matmul.window": "3 s", "burn_in.duration": "10 min"}
        record = WorkloadRecord(
            profile="full" if self.has_gpus else "cpu",
            file="acceptance/workloads.yaml",
            values=sizes,
            origins={key: f"acceptance/workloads.yaml:{40 + 3 * at}:7" for at, key in enumerate(sizes)},
        )
        self.lines.append(record.line())

    def collect(self, criteria):
        """The line of collected tests: nodeid -> criterion."""
        for at, (nodeid, criterion) in enumerate(criteria.items()):
            location = (nodeid.partition("::")[0], 18 + 9 * at, "")
            self.tests.append(CollectedTest.of(nodeid, location, criterion))
        self.lines.append({"type": "collected", "tests": [asdict(test) for test in self.tests], "manifest": True})

    def start(self, nodeid):
        """The line of a test that begins; return its record."""
        self._at += timedelta(milliseconds=40)
        test = next(test for test in self.tests if test.nodeid == nodeid)
        record = TestRecord(test=test, started_at=self._now())
        self.lines.append({"type": "start", "nodeid": nodeid, "at": record.started_at, "deadline_seconds": 300.0})
        return record

    def test(self, nodeid, *measured, seconds=12.0, bad=None, properties=(), telemetry=None, printed="", isolated=None):
        """The lines of a whole test: what every rank measured, and how those ended that did not simply pass."""
        record = self.start(nodeid)
        by_rank = {rank: [] for rank in self.ranks}
        for values in measured:
            for rank, found in values.items():
                by_rank[rank] += found
        outcomes = [
            replace(
                (bad or {}).get(rank, RankOutcome(rank=rank, outcome="passed")),
                measurements=[one.to_json() for one in by_rank[rank]],
                telemetry=(telemetry or {}).get(rank, {}),
            )
            for rank in self.ranks
        ]
        merged = judge_merged(self._judge(), record, merge(outcomes, self.names), outcomes)
        outcome = "failed" if merged.outcome in ("failed", "error") else merged.outcome
        record.properties = list(properties)
        if printed:
            record.sections = [("Captured stdout call", printed)]
        record.add("setup", outcome="passed", message="", text="", seconds=0.004, merged=None)
        record.add("call", outcome=outcome, message=merged.message, text=merged.text, seconds=seconds, merged=merged)
        if isolated is not None:
            self._isolated(record, *isolated)
        record.spent = {rank: self._spent(rank, seconds) for rank in self.ranks}
        return self._finish(record, seconds)

    @staticmethod
    def _spent(rank, seconds):
        """Return where a test's time went, in the order of ``time_spent.PARTS``: of four ranks each waits longer for
        the others, and is done with measuring earlier."""
        waits = 0.002 * seconds * (1 + rank % 4)
        shares = [0.004, 0.14 * seconds, 0.6 * seconds - waits, 0.22 * seconds, 0.01 * seconds + waits]
        return [round(share, 4) for share in (*shares, seconds + 0.004 - sum(shares))]

    def _isolated(self, record, found, name):
        units = sorted({unit for outcomes in found.rounds for one in outcomes for unit in one.members})
        plan = SimpleNamespace(names={unit: name(unit) for unit in units}, cut_short="")
        search = isolation.Search(plan=plan, found=found, seconds=48.2)
        record.isolation = search.to_json()
        record.properties.append(("exclude", f"{FOLDER}/exclude.txt"))
        record.message = first_line(f"{search.headline}; {record.message}")
        record.text = f"{record.text}\n\n{search.text()}"
        record.culprits |= {rank for one in found.culprits for node in one.units for rank in self.ranks_of(node)}

    def skip(self, nodeid, why, *, applies=False):
        """The lines of a test that is skipped on every rank; if it ``applies``, it is missed."""
        record = self.start(nodeid)
        record.applicable = applies
        merged = merge([RankOutcome(rank=rank, outcome="skipped", message=why, text=why) for rank in self.ranks], {})
        record.add("setup", outcome="skipped", message=merged.message, text=merged.text, seconds=0.003, merged=merged)
        record.spent = {rank: [0.0, 0.0, 0.0, 0.0, 0.002, 0.001] for rank in self.ranks}
        self._finish(record, 0.003)

    def lose(self, nodeid, rank, why):
        """The lines of a test in which a rank is lost, which ends the run."""
        record = self.start(nodeid)
        message = f"{self.names[rank]} is lost during call of {nodeid}: {why}"
        self.lines.append(
            {"type": "problem", "name": "rank lost", "outcome": "error", "message": first_line(message), "text": why}
        )
        self.problems.append(first_line(message))
        merged = merge(
            [
                RankOutcome(rank=one, outcome="lost" if one == rank else "released", message=message, text=message)
                for one in self.ranks
            ],
            self.names,
        )
        record.add("call", outcome="failed", message=merged.message, text=merged.text, seconds=31.5, merged=merged)
        self._finish(record, 31.5)

    def end(self, *, properties=()):
        """The closing lines, with the verdict that this run deserves."""
        self.lines += [{"type": "property", "name": name, "value": value} for name, value in properties]
        done = {result.nodeid for result in self.results}
        not_run = [test.nodeid for test in self.tests if test.nodeid not in done]
        nodes = len(self.hosts)
        shape = f"{nodes} node{'s' * (nodes != 1)}, {len(self.ranks)} ranks"
        decided = verdict.decide(
            self.results,
            pytest_exit=0 if all(one.outcome in ("passed", "skipped") for one in self.results) else 1,
            abort=(11, self.problems[0]) if self.problems else None,
            not_run=not_run if not self.problems else (),
            kind=KINDS[self.device],
            selection=False,
            manifest=True,
            topology=f"{shape}, as expected ({nodes}x{self.per_node}xH100)" if self.has_gpus else shape,
        )
        outcomes = [result.outcome for result in self.results]
        self.lines.append(
            {
                "type": "end",
                "at": self._now(),
                "verdict": decided.word,
                "exit": decided.exit,
                "reason": decided.reason,
                "counts": {kind: outcomes.count(kind) for kind in ("passed", "failed", "error", "skipped")},
                "not_run": not_run,
                "by": "rank 0",
            }
        )
        return decided

    def _finish(self, record, seconds):
        self._at += timedelta(seconds=seconds)
        self.results.append(record.result())
        line = record.line()
        for judged in line["measurements"]:
            if judged["limit"] is not None:  # the run read the file where its site keeps it
                judged["limit"]["origin"] = judged["limit"]["origin"].replace(str(LIMITS_FILE), _LIMITS_NAME)
            judged["reason"] = judged["reason"].replace(str(LIMITS_FILE), _LIMITS_NAME)
        line["text"] = line["text"].replace(str(LIMITS_FILE), _LIMITS_NAME)
        self.lines.append(line)
        return line

    def _judge(self):
        """What :func:`judge_merged` asks a run for."""
        gpu = "NVIDIA H100 80GB HBM3" if self.has_gpus else None
        return SimpleNamespace(
            names=self.names,
            rehearsal=not self.has_gpus,
            slowdown=1.0,
            baseline=None,
            settings=SimpleNamespace(thresholds=None),
            limits=_LIMITS,
            roll=SimpleNamespace(hosts=[who["host"] for who in self.who]),
            gpu_name=lambda: gpu,
            sku=lambda _: "H100 SXM" if self.has_gpus else "cpu-rehearsal",
            node_of=lambda: {who["rank"]: who["node_rank"] for who in self.who},
        )

    def _now(self):
        return self._at.isoformat(timespec="milliseconds")


def searched(units, rate_of):
    """Let the planner search for the culprit among nodes; ``rate_of`` tells the busbw of a group in GB/s."""
    planner = Planner(range(units), floor=lambda count: 400.0 if count == 1 else 350.0)
    while (groups := planner.next_round()) is not None:
        planner.take([Outcome(members=members, busbw=rate_of(members)) for members in groups])
    return planner.finding()
