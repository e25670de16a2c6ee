"""Do all ranks run the same tests? Pure: hashes in the normal case, a diff when they differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

from pytest_gpucluster.wording import first_line, rank_ranges

_SHOWN = 20


def digest(node_ids: Sequence[str]) -> str:
    """Return a hash of the tests: ranks may have found them in another order, but each as often."""
    text = "\n".join(sorted(node_ids)).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()


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
