"""Run the acceptance suite on simulated clusters, healthy ones and each fault, and print what was found and named.

    python perf/simulate.py --into DIR                  # the whole series; what DIR has already is not run again
    python perf/simulate.py --only dead-rail,healthy --seeds 1
    python perf/simulate.py --today                     # a healthy cluster, and two faults that change with the date

Each run is ``gpucluster demo``: a forked rank for each GPU. A fault counts as found where the run does not pass, as
named where the one-line message of a test names its GPU, port or node, and as a false accusation where such a message
names a few GPUs, and none of the right place. The exit code is 1 where fewer than 95 % are found and named, or a
healthy part is accused.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison import parser_of, some_of

from pytest_gpucluster.simulation.faults import KINDS, parse

SHAPE, OF_NODES = "2x8xH100", "2x4xH100"
"""With published limits between nodes; and smaller, for the tests of single nodes."""
HEALTHY = ("2x8xH100", "2x8xH200", "1x8xA100", "2x8xB200", "4x4xGB200")
"""The shipped descriptions, those of more than 16 GPUs with fewer nodes."""
PLACES = {"gpu": ":gpu-01/3", "port": ":gpu-01/mlx5_3", "host": ":gpu-01", "cluster": ""}
AMOUNTS = {"throttle": "=20s"}
"""Instead of the kind's own. The profile soak has load for ten minutes; here it is quick."""
NODE = (
    "inventory or health or fleet or test_host or computes or agree or repeats or matmul or hbm or patterns or skew"
    " or burn_in"
)
NETWORK = "(nccl or links or test_collective or all_reduce or fabric_ports or busbw or scaling) and not sharded"
TRAINING = "test_ddp or training_step or test_throughput or stragglers"
TESTS = {
    **dict.fromkeys(("slow-gpu", "slow-host", "half-rate"), f"{NODE} or {NETWORK}"),
    **dict.fromkeys(("no-gdr", "net-socket", "nvls-off", "wrong-reduce", "nic-down"), NETWORK),
    **dict.fromkeys(("straggler", "wrong-gradient", "diverge"), TRAINING),
    "hang": "test_hbm and write or test_matmul and bf16 and not search",  # each test after it waits for its deadline
    "slow-files": "shared_filesystem",
}
"""Fault -> which tests run: those that look at what it is in, by default at nodes, for ports at the network."""
ALONE = {
    "scaling and node": "straggler",
    "scaling and fabric": "dead-rail",
    "busbw_retention": "slow-rail",
    "vision_throughput and resnet18": "diverge",
}
"""Test on two nodes -> the fault that makes it fail."""
UNTRAINED = (
    "not (test_ddp or training_step or throughput or lora or fsdp or sharded or checkpoint or failure_propagation)"
)
OTHERS = ("slow-gpu=20%", "slow-gpu=5%")
"""Other amounts; 5 % are not to be found: the limits leave that much to the spread of healthy GPUs."""
SITE = "{schema_version: 1, every_sku: {limits: {shared_filesystem.small_files: {min: 20 files/s, source: agreed}}}}"
"""Limits of a site, which alone judge the rate of its files. The fault leaves at most 10 a second."""
GOAL = 0.95
FOLDER = Path("gpucluster-report/simulated")
_GPU = re.compile(r"\((gpu-\d+), GPU (\d+)")
_FEW = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a cluster, a fault or none, and the seed."""

    what: str
    fault: str
    seed: int
    tests: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run.

    Attributes:
        exit: of the run.
        cpu_seconds: of all its processes.
        found, named: the fault.
        accused: messages that name something healthy.
        by: the first test that names it, or that found it.
        message: of that test.
    """

    exit: int
    cpu_seconds: float
    found: bool
    named: bool
    accused: Sequence[str]
    by: str
    message: str


def cases(names: Iterable[str], seeds: int) -> Iterator[Case]:
    """Yield the healthy clusters, and tests alone, where asked for, and each named fault, for each seed."""
    for seed in range(1, 1 + seeds):
        for name in names:
            if name == "healthy":
                yield from (Case(what=what, fault="", seed=seed, tests=UNTRAINED) for what in HEALTHY)
            elif name == "alone":
                for tests, fault in ALONE.items():
                    yield Case(what=SHAPE, fault=fault + PLACES[KINDS[fault].where], seed=seed, tests=tests)
            else:
                kind, equals, amount = name.partition("=")
                where = KINDS[kind].where
                tests = TESTS.get(kind, NETWORK if where == "port" else NODE)
                what = SHAPE if NETWORK in tests else OF_NODES
                fault = kind + PLACES[where] + (equals + amount or AMOUNTS.get(kind, ""))
                yield Case(what=what, fault=fault, seed=seed, tests=tests)


def of_today(day: datetime.date) -> list[Case]:
    """Return a healthy cluster, and two faults: all have had their turn after as many days as there are pairs."""
    names, at = list(KINDS), 2 * day.toordinal()
    healthy = Case(what=SHAPE, fault="", seed=day.toordinal(), tests=UNTRAINED)
    return [healthy, *cases([names[at % len(names)], names[(at + 1) % len(names)]], 1)]


