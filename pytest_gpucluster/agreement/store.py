"""The rendezvous store, the control plane of a run outside any rank that may die, and the board of notices on it.

Under torchrun it is the agent's TCPStore, which outlives every rank. Without torchrun rank 0 first starts a store in a
process of its own (``agreement.store_process``). A single process keeps its store in memory.

A TCPStore client is one connection behind one mutex: a blocking call blocks every other thread on it. So each rank has
two: ``main`` for the main thread's exchanges, which block, and ``side`` for the watcher, which never does.

On a :class:`Board` ranks leave notices for each other without a process group: before any is made, and also where none
can be made.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

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
    connect_seconds: float = 0.0
    """How long it took to connect to a store that was up already; waiting for one to come up is left out."""


class MemoryStore:
    """A store for a run of one process: the same calls, in a dictionary."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._timeout = 300.0

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._changed:
            self.wait(keys, timedelta(seconds=self._timeout))
            return [self._values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._changed:
            if self._values.get(key, b"") == expected.encode():
                self._values[key] = desired.encode()
                self._changed.notify_all()
            return self._values.get(key, expected.encode())

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds()):
                missing = [key for key in keys if key not in self._values]
                # A RuntimeError, as torch's DistStoreError is one: callers catch that.
                raise RuntimeError(f"{', '.join(missing)} did not come within {timeout.total_seconds():g} s")

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()


def connect(facts: RankFacts, *, timeout_seconds: float) -> Stores:
    """Connect to the run's store.

    Every rank must call this. The keys of one run never meet those of another, nor those of an earlier restart.

    Raises:
        StoreError: nothing answers at the store's address within the time.
    """
    if facts.world_size == 1:
        memory = MemoryStore()
        return Stores(main=memory, side=memory, for_group=_store_in_memory)

    dist = _torch_distributed()
    address = f"{facts.master_addr}:{facts.master_port}"
    timeout = timedelta(seconds=timeout_seconds)
    begin = time.monotonic()
    try:
        tcp = dist.TCPStore(str(facts.master_addr), int(facts.master_port or 0), is_master=False, timeout=timeout)
        if not facts.agent_store:  # rank 0 has just started it
            begin = time.monotonic()
        prefix = prefix_of(facts)
        main = dist.PrefixStore(prefix, tcp)
        side = dist.PrefixStore(prefix, tcp.clone())
    except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
        first = next(iter(str(error).splitlines()), "")
        raise StoreError(
            f"rank {facts.rank} on {facts.hostname}: no store answers at {address} within {timeout_seconds:g} s "
            f"({first}). {_what_to_check(facts)} (launcher: {facts.launcher})"
        ) from error
    return Stores(
        main=main,
        side=side,
        for_group=lambda name: dist.PrefixStore(f"{prefix}/torch/{name}", tcp.clone()),
        # Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, kStoreDumpKey, on the store below all prefixes.
        after_abort=lambda: tcp.delete_key("exception_dump"),
        connect_seconds=time.monotonic() - begin,
    )


def _what_to_check(facts: RankFacts) -> str:
    if facts.nnodes == 1:
        return "All ranks are on this node: check that rank 0 has started, and that all were given the same MASTER_PORT"
    return (
        "Check that MASTER_ADDR and MASTER_PORT name the first node as the other nodes can reach it, and that no "
        "firewall lies between"
    )


def prefix_of(facts: RankFacts) -> str:
    """Return what every key of a run begins with."""
    return f"gpucluster/{facts.run_id}/{facts.restart_count}"


def _store_in_memory(name: str) -> Any:
    return _torch_distributed().HashStore()


def _torch_distributed() -> Any:
    """Import torch late. Its stores are C++ classes, which it re-exports without declaring them."""
    import torch.distributed

    return torch.distributed


_FIRST_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 0.25
"""From hundreds of ranks that wait for long, the store must not be asked more than it can answer."""


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

    def post(self, name: str, value: Any) -> None:
        """Leave a notice of plain JSON types, once under each name in a phase.

        This rank's notices of earlier phases are removed: every rank has left those phases.

        Raises: StoreError if the store has stopped answering.
        """
        key = self._key(name, self._rank)
        try:
            if self._number() != self._posted_in:
                while self._posted:
                    self._store.delete_key(self._posted.pop())
                self._posted_in = self._number()
            self._posted.append(key)
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:  # torch's DistError family
            raise StoreError(f"the rendezvous store has stopped answering: {first_line(str(error))}") from error

    def read(self, name: str, ranks: Sequence[int], *, within_seconds: float) -> dict[int, Any]:
        """Return rank -> notice of those ranks that have left one within the time.

        It looks in small steps instead of waiting in one call, so that what ends the test is handled during the wait.

        Raises: StoreError if the store has stopped answering.
        """
        until = time.monotonic() + within_seconds
        keys = {rank: self._key(name, rank) for rank in ranks}
        pause = _FIRST_POLL_SECONDS
        waiting = list(ranks)
        try:
            while waiting:
                # One key is asked for, and the others only once it is there: a thousand ranks that each ask for a
                # thousand keys, many times a second, would keep the store from answering anybody.
                if self._store.check([keys[waiting[0]]]):
                    waiting = waiting[_present(lambda few: self._store.check([keys[rank] for rank in few]), waiting) :]
                    pause = _FIRST_POLL_SECONDS
                elif time.monotonic() >= until:
                    break
                else:
                    time.sleep(min(pause, max(0.0, until - time.monotonic())))
                    pause = min(2 * pause, _LONGEST_POLL_SECONDS)
            missing = {rank for rank in waiting if not self._store.check([keys[rank]])}
            present = [rank for rank in ranks if rank not in missing]
            texts = self._store.multi_get([keys[rank] for rank in present]) if present else []
        except RuntimeError as error:
            raise StoreError(f"the rendezvous store has stopped answering: {first_line(str(error))}") from error
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


def _present(check: Callable[[Sequence[int]], bool], ranks: Sequence[int]) -> int:
    """Return how many of these ranks, from the first one on, are there; the first one is. Asks a few times only.

    >>> there, asked = {4, 5, 6, 9}, []
    >>> _present(lambda few: asked.append(few) or there.issuperset(few), [4, 5, 6, 7, 8, 9])
    3
    """
    known, unknown = 1, len(ranks)
    if check(ranks):
        return unknown
    while unknown - known > 1:
        middle = (known + unknown) // 2
        if check(ranks[known:middle]):
            known = middle
        else:
            unknown = middle
    return known
