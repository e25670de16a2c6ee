"""The survey of all links: its matrices and culprits, as text and as JSON, and what is required of each rank.

Text and JSON have the bad links by host and GPU, their second measurement, the matrix, and the planned time. A failed
requirement is raised on the culprits' ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault, WrongResult
from pytest_gpucluster.isolation.link_matrix import Culprit, Matrix, Reading, Scope, culprits, explained_by_others
from pytest_gpucluster.isolation.round_robin import Pair, Places
from pytest_gpucluster.metrics import units

Fault = Literal["wrong", "slow"]
"""Of a link: data that do not arrive as sent, or a rate far below the median."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Equal on all ranks.

    Attributes:
        scope: "node" for the links within nodes, "world" for those across them.
        places: node and rail of the ranks.
        matrix: of the tournament.
        alone: of the suspects, measured again without the traffic that could have shared their path.
        below: the ratio to the median below which a link is a suspect; None where there is no limit for it.
        rounds: of the tournament.
        planned_seconds, seconds: of the tournament: as planned, and on the rank where it took longest.
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

    def culprits(self, fault: Fault) -> tuple[Culprit, ...]:
        """Return the culprits for pairs with wrong data, in either measurement, or for slow pairs."""
        return self._culprits[fault]

    @cached_property
    def _culprits(self) -> Mapping[Fault, tuple[Culprit, ...]]:
        bad: dict[Fault, Iterable[Pair]] = {"wrong": {*self.matrix.wrong(), *self.alone.wrong()}, "slow": self.slow}
        return {fault: culprits(pairs, self.matrix.pairs, self.places, self.scope) for fault, pairs in bad.items()}

    def of_rank(self, rank: int) -> Reading:
        """Return the reading that represents a rank: its slowest, without those that have another culprit.

        Raises:
            KeyError: the rank has no reading.
        """
        return self.matrix.of_rank(rank, without=explained_by_others(self.culprits("slow"), rank))


def matrix_of(readings: Iterable[Reading], scope: Scope, places: Places) -> Matrix:
    """Return the matrix of a scope: within nodes a GPU may be slow as a whole, and across them a node."""
    where = places.where()
    return Matrix(readings, (lambda rank: where[rank][0]) if scope == "world" else (lambda rank: rank))


def readings_of(pairs: Iterable[Pair], matrix: Matrix) -> list[Reading]:
    """Return the readings of some pairs, the slowest first."""
    found = [reading for link in pairs for reading in matrix.pairs.get(link, ())]
    return sorted(found, key=lambda reading: reading.bytes_per_second)


GB = 1e9
_MAX_LINES = 16
"""Bad links in a failure's text, and columns of a table: more do not fit on a screen."""
_MAX_JOURNAL_READINGS = 240
"""Readings in the journal: those of a node with 16 GPUs. Of more only the slowest; the file has all of them."""
_NO_FAULT: dict[Fault, str] = {"wrong": "all data arrived as sent", "slow": "no pair is far below the median"}
_HINTS = {
    "gpu": "Look at its NVLinks (nvidia-smi nvlink -s, -e) and at its PCIe link",
    "port": "Look at the NIC of this rail on that node (ibstat) and its cable; is it the one closest to the GPU?",
    "link": "Either end is suspected: look at the NVLinks, or the ports and the path between them, and swap a partner",
    "node link": "Look at the path between these nodes: cables between switches, routing",
    "node": "Look at the node: Fabric Manager, NVSwitch, PCIe, its NICs (ibstat) and NCCL_* variables",
    "rail": "Look at the leaf switch of this rail, and at its cables to the others",
    "fabric": "Look at the switches between the nodes, and at NCCL's transport (NET/Socket?)",
}


def culprit_name(culprit: Culprit, places: Places) -> str:
    """Return the name of a culprit: a GPU, a port, a link, a node, a rail, or the fabric."""
    first = places.names[culprit.ranks[0]]
    node, rail = places.where()[culprit.ranks[0]]
    if culprit.kind == "gpu":
        return f"the GPU of {first}"
    if culprit.kind == "port":
        return f"the port of {first} on rail {rail}"
    if culprit.kind == "link":
        return f"the link between {first} and {places.names[culprit.ranks[1]]}"
    if culprit.kind == "node link":
        other = places.where()[culprit.pairs[0][1]][0]
        hosts = f"{places.hosts[node]} and {places.hosts[other]}"
        return f"{len(culprit.pairs)} of {culprit.links} rails between {hosts}"
    if culprit.kind == "node":
        return f"the node {places.hosts[node]}"
    return f"rail {rail}" if culprit.kind == "rail" else "the fabric"


