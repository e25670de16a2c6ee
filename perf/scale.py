"""The cost of the agreement with hundreds and thousands of ranks, on one machine.

    python perf/scale.py                                   # 64, 256, 1024 ranks; some minutes
    python perf/scale.py --ranks 2048 --tests 5
    python perf/scale.py --ranks 1024 --failing            # in the last test all ranks fail with 20 kB each
    python perf/scale.py --ranks 1024 --failing different  # each with a text of its own, which cannot be folded
    python perf/scale.py --ranks 1024 --failing slow       # simulated GPUs, of which one is 20 % slower
    python perf/scale.py --ranks 1024 --resolver           # with this machine's resolver of names, however slow

The store is like the one of torchrun's agent, in a process of its own. Rank 0 is the real one: pytest with the
plugin, its recorder, journal and JUnit. All others are simulated, many in a process, and speak the protocol with the
product's own code (scale_crowd.py). Each posts one measurement of 200 samples a test, some 4 kB.

How long connecting takes depends on how fast the resolver resolves addresses (docs/performance.md). So all processes
have RES_OPTIONS=attempts:0 here, with which DNS is not queried, unless --resolver is given.

All of that shares this machine's cores, so the time of a test is an upper bound for a cluster, where each rank has a
core of its own. Next to it is the processor time of the store and of rank 0, which no other machine can take over.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison import TEMPORARY, Conditions, parser_of, peak_bytes, row
from scale_crowd import GPUS_PER_NODE, Plan, host_of, product_tflops, slow_rank

# The tests' way to get a port.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from ports import free_port

GOAL_SECONDS_A_TEST = 1.0
GOAL_CONNECT_SECONDS = 10.0
GOAL_RANKS = 1024
GOAL_MERGE_SECONDS, GOAL_MERGE_BYTES, GOAL_JUNIT_BYTES = 5.0, 10**9, 10**6
CROWD_PROCESSES = 8
NO_DNS = "attempts:0"
"""As RES_OPTIONS: DNS is not queried."""
_DEADLINE_SECONDS = 600
_SAMPLE_SECONDS = 0.1

_STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""

_SUITE = """
import pytest

SAMPLES = [100 + i / 1000 for i in range(200)]


@pytest.mark.parametrize("number", range({tests}))
def test_measures(measure, number):
    measure("matmul.bf16.tflops", {value}, unit="TFLOPS", samples=SAMPLES, record_only={value} == 100.5)
    assert not ({failing!r} in ("equal", "different") and number == {tests} - 1), "it is wrong"
"""

_CONFTEST = """
import json
import os
import time

import pytest

from pytest_gpucluster.agreement.exchange import Exchange

FOUND = {"bytes": 0, "tests": []}
gather = Exchange._gather


def counted(self, number, body):
    bodies = gather(self, number, body)
    FOUND["bytes"] += sum(len(json.dumps(one)) for one in bodies.values()) if number <= 4 else 0
    return bodies


Exchange._gather = counted


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    begin = time.perf_counter()
    result = yield
    FOUND["tests"].append(time.perf_counter() - begin)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session):
    cpu = time.process_time()
    result = yield
    FOUND["cpu"] = time.process_time() - cpu
    with open(os.environ["PERF_TIMES"], "w") as file:
        json.dump(FOUND, file)
    return result
"""


@dataclass
class Usage:
    """Peak memory and descriptors of a process, and its processor time, from /proc."""

    pid: int
    rss_bytes: int = 0
    descriptors: int = 0
    cpu_seconds: float = 0.0

    def sample(self) -> None:
        """Read the present state, if the process is still running."""
        try:
            self.rss_bytes = max(self.rss_bytes, peak_bytes(self.pid))
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            descriptors = len(os.listdir(f"/proc/{self.pid}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            return
        self.descriptors = max(self.descriptors, descriptors)
        self.cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Watched:
    """Samples some processes during a run."""

    store: Usage
    rank_0: Usage
    recorder: Usage | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def until_over(self) -> None:
        """Sample until ``over`` is set, the recorder as soon as there is one."""
        while not self.over.wait(_SAMPLE_SECONDS):
            self.store.sample()
            self.rank_0.sample()
            if self.recorder is None:
                self.recorder = recorder_of(self.rank_0.pid)
            else:
                self.recorder.sample()


def recorder_of(pid: int) -> Usage | None:
    """Return the recorder that a rank has started, by its command line."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and b"recorder.process" in words:
            return Usage(int(entry.name))
    return None


