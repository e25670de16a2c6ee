"""Write docs/isolation-simulations.md: whom isolation accuses in made-up clusters, and in how many rounds.

python perf/isolation.py                        # rewrites the page, in about ten minutes on one core
python perf/isolation.py --trials 10 --print    # quick, to the terminal

The cluster is in isolation_cluster.py, the faults that are planted in isolation_trials.py. The same seed and the same
planner give the same page.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import isolation_cluster as cluster
from isolation_trials import CLAIMED, NODES, SCENARIOS, SEED, Found, bound, run
from page_text import bullets, paragraph, table
from rates import bounds, percent

PAGE = Path(__file__).parent.parent / "docs" / "isolation-simulations.md"
TRIALS = 100
SIZES = (8, 16, 64, 1024)
"""Other numbers of nodes, for the faults whose rounds are promised: with fewer trials."""
FEW = 5

Results = Mapping[str, Found]


def simulate(trials: int) -> Results:
    """Run all scenarios."""
    return {scenario.name: run(scenario, NODES, trials) for scenario in SCENARIOS}


def simulate_sizes(trials: int) -> Mapping[int, Found]:
    """Run what is promised on other numbers of nodes."""
    found = {}
    for total in SIZES:
        parts = [run(scenario, total, max(1, trials // FEW)) for scenario in CLAIMED]
        found[total] = Found(
            trials=sum(part.trials for part in parts),
            rounds=[rounds for part in parts for rounds in part.rounds],
            planted=sum(part.planted for part in parts),
            missed=sum(part.missed for part in parts),
            accused_falsely=sum(part.accused_falsely for part in parts),
            half_right=sum(part.half_right for part in parts),
            reproduced=sum(part.reproduced for part in parts),
            undecided=sum(part.undecided for part in parts),
        )
    return found


def header(trials: int) -> str:
    """Return what was simulated, and how often: the part of the page that follows from the parameters alone."""
    zero = 100 * bounds(0, trials)[1]
    return "\n".join(
        [
            "# Isolation: misses and false accusations\n",
            *paragraph(
                "This page is made by `python perf/isolation.py`. Do not edit it. It tells whom"
                " [isolation](isolation.md) accuses in clusters that are made up, with faults planted at random, and"
                " how many rounds of probes that takes. The planner is the one that searches a real cluster. It sees"
                " what came of its probes, and never the plant."
            ),
            *bullets(
                f"Seed {SEED}; {NODES} nodes; {trials} clusters for each row. Of {trials} trials the 95 % bound"
                f" (Wilson) of a `0` is {zero:.2g} %.",
                f"A healthy node does {cluster.ALONE_GB_PER_SECOND:g} GB/s alone, two do"
                f" {cluster.TOGETHER_GB_PER_SECOND:g} GB/s, and each doubling leaves {100 * cluster.PER_DOUBLING:g} %"
                f" of that. Nodes differ by {100 * cluster.SPREAD:g} %, probes by {100 * cluster.NOISE:g} % (standard"
                f" deviations). The limit for each size is {100 * cluster.FLOOR_SHARE:g} % of a healthy group.",
                "What is slow does half. What is dead does not end its probe. Wrong data is seen by any rank of the"
                " group, not by the culprit. Nothing but `slow alone` shows where a node is alone.",
                f"The promise: 1 to 3 bad nodes or NICs that fail each time are found in 2 log2(N) + 5 rounds at most,"
                f" {bound(NODES)} at {NODES} nodes, and nobody else is accused.",
            ),
        ]
    )


def page(results: Results, sizes: Mapping[int, Found]) -> str:
    """Return the whole page."""
    return "\n".join([header(next(iter(results.values())).trials), *_faults(results), *_sizes(sizes), *_reading()])


def _faults(results: Results) -> Iterator[str]:
    yield "## Faults of every kind\n"
    yield from paragraph(
        "Missed: planted faults that nobody was accused of, in percent. False: clusters in which somebody was accused"
        " who is no part of a fault, in percent. Half right: a node was accused for a link at its end. Undecided: nodes"
        " that were neither accused nor cleared, on average."
    )
    yield from table(
        ("planted", "rounds: mean", "most", "missed", "false", "half right", "showed again", "undecided"),
        (
            (
                name,
                f"{sum(found.rounds) / found.trials:.1f}",
                str(max(found.rounds)),
                percent(found.missed, found.planted) if found.planted else "-",
                percent(found.accused_falsely, found.trials),
                percent(found.half_right, found.trials),
                percent(found.reproduced, found.trials),
                f"{found.undecided / found.trials:.1f}",
            )
            for name, found in results.items()
        ),
    )


def _sizes(sizes: Mapping[int, Found]) -> Iterator[str]:
    yield "## Clusters of other sizes\n"
    yield from paragraph("1 to 3 bad nodes or NICs that fail each time, all kinds together.")
    yield from table(
        ("nodes", "clusters", "rounds: mean", "most", "promised", "missed", "false"),
        (
            (
                str(total),
                str(found.trials),
                f"{sum(found.rounds) / found.trials:.1f}",
                str(max(found.rounds)),
                str(bound(total)),
                percent(found.missed, found.planted),
                percent(found.accused_falsely, found.trials),
            )
            for total, found in sizes.items()
        ),
    )


def _reading() -> Iterator[str]:
    yield "## What this means\n"
    yield from bullets(
        "A node that is bad each time is found in five rounds or so, however many nodes there are: alone, in pairs,"
        " with two other partners, and the rest together. The halving is for what no pair shows.",
        "A healthy cluster takes longer than a broken one: where nothing fails, it is tried again with other partners,"
        " and then said that it did not happen again. That is no pass.",
        "A link needs more rounds than a node. Two nodes that fail together may be a bad link, or one of them may fail"
        " now and then; they are told apart by how often each passes with others.",
        "What fails 1 of 8 times or less is often missed: three failures must come of it before it is accused. It is"
        " named as not confirmed if it showed at all, and the nodes that were in it are not cleared.",
        "A pair that fails only now and then is hardly ever confirmed, for it looks like either of its ends. It stays"
        " undecided. The other way round, a node that fails now and then may fail with the same partner so often that"
        " the link between them is accused: that is the false accusation where there is one above.",
        "With two nodes, or with four of which three are bad, there is nobody left to compare with. Then nobody is"
        " accused.",
        "What a simulation cannot show: how real fabrics fail. Nobody measured here how far pairs scatter on one, or"
        " whether all groups that are probed at once get in each other's way.",
    )


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"clusters of each kind (default {TRIALS})")
    parser.add_argument("--print", action="store_true", help="print the page instead of writing it")
    arguments = parser.parse_args()
    if arguments.trials < 1:
        parser.error(f"--trials must be 1 or more, not {arguments.trials}")
    made = page(simulate(arguments.trials), simulate_sizes(arguments.trials))
    if arguments.print:
        print(made)
    else:
        PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
