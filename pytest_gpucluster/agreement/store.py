"""The rendezvous store, the control plane of a run outside any rank that may die; event log and board of notices on it.

Under torchrun it is the agent's TCPStore, which outlives every rank. For launchers that bring none (srun, mpirun, a
bare Kubernetes Job) rank 0 first starts a store in a process in a session of its own (this module): the other ranks may
still have to read why the run ended. It notifies them at once when rank 0 exits without a message, and it exits by
itself when every rank has left, or some time after rank 0. A single process has torch's HashStore, in its memory.

A TCPStore client is one connection behind one mutex: a blocking call blocks every other thread on it. So each rank has
two: ``main`` for the main thread's exchanges, which block, and ``side`` for the watcher, which never does.

The event log is one ordered list of failures, for all ranks. Events are level-triggered: they stay, so a rank that
reads late still sees them. Nothing is posted while all is well.

On a :class:`Board` ranks leave notices for each other without a process group: before any is made, and also where none
can be made.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from pytest_gpucluster.device.process_group import forget_abort
from pytest_gpucluster.errors import StoreError
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.text import first_line


class Store(Protocol):
    """What the agreement needs of a store: the subset of torch.distributed's Store that it calls."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: Sequence[str], /) -> list[bytes]: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: Sequence[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> None: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Stores:
    """The two connections of a rank, and a way to make a further one for each process group."""

    main: Store
    side: Store
    for_group: Callable[[str], Any]
    """Makes, under the given prefix, a ``torch.distributed.Store`` on a connection of its own: a rank that waits in it
    for a peer that never comes is freed by closing that connection, and the agreement goes on over the others."""
    after_abort: Callable[[], object] = lambda: None
    """Takes back what NCCL's watchdog leaves in the store at a timeout; a later group would read it as its own."""


@contextlib.contextmanager
def store_errors(who: str = "") -> Iterator[None]:
    """Turn the errors of torch's store inside (its DistError family) into a StoreError that begins with ``who``."""
    try:
        yield
    except RuntimeError as error:
        raise StoreError(f"{who}the rendezvous store has stopped answering: {first_line(str(error))}") from error


def connect(facts: RankFacts, *, timeout_seconds: float) -> Stores:
    """Connect to the run's store.

    Every rank must call this. The keys of one run never meet those of another, nor those of an earlier restart.

    Raises:
        StoreError: nothing answers at the store's address within the time.
    """
    import torch.distributed

    dist: Any = torch.distributed  # re-exports its stores, which are C++ classes, without declaring them
    if facts.world_size == 1:
        memory = dist.HashStore()
        return Stores(main=memory, side=memory, for_group=lambda name: dist.HashStore())
    address = f"{facts.master_addr}:{facts.master_port}"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        tcp = dist.TCPStore(str(facts.master_addr), int(facts.master_port or 0), is_master=False, timeout=timeout)
        prefix = prefix_of(facts)
        main = dist.PrefixStore(prefix, tcp)
        side = dist.PrefixStore(prefix, tcp.clone())
    except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
        check = (
            "All ranks are on this node: check that rank 0 has started, and that all were given the same MASTER_PORT"
        )
        if facts.nnodes > 1:
            check = (
                "Check that MASTER_ADDR and MASTER_PORT name the first node as the other nodes can reach it, and that "
                "no firewall lies between"
            )
        raise StoreError(
            f"{facts}: no store answers at {address} within {timeout_seconds:g} s ({first_line(str(error))}). "
            f"{check} (launcher: {facts.launcher})"
        ) from error
    return Stores(
        main=main,
        side=side,
        for_group=lambda name: dist.PrefixStore(f"{prefix}/torch/{name}", tcp.clone()),
        after_abort=lambda: forget_abort(tcp),
    )


def prefix_of(facts: RankFacts) -> str:
    """Return what every key of a run begins with."""
    return f"gpucluster/{facts.run_id}/{facts.restart_count}"


_FIRST_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 0.25
"""From hundreds of ranks that wait for long, the store must not be asked more than it can answer."""
_KEYS_AT_ONCE = 16


