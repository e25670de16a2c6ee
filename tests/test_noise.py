"""A busy process beside a run: its stalls flip no verdict, and hide nothing that is truly slow.

perf/noise.py shows it with real sessions and a real process. Here the stalls are made up, on a clock that stands still
otherwise: sampling, measurement and judge are the product's own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from each import of_each
from sessions import DEADLINE_SECONDS, environment

from pytest_gpucluster import hardware, thresholds, workload_file
from pytest_gpucluster.benchmarks.blocks import measure_rate
from pytest_gpucluster.benchmarks.clock import ManualClock
from pytest_gpucluster.judge import judge
from pytest_gpucluster.judged import Judged
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.sampling import Sampling

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package: they import each other by name
try:
    import noise
    import noise_sessions
finally:
    sys.path.remove(str(PERF))

REPEATS = 20
PRODUCT_SECONDS = 0.002
METRIC = noise.METRICS["matmul"][0]
QUIET_TFLOPS = 0.1


def sampling_of_the_program() -> Sampling:
    """The times that perf/noise.py gives its sessions, read as they read them."""
    told = [
        workload_file.Override.parse(f"{key}={value}")
        for key, value in noise.WORKLOAD.items()
        if key.startswith("matmul.")
    ]
    loaded = workload_file.load(PERF.parent / "acceptance" / "workloads.yaml", profile="cpu", overrides=told)
    return loaded.workload.matmul.sampling


@dataclass
class Disturbed:
    """Work whose clock is held up: for a time slice of 4 to 20 ms, in ``share`` of the time on average."""

    clock: ManualClock
    random: Random
    share: float
    speed: float
    most_at_once: int = 8

    def start(self, index: int) -> None:
        seconds = PRODUCT_SECONDS / self.speed
        # On average 12 ms are lost for each 12 ms * (1 - share) / share of work.
        if self.share and self.random.random() < seconds * self.share / (0.012 * (1 - self.share)):
            seconds += self.random.uniform(0.004, 0.020)
        self.clock.advance(seconds)

    def verify(self, done: range) -> None:
        pass


def repeated(tmp_path: Path, *, share: float, speed: float = 1.0, sampling: Sampling | None = None) -> list[Judged]:
    """Measure and judge as often as the program does, by a limit of 80 % of the quiet rate."""
    overlay = tmp_path / "limits.yaml"
    overlay.write_text(noise.overlay({METRIC: (noise.SHARE * QUIET_TFLOPS, "TFLOPS")}))
    limits = thresholds.load(thresholds.shipped_path(), overlay)
    found = []
    for number in range(REPEATS):
        clock = ManualClock()
        work = Disturbed(clock=clock, random=Random(f"20260 {share} {speed} {number}"), share=share, speed=speed)
        rate = measure_rate(work, clock, sampling=sampling or sampling_of_the_program())
        series = rate.per_second.scaled(QUIET_TFLOPS * PRODUCT_SECONDS)
        judgement = judge(
            {0: [measurement(METRIC, series, unit="TFLOPS")]},
            world={0: "rank 0"},
            node_of={0: 0},
            limits=limits,
            sku=hardware.CPU_REHEARSAL,
            gpu_name=None,
        )
        found.append(judgement.measurements[0])
    return found


@of_each("share", [0.0, 0.3])
def test_stalls_flip_no_verdict_at_80_percent_and_what_does_70_percent_is_refused(share: float, tmp_path: Path) -> None:
    found = repeated(tmp_path, share=share)
    assert Counter(judged.status for judged in found) == {"passed": REPEATS}
    assert {judged.stopped.by for judged in found if judged.stopped is not None} == {"interval"}
    found = repeated(tmp_path, share=share, speed=0.7)
    assert Counter(judged.status for judged in found) == {"failed": REPEATS}


def test_a_process_that_takes_most_of_the_time_is_not_called_noise(tmp_path: Path) -> None:
    # With the samples so short, less than about three quarters spoil too few of them.
    found = repeated(tmp_path, share=0.85)
    assert Counter(judged.status for judged in found) == {"failed": REPEATS}


def test_a_rule_that_does_not_measure_on_flips_verdicts(tmp_path: Path) -> None:
    impatient = Sampling(warmup_seconds=0.1, window_seconds=0.1, longest_seconds=0.1, tolerance_ratio=0.1)
    found = repeated(tmp_path, share=0.3, sampling=impatient)
    assert Counter(judged.status for judged in found)["failed"] > 0
    assert {judged.stopped.by for judged in found if judged.status == "failed" and judged.stopped} == {"time"}


def program(monkeypatch: pytest.MonkeyPatch, ends: Iterator[str]) -> int:
    """Run the program with sessions that end so, each with the same value."""

    def session(options: Sequence[str], *, ranks: int, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(journal=SimpleNamespace(verdict=next(ends), reason="too slow"), said="")

    found = noise.Found(outcome="passed", value=1.0, low=1.0, high=1.0, inconclusive="", stopped="sure")
    monkeypatch.setattr(noise, "session", session)
    monkeypatch.setattr(noise, "_found", lambda made, metric: found)
    return noise.main(["--only", "matmul", "--repeats", "2", "--busy", "0"])


@pytest.mark.parametrize(
    ("ends", "shown", "code"),
    [
        (["INCOMPLETE", "REHEARSED"] * 7, 7, 0),
        (chain(["REHEARSED"] * 5, repeat("INCOMPLETE")), 2 * noise.ATTEMPTS, 1),
        (chain(["INCOMPLETE"] * noise.ATTEMPTS, repeat("REHEARSED")), noise.ATTEMPTS, 1),
        (repeat("INCOMPLETE"), noise.QUIET * noise.ATTEMPTS, 1),
    ],
    ids=["each at first", "each beside a process", "one with nothing beside it", "all"],
)
def test_an_incomplete_session_is_shown_and_repeated_and_without_a_usable_one_nothing_is_met(
    ends: Iterable[str], shown: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(monkeypatch, iter(ends)) == code
    assert capsys.readouterr().out.count("| not usable |") == shown


def test_a_broken_session_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="BROKEN"):
        program(monkeypatch, repeat("BROKEN"))


@pytest.mark.extended
def test_the_program_runs_real_sessions_on_two_ranks_and_says_what_it_found() -> None:
    command = [sys.executable, str(PERF / "noise.py"), "--only", "all-reduce", "--repeats", "2"]
    command += ["--workload", "nccl.all_reduce.tolerance=300 %"]  # a test asks for no quiet machine
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    taken = [row for row in rows if row[0] in ("nothing", *noise_sessions.BUSY)]
    assert {row[1] for row in taken} == {"all-reduce"}, done.stderr
    # On a machine with much else to do even that may not be enough: then the row says so, and the program too.
    usable = [row for row in taken if row[2] != "not usable"]
    found, beside = Counter(row[0] for row in usable), (2 * noise.kinds("all-reduce", os.cpu_count() or 1))[:2]
    asked = Counter([*["nothing"] * noise.QUIET, *beside])
    assert found <= asked
    said = re.compile(r"(sure|time up) after \d+ samples in .* wide, 300 % is allowed.*")
    assert all(said.fullmatch(row[5]) for row in usable), taken
    unsure = any(row[0] == "nothing" and row[5].startswith("time up") for row in usable)
    assert ("NOT QUIET" in done.stdout) == (unsure or not found["nothing"])
    judged = [row for row in rows if row[0] == "all-reduce"]
    assert {row[1]: int(row[2]) for row in judged} == {kind: count for kind, count in found.items() if kind in beside}
    assert done.returncode == int(unsure or found != asked or any(row[4] != "0" for row in judged))
