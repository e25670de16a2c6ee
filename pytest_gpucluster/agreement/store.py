"""The rendezvous store: the control plane of a run, outside any rank that may die.

Under torchrun it is the agent's TCPStore, which outlives every rank. Without torchrun rank 0 first starts a store in a
process of its own (``agreement.host``). A single process keeps its store in memory.

A TCPStore client is one connection behind one mutex: a blocking call blocks every other thread on it. So each rank has
two: ``main`` for the main thread's exchanges, which block, and ``side`` for the watcher, which never does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from pytest_gpucluster.errors import StoreError
from pytest_gpucluster.launch.launchers import RankFacts


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
