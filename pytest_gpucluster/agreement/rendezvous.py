"""The roll call before any process group is made: every rank reports, and rank 0 decides whether the run may start.

It also compares the tests that the ranks have collected, and their workloads. That is pure.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pytest_gpucluster.agreement.exchange import AbortReason
from pytest_gpucluster.agreement.preflight import by_value
from pytest_gpucluster.agreement.store import Store, store_errors
from pytest_gpucluster.errors import LaunchError, PreflightError, StoreError
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.text import first_line, rank_ranges

_POLL_SECONDS = 0.02
_LOOK_SECONDS = 1.0
_STEP_SECONDS = 0.05
_RANKS_PER_STEP = 128
"""Above this many ranks each asks less often, so that the store's load stays what it is at this many."""
_VERDICT_MARGIN_SECONDS = 60.0
Who = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RollCall:
    """What every rank knows after the roll call.

    ``who`` holds all ranks on rank 0, elsewhere this rank and its siblings on the same host; :func:`fetch_reports`
    fetches all.
    """

    hosts: Sequence[str] = ()
    who: Mapping[int, Who] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    """What rank 0 reports to all: the recorder's process, for one."""

    @property
    def first_host(self) -> str:
        """The host of rank 0; "" before the roll call."""
        return self.hosts[0] if self.hosts else ""


def join(
    store: Store,
    facts: RankFacts,
    me: Who,
    *,
    timeout_seconds: float,
    check: Callable[[Mapping[int, Who]], AbortReason | None],
    shared: Mapping[str, Any],
    is_hopeless: Callable[[], bool] = lambda: False,
) -> RollCall:
    """Report this rank and wait for rank 0's word. Every rank must call this.

    ``check`` runs on rank 0 only, with whatever ranks have reported by the deadline; or before it, if ``is_hopeless``
    finds that a rank will never report. On the other ranks it finds that rank 0 will never answer.

    Raises:
        Refused: the ranks do not suit; it is the same on every rank.
        LaunchError: another process has reported as this rank.
        StoreError: rank 0 gave no word in time, or has ended, or the store has gone.
    """
    with store_errors(f"{facts}: "):
        if store.add(f"taken/{facts.rank}", 1) != 1:
            raise LaunchError(
                f"{facts}: another process of this run is this rank already. A pytest that is started in a test needs "
                "an environment without the launcher's variables (RANK, WORLD_SIZE, TORCHELASTIC_RUN_ID ...)"
            )
        store.set(f"hb/{facts.rank}", "0")
        store.set(f"who/{facts.rank}", json.dumps(me))
        store.add("who/count", 1)
        if facts.rank == 0:
            ranks = range(facts.world_size)
            _wait(lambda: store.add("who/count", 0) >= len(ranks), timeout_seconds, _POLL_SECONDS, is_hopeless)
            who = fetch_reports(store, [rank for rank in ranks if store.check([f"who/{rank}"])])
            refusal = check(who)
            hosts = [str(who[rank]["host"]) if rank in who else "?" for rank in ranks]
            plain = None if refusal is None else asdict(refusal)
            store.set("join", json.dumps({"hosts": hosts, "shared": dict(shared), "refusal": plain}))
            if refusal is not None:
                raise Refused(refusal)
            return RollCall(hosts=hosts, who=who, shared=shared)
        step = _STEP_SECONDS * max(1.0, facts.world_size / _RANKS_PER_STEP)
        seconds = timeout_seconds + _VERDICT_MARGIN_SECONDS
        came = _wait(lambda: store.check(["join"]), seconds, step, is_hopeless)
        if came is None:
            raise StoreError(f"{facts}: rank 0 has ended before it called the roll; see its output")
        if not came:
            raise StoreError(
                f"{facts}: rank 0 gave no word within {timeout_seconds:g} s after the start; see its output and the "
                "report on its host"
            )
        answer = json.loads(store.get("join"))
        if answer["refusal"] is not None:
            store.set(f"bye/{facts.rank}", "refused")
            raise Refused(AbortReason.from_json(answer["refusal"]))
        here = [rank for rank, host in enumerate(answer["hosts"]) if host == me["host"] or rank == 0]
        return RollCall(hosts=answer["hosts"], who=fetch_reports(store, here), shared=answer["shared"])