def measure(ranks: int, tests: int, failing: str, folder: Path, *, resolver: bool = False) -> dict[str, Any]:
    """Run a suite with one real rank and all others simulated; DNS is queried only with ``resolver``.

    Raises:
        RuntimeError: a rank failed, so that the figures mean nothing.
    """
    value = product_tflops(0, ranks) if failing == "slow" else 100.5
    (folder / "test_scale.py").write_text(_SUITE.format(tests=tests, failing=failing, value=value))
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    port, times = free_port(), folder / "times.json"
    local = min(GPUS_PER_NODE, ranks)
    variables = {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": str(ranks // local),
        "TORCHELASTIC_RUN_ID": f"scale-{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GPUCLUSTER_HOSTNAME": host_of(0),
        "PERF_TIMES": str(times),
    }
    dns = {} if resolver else {"RES_OPTIONS": NO_DNS}
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a warning for each look-up of a name that fails
    environ = {**os.environ, **variables, **dns, **quiet}
    described = ["--gpucluster-device=simulated", f"--gpucluster-simulate={ranks // local}x{local}xH100"]
    started: list[subprocess.Popen[str]] = []
    output = (folder / "rank-0.txt").open("w")
    try:
        store = subprocess.Popen(
            [sys.executable, "-c", _STORE, str(port)],
            env={**os.environ, **dns, **quiet},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(store)
        assert store.stdout is not None
        store.stdout.readline()
        before = Usage(store.pid)
        before.sample()
        # The simulated ranks first: they take longer, and rank 0 waits for them at the roll call.
        plan = Plan(suite="test_scale.py", tests=tests, failing=failing)
        crowds, results = [], []
        for number, (first, last) in enumerate(shares(ranks)):
            results.append(folder / f"crowd-{number}.json")
            words = [str(ranks), str(first), str(last), plan.suite, str(tests), failing or "passing"]
            command = [sys.executable, str(Path(__file__).with_name("scale_crowd.py")), *words, str(results[-1])]
            crowds.append(subprocess.Popen(command, env=environ, text=True))
        started += crowds
        rank_0 = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(folder / "pytest.ini")),
                *(described if failing == "slow" else ["--gpucluster-device=cpu"]),
                f"--gpucluster-report-dir={folder / 'reports'}",
                *(f"--junitxml={folder / 'junit.xml'}", str(folder)),
            ],
            cwd=folder,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(rank_0)
        watched = Watched(Usage(store.pid), Usage(rank_0.pid))
        sampler = threading.Thread(target=watched.until_over, daemon=True)
        sampler.start()
        expected = 1 if failing else 0
        codes = ended([rank_0, *crowds], [expected] + [0] * len(crowds))
        watched.over.set()
        sampler.join()
        watched.store.cpu_seconds -= before.cpu_seconds
        reports = [json.loads(result.read_text()) for result in results if result.exists()]
        failures = [failure for one in reports for failure in one["failures"]]
        if codes[0] != expected or any(codes[1:]) or failures or len(reports) < len(crowds):
            text = (folder / "rank-0.txt").read_text()[-4000:]
            raise RuntimeError(f"{ranks} ranks ended with {codes}:\n{text}\n{''.join(failures[:1])}")
    finally:
        output.close()
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
    operations: Counter[str] = Counter()
    for one in reports:
        operations += Counter(one["operations"])
    return {
        "ranks": ranks,
        "tests": tests,
        **json.loads(times.read_text()),
        # Of all processes: some start later, for all import torch on the same cores before.
        "connect_seconds": max(one["connected_between"][1] for one in reports)
        - min(one["connected_between"][0] for one in reports),
        "operations": sum(operations.values()) / (ranks - 1),
        "watched": watched,
        "junit_bytes": (folder / "junit.xml").stat().st_size,
        "journal_bytes": next((folder / "reports").glob("*/journal.jsonl")).stat().st_size,
        "failures": [one.get("message") for one in ElementTree.parse(folder / "junit.xml").iter("failure")],
    }