def run(case: Case, folder: Path) -> tuple[int, float]:
    """Run the suite on the simulated cluster; return the exit code and the CPU seconds."""
    shutil.rmtree(folder, ignore_errors=True)  # an earlier run there must not be taken for this one
    folder.mkdir(parents=True)
    before = _cpu_seconds()
    command = [sys.executable, "-m", "pytest_gpucluster", "demo", case.what, f"--seed={case.seed}"]
    command += [f"--fault={case.fault}"] if case.fault else []
    command += [f"--report-dir={folder}", "--", "-k", case.tests, "-p", "no:logging"]
    command += ["--gpucluster-deadline=60"] if case.fault.startswith("hang") else []
    if case.fault == "slow-files":
        (folder / "site.yaml").write_text(SITE, encoding="utf-8")
        command += [f"--gpucluster-thresholds={folder / 'site.yaml'}"]
    # Without the plugins of other packages, which are loaded in each rank.
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_gpucluster.plugin"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    (folder / "terminal.txt").write_text(done.stdout, encoding="utf-8")
    return done.returncode, _cpu_seconds() - before


def judged(case: Case, code: int, cpu_seconds: float, tests: Sequence[Mapping[str, str]]) -> Outcome:
    """Compare what the messages name with the place of the fault."""
    bad = [test for test in tests if test["outcome"] in ("failed", "error", "running")]
    naming = [test for test in bad if case.fault and _names(test["message"], case.fault)]
    accused = [
        f"{test['name']}: {test['message']}"
        for test in bad
        if test not in naming and (not case.fault or _blames_few(test["message"]))
    ]
    first: Mapping[str, str] = next(iter([*naming, *bad]), {"name": "", "message": ""})
    return Outcome(
        exit=code,
        cpu_seconds=round(cpu_seconds, 1),
        found=code != 0,
        named=bool(naming),
        accused=accused,
        by=first["name"],
        message=first["message"],
    )


def _blames_few(message: str) -> bool:
    return 0 < len(set(_GPU.findall(message))) <= _FEW and "more ranks" not in message


def _names(message: str, fault: str) -> bool:
    planted = parse(fault)
    if not planted.host:
        return True  # nothing is to be named
    if not planted.place:
        return planted.host in message
    gpu = planted.place.removeprefix("mlx5_")
    is_isolated = f"isolated: {planted.host}" in message  # the node, which its faulty GPU has made wrong
    is_port = gpu != planted.place and planted.place in message
    is_gpu = (planted.host, gpu) in _GPU.findall(message) and "more ranks" not in message  # not the first of many
    return is_gpu or is_isolated or is_port


def _cpu_seconds() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def table(outcomes: Mapping[Case, Outcome]) -> Iterator[str]:
    """Yield the table, a row for each fault and each healthy cluster."""
    yield "| fault | runs | found/named/falsely accused | named by | CPU s a run |"
    yield "| --- | ---: | ---: | --- | ---: |"
    rows = defaultdict[str, list[Outcome]](list)
    for case, outcome in outcomes.items():
        alone = f", {case.tests} alone" if case.tests in ALONE else ""
        rows[case.fault + alone or f"none, {case.what}"].append(outcome)
    for name, of_fault in rows.items():
        counts = [sum(bool(getattr(one, key)) for one in of_fault) for key in ("found", "named", "accused")]
        by = ", ".join(dict.fromkeys(one.by for one in of_fault if one.by)) or "-"
        seconds = sum(one.cpu_seconds for one in of_fault) / len(of_fault)
        yield f"| {name} | {len(of_fault)} | {'/'.join(map(str, counts))} | {by} | {seconds:.0f} |"


def is_good(outcomes: Mapping[Case, Outcome]) -> bool:
    """Whether enough faults are found and named, and nothing healthy is accused."""
    healthy = [one for case, one in outcomes.items() if _is_healthy(case)]
    faulty = {case: one for case, one in outcomes.items() if not _is_healthy(case)}
    # A test alone is to fail; another one names the part.
    enough = sum(
        case.fault.endswith("=5%") or (one.found and (one.named or case.tests in ALONE)) for case, one in faulty.items()
    )
    accused = any(one.found or one.accused for one in healthy) or any(one.accused for one in faulty.values())
    return enough >= GOAL * len(faulty) and not accused


def _is_healthy(case: Case) -> bool:
    return not case.fault or KINDS[parse(case.fault).name].healthy


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not there yet, and print the table."""
    parser = parser_of(__doc__)
    known = ["healthy", "alone", *KINDS, *OTHERS]
    parser.add_argument("--only", type=some_of(known), default=known, help="faults, healthy, and alone (default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--today", action="store_true", help="a healthy cluster and the two faults of the day")
    parser.add_argument("--into", type=Path, default=FOLDER, help=f"folder of all runs (default: {FOLDER})")
    parser.add_argument("--anew", action="store_true", help="run also what is there already")
    options = parser.parse_args(arguments)
    outcomes = {}
    for case in of_today(datetime.date.today()) if options.today else cases(options.only, options.seeds):
        alone = case.tests if case.tests in ALONE else ""
        name = re.sub("[^a-z0-9_=-]+", "-", f"{case.what}-{case.fault}-{alone}{case.seed}".lower())
        folder = options.into / name
        kept = folder / "ended.json"
        if options.anew or options.today or not kept.exists():
            kept.write_text(json.dumps(run(case, folder)), encoding="utf-8")
        code, seconds = json.loads(kept.read_text(encoding="utf-8"))
        results = json.loads((folder / "latest" / "results.json").read_text(encoding="utf-8"))
        outcomes[case] = found = judged(case, code, seconds, results["tests"])
        print(f"{name}: exit code {found.exit}, {found.cpu_seconds:.0f} CPU s: {found.by}: {found.message}", flush=True)
        for line in found.accused:
            print(f"  ACCUSED: {line}", flush=True)
    print("\n".join(table(outcomes)))
    good = is_good(outcomes)
    print("\ngoals: at least 95 % found and named, nothing healthy accused:", "met" if good else "MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