class Board:
    """The board of one run.

    Args:
        store: of the main thread.
        rank: of this process.
        number: of the phase in progress, the same on all ranks: no notice is read in a later phase, or by a later
            attempt at the same test.
    """

    def __init__(self, store: Store, rank: int, number: Callable[[], int]) -> None:
        self._store, self._rank, self._number = store, rank, number
        self._posted: list[str] = []
        self._posted_in = number()

    @store_errors()
    def post(self, name: str, value: Any) -> None:
        """Leave a notice of plain JSON types, once under each name in a phase.

        This rank's notices of earlier phases are removed: every rank has left those phases.

        Raises: StoreError if the store has stopped answering.
        """
        key = self._key(name, self._rank)
        if self._number() != self._posted_in:
            while self._posted:
                self._store.delete_key(self._posted.pop())
            self._posted_in = self._number()
        self._posted.append(key)
        self._store.set(key, json.dumps(value))

    @store_errors()
    def read(self, name: str, ranks: Sequence[int], *, within_seconds: float) -> dict[int, Any]:
        """Return rank -> notice of those ranks that have left one within the time.

        It looks in small steps instead of waiting in one call, so that what ends the test is handled during the wait.

        Raises: StoreError if the store has stopped answering.
        """
        until = time.monotonic() + within_seconds
        keys = {rank: self._key(name, rank) for rank in ranks}
        pause = _FIRST_POLL_SECONDS
        waiting = list(ranks)
        while waiting:
            # Few keys are asked for at once: a thousand ranks that each ask for a thousand keys, many times a second,
            # would keep the store from answering anybody.
            if self._store.check([keys[rank] for rank in waiting[:_KEYS_AT_ONCE]]):
                waiting = waiting[_KEYS_AT_ONCE:]
                pause = _FIRST_POLL_SECONDS
            elif time.monotonic() >= until:
                break
            else:
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
                pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        missing = {rank for rank in waiting if not self._store.check([keys[rank]])}
        present = [rank for rank in ranks if rank not in missing]
        texts = self._store.multi_get([keys[rank] for rank in present]) if present else []
        return {rank: json.loads(text) for rank, text in zip(present, texts, strict=True)}

    def gather(self, name: str, value: Any, ranks: Sequence[int], *, within_seconds: float) -> dict[int, Any]:
        """Leave a notice and return those of these ranks, as :meth:`read`. All of these ranks must call this."""
        self.post(name, value)
        return self.read(name, ranks, within_seconds=within_seconds)

    def round_trip_seconds(self) -> float:
        """Return how long the store takes to answer, from this rank.

        Raises: StoreError if it does not.
        """
        begin = time.perf_counter()
        self.post("round-trip", 0)
        self.read("round-trip", [self._rank], within_seconds=0.0)
        # Each of the three calls (set, check, get) is one round trip.
        return (time.perf_counter() - begin) / 3

    def _key(self, name: str, rank: int) -> str:
        return f"board/{self._number()}/{name}/{rank}"


_COUNT = "ev/count"
_ABANDONED_AFTER_SECONDS = 2.0
"""A ticket whose text has not come by then belongs to a rank that died between the two."""


def post_event(store: Store, kind: str, **body: Any) -> None:
    """Append an event. Any rank may call this, from any connection."""
    ticket = store.add(_COUNT, 1)
    store.set(f"ev/{ticket}", json.dumps({"kind": kind, **body}))


class EventLog:
    """A reader's place in the log."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = 0
        self._stalled_since: float | None = None

    def unread(self) -> list[dict[str, Any]]:
        """Return the events that came since the last call, in the order of the log, without ever blocking."""
        events: list[dict[str, Any]] = []
        total = self._store.add(_COUNT, 0)
        while self._seen < total:
            key = f"ev/{self._seen + 1}"
            if not self._store.check([key]):
                now = time.monotonic()
                self._stalled_since = self._stalled_since or now
                if now - self._stalled_since < _ABANDONED_AFTER_SECONDS:
                    break
            else:
                events.append(json.loads(self._store.get(key)))
            self._seen += 1
            self._stalled_since = None
        return events


_LINGER_SECONDS = 20.0
_LAST_WORDS_SECONDS = 0.2
"""A rank says goodbye before its last look at the store."""
_POLL_SECONDS = 0.1
_NO_LOOKUPS = "attempts:0"
"""For RES_OPTIONS: DNS is not asked at all. The store's only thread looks up the name of each address that connects,
for torch's logs, one after the other, and answers no rank during the look-up. This process looks up nothing else.

Source: resolv.conf(5), which RES_OPTIONS amends; torch/csrc/distributed/c10d/socket.cpp, formatSockAddr.
"""


def start_store(facts: RankFacts, *, timeout_seconds: float = 120.0) -> None:
    """Start the store's process on this host and return once it listens. Rank 0 only.

    Raises:
        StoreError: the port is taken, or the process did not come up in time.
    """
    command = [sys.executable, "-m", "pytest_gpucluster.agreement.store", str(facts.master_port), str(os.getpid())]
    command += [prefix_of(facts), str(facts.world_size)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "RES_OPTIONS": f"{os.environ.get('RES_OPTIONS', '')} {_NO_LOOKUPS}".strip()},
    )
    assert process.stdout is not None
    import torch.distributed  # noqa: F401  # needed next in any case, and the new process is busy with the same

    ready, _, _ = select.select([process.stdout], [], [], timeout_seconds)
    line = process.stdout.readline().decode("utf-8", "backslashreplace").strip() if ready else ""
    process.stdout.close()
    if line != "listening":
        process.kill()
        process.wait()
        raise StoreError(
            f"no store could be started on port {facts.master_port} of {facts.hostname} "
            f"({line or f'no answer within {timeout_seconds:g} s'}). Another job may use the port: "
            "set MASTER_PORT to a free one on every rank"
        )
    process.returncode = 0  # it outlives this process on purpose, which is no reason for a warning


def main(port: int, pid: int, prefix: str, world_size: int) -> int:
    """Host the store for as long as a rank may need it. Rank 0, whose process is ``pid``, starts it."""
    pidfd = os.pidfd_open(pid)

    import torch.distributed

    dist: Any = torch.distributed  # re-exports its C++ classes without declaring them

    try:
        tcp = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        print(next(iter(str(error).splitlines()), "no reason given"), flush=True)
        return 1
    print("listening", flush=True)
    sys.stdout.close()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # replaces the closed stream until the process ends
    select.select([pidfd], [], [])
    store = dist.PrefixStore(prefix, tcp)
    if not store.check(["bye/0"]):
        post_event(
            store, "lost", rank=0, message="its process has exited without a message (killed, or ended by os._exit)"
        )
    others = [f"bye/{rank}" for rank in range(1, world_size)]
    until = time.monotonic() + _LINGER_SECONDS
    while not store.check(others) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    time.sleep(_LAST_WORDS_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
