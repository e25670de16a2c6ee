"""Which ranks are alive, and how rank 0 enforces the deadline of a phase on all of them.

A rank's exit is seen by its pidfd on this host, a frozen heartbeat anywhere, and /proc describes a silent one. After a
missed deadline rank 0 asks where each rank is, names the culprits, releases the ranks, and at last gives up.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pytest_gpucluster.agreement import exchange, hang_diagnosis
from pytest_gpucluster.agreement.exchange import AbortReason
from pytest_gpucluster.agreement.hang_diagnosis import Culprit, Where
from pytest_gpucluster.agreement.store import Store, post_event
from pytest_gpucluster.metrics.codec import read

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep, usually in a driver or file system",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, not yet reaped",
}


_LOOKS = 5


def _stat(process: Path) -> list[str]:
    """Return what the kernel lists of a process or thread from its state on, which is field 3 of stat in proc(5).

    Raises: OSError: it has ended.
    """
    return (process / "stat").read_text().rpartition(")")[2].split()


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None if there is none. Source: proc(5), stat 22."""
    try:
        return int(_stat(Path(f"/proc/{pid}"))[19])
    except OSError:
        return None


def process_state(pid: int) -> str:
    """Return in words what a process is doing. Source: proc(5), stat field 3."""
    try:
        letter = _stat(Path(f"/proc/{pid}"))[0]
    except OSError:
        return "gone"
    return f"{letter}: {_STATES.get(letter, 'unknown state')}"


def computes(seconds: float = 0.25) -> bool:
    """Return whether this process's main thread, or a descendant of this process, uses a CPU.

    It does if one of these threads is running or waits for a CPU in most of five looks, or if all of them together have
    used a tenth of the time. Other threads of this process are left out: they may spin while the main thread hangs.

    Args:
        seconds: how long to look, which is how long the caller waits; it must not be the main thread.

    Source: proc(5), stat fields 3, 14 and 15, and task/TID/children.
    """
    before = _working_threads()
    after = before
    ready = 0
    for _ in range(_LOOKS):
        time.sleep(seconds / _LOOKS)
        after = _working_threads()
        ready += any(state == "R" for state, _ in after.values())
    ticks = sum(used - before[thread][1] for thread, (_, used) in after.items() if thread in before)
    return 2 * ready > _LOOKS or ticks / os.sysconf("SC_CLK_TCK") >= 0.1 * seconds


def _working_threads() -> dict[int, tuple[str, int]]:
    """Return state and used clock ticks of this process's main thread and of all threads of its descendants."""
    own = os.getpid()
    found: dict[int, tuple[str, int]] = {}
    waiting = [own]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):  # it has ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
                if pid != own or int(task.name) == own:
                    fields = _stat(task)
                    found[int(task.name)] = fields[0], int(fields[11]) + int(fields[12])
    return found


