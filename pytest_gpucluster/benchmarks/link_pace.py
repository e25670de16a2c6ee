"""How much is sent over a link, and how often, in the time that a round may take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpucluster.benchmarks.link_payload import WORD_BYTES

WINDOWS = 5
"""In each direction. The median of as many stands one or two that something else has disturbed."""

PROBE_SHARE = 64
"""The first look at a link sends this part of the payload, so that a link that is far too slow is found out early."""

_LEAST_PROBE_BYTES = 4096
_MOST_CALLS = 500
"""In one window: a GPU's queue has room for about a thousand launches, and then the host waits for it."""

_PATIENCE = 4
"""A single call may take so many windows. A slower link gets less to send."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """``calls`` of ``words`` words of 32 bits each between two looks at the clock."""

    calls: int
    words: int


def window_seconds(round_seconds: float) -> float:
    """Return how long a window should take: a round has that many in each direction, and one of each to warm up."""
    return round_seconds / (2 * (WINDOWS + 1))


def probe_bytes(payload_bytes: int) -> int:
    """Return how much the first look at a link sends.

    >>> probe_bytes(256 * 2**20) / 2**20, probe_bytes(65536), probe_bytes(400)
    (4.0, 4096, 400)
    """
    share = payload_bytes // PROBE_SHARE // WORD_BYTES * WORD_BYTES
    return min(payload_bytes, max(_LEAST_PROBE_BYTES, share))


def pace(probe_seconds: float, *, payload_bytes: int, round_seconds: float) -> Pace:
    """Decide from the time that the first look took.

    >>> pace(100e-6, payload_bytes=256 * 2**20, round_seconds=0.6)
    Pace(calls=8, words=67108864)
    >>> pace(1.0, payload_bytes=256 * 2**20, round_seconds=0.6)
    Pace(calls=1, words=1048576)
    """
    window, probe = window_seconds(round_seconds), probe_bytes(payload_bytes)
    whole = probe_seconds * payload_bytes / probe
    if whole <= _PATIENCE * window:
        return Pace(calls=max(1, min(_MOST_CALLS, round(window / max(whole, 1e-9)))), words=payload_bytes // WORD_BYTES)
    fitting = int(payload_bytes * _PATIENCE * window / whole)
    return Pace(calls=1, words=max(probe, fitting) // WORD_BYTES)