def ended(processes: list[subprocess.Popen[str]], expected: list[int]) -> list[int | None]:
    """Wait until all have ended, or one has ended unexpectedly; return their exit codes."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        wrong = [code for code, right in zip(codes, expected, strict=True) if code not in (None, right)]
        if wrong or None not in codes:
            return codes
        time.sleep(_SAMPLE_SECONDS)
    return [process.poll() for process in processes]


def shares(ranks: int) -> list[tuple[int, int]]:
    """Return the first and last simulated rank of each crowd process; rank 0 is real."""
    count = min(CROWD_PROCESSES, ranks - 1)
    ends = [1 + (ranks - 1) * number // count for number in range(count + 1)]
    return [(begin, end - 1) for begin, end in itertools.pairwise(ends)]


def passing_row(found: dict[str, Any]) -> str:
    """Return a row of the table of passing tests: medians over the tests but the first."""
    tests = sorted(found["tests"][1:] or found["tests"])
    watched = found["watched"]
    recorder = watched.recorder.rss_bytes if watched.recorder else 0
    cells = (
        f"{found['ranks']}",
        f"{tests[len(tests) // 2]:.3f} s",
        f"{found['cpu'] / len(found['tests']):.3f} s",
        f"{watched.store.cpu_seconds / len(found['tests']):.3f} s",
        f"{found['connect_seconds']:.1f} s",
        f"{found['operations']:.0f}",
        f"{found['bytes'] / 1e6:.2f} MB",
        f"{watched.store.descriptors}",
        f"{watched.store.rss_bytes / 1e6:.0f} MB",
        f"{watched.rank_0.rss_bytes / 1e6:.0f} MB",
        f"{recorder / 1e6:.0f} MB",
        f"{found['journal_bytes'] / 1e6 / len(found['tests']):.2f} MB",
    )
    return row(cells)


HEADER = (
    "| ranks | a test | of rank 0's processor | of the store's | to connect all |"
    " operations a rank, whole run | to rank 0, first test | store: descriptors | store: memory | rank 0: memory |"
    " recorder: memory | journal a test |"
)


def passing(arguments: argparse.Namespace) -> bool:
    """Print the table of tests that pass; return whether the goals are met."""
    met = True
    print(HEADER)
    print("|" + " --- |" * (HEADER.count("|") - 1), flush=True)
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
            found = measure(ranks, arguments.tests, "", Path(name), resolver=arguments.resolver)
        print(passing_row(found), flush=True)
        if ranks == GOAL_RANKS:
            tests = sorted(found["tests"][1:] or found["tests"])
            typical = tests[len(tests) // 2]
            met = typical <= GOAL_SECONDS_A_TEST and found["connect_seconds"] <= GOAL_CONNECT_SECONDS
            how = "with this machine's resolver" if arguments.resolver else "without DNS"
            print(
                f"goal at {ranks}: 1 s a test, all connected within 10 s {how}: {'met' if met else 'MISSED'} "
                f"({typical:.2f} s, {found['connect_seconds']:.1f} s)"
            )
    return met


def failing(arguments: argparse.Namespace) -> bool:
    """Let all ranks fail in the last of some tests; return whether the goals are met."""
    met = True
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
            found = measure(ranks, 2, arguments.failing, Path(name), resolver=arguments.resolver)
        seconds, memory, failures = found["tests"][-1], found["watched"].rank_0.rss_bytes, found["failures"]
        good = seconds <= GOAL_MERGE_SECONDS and memory <= GOAL_MERGE_BYTES and found["junit_bytes"] <= GOAL_JUNIT_BYTES
        if arguments.failing == "slow":
            slow = slow_rank(ranks)
            named = f"rank {slow} ({host_of(slow)}, GPU {slow % GPUS_PER_NODE} "
            good = good and len(failures) == 2 and all(named in message for message in failures)
            what = f"of {ranks} simulated GPUs that of rank {slow} is slow: {failures[-1]}"
        else:
            good = good and len(failures) == 1
            what = f"{ranks} ranks fail with 20 kB each, {arguments.failing}: {len(failures)} failed testcase"
        print(
            f"{what}; {seconds:.2f} s for the test, rank 0 at {memory / 1e6:.0f} MB, JUnit "
            f"{found['junit_bytes'] / 1e3:.0f} kB, journal {found['journal_bytes'] / 1e6:.1f} MB "
            f"(goal: 5 s, 1 GB, 1 MB): {'met' if good else 'MISSED'}",
            flush=True,
        )
        met = met and good
    return met


def numbers(text: str) -> list[int]:
    """Read numbers of ranks: whole nodes of 8, or fewer than that."""
    found = [int(word) for word in text.split(",")]
    if any(ranks < 2 or (ranks > GPUS_PER_NODE and ranks % GPUS_PER_NODE) for ranks in found):
        raise argparse.ArgumentTypeError(f"{text!r}: each must be 2 to 8, or a multiple of 8")
    return found


def main() -> int:
    """Read the arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=numbers, default="64,256,1024", help="(default: 64,256,1024)")
    parser.add_argument("--tests", type=int, default=10, help="(default: 10)")
    parser.add_argument(
        "--failing",
        choices=("equal", "different", "slow"),
        nargs="?",
        const="equal",
        default="",
        help="let all ranks fail in the last test, with the same text (default) or each with its own; or slow one GPU",
    )
    parser.add_argument("--resolver", action="store_true", help="query DNS, as this machine is configured")
    arguments = parser.parse_args()
    if arguments.tests < 1:
        parser.error(f"--tests {arguments.tests}: 1 or more are needed")
    needed = 2 * max(arguments.ranks) + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        if hard < needed:
            parser.error(f"{needed} open files are needed, and the hard limit is {hard} (ulimit -Hn)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    conditions, begin = Conditions(), time.monotonic()
    met = (failing if arguments.failing else passing)(arguments)
    print(f"\n{time.monotonic() - begin:.0f} s; {conditions.line()}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