def culprit_lines(survey: Survey, fault: Fault, *, first: Culprit | None = None) -> list[str]:
    """Return a line for each culprit, ``first`` before the others, and then lines with the bad links."""
    found = survey.culprits(fault)
    order = found if first is None else [first, *(culprit for culprit in found if culprit is not first)]
    lines = [_culprit_line(survey, fault, culprit) for culprit in order]
    bad = dict.fromkeys(link for culprit in order for link in culprit.pairs)
    readings = _evidence(survey, fault, list(bad))
    count = f"{len(bad)} bad link{'s' * (len(bad) != 1)}"
    lines += ["", f"{count}, the slowest first:", *(_link_line(survey, one) for one in readings[:_MAX_LINES])]
    if len(readings) > _MAX_LINES:
        lines.append(f"  and {len(readings) - _MAX_LINES} more directions, all of them in links-{survey.scope}.json")
    return lines


def survey_text(survey: Survey) -> str:
    """Return the whole survey as text, for a file or a terminal."""
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
        lines.append("there is no limit for the ratio to the median")
    for fault, no_fault in _NO_FAULT.items():
        if survey.culprits(fault):
            lines += ["", *culprit_lines(survey, fault)]
        elif fault == "wrong" or survey.below is not None:
            lines.append(no_fault)
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
    """Return plain JSON types. Rates are in GB/s."""
    return {
        "schema_version": 1,
        "scope": survey.scope,
        "unit": "GB/s",
        "ranks": list(survey.places.names),
        "nodes": [list(ranks) for ranks in survey.places.ranks],
        "median": _gigabytes(survey.matrix.median),
        "suspect_below": survey.below,
        "rounds": survey.rounds,
        "planned_seconds": survey.planned_seconds,
        "seconds": survey.seconds,
        "columns": ["sender", "receiver", "value", "low", "high", "payload_bytes", "wrong"],
        "readings": [_json_row(reading) for reading in survey.matrix.readings.values()],
        "alone": [_json_row(reading) for reading in survey.alone.readings.values()],
        "not_measured": [list(link) for link in survey.left_out],
        "culprits": [
            {
                "what": fault,
                "kind": culprit.kind,
                "ranks": list(culprit.ranks),
                "pairs": [list(link) for link in culprit.pairs],
                "links": culprit.links,
                "text": _culprit_line(survey, fault, culprit),
            }
            for fault in _NO_FAULT
            for culprit in survey.culprits(fault)
        ],
    }


def compact(survey: Survey) -> str:
    """Return the matrix as one short line of JSON: ``[sender, receiver, GB/s]``, all of them or the slowest."""
    readings = readings_of(survey.matrix.pairs, survey.matrix)
    kept = readings[: _MAX_JOURNAL_READINGS if len(readings) <= _MAX_JOURNAL_READINGS else _MAX_LINES]
    return json.dumps(
        {
            "unit": "GB/s",
            "pairs": len(survey.matrix.pairs),
            "rounds": survey.rounds,
            "median": _gigabytes(survey.matrix.median),
            "readings": [[one.sender, one.receiver, _gigabytes(one.bytes_per_second)] for one in kept],
            **({} if len(kept) == len(readings) else {"left_out": len(readings) - len(kept)}),
        },
        separators=(",", ":"),
    )


def _culprit_line(survey: Survey, fault: Fault, culprit: Culprit) -> str:
    name = culprit_name(culprit, survey.places)
    count = "all" if len(culprit.pairs) == culprit.links else f"{len(culprit.pairs)} of"
    links = f"{count} its {culprit.links} links" if culprit.links > 1 else ""
    worst = _evidence(survey, fault, culprit.pairs)[0]
    if fault == "wrong":
        return f"{name}: wrong data{f' over {links}' if links else ''}: {worst.wrong}. {_HINTS[culprit.kind]}"
    ratio = survey.matrix.ratio(worst)
    share = "" if ratio is None else f", {ratio:.2g} of the median of the others"
    rate = f"{links}, the slowest at {_rate(worst.bytes_per_second)}" if links else _rate(worst.bytes_per_second)
    return f"{name}: {rate}{share}{_alone(survey, culprit.pairs)}. {_HINTS[culprit.kind]}"


