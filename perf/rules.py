"""Write docs/simulations.md: how often the rules accept a slow GPU or refuse a good one, by simulation.

python perf/rules.py                        # rewrites the page, in about two minutes on one core
python perf/rules.py --trials 50 --print    # quick, to the terminal

What is simulated is in rule_trials.py, and how much of it in rule_results.py. The same seed and the same
rules give the same page.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import rule_trials as trials_of
import straggler_page
from page_text import bullets, paragraph, table
from rates import bounded, bounds, percent
from rule_results import SLOW_FLEET, SLOW_FLEET_SPREAD, Results, fleet_trials, simulate
from rule_trials import (
    FALSE_ALARMS,
    FLEETS,
    LEVELS,
    METRIC,
    MISSES,
    RATIOS,
    RULES,
    SAMPLING,
    SEED,
    SKU,
    SLOW,
    SPREADS,
    Compared,
)

PAGE = Path(__file__).parent.parent / "docs" / "simulations.md"
TRIALS = 2000

OURS, *OTHERS = RULES
BESIDE = (0.99, 1.01)
"""Levels at which the rules stand side by side."""


def header(trials: int) -> str:
    """Return what was simulated, and how often: the part of the page that follows from the parameters alone."""
    zero = 100 * bounds(0, trials)[1]
    limit = trials_of.shipped_limit()
    assert limit.min_ratio_to_median is not None  # the shipped file has one
    spreads = ", ".join(f"{100 * spread:g}" for spread in SPREADS)
    return "\n".join(
        [
            "# False alarms and misses\n",
            *paragraph(
                "This page is made by `python perf/rules.py`. Do not edit it. It tells how often the two rules that"
                " decide about noisy values err: the one that says when a measurement is sure enough, and the one that"
                " finds a rank behind the others. The noise is made up; the rules are the code that judges a cluster,"
                " with the limits and the times that are shipped."
            ),
            *bullets(
                f"Seed {SEED}; {trials} GPUs for each kind of noise; {fleet_trials(2, trials)} fleets of each kind,"
                f" {fleet_trials(1024, trials)} of those with 1024 ranks.",
                "Rates are in percent. `0` and `100` mean never and always in these trials. With"
                f" {trials} trials the 95 % bound (Wilson) of a `0` is {zero:.2g} %, and half of the trials is"
                f" {bounded(trials // 2, trials)}.",
                f"Sampling: {SAMPLING.warmup_seconds:g} s of warm-up, blocks of {trials_of.BLOCK_SECONDS:g} s, a window"
                f" of {SAMPLING.window_seconds:g} s, then asked again each {trials_of.LOOK_SECONDS:g} s, until the 95 %"
                f" interval of the median is no wider than {100 * SAMPLING.tolerance_ratio:g} % of it, for"
                f" {SAMPLING.longest_seconds:g} s and then as long once more: the profile `full`.",
                f"Limit: {SKU}, {METRIC}: min {limit.min:g} TFLOPS, min_ratio_to_median"
                f" {100 * limit.min_ratio_to_median:g} % where a table does not say otherwise. A healthy rank does"
                f" {trials_of.HEALTHY_TFLOPS:g} TFLOPS.",
                f"Spread between healthy ranks, as a standard deviation: {spreads} %.",
            ),
        ]
    )


def page(results: Results) -> str:
    """Return the whole page."""
    parts = [header(results.trials), *_sampling(results), *_stragglers(results)]
    parts += [*straggler_page.section(results.named, results.trials), *_reading(results), *_others(results)]
    return "\n".join(parts)


def _sampling(results: Results) -> Iterator[str]:
    n = results.trials
    yield "## When a measurement is sure enough\n"
    yield from paragraph(
        "The noise is normal, around a true median, with the standard deviation that is named. `correlated 0.9`: each"
        " block resembles the one before (AR(1)). `drift`: the GPU starts 2 % too fast, and what it ends at counts as"
        " the truth. The 95 % interval should hold the true median in 95 % of the runs. `looked once` is the interval"
        " after the window alone: what is lost from there to `at the end` is the price of looking again until the"
        " interval is narrow. `each block` asks after every block, as the all-reduce does."
    )
    ends = ("window", "time", "extension", "inconclusive")
    yield from table(
        (
            "noise of a block",
            "sure in the window",
            f"by {SAMPLING.longest_seconds:g} s",
            "in the extension",
            "inconclusive",
            "mean seconds",
            "interval holds the median: at the end",
            "looked once",
            "each block",
        ),
        (
            (
                name,
                *(percent(row.ends[end], n) for end in ends),
                f"{row.seconds / n:.1f}",
                bounded(row.covered["ended"], n),
                percent(row.covered["window"], n),
                percent(row.covered["often"], n),
            )
            for name, row in results.sampled.items()
        ),
    )
    yield from paragraph(
        "Wrong verdicts of this suite's rule, by where the true median lies beside the limit. Below 1 the GPU is too"
        " slow, and accepting it is a miss. From 1 on it is good, and refusing it is a false alarm. Accepted is what"
        " is surely above the limit, so a GPU that lies on the limit is nearly always refused. That is meant."
    )
    yield from _wrong(results, [OURS])
    yield from paragraph(
        f"What the rule buys. Misses at {BESIDE[0]:g} and false alarms at {BESIDE[1]:g} of the limit, beside three"
        " simpler rules: one block decides; the mean of the window decides; the mean decides, and whoever fails may try"
        " twice more."
    )
    yield from table(
        ("noise of a block", *(f"{rule}: {kind}" for rule in RULES for kind in ("miss", "false alarm"))),
        (
            (name, *(percent(row.wrong[rule, level], n) for rule in RULES for level in BESIDE))
            for name, row in results.sampled.items()
        ),
    )


def _wrong(results: Results, rules: Sequence[str]) -> Iterator[str]:
    levels = [f"miss at {x:g}" for x in MISSES] + [f"false alarm at {x:g}" for x in FALSE_ALARMS]
    yield from table(
        ("noise of a block", *(["rule"] if len(rules) > 1 else []), *levels),
        (
            (
                name,
                *([rule] if len(rules) > 1 else []),
                *(percent(row.wrong[rule, level], row.trials) for level in LEVELS),
            )
            for name, row in results.sampled.items()
            for rule in rules
        ),
    )


def _stragglers(results: Results) -> Iterator[str]:
    yield "## Who is behind the others\n"
    yield from paragraph(
        "`min_ratio_to_median` alone, without an absolute limit. False alarms: runs that fail although all ranks are"
        " healthy, by how far healthy ranks spread."
    )
    yield from table(
        ("ranks", *(f"{ratio:.2f}, spread {100 * spread:g} %" for ratio in RATIOS for spread in SPREADS)),
        (
            (
                str(ranks),
                *(_failed(results.one_slow[ranks, spread, 1.0], ratio) for ratio in RATIOS for spread in SPREADS),
            )
            for ranks in FLEETS
        ),
    )
    yield from paragraph(
        "Misses: runs that pass although one rank does only so much of what the others do. From the least to the most"
        f" over the fleets of {FLEETS[0]} to {FLEETS[-1]} ranks. A run also counts as failed where only a healthy rank"
        " is named."
    )
    yield from table(
        ("ratio", "slow rank does", *(f"spread {100 * spread:g} %" for spread in SPREADS)),
        (
            (
                f"{ratio:.2f}",
                f"{slow:g}",
                *(_range([results.one_slow[ranks, spread, slow] for ranks in FLEETS], ratio) for spread in SPREADS),
            )
            for ratio in RATIOS
            for slow in SLOW
        ),
    )
    strictest = max(RATIOS)
    yield from paragraph(
        f"The right name: of the runs that fail at {strictest:.2f}, those in which the slow rank is the first that is"
        " named. A dash: fewer than 20 runs failed."
    )
    shown = (SPREADS[1], SPREADS[-1])
    yield from table(
        ("ranks", *(f"{slow:g}, spread {100 * spread:g} %" for slow in SLOW for spread in shown)),
        (
            (
                str(ranks),
                *(_named(results.one_slow[ranks, spread, slow], strictest) for slow in SLOW for spread in shown),
            )
            for ranks in FLEETS
        ),
    )
    yield from paragraph(
        f"Many slow ranks: each does {SLOW_FLEET:g} of a healthy one, with a spread of {100 * SLOW_FLEET_SPREAD:g} %."
        " Runs that fail by a ratio alone, and by the shipped entry, whose absolute limit does not ask the others."
    )
    yield from table(
        ("ranks", "slow", *(f"ratio {ratio:.2f} alone" for ratio in RATIOS), "the shipped entry"),
        (
            (
                str(ranks),
                str(slow),
                *(_failed(found, ratio) for ratio in RATIOS),
                percent(refused, found.trials),
            )
            for (ranks, slow), (found, refused) in results.slow_fleets.items()
        ),
    )
    yield from paragraph(
        "False alarms of the shipped entry as a whole: healthy fleets that it refuses, by how far healthy ranks spread."
        f" {_room()}"
    )
    yield from table(
        ("ranks", *(f"spread {100 * spread:g} %" for spread in SPREADS)),
        (
            (
                str(ranks),
                *(
                    percent(refused, found.trials)
                    for found, refused in (results.healthy_fleets[ranks, s] for s in SPREADS)
                ),
            )
            for ranks in FLEETS
        ),
    )


def _room() -> str:
    limit = trials_of.shipped_limit().min
    assert limit is not None  # the shipped file has one
    room = 100 * (1 - limit / trials_of.HEALTHY_TFLOPS)
    return f"The min lies {room:.1f} % below what a healthy rank does here."


def _failed(found: Compared, ratio: float) -> str:
    return percent(found.failed[ratio], found.trials)


def _range(found: Iterable[Compared], ratio: float) -> str:
    rows = sorted(found, key=lambda row: row.failed[ratio] / row.trials, reverse=True)
    least, most = (percent(row.trials - row.failed[ratio], row.trials) for row in (rows[0], rows[-1]))
    return least if least == most else f"{least} to {most}"


def _named(found: Compared, ratio: float) -> str:
    failed = found.failed[ratio]
    return percent(found.named[ratio], failed) if failed >= 20 else "-"


def _reading(results: Results) -> Iterator[str]:
    n, sampled = results.trials, results.sampled

    def wrong(noise: str, level: float, rule: str = OURS) -> str:
        return f"{percent(sampled[noise].wrong[rule, level], n)} %"

    def holds(noise: str) -> str:
        return f"{bounded(sampled[noise].covered['ended'], n)} %"

    def alarm(ranks: int, spread: float, ratio: float) -> str:
        return f"{_failed(results.one_slow[ranks, spread, 1.0], ratio)} %"

    def refuses(ranks: int, spread: float) -> str:
        found, refused = results.healthy_fleets[ranks, spread]
        return f"{percent(refused, found.trials)} %"

    most, refused = results.slow_fleets[8, 5]
    drift, later, mean = "drift of -2 % in 10 s, 0.3 %", "the same drift, longer warm-up", "mean of the window"
    yield "## What this means\n"
    yield from bullets(
        f"Quiet cards are told apart at once. With independent noise of 0.3 % a card 1 % below the limit passes in"
        f" {wrong('independent, 0.3 %', 0.99)} of the runs, one 1 % above it fails in"
        f" {wrong('independent, 0.3 %', 1.01)}.",
        f"Independent noise costs good cards and spares no bad one. With 3 % a card 1 % below the limit passes in"
        f" {wrong('independent, 3 %', 0.99)} of the runs, against {wrong('independent, 3 %', 0.99, mean)} by the mean"
        f" and {wrong('independent, 3 %', 0.99, 'best of 3 windows')} with two more tries. The price: one 3 % above"
        f" the limit fails in {wrong('independent, 3 %', 1.03)}, as inconclusive.",
        f"Looking again costs little. The interval promises 95 %; with independent noise of 1 %, where most series go"
        f" on after the window, it holds the median in {holds('independent, 1 %')} of the runs.",
        "Blocks that resemble each other are worth fewer of them. The interval is widened by as much of that as a short"
        f" series shows. At a correlation of 0.5 and 1 % it holds the median in {holds('correlated 0.5, 1 %')}, at 0.9"
        f" in {holds('correlated 0.9, 1 %')} of the runs, and a card 1 % below the limit passes in"
        f" {wrong('correlated 0.9, 1 %', 0.99)}. The price is that many such series stay inconclusive.",
        f"What comes after the window is not known. A card that loses 2 % in the 10 s after the warm-up and ends 1 %"
        f" below the limit passes in {wrong(drift, 0.99)} of the runs, and in {wrong(later, 0.99)} when it warms up for"
        f" {trials_of.LATER_SECONDS:g} s longer. Where cards take that long, give them more `warmup`, as the profiles"
        " `full` and `soak` do, and look at the clocks and throttle reasons beside the value.",
        f"A median does not see what is rare. A card that does 80 % for one block of 20 is judged by its other blocks:"
        f" 1 % above the limit it fails in {wrong('5 % of blocks at 80 %, 0.3 %', 1.01)} of the runs, by the mean in"
        f" {wrong('5 % of blocks at 80 %, 0.3 %', 1.01, mean)}. One second at 70 % is"
        f" outweighed by measuring on: 1 % above the limit the card fails in {wrong('1 s at 70 %, 0.3 %', 1.01)}.",
        f"A ratio must leave room for the spread, the more so the larger the fleet. At 0.93, healthy fleets of 1024"
        f" ranks fail in {alarm(1024, 0.01, 0.93)} of the runs with a spread of 1 %, in {alarm(1024, 0.02, 0.93)}"
        f" with 2 % and in {alarm(1024, 0.03, 0.93)} with 3 %; at 0.75 in {alarm(1024, 0.03, 0.75)}. Where healthy"
        " ranks fail too, the first name may be theirs.",
        f"A ratio cannot see what most ranks share. With 5 of 8 ranks at {SLOW_FLEET:g}, a ratio of 0.93 fails"
        f" {_failed(most, 0.93)} % of the runs, the shipped entry {percent(refused, most.trials)} %. Half of the fleet"
        " is still seen, because each rank is held beside the others without itself.",
        *straggler_page.reading(results.named),
        "An absolute limit must leave room for the spread, too: every rank has to reach it."
        f" {_room()} Of healthy fleets of 16 ranks it refuses {refuses(16, 0.01)} with a spread of 1 % and"
        f" {refuses(16, 0.02)} with 2 %.",
        "What a simulation cannot show: how real GPUs scatter. Nobody measured here how far blocks resemble each other,"
        " how long a card takes to become warm, or how much healthy cards differ. The tables tell what follows from a"
        " noise, not which noise there is. Compare the samples in your journal with the rows above.",
    )


def _others(results: Results) -> Iterator[str]:
    yield "## The other rules in full\n"
    yield from _wrong(results, OTHERS)


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"GPUs for each kind of noise (default: {TRIALS})")
    parser.add_argument("--print", action="store_true", help="print the page and leave docs/simulations.md as it is")
    arguments = parser.parse_args()
    if arguments.trials < 1:
        parser.error(f"--trials must be 1 or more, not {arguments.trials}")
    text = page(simulate(arguments.trials))
    if arguments.print:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
        print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
