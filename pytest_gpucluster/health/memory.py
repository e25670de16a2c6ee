"""Is all of the memory there, and is it free but for this job?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.metrics.finding import Finding

LEAST_FREE_RATIO = 0.95
"""Part of the memory that nobody else may use. Source: this suite's rule; what the driver keeps for itself, which is
1 to 2 %, is not counted as used."""


def check(situation: Situation) -> Iterator[Finding]:
    """Hold the size against the promise, and what others use against the limit; name them."""
    yield from _size(situation)
    free = free_ratio(situation)
    if free is None:
        return
    strangers = _strangers(situation)
    if free < LEAST_FREE_RATIO:
        taken = taken_bytes(situation) or 0
        by = "; ".join(strangers) or "no process that NVML names"
        yield situation.finding(
            "memory_taken",
            "environment",
            f"{taken / 1e9:.2f} GB are used beside this job, {100 * free:.1f} % are free: {by}",
            allowed=f"at least {100 * LEAST_FREE_RATIO:g} % free beside this job's own ranks",
            remedy="end the named process and start again, or reset the GPU where none is named",
        )
    elif strangers and not _may_be_this_one(situation):
        yield situation.finding(
            "stranger",
            "note",
            f"others have a context on this GPU: {'; '.join(strangers)}",
            allowed="only this job, for numbers that mean something",
            remedy="find out what it does, and measure again without it if numbers are low",
        )


def free_ratio(situation: Situation) -> float | None:
    """Return the part of the memory that nobody but this job uses; None where NVML does not tell."""
    total, taken = situation.before.get("memory.total"), taken_bytes(situation)
    return None if not total or taken is None else 1 - taken / total


def taken_bytes(situation: Situation) -> int | None:
    """Return the bytes that others use, or None where NVML does not tell.

    In a container NVML may name processes by numbers of the host. This job's ranks are then not among them, and what
    this process's allocator holds is taken for its own; its context, some 0.5 GB, counts as somebody else's.
    """
    used = situation.before.get("memory.used")
    if used is None:
        return None
    listed = _listed(situation)
    own = [listed[pid] for pid in situation.own_pids if pid in listed]
    known = sum(bytes_ for bytes_ in own if bytes_ is not None)
    return max(0, int(used) - max(known, situation.held_bytes))


def _size(situation: Situation) -> Iterator[Finding]:
    total, promise = situation.before.get("memory.total"), situation.promise
    # A slice has a part of the memory, and the promise is about the whole.
    if promise is None or total is None or situation.is_slice or total >= promise.memory_gb * 1e9:
        return
    yield situation.finding(
        "memory_size",
        "hardware",
        f"{total / 1e9:.2f} GB of device memory",
        allowed=f"at least {promise.memory_gb:g} GB, as the data sheet of the {situation.sku} says",
        remedy="compare the product with the order, and have the vendor look at the card",
    )


def _strangers(situation: Situation) -> list[str]:
    """Name the processes that are not this job's."""
    listed = _listed(situation)
    named = []
    for pid, used in listed.items():
        if pid not in situation.own_pids:
            size = "an unknown amount" if used is None else f"{used / 1e9:.2f} GB ({used} bytes)"
            named.append(f"{situation.who.get(pid) or f'pid {pid}'} with {size}")
    return named


def _may_be_this_one(situation: Situation) -> bool:
    """Tell whether NVML names one process only, by a number that is not of this namespace: then it is this one."""
    listed = _listed(situation)
    return len(listed) == 1 and all(pid in situation.who and not situation.who[pid].known for pid in listed)


def _listed(situation: Situation) -> dict[int, int | None]:
    """Return pid -> bytes of the processes that NVML names."""
    return dict(situation.before.get("processes") or ())
