"""The survey of all links: its matrices and culprits, as text and as JSON, and what is required of each rank.

The text and the JSON give the bad links by host and GPU, the second measurements, the matrix, and the planned time.
A failed requirement is raised on the culprits' ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault, WrongResult
from pytest_gpucluster.isolation.link_matrix import Culprit, Matrix, Reading, Scope, culprits, explained_by_others
from pytest_gpucluster.isolation.round_robin import Pair, Places, Round
from pytest_gpucluster.metrics import units

What = Literal["wrong", "slow"]
"""What can be bad about a link: data that do not arrive as sent, or a rate far under the median."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Equal on all ranks.

    Attributes:
        scope: "node" for the links within nodes, "world" for those across them.
        places: where the ranks are.
        matrix: of the tournament.
        alone: of the suspects, measured once more without what could have shared their way.
        below: the ratio to the median below which a link is a suspect; None where no limit says so.
        rounds: of the tournament.
        planned_seconds, seconds: what the tournament was to take and what it took, where it took longest.
        left_out: pairs that were not measured, because the time was up.
    """

    scope: Scope
    places: Places
    matrix: Matrix
    alone: Matrix
    below: float | None
    rounds: int
    planned_seconds: float
    seconds: float
    left_out: tuple[Pair, ...] = ()

    @cached_property
    def slow(self) -> tuple[Pair, ...]:
        """The pairs that are suspects, the slowest first."""
        return () if self.below is None else tuple(self.matrix.slow(self.below))

    def culprits(self, what: What) -> tuple[Culprit, ...]:
        """Return what explains the pairs that delivered wrong data, then or once more, or that are slow."""
        return self._wrong if what == "wrong" else self._slow

    @cached_property
    def _slow(self) -> tuple[Culprit, ...]:
        return culprits(self.slow, self.matrix.pairs, self.places, self.scope)

    @cached_property
    def _wrong(self) -> tuple[Culprit, ...]:
        wrong = {*self.matrix.wrong(), *self.alone.wrong()}
        return culprits(wrong, self.matrix.pairs, self.places, self.scope)

    def of_rank(self, rank: int) -> Reading:
        """Return the reading that stands for a rank: its slowest, but for those that others are to blame for.

        Raises:
            KeyError: the rank has no reading.
        """
        theirs = explained_by_others(self._slow, rank)
        return self.matrix.of_rank(rank, without=theirs)

    def ratio_of_rank(self, rank: int) -> float | None:
        """Return the ratio of this reading to its yardstick; None where there is no other pair."""
        return self.matrix.ratio(self.of_rank(rank))


def matrix_of(readings: Iterable[Reading], scope: Scope, places: Places) -> Matrix:
    """Return the matrix of a scope: what may be slow as a whole is a GPU within nodes, and a node across them."""
    where = places.where()
    return Matrix(readings, (lambda rank: where[rank][0]) if scope == "world" else (lambda rank: rank))


def readings_of(pairs: Iterable[Pair], matrix: Matrix) -> list[Reading]:
    """Return the readings of some pairs, the slowest first."""
    found = [reading for link in pairs for reading in matrix.pairs.get(link, ())]
    return sorted(found, key=lambda reading: reading.bytes_per_second)


GB = 1e9
_SHOWN = 16
"""Bad links in a failure's text, and at most so many columns in a table: more do not fit on a screen."""
_COMPACT = 240
"""Readings in the journal: those of a node with 16 GPUs. Of more only the slowest; the file has all of them."""
_NOTHING: dict[What, str] = {"wrong": "all data arrived as sent", "slow": "no pair is far under the median"}
_HINTS = {
    "gpu": "Look at its NVLinks (nvidia-smi nvlink -s, -e) and at its PCIe link",
    "port": "Look at the NIC of this rail on that node (ibstat) and its cable; is it the one beside the GPU?",
    "link": "Either end may be it: look at the NVLinks, or the ports and the way between them, and swap a partner",
    "node link": "Look at the way between these nodes: cables between switches, routing",
    "node": "Look at the node: Fabric Manager, NVSwitch, PCIe, its NICs (ibstat) and NCCL_* variables",
    "rail": "Look at the leaf switch of this rail, and at its cables to the others",
    "fabric": "Look at the switches between the nodes, and at what NCCL uses (NET/Socket?)",
}


def announced(rounds: Sequence[Round], seconds: float, what: str) -> str:
    """Say what is going to be measured and how long that takes.

    >>> announced((((0, 1), (2, 3)), ((0, 2), (1, 3))), 1.0, "links within nodes")
    'links within nodes: 2 rounds of up to 2 pairs at once, about 1 s'
    """
    most = max((len(round_) for round_ in rounds), default=0)
    return f"{what}: {len(rounds)} rounds of up to {most} pairs at once, about {seconds:.3g} s"


