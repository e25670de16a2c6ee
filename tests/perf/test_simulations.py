"""docs/simulations.md: made by perf/rules.py from the rules that are shipped, and true of them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from random import Random

import pytest
from verdicts import hold

from pytest_gpucluster.benchmarks import blocks
from pytest_gpucluster.benchmarks.clock import ManualClock
from pytest_gpucluster.judge.limits import Thresholds
from pytest_gpucluster.metrics import sampling
from pytest_gpucluster.metrics.measurement import measurement

PERF = Path(__file__).parents[2] / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package: they import each other by name
try:
    import rule_trials
    import rules
    import straggler_trials
finally:
    sys.path.remove(str(PERF))

QUIET, NOISY, LOUD = "independent, 0.3 %", "independent, 1 %", "independent, 3 %"
OURS = rules.OURS


def test_the_page_was_made_with_these_parameters() -> None:
    assert rules.PAGE.read_text(encoding="utf-8").startswith(rules.header(rules.TRIALS))


def changed_limits(**changes: object) -> Thresholds:
    """The shipped limits, with the entry that decides in the simulations changed."""
    shipped = rule_trials.shipped_limit()
    kept = tuple(
        dataclasses.replace(limit, **changes) if limit is shipped else limit  # type: ignore[arg-type]
        for limit in rule_trials.LIMITS.limits
    )
    return dataclasses.replace(rule_trials.LIMITS, limits=kept)


def test_the_program_prints_the_page_or_writes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = rules.simulate(2)
    monkeypatch.setattr(rules, "simulate", lambda trials: results)
    monkeypatch.setattr(rules, "PAGE", tmp_path / "simulations.md")
    monkeypatch.setattr(sys, "argv", ["rules.py", "--trials", "2", "--print"])
    rules.main()
    assert not rules.PAGE.exists()
    printed = capsys.readouterr().out.removesuffix("\n")
    monkeypatch.setattr(sys, "argv", ["rules.py", "--trials", "2"])
    rules.main()
    assert rules.PAGE.read_text(encoding="utf-8") == printed


ENTRY, TIGHT, LOOSE = "the shipped entry", "ratio 0.929 alone", "ratio 0.75 alone"


@pytest.mark.parametrize("rule", [LOOSE, TIGHT, ENTRY])
def test_the_judge_names_whom_the_simulation_of_fleets_counts(rule: str) -> None:
    """The whole judge, with the limit of each rule in the place of the shipped one."""
    limit = straggler_trials.rules()[rule]
    limits = changed_limits(min=limit.min, min_ratio_to_median=limit.min_ratio_to_median)
    random, seen = Random(7), set()
    for at in (1.0, 0.95, 0.9, 0.7) * 5:
        values = rule_trials.fleet(random, 8, 0.02, at, 2)
        by_rank = {
            rank: [measurement(rule_trials.METRIC, value, unit="TFLOPS", labels=rule_trials.LABELS)]
            for rank, value in enumerate(values)
        }
        judgement = hold(by_rank, limits=limits)
        named = straggler_trials.named(values, {rule: limit})[rule]
        assert set(judgement.measurements[0].misses) == named
        assert judgement.outcome == ("failed" if named else "passed")
        seen.add(judgement.outcome)
    assert seen == {"passed", "failed"}


# What the page claims.


def test_slow_cards_are_refused() -> None:
    assert rule_trials.sample(QUIET, 200, rules=[OURS]).wrong[OURS, 0.98] <= 2


def test_noise_makes_no_slow_card_pass() -> None:
    assert rule_trials.sample(LOUD, 200, rules=[OURS]).wrong[OURS, 0.99] <= 2


def test_noise_is_outlasted() -> None:
    assert rule_trials.sample(NOISY, 200, rules=[OURS]).wrong[OURS, 1.02] <= 10


def test_quiet_cards_hardly_take_longer_than_the_window() -> None:
    found = rule_trials.sample(QUIET, 200, rules=[])
    assert found.ends["window"] >= 0.85 * 200
    assert found.seconds / 200 == pytest.approx(rule_trials.SAMPLING.window_seconds, rel=0.1)


def test_the_interval_holds_the_median() -> None:
    assert rule_trials.sample(NOISY, 200, rules=[]).covered["ended"] >= 0.9 * 200


def test_a_slow_rank_is_found_and_named() -> None:
    found = rule_trials.compare(16, 0.01, 0.8, 200)
    assert found.failed[0.9] == found.named[0.9] == 200


def test_slow_ranks_are_named_beside_each_other() -> None:
    for count in (1, 2, 3):
        named = straggler_trials.name_stragglers((16, 0.005, count, 0.9), 50)
        assert (named[TIGHT].missed, named[ENTRY].missed) == (0, 0)


def test_healthy_ranks_are_not_named() -> None:
    for count, at in ((0, 1.0), (3, 0.8)):
        found = straggler_trials.name_stragglers((64, 0.005, count, at), 50)
        assert [named.wronged for named in found.values()] == [0, 0, 0]


def test_a_loose_ratio_misses_who_is_a_little_behind() -> None:
    found = straggler_trials.name_stragglers((16, 0.01, 3, 0.9), 50)
    assert found[LOOSE].missed == 150
    assert found[LOOSE].passed == 50


def test_a_slow_fleet_is_not_found_by_the_ratio() -> None:
    for ranks, slow in ((8, 8), (8, 5), (64, 64)):
        found, _ = rule_trials.slow_fleet(ranks, slow, 0.9, 50, spread=0.01)
        assert max(found.failed.values(), default=0) == 0


def test_a_slow_fleet_is_found_by_the_absolute_limit() -> None:
    for ranks, slow in ((8, 8), (8, 5), (64, 64)):
        assert rule_trials.slow_fleet(ranks, slow, 0.9, 50, spread=0.01)[1] == 50


# That the simulations are of what they say.


def test_the_simulation_asks_as_often_as_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Driven with a clock on which each block takes as long as in the simulation."""
    rule = dataclasses.replace(rule_trials.SAMPLING, warmup_seconds=0)
    asked: list[tuple[int, float]] = []

    def until_the_end(samples: list[float], *, spent_seconds: float, sampling: sampling.Sampling) -> bool:
        asked.append((len(samples), spent_seconds))
        return spent_seconds < sampling.at_most_seconds

    monkeypatch.setattr(sampling, "wants_more", until_the_end)
    monkeypatch.setattr(blocks, "wants_more", until_the_end)
    clock = ManualClock()

    class Steady:
        most_at_once = 1

        def start(self, index: int) -> None:
            clock.advance(rule_trials.BLOCK_SECONDS)

        def verify(self, done: range) -> None:
            pass

    blocks.measure_rate(Steady(), clock, sampling=rule)
    measured, asked = asked, []
    rule_trials.take([1.0] * 80)
    assert asked == measured
    assert len(asked) > 10
