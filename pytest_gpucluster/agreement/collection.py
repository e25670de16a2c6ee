"""Do all ranks run the same tests, with the same workload? Pure: hashes in the normal case, a diff when they differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

from pytest_gpucluster.text import first_line, rank_ranges

_SHOWN = 20


def digest(node_ids: Sequence[str]) -> str:
    """Return a hash of the tests: ranks may have found them in another order, but each as often."""
    text = "\n".join(sorted(node_ids)).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()


def digest_of(values: Mapping[str, str]) -> str:
    """Return a hash of a workload's keys and values."""
    return digest([f"{key}={value}" for key, value in values.items()])


def disagreement(
    expected: Sequence[str], found: Mapping[int, Sequence[str]], names: Mapping[int, str], *, subset: bool
) -> tuple[str, str] | None:
    """Compare the tests of other ranks with rank 0's.

    Args:
        expected: the node ids that rank 0 is going to run.
        found: rank -> the node ids that it has collected.
        subset: rank 0 left tests out by its cache (``--lf`` and the like), so that other ranks may know more tests.

    Returns:
        None if they agree, else one line for the report and a diff of every group of deviating ranks.
    """
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for rank, node_ids in found.items():
        missing = _without(expected, node_ids)
        extra = () if subset else _without(node_ids, expected)
        if missing or extra:
            groups.setdefault((missing, extra), []).append(rank)
    if not groups:
        return None
    (missing, extra), ranks = next(iter(groups.items()))
    who = names[ranks[0]] if len(ranks) == 1 else rank_ranges(ranks)
    verbs = ("lacks", "alone has") if len(ranks) == 1 else ("lack", "alone have")
    parts = [
        f"{what} {len(tests)} test{'s' if len(tests) > 1 else ''} ({tests[0]}{', …' if len(tests) > 1 else ''})"
        for what, tests in zip(verbs, (missing, extra), strict=True)
        if tests
    ]
    message = first_line(f"different tests collected: {who} {' and '.join(parts)}")
    return message, "\n\n".join(_diff(rank_ranges(ranks), missing, extra) for (missing, extra), ranks in groups.items())


def workload_disagreement(
    workloads: Mapping[int, Mapping[str, str]], names: Mapping[int, str], *, subset: bool
) -> tuple[str, str] | None:
    """Compare the workloads of other ranks with the first one's. With different sizes a collective would hang.

    Args:
        workloads: rank -> key -> value; nothing where no test uses a workload.
        subset: the first rank left tests out by its cache, maybe all of those that use a workload.

    Returns:
        None if they agree, else one line for the report and every key of every group of deviating ranks.
    """
    first, expected = next(iter(workloads.items()))
    if subset and not expected:
        return None
    groups: dict[tuple[tuple[str, str, str], ...], list[int]] = {}
    for rank, values in workloads.items():
        keys = dict.fromkeys([*expected, *values])
        differences = tuple(
            (key, values.get(key, "nothing"), expected.get(key, "nothing"))
            for key in keys
            if values.get(key) != expected.get(key)
        )
        if differences:
            groups.setdefault(differences, []).append(rank)
    if not groups:
        return None
    differences, ranks = next(iter(groups.items()))
    who, verb = (names[ranks[0]], "has") if len(ranks) == 1 else (rank_ranges(ranks), "have")
    key, value, other = differences[0]
    more = f" (and {len(differences) - 1} more keys)" if len(differences) > 1 else ""
    message = first_line(f"different workloads: {who} {verb} {key} {value}, and {names[first]} has {other}{more}")
    told = []
    for differences, ranks in groups.items():
        who = ", ".join(names[rank] for rank in ranks[:_SHOWN]) + (", …" if len(ranks) > _SHOWN else "")
        told.append("\n".join([f"{names[first]} against {who}:", *(f"{k}: {b} | {a}" for k, a, b in differences)]))
    hint = "The same workloads.yaml must lie on every host, and every rank must get the same --gpucluster-workload."
    return message, "\n\n".join([*told, hint])


def _without(node_ids: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Return what is in the first and not, or not as often, in the second."""
    return tuple((Counter(node_ids) - Counter(others)).elements())


def _diff(who: str, missing: Sequence[str], extra: Sequence[str]) -> str:
    lines = [f"rank 0 against {who}:"]
    for sign, tests, told in (
        ("-", missing, f"only on rank 0, missing on {who}"),
        ("+", extra, f"only on {who}"),
    ):
        lines += [f"{sign} {node_id}    ({told})" for node_id in tests[:_SHOWN]]
        if len(tests) > _SHOWN:
            lines.append(f"{sign} and {len(tests) - _SHOWN} more")
    return "\n".join(lines)