def named(one: Culprit, places: Places) -> str:
    """Say who it is: a GPU, a link, a node, a rail."""
    first = places.names[one.ranks[0]]
    node, rail = places.where()[one.ranks[0]]
    if one.kind == "gpu":
        return f"the GPU of {first}"
    if one.kind == "port":
        return f"the port of {first} on rail {rail}"
    if one.kind == "link":
        return f"the link between {first} and {places.names[one.ranks[1]]}"
    if one.kind == "node link":
        other = places.where()[one.pairs[0][1]][0]
        return f"{len(one.pairs)} of {one.links} rails between {places.hosts[node]} and {places.hosts[other]}"
    if one.kind == "node":
        return f"the node {places.hosts[node]}"
    return f"rail {rail}" if one.kind == "rail" else "the fabric"


def told(survey: Survey, what: What, *, first: Culprit | None = None) -> list[str]:
    """Return lines about what is to blame: a line on ``first``, then on the others, then the bad links themselves."""
    found = survey.culprits(what)
    order = found if first is None else [first, *(one for one in found if one is not first)]
    lines = [_line(survey, what, one) for one in order]
    bad = dict.fromkeys(link for one in order for link in one.pairs)
    readings = _evidence(survey, what, list(bad))
    lines += ["", f"{_links(len(bad))}, the slowest first:", *(_cell(survey, one) for one in readings[:_SHOWN])]
    if len(readings) > _SHOWN:
        lines.append(f"  and {len(readings) - _SHOWN} more directions, all of them in links-{survey.scope}.json")
    return lines


def survey_text(survey: Survey) -> str:
    """Return everything that a person wants to read, for a file or a terminal."""
    matrix, places = survey.matrix, survey.places
    title = "links within nodes" if survey.scope == "node" else "links across nodes"
    slowest = min(matrix.readings.values(), key=lambda one: one.bytes_per_second)
    fastest = max(matrix.readings.values(), key=lambda one: one.bytes_per_second)
    lines = [
        f"{title}: {len(matrix.pairs)} pairs in {survey.rounds} rounds, {survey.seconds:.3g} s "
        f"({survey.planned_seconds:.3g} s planned)",
        f"median {_rate(matrix.median)}, from {_rate(slowest.bytes_per_second)} to {_rate(fastest.bytes_per_second)}",
    ]
    if survey.below is None:
        lines.append("no limit says what is far under the median")
    for what, nothing in _NOTHING.items():
        if survey.culprits(what):
            lines += ["", *told(survey, what)]
        elif what == "wrong" or survey.below is not None:
            lines.append(nothing)
    if survey.left_out:
        lines.append(f"{len(survey.left_out)} pairs were not measured: the time was up")
    if survey.scope == "node":
        for node, ranks in enumerate(places.ranks):
            lines += ["", *_table(survey, places.hosts[node], list(ranks))]
    else:
        for rail in range(places.rails):
            lines += ["", *_table(survey, f"rail {rail}", [ranks[rail] for ranks in places.ranks])]
    return "\n".join(lines) + "\n"


def to_json(survey: Survey) -> dict[str, Any]:
    """Return everything as plain JSON types. Rates are in GB/s."""
    return {
        "schema_version": 1,
        "scope": survey.scope,
        "unit": "GB/s",
        "ranks": list(survey.places.names),
        "nodes": [list(ranks) for ranks in survey.places.ranks],
        "median": _short(survey.matrix.median),
        "suspect_below": survey.below,
        "rounds": survey.rounds,
        "planned_seconds": survey.planned_seconds,
        "seconds": survey.seconds,
        "columns": ["sender", "receiver", "value", "low", "high", "payload_bytes", "wrong"],
        "readings": [_plain(reading) for reading in survey.matrix.readings.values()],
        "alone": [_plain(reading) for reading in survey.alone.readings.values()],
        "not_measured": [list(link) for link in survey.left_out],
        "culprits": [
            {
                "what": what,
                "kind": one.kind,
                "ranks": list(one.ranks),
                "pairs": [list(link) for link in one.pairs],
                "links": one.links,
                "text": _line(survey, what, one),
            }
            for what in _NOTHING
            for one in survey.culprits(what)
        ],
    }


def compact(survey: Survey) -> str:
    """Return the matrix as one short line of JSON: ``[sender, receiver, GB/s]``, all of them or the slowest."""
    readings = readings_of(survey.matrix.pairs, survey.matrix)
    shown = readings[: _COMPACT if len(readings) <= _COMPACT else _SHOWN]
    return json.dumps(
        {
            "unit": "GB/s",
            "pairs": len(survey.matrix.pairs),
            "rounds": survey.rounds,
            "median": _short(survey.matrix.median),
            "readings": [[one.sender, one.receiver, _short(one.bytes_per_second)] for one in shown],
            **({} if len(shown) == len(readings) else {"left_out": len(readings) - len(shown)}),
        },
        separators=(",", ":"),
    )


def _line(survey: Survey, what: What, one: Culprit) -> str:
    who = named(one, survey.places)
    count = "all" if len(one.pairs) == one.links else f"{len(one.pairs)} of"
    over = f"{count} its {one.links} links" if one.links > 1 else ""
    worst = _evidence(survey, what, one.pairs)[0]
    if what == "wrong":
        return f"{who}: wrong data{f' over {over}' if over else ''}: {worst.wrong}. {_HINTS[one.kind]}"
    ratio = survey.matrix.ratio(worst)
    share = "" if ratio is None else f", {ratio:.2g} of the median of the others"
    rate = f"{over}, the slowest at {_rate(worst.bytes_per_second)}" if over else _rate(worst.bytes_per_second)
    return f"{who}: {rate}{share}{_alone(survey, one.pairs)}. {_HINTS[one.kind]}"


