"""The cost of the agreement of ranks for each test, against plain pytest on the same ranks, in one run.

Both sides are started by torchrun with the same number of ranks on this machine and run the same suite, in turn:

* plain: pytest without the plugin, every rank for itself;
* agreed: the plugin on cpu, each test with one measurement of 100 samples on every rank, judged and recorded.

Printed are milliseconds a test, the median over the pairs with minimum and maximum: the whole run of the suite, what
the plugin adds to plain pytest, and the part of it that rank 0 spends inside exchanges: three a test, with the waiting
for peers, without its merging and judging.

    python perf/agreement.py [--ranks 2,4] [--tests 200] [--pairs 5]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from comparison import TEMPORARY, Conditions, parser_of

GOALS_MS = {2: (1.5, 3.0), 4: (3.0, 6.0)}
"""ranks -> milliseconds a test: inside exchanges, and added in all."""
_DEADLINE_SECONDS = 300

_SUITE = """
import pytest
import torch  # as every acceptance test does: pytest's log capture is slower with torch's loggers, on both sides

SAMPLES = [1.0 + i / 1000 for i in range(100)]


@pytest.mark.parametrize("number", range({tests}))
def test_measures(measure, number):
    measure("matmul.bf16.tflops", 1.0, unit="TFLOPS", samples=SAMPLES, record_only=True)
"""

_CONFTEST = """
import json
import os
import time

import pytest

TIMES = {"exchange": 0.0}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session):
    begin = time.perf_counter()
    result = yield
    TIMES["loop"] = time.perf_counter() - begin
    TIMES["tests"] = len(session.items)
    if os.environ["RANK"] == "0":
        with open(os.environ["PERF_TIMES"], "w") as file:
            json.dump(TIMES, file)
    return result


if os.environ["PERF_SIDE"] == "plain":

    @pytest.fixture
    def measure():
        return lambda *arguments, **keywords: None

else:
    from pytest_gpucluster.agreement.exchange import Exchange

    run = Exchange.run

    def timed(self, body, decide, **keywords):
        def timed_decide(bodies):
            begin = time.perf_counter()
            try:
                return decide(bodies)
            finally:
                TIMES["exchange"] -= time.perf_counter() - begin

        begin = time.perf_counter()
        try:
            return run(self, body, timed_decide, **keywords)
        finally:
            TIMES["exchange"] += time.perf_counter() - begin

    Exchange.run = timed
"""


def milliseconds_per_test(folder: Path, side: str, ranks: int) -> tuple[float, float]:
    """Run the suite once; return ms a test for the whole loop and inside exchanges, as rank 0 measured them.

    Raises:
        RuntimeError: the run failed, so that its time means nothing.
    """
    times = folder / "times.json"
    times.unlink(missing_ok=True)
    options = ["-p", "no:gpucluster"] if side == "plain" else ["--gpucluster-device=cpu"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "-m", "pytest", "-q"),
            *("-p", "no:cacheprovider", "-c", str(folder / "pytest.ini"), *options, str(folder)),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PERF_SIDE": side, "PERF_TIMES": str(times)},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_SECONDS,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{side} with {ranks} ranks ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found = json.loads(times.read_text())
    return 1e3 * found["loop"] / found["tests"], 1e3 * found["exchange"] / found["tests"]


def spread(values: list[float]) -> str:
    """Return "median (minimum to maximum)"."""
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    """Print the table; return 1 if a goal is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, separated by commas (default: 2,4)")
    parser.add_argument("--tests", type=int, default=200, help="tests in the suite (default: 200)")
    parser.add_argument("--pairs", type=int, default=5, help="alternating pairs of runs (default: 5)")
    arguments = parser.parse_args()
    print(f"{arguments.tests} tests, {arguments.pairs} pairs; ms a test, median (min to max)")
    print(f"{'ranks':>5}  {'plain pytest':22}  {'agreed':22}  {'added':22}  {'inside exchanges':22}  goals")
    missed, conditions = False, Conditions()
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
        folder = Path(name)
        (folder / "test_suite.py").write_text(_SUITE.format(tests=arguments.tests))
        (folder / "conftest.py").write_text(_CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")
        for ranks in map(int, arguments.ranks.split(",")):
            plain, agreed, added, inside = [], [], [], []
            for _ in range(arguments.pairs):
                base, _ = milliseconds_per_test(folder, "plain", ranks)
                whole, exchange = milliseconds_per_test(folder, "agreed", ranks)
                plain.append(base)
                agreed.append(whole)
                added.append(whole - base)
                inside.append(exchange)
            goals = GOALS_MS.get(ranks)
            met = goals is None or (statistics.median(inside) <= goals[0] and statistics.median(added) <= goals[1])
            missed = missed or not met
            verdict = "none" if goals is None else f"{goals[0]} inside, {goals[1]} added: {'met' if met else 'MISSED'}"
            cells = [f"{spread(values):22}" for values in (plain, agreed, added, inside)]
            print("  ".join([f"{ranks:5}", *cells, verdict]))
    print(f"\n{conditions.line()}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