class Siblings:
    """The other ranks on this host, each held by a pidfd, so that no recycled pid can be taken for one of them."""

    def __init__(self, who: Mapping[int, Mapping[str, Any]], rank: int) -> None:
        self._rank_of_fd: dict[int, int] = {}
        self.rank_fds: dict[int, int] = {}
        for peer, facts in who.items():
            if peer == rank or facts["host"] != who[rank]["host"] or not hasattr(os, "pidfd_open"):
                continue
            try:
                fd = os.pidfd_open(facts["pid"])
            except OSError:
                continue  # it has ended: its frozen heartbeat will show it
            # The same host name may hide another pid namespace (a container for each rank), or the number may have
            # been given to another process. Compared once the pidfd holds it, so that it cannot change any more.
            if start_time(facts["pid"]) != facts["start_time"]:
                os.close(fd)
                continue
            self._rank_of_fd[fd] = peer
            self.rank_fds[peer] = fd

    def watch(self, poller: select.poll) -> None:
        """Register every pidfd."""
        for fd in self.rank_fds.values():
            poller.register(fd, select.POLLIN)

    def rank_of(self, fd: int, poller: select.poll) -> int | None:
        """Return the rank whose process has ended, once."""
        rank = self._rank_of_fd.pop(fd, None)
        if rank is not None:
            poller.unregister(fd)
        return rank

    def ended(self) -> list[int]:
        """Return the ranks on this host whose process is gone right now."""
        poller = select.poll()
        self.watch(poller)
        fds = {fd for fd, _ in poller.poll(0)}
        return [rank for rank, fd in self.rank_fds.items() if fd in fds]

    def wait_for_end(self, ranks: Iterable[int], seconds: float) -> None:
        """Wait for the end of some siblings, but no longer than so."""
        until = time.monotonic() + seconds
        for fd in (self.rank_fds[rank] for rank in ranks if rank in self.rank_fds):
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(1000 * max(0.0, until - time.monotonic()))

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a sibling, if it still lives."""
        with contextlib.suppress(ProcessLookupError, KeyError):
            signal.pidfd_send_signal(self.rank_fds[rank], number)

    def close(self) -> None:
        """Close the pidfds."""
        for fd in self.rank_fds.values():
            os.close(fd)
        self._rank_of_fd.clear()
        self.rank_fds.clear()


class Heartbeats:
    """When each rank's heartbeat last changed, by this process's own clock: clocks of hosts are never compared."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._last: dict[int, tuple[bytes, float]] = dict.fromkeys(ranks, (b"", time.monotonic()))

    def update(self, beats: Mapping[int, bytes]) -> None:
        """Take the present beats."""
        now = time.monotonic()
        for rank, beat in beats.items():
            if self._last[rank][0] != beat:
                self._last[rank] = (beat, now)

    def silent_for(self, rank: int) -> float:
        """Return for how many seconds a rank's beat has stood still."""
        return time.monotonic() - self._last[rank][1]


class Liveness:
    """What this process knows of the lives of the ranks that it watches."""

    def __init__(self, who: Mapping[int, Mapping[str, Any]], rank: int) -> None:
        self.who = who
        self.siblings = Siblings(who, rank)
        # Rank 0 watches all; the others watch rank 0, and each its siblings' processes.
        self.heartbeats = Heartbeats([peer for peer in who if peer != rank] if rank == 0 else [0])

    def last_words(self, rank: int) -> str:
        """Return what faulthandler wrote for a sibling that died of a signal it could still report."""
        try:
            with open(self.who[rank]["fault_file"], encoding="utf-8", errors="backslashreplace") as file:
                text = file.read()
        except OSError:
            return ""
        return f" ({hang_diagnosis.fatal_error(text) or 'killed, or ended by os._exit'})"

    def describe_silence(self, rank: int) -> str:
        """Describe a process that does not answer, as far as this host can see it."""
        if rank not in self.siblings.rank_fds:
            return f"on {self.who[rank]['host']}, no heartbeat for {self.heartbeats.silent_for(rank):.0f} s"
        state = f"process {self.who[rank]['pid']} is {process_state(self.who[rank]['pid'])}"
        path = self.who[rank]["fault_file"]
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="backslashreplace") as file:
            place = hang_diagnosis.stack_location(file.read())
            if place:
                state += f", holding the GIL at {place}"
        return state


@dataclass(kw_only=True)
class WatchedPhase:
    """One phase, from the main thread's entering it until it enters the next. Times are of the monotonic clock."""

    number: int
    label: str
    deadline_seconds: float
    started: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    """By the wall clock, as the flight recorder stamps its entries."""
    in_body: bool = True
    """The main thread may be released. Afterwards it waits in the exchange, or is between two phases."""
    peer_failed: float | None = None
    peer_message: str = ""
    release_reason: str = ""
    overdue_since: float | None = None
    released_since: float | None = None
    culprits: dict[int, Culprit] = field(default_factory=dict)
    too_slow: str = ""
    """Why it is only slow, in a rehearsal, so that there is no culprit. Known on rank 0."""
    late: str = ""
    """Which deadline it has missed, in words. Rank 0 knows."""
    stuck: bool = False
    """A rank could not be released from it."""

    @property
    def overdue(self) -> float:
        """How many seconds the phase is past its deadline; negative before."""
        return time.monotonic() - self.started - self.deadline_seconds