def fetch_reports(store: Store, ranks: Sequence[int]) -> dict[int, Who]:
    """Return what ranks have reported of themselves. Any time after :func:`join`."""
    texts = store.multi_get([f"who/{rank}" for rank in ranks])
    return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}


class Refused(PreflightError):
    """The run does not start. Carries the reason."""

    def __init__(self, refusal: AbortReason) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


def _wait(is_over: Callable[[], bool], seconds: float, step: float, is_hopeless: Callable[[], bool]) -> bool | None:
    """Return whether it has come in time; None if it never will.

    Not in one blocking call, so that Ctrl-C and SIGTERM are handled; nor in short ones, each of which logs a warning.
    """
    deadline = time.monotonic() + seconds
    next_look = time.monotonic() + _LOOK_SECONDS
    while not is_over():
        if time.monotonic() >= deadline:
            return False
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + _LOOK_SECONDS
            if is_hopeless():
                return None
        time.sleep(step)
    return True


_SHOWN = 20


def collection_difference(
    expected: Sequence[str],
    found: Mapping[int, Sequence[str]],
    names: Mapping[int, str],
    *,
    subset: bool,
    kind: Literal["test", "value"] = "test",
    first: int = 0,
) -> tuple[str, str] | None:
    """Compare what other ranks have collected with what the first one has: node ids, or values of the workload.

    With another workload a collective would hang.

    Args:
        expected: what the first rank is going to run, or to measure with.
        found: rank -> what it has collected.
        names: rank -> how to call it.
        subset: the first rank left tests out by its cache (``--lf`` and the like), so that other ranks may have more.
        kind: what is compared.
        first: the first rank.

    Returns:
        None if they agree, else one line for the report and a diff of every group of deviating ranks.
    """
    groups = by_value(
        {rank: (_without(expected, ids), () if subset else _without(ids, expected)) for rank, ids in found.items()}
    )
    groups.pop(((), ()), None)
    if not groups:
        return None
    (missing, extra), ranks = next(iter(groups.items()))
    who = names[ranks[0]] if len(ranks) == 1 else rank_ranges(ranks)
    verbs = ("lacks", "alone has") if len(ranks) == 1 else ("lack", "alone have")
    parts = [
        f"{what} {len(items)} {kind}{'s' if len(items) > 1 else ''} ({items[0]}{', …' if len(items) > 1 else ''})"
        for what, items in zip(verbs, (missing, extra), strict=True)
        if items
    ]
    what = "different tests collected" if kind == "test" else "different workloads"
    texts = [_diff(f"rank {first}", rank_ranges(ranks), missing, extra) for (missing, extra), ranks in groups.items()]
    if kind == "value":
        texts.append("All hosts need the same workloads.yaml, and all ranks the same --gpucluster-workload.")
    return first_line(f"{what}: {who} {' and '.join(parts)}"), "\n\n".join(texts)


def _without(node_ids: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Return what is in the first and not, or not as often, in the second."""
    return tuple((Counter(node_ids) - Counter(others)).elements())


def _diff(first: str, who: str, missing: Sequence[str], extra: Sequence[str]) -> str:
    lines = [f"{first} against {who}:"]
    for sign, items, where in (
        ("-", missing, f"only on {first}, missing on {who}"),
        ("+", extra, f"only on {who}"),
    ):
        lines += [f"{sign} {item}    ({where})" for item in items[:_SHOWN]]
        if len(items) > _SHOWN:
            lines.append(f"{sign} and {len(items) - _SHOWN} more")
    return "\n".join(lines)
