"""The part of docs/simulations.md that tells whom the rules name in fleets with none to three slow GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from page_text import paragraph, table
from rates import bounds, percent
from straggler_trials import CRITERION, FLEET_SIZES, SLOW_AT, SLOW_COUNTS, SPREADS, Kind, Named, fleets_of, rules

Results = Mapping[Kind, Mapping[str, Named]]


def section(found: Results, trials: int) -> Iterator[str]:
    """Yield the lines of this part."""
    loose, *others = rules()
    small, large = fleets_of(64, trials), fleets_of(1024, trials)
    yield "## None to three slow GPUs\n"
    yield from paragraph(
        f"Fleets of {FLEET_SIZES[0]} to {FLEET_SIZES[-1]} GPUs, {small} of each kind up to 64 ranks and {large} of the"
        f" larger ones: the 95 % bound of a `0` is {100 * bounds(0, small)[1]:.2g} % and"
        f" {100 * bounds(0, large)[1]:.2g} %. By three rules of a run: the ratio of `{CRITERION}`, which most metrics"
        " have; that of the shipped entry; and this entry whole, with its min. False alarms: healthy fleets of which a"
        " rank is named."
    )
    yield from table(
        ("ranks", *(f"{rule}, spread {100 * spread:g} %" for rule in rules() for spread in SPREADS)),
        (
            (
                str(ranks),
                *(
                    percent(found[ranks, spread, 0, 1.0][rule].wronged, found[ranks, spread, 0, 1.0][rule].trials)
                    for rule in rules()
                    for spread in SPREADS
                ),
            )
            for ranks in FLEET_SIZES
        ),
    )
    yield from paragraph(
        "Misses. `missed`: slow ranks that are not named, of all slow ranks. `passes`: runs that name nobody."
        " `wronged`: runs that name a healthy rank, beside the slow ones or in their place. The entry's min asks"
        " each rank by itself, and is reached or missed by its own value alone."
    )
    for rule in others:
        yield from paragraph(f"By {rule}:" if rule.startswith("the") else f"By the {rule}:")
        yield from table(_HEAD, ((_rule_row(found, rule, ranks, count, at)) for ranks, count, at in _ROWS))
    yield from paragraph(f"By the {loose}, from the least to the most over all these fleets:")
    yield from table(
        ("slow rank does", *_HEAD[3:]),
        ((f"{at:g}", *_cells_over_all(found, loose, at)) for at in SLOW_AT),
    )


_HEAD = (
    "ranks",
    "slow",
    "each does",
    *(f"{what}, spread {100 * spread:g} %" for spread in SPREADS for what in ("missed", "passes", "wronged")),
)
_FLEETS = [(ranks, count) for ranks in FLEET_SIZES for count in SLOW_COUNTS]
_ROWS = [(ranks, count, at) for ranks in FLEET_SIZES for at in SLOW_AT for count in SLOW_COUNTS]


def _rule_row(found: Results, rule: str, ranks: int, count: int, at: float) -> tuple[str, ...]:
    of = [found[ranks, spread, count, at][rule] for spread in SPREADS]
    return (str(ranks), str(count), f"{at:g}", *(cell for one in of for cell in _cells(one, count)))


def _cells(one: Named, count: int) -> tuple[str, str, str]:
    return (
        percent(one.missed, count * one.trials),
        percent(one.passed, one.trials),
        percent(one.wronged, one.trials),
    )


def _cells_over_all(found: Results, rule: str, at: float) -> Iterator[str]:
    for spread in SPREADS:
        of = [(found[ranks, spread, count, at][rule], count) for ranks, count in _FLEETS]
        cells = [_cells(one, count) for one, count in of]
        rates = [_rates(one, count) for one, count in of]
        for column in range(3):
            ordered = sorted(range(len(of)), key=[rate[column] for rate in rates].__getitem__)
            least, most = cells[ordered[0]][column], cells[ordered[-1]][column]
            yield least if least == most else f"{least} to {most}"


def _rates(one: Named, count: int) -> tuple[float, float, float]:
    return one.missed / (count * one.trials), one.passed / one.trials, one.wronged / one.trials


def reading(found: Results) -> tuple[str, str]:
    """Return what these tables say, in the figures that are in them."""
    loose, ratio, entry = rules()

    def missed(rule: str, at: float, spread: float) -> str:
        of = [found[ranks, spread, count, at][rule] for ranks, count in _FLEETS]
        slow = sum(one.trials * count for one, (_, count) in zip(of, _FLEETS, strict=True))
        return f"{percent(sum(one.missed for one in of), slow)} %"

    def alarms(rule: str, spread: float, ranks: int) -> str:
        one = found[ranks, spread, 0, 1.0][rule]
        return f"{percent(one.wronged, one.trials)} %"

    def beside(count: int) -> str:
        one = found[8, SPREADS[2], count, 0.9][ratio]
        return f"{percent(one.missed, count * one.trials)} %"

    return (
        f"Slow GPUs hide each other little. In a fleet of 8 with a spread of {100 * SPREADS[2]:g} % the {ratio} misses"
        f" {beside(1)} of those at 0.9 where there is one, and {beside(3)} where there are three. With a"
        f" spread of {100 * SPREADS[1]:g} % the {ratio} misses {missed(ratio, 0.8, SPREADS[1])} of the slow ranks at"
        f" 0.8, {missed(ratio, 0.9, SPREADS[1])} at 0.9 and {missed(ratio, 0.95, SPREADS[1])} at 0.95, over all fleets"
        f" with one to three of them; the shipped entry, by its min, {missed(entry, 0.8, SPREADS[1])},"
        f" {missed(entry, 0.9, SPREADS[1])} and {missed(entry, 0.95, SPREADS[1])}. Its false alarms: of healthy fleets"
        f" of {FLEET_SIZES[-1]}, {alarms(entry, SPREADS[1], FLEET_SIZES[-1])} with a spread of {100 * SPREADS[1]:g} %"
        f" and {alarms(entry, SPREADS[2], FLEET_SIZES[-1])} with {100 * SPREADS[2]:g} %; of 8,"
        f" {alarms(entry, SPREADS[1], 8)} and {alarms(entry, SPREADS[2], 8)}.",
        f"The {loose}, which most metrics and the criterion of stragglers have, is for GPUs that hold a job up, not for"
        f" those that are a little behind: it misses {missed(loose, 0.9, SPREADS[1])} of the ranks at 0.9 and"
        f" {missed(loose, 0.8, SPREADS[1])} of those at 0.8. Whoever wants these named sets a ratio of their own, from"
        " what healthy ranks of the cluster differ by.",
    )
