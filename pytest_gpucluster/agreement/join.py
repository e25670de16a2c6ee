"""The roll call: every rank reports before any process group is made, and rank 0 says whether they suit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.agreement.store import Store
from pytest_gpucluster.errors import LaunchError, PreflightError, StoreError
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.text import first_line

_POLL_SECONDS = 0.02
_LOOK_SECONDS = 1.0
_STEP_SECONDS = 0.05
_RANKS_PER_STEP = 128
"""Above this many ranks each asks less often, so that the store's load stays what it is at this many."""
_VERDICT_MARGIN_SECONDS = 60.0
SLOW_CONNECT_SECONDS = 5.0
"""From here on it is told. Source: this suite's rule; a resolver asks again after 5 s (resolv.conf(5), timeout)."""
Who = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why the run does not start: one line, the whole text, and the exit code."""

    message: str
    text: str
    exit: int


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What every rank knows after the roll call.

    ``who`` holds all ranks on rank 0, elsewhere this rank and its siblings on the same host; :func:`roll` fetches all.
    """

    hosts: Sequence[str]
    who: Mapping[int, Who]
    shared: Mapping[str, Any]
    """What rank 0 tells all: the recorder's process, for one."""


def join(
    store: Store,
    facts: RankFacts,
    me: Who,
    *,
    timeout_seconds: float,
    check: Callable[[Mapping[int, Who]], Refusal | None],
    shared: Mapping[str, Any],
    is_hopeless: Callable[[], bool] = lambda: False,
) -> Joined:
    """Report this rank and wait for rank 0's word. Every rank must call this.

    ``check`` runs on rank 0 only, with whatever ranks have reported by the deadline; or before it, if ``is_hopeless``
    finds that a rank will never report. On the other ranks it finds that rank 0 will never answer.

    Raises:
        Refused: the ranks do not suit; it is the same on every rank.
        LaunchError: another process has reported as this rank.
        StoreError: rank 0 gave no word in time, or has ended, or the store has gone.
    """
    try:
        return _report(store, facts, me, timeout_seconds, check, shared, is_hopeless)
    except RuntimeError as error:  # torch's DistError family
        raise StoreError(f"{facts}: the rendezvous store is gone: {first_line(str(error))}") from error


def _report(
    store: Store,
    facts: RankFacts,
    me: Who,
    timeout_seconds: float,
    check: Callable[[Mapping[int, Who]], Refusal | None],
    shared: Mapping[str, Any],
    is_hopeless: Callable[[], bool],
) -> Joined:
    if store.add(f"taken/{facts.rank}", 1) != 1:
        raise LaunchError(
            f"{facts}: another process of this run is this rank already. A pytest that is started in a test needs an "
            "environment without the launcher's variables (RANK, WORLD_SIZE, TORCHELASTIC_RUN_ID ...)"
        )
    store.set(f"hb/{facts.rank}", "0")
    store.set(f"who/{facts.rank}", json.dumps(me))
    store.add("who/count", 1)
    if facts.rank == 0:
        who = _wait_for_all(store, facts, timeout_seconds, is_hopeless)
        refusal = check(who)
        hosts = [str(who[rank]["host"]) if rank in who else "?" for rank in range(facts.world_size)]
        answer = {
            "hosts": hosts,
            "shared": dict(shared),
            "refusal": None
            if refusal is None
            else {"message": refusal.message, "text": refusal.text, "exit": refusal.exit},
        }
        store.set("join", json.dumps(answer))
        if refusal is not None:
            raise Refused(refusal)
        return Joined(hosts=hosts, who=who, shared=shared)
    deadline = time.monotonic() + timeout_seconds + _VERDICT_MARGIN_SECONDS
    next_look = time.monotonic() + _LOOK_SECONDS
    # Not in one blocking call, so that SIGTERM is heard meanwhile; nor in short ones, of which each one is a warning.
    while not store.check(["join"]):
        if time.monotonic() >= deadline:
            raise StoreError(
                f"{facts}: rank 0 gave no word within {timeout_seconds:g} s after the start; see its output and the "
                "report on its host"
            )
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + _LOOK_SECONDS
            if is_hopeless():
                raise StoreError(f"{facts}: rank 0 has ended before it called the roll; see its output")
        time.sleep(_STEP_SECONDS * max(1.0, facts.world_size / _RANKS_PER_STEP))
    answer = json.loads(store.get("join"))
    if answer["refusal"] is not None:
        store.set(f"bye/{facts.rank}", "refused")
        raise Refused(Refusal(**answer["refusal"]))
    here = [rank for rank, host in enumerate(answer["hosts"]) if host == me["host"] or rank == 0]
    return Joined(hosts=answer["hosts"], who=roll(store, here), shared=answer["shared"])


def roll(store: Store, ranks: Sequence[int]) -> dict[int, Who]:
    """Return what ranks have reported of themselves. Any time after :func:`join`."""
    texts = store.multi_get([f"who/{rank}" for rank in ranks])
    return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}


def slow_connection(who: Mapping[int, Who]) -> str:
    """Return which rank took longest to connect to the store, and why that may be; nothing where none took long."""
    seconds = {rank: float(one.get("connect_seconds", 0.0)) for rank, one in who.items()}
    slow = [rank for rank in seconds if seconds[rank] >= SLOW_CONNECT_SECONDS]
    if not slow:
        return ""
    longest = max(slow, key=lambda rank: seconds[rank])
    return (
        f"{len(slow)} of {len(who)} ranks took {SLOW_CONNECT_SECONDS:g} s or more to connect, rank {longest} on "
        f"{who[longest].get('host', '?')} {seconds[longest]:.1f} s. The store looks up the name of each address that "
        "connects, one after the other: see how long `getent hosts ::ffff:ADDRESS` takes on the first node, and "
        "docs/scale.md for what helps; criterion dns measures it"
    )


class Refused(PreflightError):
    """The run does not start. Carries the :class:`Refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


def _wait_for_all(
    store: Store, facts: RankFacts, timeout_seconds: float, is_hopeless: Callable[[], bool]
) -> dict[int, Who]:
    # In small steps instead of one blocking call, so that Ctrl-C and SIGTERM are heard meanwhile.
    deadline = time.monotonic() + timeout_seconds
    next_look = time.monotonic() + _LOOK_SECONDS
    while store.add("who/count", 0) < facts.world_size and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + _LOOK_SECONDS
            if is_hopeless():
                break
    present = [rank for rank in range(facts.world_size) if store.check([f"who/{rank}"])]
    return roll(store, present)