ANSWER_SECONDS = 1.0
"""How long ranks have to say where they are, once a deadline has passed."""
_REHEARSED_ANSWER_SECONDS = 3.0
"""The same in a rehearsal on cpu, in which each also looks whether it computes, and may have to wait for a CPU."""


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """The steps after a missed deadline, one at each look of rank 0's watcher; none of them blocks.

    In a rehearsal on cpu, ranks that hang are distinguished from ranks that are only too slow.
    """

    store: Store
    liveness: Liveness
    names: Mapping[int, str]
    stuck_seconds: float
    end_at_once: Callable[[AbortReason], None]
    rehearsal: bool = False

    def hold(self, phase: WatchedPhase) -> None:
        """Past the deadline find out where everyone is, name the culprits, release, and give up at last."""
        if phase.overdue <= 0:
            return
        now = time.monotonic()
        if phase.overdue_since is None:
            if self._missing(phase):
                phase.overdue_since = now
                post_event(self.store, "overdue", number=phase.number)
            return
        if phase.released_since is None:
            ranks = list(self.liveness.who)
            answered = [r for r in ranks if self.store.check([f"where/{phase.number}/{r}"])]
            patience = _REHEARSED_ANSWER_SECONDS if self.rehearsal else ANSWER_SECONDS
            if len(answered) < len(ranks) and now - phase.overdue_since < patience:
                return
            self._blame(phase, answered)
            return
        missing = self._missing(phase)
        if missing and not phase.stuck and now - phase.released_since > self.stuck_seconds:
            self._give_up(phase, missing)

    def _missing(self, phase: WatchedPhase) -> list[int]:
        return [
            rank
            for rank in self.liveness.who
            if (phase.in_body if rank == 0 else not exchange.arrived(self.store, phase.number, rank))
        ]

    def _blame(self, phase: WatchedPhase, answered: Sequence[int]) -> None:
        missing = self._missing(phase)
        if not missing:
            return
        answers = {rank: json.loads(self.store.get(f"where/{phase.number}/{rank}")) for rank in answered}
        wheres = {rank: read(Where, answer, f"rank {rank}") for rank, answer in answers.items()}
        silent = {rank: self.liveness.describe_silence(rank) for rank in missing if rank not in answered}
        if self.rehearsal:
            phase.too_slow = hang_diagnosis.too_slow(
                wheres, silent, missing=missing, deadline_seconds=phase.deadline_seconds
            )
        found = {} if phase.too_slow else hang_diagnosis.culprits(wheres, silent, missing=missing)
        # Here at once: the ranks may answer before this rank has read its own event.
        phase.culprits = found
        if phase.deadline_seconds:  # 0 where a rank was silent before it
            phase.late = f"not finished within {phase.deadline_seconds:g} s"
        who = "; ".join(f"{self.names[rank]} {c.message}" for rank, c in list(found.items())[:3])
        reason = phase.too_slow or who or phase.late or "not finished"
        post_event(
            self.store,
            "release",
            number=phase.number,
            reason=reason,
            culprits={rank: asdict(culprit) for rank, culprit in found.items()},
        )
        phase.released_since = now = time.monotonic()
        phase.overdue_since = phase.overdue_since or now

    def _give_up(self, phase: WatchedPhase, missing: Sequence[int]) -> None:
        phase.stuck = True
        for rank in missing:
            if rank != 0 and not self.store.check([f"where/{phase.number}/{rank}"]):
                state = self.liveness.describe_silence(rank)  # by now more may be known of it
                phase.culprits[rank] = hang_diagnosis.silent_culprit(state)
        names = ", ".join(self.names[rank] for rank in missing)
        causes = "; ".join(c.message for rank, c in phase.culprits.items() if rank in missing)
        message = f"{names} cannot be released from {phase.label}" + (f": {causes}" if causes else "")
        abort = AbortReason(name="rank stuck", message=message, exit=11, culprits=list(missing))
        if 0 in missing:
            self.end_at_once(abort)
            return
        post_event(self.store, "end", **asdict(abort))
        for rank in missing:
            unknown = Culprit(message="cannot be released", text="The rank could not be released.")
            body = {"outcome": "hung", **asdict(phase.culprits.get(rank, unknown))}
            exchange.answer_for(self.store, phase.number, rank, body)
