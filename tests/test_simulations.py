"""docs/simulations.md: made by perf/rules.py from the rules that are shipped, and true of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from verdicts import hold

from pytest_gpucluster import sampling, stats, stragglers, thresholds
from pytest_gpucluster.benchmarks import blocks
from pytest_gpucluster.benchmarks.clock import ManualClock
from pytest_gpucluster.limits import Thresholds
from pytest_gpucluster.metrics import measurement

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package: they import each other by name
try:
    import rates
    import rule_trials
    import rules
    import straggler_trials
finally:
    sys.path.remove(str(PERF))

SHIPPED = rules.PAGE.read_text(encoding="utf-8")
QUIET, NOISY, LOUD = "independent, 0.3 %", "independent, 1 %", "independent, 3 %"
OURS = rules.OURS


def skeleton(page: str) -> list[str]:
    """Headings, heads of tables, and what stands in the first column."""
    lines = page.splitlines()
    found = [line for line in lines if line.startswith("#")]
    for before, line in itertools.pairwise(lines):
        if line.startswith("|---"):
            found.append(before)
    return found + [line.split(" | ")[0] for line in lines if line.startswith("| ")]


def cells(head: str, *first: str, page: str = SHIPPED) -> dict[str, str]:
    """The row of the shipped page that begins so, in the table that has ``head`` in its head, by column."""
    lines = iter(page.splitlines())
    columns = next(line for line in lines if line.startswith("| ") and head in line)
    for line in lines:
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if tuple(row[: len(first)]) == first:
            return dict(zip((cell.strip() for cell in columns.strip("|").split("|")), row, strict=True))
    raise AssertionError(f"no row {first} below {head!r}")


def agrees(shown: str, count: int, trials: int) -> bool:
    """Whether a few trials could have come from the rate on the page, with generous bounds."""
    low, high = rates.bounds(count, trials)
    slack = high - low
    rate = float(re.match(r"[\d.]+", shown)[0]) / 100  # type: ignore[index]  # a cell begins with a number
    return low - slack <= rate <= high + slack


def test_the_page_was_made_with_these_parameters() -> None:
    assert SHIPPED.startswith(rules.header(rules.TRIALS))
    assert not SHIPPED.startswith(rules.header(rules.TRIALS - 1))


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (rules, "SEED", 1),
        (rules, "SPREADS", (0.01,)),
        (rules, "SAMPLING", dataclasses.replace(rule_trials.SAMPLING, tolerance_ratio=0.02)),
        (rule_trials, "LIMITS", None),
    ],
    ids=["seed", "spreads", "tolerance", "limit"],
)
def test_a_page_of_other_parameters_is_noticed(
    where: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value if name != "LIMITS" else changed_limits(min=710.0))
    assert not SHIPPED.startswith(rules.header(rules.TRIALS))


def changed_limits(**changes: object) -> Thresholds:
    """The shipped limits, with the entry that decides in the simulations changed."""
    shipped = rule_trials.shipped_limit()
    kept = tuple(
        dataclasses.replace(limit, **changes) if limit is shipped else limit  # type: ignore[arg-type]
        for limit in rule_trials.LIMITS.limits
    )
    return dataclasses.replace(rule_trials.LIMITS, limits=kept)


def test_the_program_writes_a_page_with_the_tables_and_rows_of_the_shipped_one_or_prints_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = rules.simulate(2)
    monkeypatch.setattr(rules, "simulate", lambda trials: results)
    monkeypatch.setattr(rules, "PAGE", tmp_path / "simulations.md")
    monkeypatch.setattr(sys, "argv", ["rules.py", "--trials", "2", "--print"])
    rules.main()
    assert not rules.PAGE.exists()
    printed = capsys.readouterr().out.removesuffix("\n")
    assert skeleton(printed) == skeleton(SHIPPED)
    monkeypatch.setattr(sys, "argv", ["rules.py", "--trials", "2"])
    rules.main()
    assert rules.PAGE.read_text(encoding="utf-8") == printed


@pytest.mark.parametrize("name", [QUIET, NOISY, "correlated 0.5, 1 %", "drift of -2 % in 10 s, 0.3 %"])
def test_a_small_run_gives_the_rates_of_the_page_for_a_measurement(name: str) -> None:
    found = rule_trials.sample(name, 150)
    ends = cells("sure in the window", name)
    assert agrees(ends["sure in the window"], found.ends["window"], 150)
    assert agrees(ends["inconclusive"], found.ends["inconclusive"], 150)
    assert agrees(ends["interval holds the median: at the end"], found.covered["ended"], 150)
    wrong = cells("miss at 0.97", name)
    for level in rules.LEVELS:
        kind = "miss" if level < 1 else "false alarm"
        assert agrees(wrong[f"{kind} at {level:g}"], found.wrong[OURS, level], 150), level
    for rule in rules.OTHERS:
        beside = cells(f"{rule}: miss", name)
        assert agrees(beside[f"{rule}: miss"], found.wrong[rule, 0.99], 150), rule


@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("spread", [0.01, 0.03])
def test_a_small_run_gives_the_rates_of_the_page_for_a_fleet(ranks: int, spread: float) -> None:
    found = rule_trials.compare(ranks, spread, 1.0, 150, slow_ranks=0)
    for ratio in rules.RATIOS:
        shown = cells("0.75, spread", str(ranks))[f"{ratio:.2f}, spread {100 * spread:g} %"]
        assert agrees(shown, found.failed[ratio], 150)


ENTRY, TIGHT, LOOSE = "the shipped entry", "ratio 0.929 alone", "ratio 0.75 alone"


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("spread", [0.01, 0.02])
def test_a_small_run_gives_the_false_alarms_of_the_page(ranks: int, spread: float) -> None:
    found = straggler_trials.name_stragglers((ranks, spread, 0, 1.0), 100)
    shown = cells(f"{LOOSE}, spread", str(ranks))
    assert list(found) == [LOOSE, TIGHT, ENTRY]
    for rule, named in found.items():
        assert named.missed == 0
        assert named.passed == 100 - named.wronged
        assert agrees(shown[f"{rule}, spread {100 * spread:g} %"], named.wronged, 100), rule


@pytest.mark.parametrize(("ranks", "count", "at"), [(8, 1, 0.95), (8, 3, 0.9), (16, 2, 0.8), (64, 3, 0.95)])
@pytest.mark.parametrize("rule", [TIGHT, ENTRY])
def test_a_small_run_gives_the_misses_of_the_page(ranks: int, count: int, at: float, rule: str) -> None:
    after = "By the shipped entry:" if rule == ENTRY else f"By the {TIGHT}:"
    shown = cells("missed, spread 0.5", str(ranks), str(count), f"{at:g}", page=SHIPPED[SHIPPED.index(after) :])
    for spread in straggler_trials.SPREADS:
        named = straggler_trials.name_stragglers((ranks, spread, count, at), 60)[rule]
        where = f"spread {100 * spread:g} %"
        assert agrees(shown[f"missed, {where}"], named.missed, 60 * count), where
        assert agrees(shown[f"passes, {where}"], named.passed, 60), where
        assert agrees(shown[f"wronged, {where}"], named.wronged, 60), where


def test_the_page_has_every_kind_of_fleet_that_is_asked_for() -> None:
    kinds = straggler_trials.kinds()
    assert len(kinds) == len(set(kinds)) == 5 * 3 * (1 + 3 * 3)
    assert {ranks for ranks, *_ in kinds} == {8, 16, 64, 256, 1024}
    assert {count for _, _, count, _ in kinds} == {0, 1, 2, 3}


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


def test_the_same_seed_gives_the_same() -> None:
    assert rule_trials.sample(NOISY, 20) == rule_trials.sample(NOISY, 20)
    assert rule_trials.compare(8, 0.03, 0.95, 20) == rule_trials.compare(8, 0.03, 0.95, 20)


# What the page claims, and that a broken rule would not bear it out.


def slow_cards_are_refused() -> None:
    assert rule_trials.sample(QUIET, 200, rules=[OURS]).wrong[OURS, 0.98] <= 2


def noise_makes_no_slow_card_pass() -> None:
    assert rule_trials.sample(LOUD, 200, rules=[OURS]).wrong[OURS, 0.99] <= 2


def noise_is_outlasted() -> None:
    assert rule_trials.sample(NOISY, 200, rules=[OURS]).wrong[OURS, 1.02] <= 10


def quiet_cards_hardly_take_longer_than_the_window() -> None:
    found = rule_trials.sample(QUIET, 200, rules=[])
    assert found.ends["window"] >= 0.85 * 200
    assert found.seconds / 200 == pytest.approx(rule_trials.SAMPLING.window_seconds, rel=0.1)


def the_interval_holds_the_median() -> None:
    assert rule_trials.sample(NOISY, 200, rules=[]).covered["ended"] >= 0.9 * 200


def a_slow_rank_is_found_and_named() -> None:
    found = rule_trials.compare(16, 0.01, 0.8, 200)
    assert found.failed[0.9] == found.named[0.9] == 200


def slow_ranks_are_named_beside_each_other() -> None:
    for count in (1, 2, 3):
        named = straggler_trials.name_stragglers((16, 0.005, count, 0.9), 50)
        assert (named[TIGHT].missed, named[ENTRY].missed) == (0, 0)


def healthy_ranks_are_not_named() -> None:
    for count, at in ((0, 1.0), (3, 0.8)):
        found = straggler_trials.name_stragglers((64, 0.005, count, at), 50)
        assert [named.wronged for named in found.values()] == [0, 0, 0]


def a_loose_ratio_misses_who_is_a_little_behind() -> None:
    found = straggler_trials.name_stragglers((16, 0.01, 3, 0.9), 50)
    assert found[LOOSE].missed == 150
    assert found[LOOSE].passed == 50


def a_slow_fleet_is_not_found_by_the_ratio() -> None:
    for ranks, slow in ((8, 8), (8, 5), (64, 64)):
        found, _ = rule_trials.slow_fleet(ranks, slow, 0.9, 50, spread=0.01)
        assert max(found.failed.values(), default=0) == 0


def a_slow_fleet_is_found_by_the_absolute_limit() -> None:
    for ranks, slow in ((8, 8), (8, 5), (64, 64)):
        assert rule_trials.slow_fleet(ranks, slow, 0.9, 50, spread=0.01)[1] == 50


CLAIMS = [
    slow_cards_are_refused,
    noise_makes_no_slow_card_pass,
    noise_is_outlasted,
    quiet_cards_hardly_take_longer_than_the_window,
    the_interval_holds_the_median,
    a_slow_rank_is_found_and_named,
    slow_ranks_are_named_beside_each_other,
    healthy_ranks_are_not_named,
    a_loose_ratio_misses_who_is_a_little_behind,
    a_slow_fleet_is_not_found_by_the_ratio,
    a_slow_fleet_is_found_by_the_absolute_limit,
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_what_the_page_claims_holds(claim: Callable[[], None]) -> None:
    claim()


def flatters(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sampling.series
    monkeypatch.setattr(sampling, "series", lambda samples, rule, **spent: honest(samples, rule, **spent).scaled(1.03))


def is_always_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "median_interval", lambda samples, **_: (stats.median(samples), stats.median(samples)))


def gives_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "wants_more", lambda samples, **_: len(samples) < sampling.MIN_SAMPLES)


def never_has_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sampling, "wants_more", lambda samples, spent_seconds, sampling: spent_seconds < sampling.at_most_seconds
    )


def sees_no_stragglers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "straggler_ratios", lambda values, better: dict.fromkeys(values, 1.0))


def compares_with_the_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not a ratio to the others: it would find a slow fleet, and the page would be wrong about it.
    monkeypatch.setattr(
        stragglers, "straggler_ratios", lambda values, better: {rank: value / 989 for rank, value in values.items()}
    )


def sees_stragglers_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "straggler_ratios", lambda values, better: dict.fromkeys(values, 0.5))


def compares_with_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not the median of the others: among many healthy ranks the best one is far above most of them.
    monkeypatch.setattr(
        stragglers,
        "straggler_ratios",
        lambda values, better: {rank: 0.93 * value / max(values.values()) for rank, value in values.items()},
    )


def is_strict_with_who_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = stragglers.straggler_ratios
    monkeypatch.setattr(
        stragglers,
        "straggler_ratios",
        lambda values, better: {rank: ratio**3 for rank, ratio in honest(values, better).items()},
    )


def has_no_absolute_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_trials, "LIMITS", changed_limits(min=None))


@pytest.mark.parametrize(
    ("sabotage", "claim"),
    [
        (flatters, slow_cards_are_refused),
        (is_always_sure, noise_makes_no_slow_card_pass),
        (is_always_sure, the_interval_holds_the_median),
        (gives_up_early, noise_is_outlasted),
        (never_has_enough, quiet_cards_hardly_take_longer_than_the_window),
        (sees_no_stragglers, a_slow_rank_is_found_and_named),
        (sees_no_stragglers, slow_ranks_are_named_beside_each_other),
        (sees_stragglers_everywhere, healthy_ranks_are_not_named),
        (compares_with_the_best, healthy_ranks_are_not_named),
        (is_strict_with_who_is_behind, a_loose_ratio_misses_who_is_a_little_behind),
        (compares_with_the_data_sheet, a_slow_fleet_is_not_found_by_the_ratio),
        (has_no_absolute_limit, a_slow_fleet_is_found_by_the_absolute_limit),
    ],
    ids=lambda function: function.__name__,
)
def test_a_rule_that_errs_is_seen_in_the_simulation(
    sabotage: Callable[[pytest.MonkeyPatch], None], claim: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        claim()


# That the simulations are of what they say.


@pytest.mark.parametrize("name", rule_trials.NOISES)
def test_the_true_median_of_each_noise_is_one(name: str) -> None:
    made = rule_trials.NOISES[name](Random(1), 40_000)
    assert stats.median(made) == pytest.approx(1, abs=0.002)


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


@pytest.mark.parametrize("ratio", [0.75, 0.9, 0.93])
def test_the_judge_names_whom_the_simulation_counts(ratio: float, tmp_path: Path) -> None:
    overlay = tmp_path / "limits.yaml"
    overlay.write_text(
        "schema_version: 1\nskus: {H100 SXM: {limits: {matmul.bf16.tflops: "
        f"{{min_ratio_to_median: {100 * ratio:g} %, source: a test}}}}}}}}\n"
    )
    limits = thresholds.load(thresholds.shipped_path(), overlay)
    random, seen = Random(5), set()
    for slow in (0, 1) * 20:
        values = rule_trials.fleet(random, 8, 0.03, ratio, slow)
        behind = rule_trials.behind(values, stragglers.straggler_ratios(dict(enumerate(values)), "higher"), ratio)
        by_rank = {rank: [measurement(rule_trials.METRIC, value, unit="TFLOPS")] for rank, value in enumerate(values)}
        judgement = hold(by_rank, limits=limits)
        assert judgement.outcome == ("failed" if behind else "passed")
        assert list(judgement.measurements[0].misses) == behind
        seen.add(judgement.outcome)
    assert seen == {"passed", "failed"}


@pytest.mark.parametrize(
    ("count", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 100, 0.0552, 0.1744), (50, 100, 0.4038, 0.5962), (10, 10, 0.7225, 1.0)],
)
def test_the_bounds_of_a_rate_are_wilsons(count: int, trials: int, low: float, high: float) -> None:
    assert rates.bounds(count, trials) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (1, "0.05"), (2, "0.1"), (1000, "50.0"), (1999, "99.95"), (2000, "100")]
)
def test_a_rate_says_never_and_always_only_where_it_was(count: int, shown: str) -> None:
    assert rates.percent(count, 2000) == shown