def _evidence(survey: Survey, what: What, pairs: Sequence[Pair]) -> list[Reading]:
    """Return the readings of bad pairs, the slowest first; of those with wrong data only these, also measured alone."""
    readings = readings_of(pairs, survey.matrix)
    if what == "slow":
        return readings
    return [reading for reading in (*readings, *readings_of(pairs, survey.alone)) if reading.wrong]


def _alone(survey: Survey, pairs: Sequence[Pair]) -> str:
    again = readings_of(pairs, survey.alone)
    if not again:
        return "; not measured once more"
    rate, others = again[0].bytes_per_second, survey.matrix.yardstick(again[0].pair)
    # Without a limit, or others to stand beside, nothing would have been repeated.
    if survey.below is not None and others is not None and rate < survey.below * others:
        return f"; alone {_rate(rate)}, so it is slow by itself"
    return f"; alone {_rate(rate)}, so what it shares with other pairs is it, or something disturbed it once"


def _cell(survey: Survey, reading: Reading) -> str:
    names = survey.places.names
    ratio = survey.matrix.ratio(reading)
    again = survey.alone.readings.get((reading.sender, reading.receiver))
    told_ = f"  {names[reading.sender]} to {names[reading.receiver]}: {_rate(reading.bytes_per_second)}"
    told_ += "" if ratio is None else f", {ratio:.2g} of the median of the others"
    told_ += "" if again is None else f", alone {_rate(again.bytes_per_second)}"
    return told_ + (f"; {reading.wrong}" if reading.wrong else "")


def _table(survey: Survey, title: str, ranks: Sequence[int]) -> list[str]:
    """Rows send, columns receive; of many ranks only what each reaches at worst."""
    matrix = survey.matrix
    bad = {*survey.slow, *(link for one in survey.culprits("wrong") for link in one.pairs)}
    if len(ranks) > _SHOWN:
        lines = [f"{title}, GB/s: the slowest and the median of each"]
        for rank in ranks:
            rates = sorted(one.bytes_per_second / GB for one in matrix.touching.get(rank, ()))
            if rates:
                lines.append(f"  {survey.places.names[rank]}: {rates[0]:.4g}, {rates[len(rates) // 2]:.4g}")
        return lines
    lines = [f"{title}, GB/s, from row to column (* far under the median, or wrong)"]
    names = {rank: survey.places.names[rank] for rank in ranks}
    wide = max(map(len, names.values()))
    lines.append(" " * wide + "".join(f"{rank:>10}" for rank in ranks))
    for sender in ranks:
        cells = []
        for receiver in ranks:
            reading = matrix.readings.get((sender, receiver))
            mark = "" if reading is None else f"{reading.bytes_per_second / GB:.4g}" + "*" * (reading.pair in bad)
            cells.append(f"{mark or '-':>10}")
        lines.append(f"{names[sender]:<{wide}}" + "".join(cells))
    return lines


def _plain(reading: Reading) -> list[Any]:
    """Return a row of the columns. There may be a hundred thousand of them."""
    rates = (reading.bytes_per_second, reading.low, reading.high)
    return [reading.sender, reading.receiver, *map(_short, rates), reading.payload_bytes, reading.wrong]


def _links(count: int) -> str:
    return f"{count} bad link{'s' * (count != 1)}"


def _rate(bytes_per_second: float) -> str:
    return units.show(bytes_per_second / GB, "GB/s")


def _short(bytes_per_second: float) -> float:
    return float(f"{bytes_per_second / GB:.4g}")


def require_sound(survey: Survey, rank: int) -> None:
    """Tell this rank whether its links are to blame. Every rank may call it: nothing is communicated.

    Raises:
        WrongResult: data arrived wrong over them.
        HardwareFault: they are far slower than the others.
    """
    kinds: dict[What, type[HardwareFault]] = {"wrong": WrongResult, "slow": HardwareFault}
    for what, kind in kinds.items():
        mine = [one for one in survey.culprits(what) if rank in one.ranks]
        if mine:
            raise kind("\n".join(told(survey, what, first=mine[0])))


def require_measured(survey: Survey) -> None:
    """Make sure that every pair was measured.

    Raises:
        EnvironmentBroken: the time was up before; names the first pair.
    """
    if survey.left_out:
        one, other = (survey.places.names[rank] for rank in survey.left_out[0])
        raise EnvironmentBroken(
            f"{len(survey.left_out)} of {len(survey.left_out) + len(survey.matrix.pairs)} pairs were not measured, "
            f"because the time was up: {survey.seconds:.3g} s have passed, {survey.planned_seconds:.3g} s planned. "
            f"The first of them is {one} with {other}. Look at what was measured (links-{survey.scope}.txt in the "
            "test's folder), or send less (--gpucluster-workload links.size=64MiB)"
        )