def _evidence(survey: Survey, fault: Fault, pairs: Sequence[Pair]) -> list[Reading]:
    """Return the readings of bad pairs, the slowest first; for wrong data only wrong ones, also of those alone."""
    readings = readings_of(pairs, survey.matrix)
    if fault == "slow":
        return readings
    return [reading for reading in (*readings, *readings_of(pairs, survey.alone)) if reading.wrong]


def _alone(survey: Survey, pairs: Sequence[Pair]) -> str:
    again = readings_of(pairs, survey.alone)
    if not again:
        return "; not measured again"
    rate, others = again[0].bytes_per_second, survey.matrix.reference_rate(again[0].pair)
    # Without a limit, or others to compare with, nothing would have been repeated.
    if survey.below is not None and others is not None and rate < survey.below * others:
        return f"; alone {_rate(rate)}, so it is slow by itself"
    return f"; alone {_rate(rate)}, so the cause is shared with other pairs, or was a single disturbance"


def _link_line(survey: Survey, reading: Reading) -> str:
    names = survey.places.names
    ratio = survey.matrix.ratio(reading)
    again = survey.alone.readings.get((reading.sender, reading.receiver))
    line = f"  {names[reading.sender]} to {names[reading.receiver]}: {_rate(reading.bytes_per_second)}"
    line += "" if ratio is None else f", {ratio:.2g} of the median of the others"
    line += "" if again is None else f", alone {_rate(again.bytes_per_second)}"
    return line + (f"; {reading.wrong}" if reading.wrong else "")


def _table(survey: Survey, title: str, ranks: Sequence[int]) -> list[str]:
    """Rows send, columns receive; of many ranks only the slowest and the median reading of each."""
    matrix = survey.matrix
    bad = {*survey.slow, *(link for one in survey.culprits("wrong") for link in one.pairs)}
    if len(ranks) > _MAX_LINES:
        lines = [f"{title}, GB/s: the slowest and the median of each"]
        for rank in ranks:
            rates = sorted(one.bytes_per_second / GB for one in matrix.touching.get(rank, ()))
            if rates:
                lines.append(f"  {survey.places.names[rank]}: {rates[0]:.4g}, {rates[len(rates) // 2]:.4g}")
        return lines
    lines = [f"{title}, GB/s, from row to column (* far below the median, or wrong)"]
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


def _json_row(reading: Reading) -> list[Any]:
    """Return a row of the columns. There may be a hundred thousand rows."""
    rates = (reading.bytes_per_second, reading.low, reading.high)
    return [reading.sender, reading.receiver, *map(_gigabytes, rates), reading.payload_bytes, reading.wrong]


def _rate(bytes_per_second: float) -> str:
    return units.show(bytes_per_second / GB, "GB/s")


def _gigabytes(bytes_per_second: float) -> float:
    return float(f"{bytes_per_second / GB:.4g}")


def require_healthy(survey: Survey, rank: int) -> None:
    """Fail on the ranks that are culprits. Every rank may call it: nothing is communicated.

    Raises:
        WrongResult: data arrived wrong over them.
        HardwareFault: they are far slower than the others.
    """
    kinds: dict[Fault, type[HardwareFault]] = {"wrong": WrongResult, "slow": HardwareFault}
    for fault, kind in kinds.items():
        own = [culprit for culprit in survey.culprits(fault) if rank in culprit.ranks]
        if own:
            raise kind("\n".join(culprit_lines(survey, fault, first=own[0])))


def require_measured(survey: Survey) -> None:
    """Check that every pair was measured.

    Raises:
        EnvironmentBroken: the time was up before that; names the first pair.
    """
    if survey.left_out:
        one, other = (survey.places.names[rank] for rank in survey.left_out[0])
        raise EnvironmentBroken(
            f"{len(survey.left_out)} of {len(survey.left_out) + len(survey.matrix.pairs)} pairs were not measured, "
            f"because the time was up: {survey.seconds:.3g} s have passed, {survey.planned_seconds:.3g} s planned. "
            f"The first of them is {one} with {other}. Look at what was measured (links-{survey.scope}.txt in the "
            "test's folder), or send less (--gpucluster-workload links.size=64MiB)"
        )
