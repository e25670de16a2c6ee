"""Many simulated ranks in one process: they speak the protocol with the product's own code, and measure nothing.

    python perf/scale_crowd.py RANKS FIRST LAST RESULT     # started by perf/scale.py, with the launcher's variables

Each rank has its two connections to the store, joins, agrees on the collection, and posts its outcome of every phase;
it waits for each verdict as a rank does. The watcher's work, reading the event log at each tick and a heartbeat each
second, is done for all ranks by one thread over each rank's own connection.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from comparison import TEMPORARY

GPUS_PER_NODE = 8
SAMPLES = 200
"""Of each measurement: some 4 kB a rank."""
TRACEBACK_BYTES = 20_000
_NO_PROCESS = 10_000_000
"""Above every process number of Linux."""
_LONGEST_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tests of all simulated ranks; in the last one all may fail.

    ``failing`` is "equal" or "different" as the texts of the failures are, empty where no rank fails, and "slow" where
    each measures its GPU of a simulated cluster, of which one is too slow.
    """

    suite: str
    tests: int
    failing: str

    @property
    def node_ids(self) -> list[str]:
        """The ids of the tests, in their order."""
        return [f"{self.suite}::test_measures[{number}]" for number in range(self.tests)]


class Counted:
    """A store that counts its operations by name."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self._counts[name] += 1
            return operation(*arguments)

        return counted


@dataclass
class Connected:
    """A simulated rank with its connections."""

    rank: int
    stores: Any
    counts: Counter[str] = field(default_factory=Counter)


def facts_of(rank: int, world_size: int) -> Any:
    """Return the facts of a simulated rank, on a node of ``GPUS_PER_NODE`` ranks."""
    from pytest_gpucluster.launch.launchers import detect

    local = min(GPUS_PER_NODE, world_size)
    place = {"RANK": rank, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local, "GROUP_RANK": rank // local}
    return detect({**os.environ, **{name: str(value) for name, value in place.items()}}, host_of(rank))


def host_of(rank: int) -> str:
    """Return the name of a simulated rank's node, as a simulated cluster has it."""
    return f"gpu-{rank // GPUS_PER_NODE:02d}"


def slow_rank(world_size: int) -> int:
    """Return the rank whose GPU is 20 % slower than the others."""
    return world_size - GPUS_PER_NODE // 2 - 1 if world_size > GPUS_PER_NODE else world_size - 1


def product_tflops(rank: int, world_size: int) -> float:
    """Return the rate of ten products on a rank's GPU of a simulated cluster of H100, by the clock of that GPU."""
    from pytest_gpucluster.simulation import cluster, device, faults, machine

    slow = slow_rank(world_size)
    described = cluster.load(f"{-(-world_size // GPUS_PER_NODE)}x{min(GPUS_PER_NODE, world_size)}xH100").with_faults(
        [faults.parse(f"slow-gpu:{host_of(slow)}/{slow % GPUS_PER_NODE}=20%")]
    )
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        world = device.World(described, machine.Machine(Path(folder), host_of(rank), rank % GPUS_PER_NODE))
        healthy = world.rates.of("matmul.bf16.tflops", n=8192).value
        for _ in range(10):
            world.work(1 / (healthy * world.factor(world.me)), device.PRODUCTS)
        return 10 / world.machine.now


class Crowd:
    """The ranks of one process."""

    def __init__(self, ranks: Sequence[int], world_size: int, plan: Plan) -> None:
        self._ranks, self._world_size, self._plan = ranks, world_size, plan
        self._connected: dict[int, Connected] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.connected_between = (0.0, 0.0)
        """Seconds of the machine's clock: when the first rank began to connect, and when the last one had connected."""
        self.sleepers: list[subprocess.Popen[bytes]] = []
        self.failures: list[str] = []

    def run(self) -> None:
        """Connect all ranks, then run each to the end of the session."""
        import torch.distributed  # noqa: F401  # not a part of connecting

        begin = time.monotonic()
        self._on_each(self._connect)
        self.connected_between = (begin, time.monotonic())
        if self.failures:
            return
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        self._on_each(self._run_rank)
        self._over.set()
        watcher.join(10.0)

    def operations(self) -> Counter[str]:
        """Return the operations of all ranks."""
        total: Counter[str] = Counter()
        for connected in self._connected.values():
            total += connected.counts
        return total

    def _on_each(self, step: Callable[[int], None]) -> None:
        def guarded(rank: int) -> None:
            try:
                step(rank)
            except Exception:  # any error must reach the program that started this one
                self.failures.append(f"simulated rank {rank}: {traceback.format_exc()}")

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in self._ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _connect(self, rank: int) -> None:
        from dataclasses import replace

        from pytest_gpucluster.agreement.store import connect

        stores = connect(facts_of(rank, self._world_size), timeout_seconds=120.0)
        connected = Connected(rank=rank, stores=stores)
        connected.stores = replace(
            stores, main=Counted(stores.main, connected.counts), side=Counted(stores.side, connected.counts)
        )
        with self._lock:
            self._connected[rank] = connected

    def _run_rank(self, rank: int) -> None:
        from pytest_gpucluster.agreement.exchange import Exchange
        from pytest_gpucluster.agreement.rendezvous import join

        stores = self._connected[rank].stores
        join(
            stores.main,
            facts_of(rank, self._world_size),
            self._facts(rank),
            timeout_seconds=120.0,
            check=lambda who: None,
            shared={},
        )
        exchange = Exchange(stores, rank, self._world_size)

        def agree(at: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
            exchange.begin(at)
            return exchange.run(body, lambda bodies: {}, deadline_seconds=300.0)

        ids = self._plan.node_ids
        verdict = agree("collection", {"ids": ids, "workload": [], "errors": [], "slowdown": 1.0})
        if verdict.get("ids") != ids:
            raise RuntimeError(f"rank 0 collected something else: {verdict!r:.300}")
        for number, nodeid in enumerate(ids):
            fails = self._plan.failing if number == len(ids) - 1 else ""
            for when in ("setup", "call", "teardown"):
                verdict = agree(f"{when} of {nodeid}", self._outcome(rank, when, fails).to_json())
                if "ended" in verdict or verdict.get("stop"):
                    raise RuntimeError(f"the run has ended: {verdict!r:.300}")
        agree("the end of the session", {"exit": 1 if self._plan.failing else 0})

    def _facts(self, rank: int) -> dict[str, Any]:
        """Return the facts of rank 0, with this rank's place."""
        store = self._connected[rank].stores.main
        store.wait(["who/0"], timedelta(seconds=120))
        who: dict[str, Any] = json.loads(store.get("who/0"))
        local = min(GPUS_PER_NODE, self._world_size)
        place = {"rank": rank, "host": host_of(rank), "node_rank": rank // local, "local_rank": rank % local}
        gpu = who["gpu"] and who["gpu"] | {"index": rank % local, "uuid": f"GPU-{rank:08x}"}
        return who | place | {"gpu": gpu, "pid": self._process_of(rank)}

    def _process_of(self, rank: int) -> int:
        """Return the number of a process in place of the rank: rank 0 can signal those of its own node."""
        if host_of(rank) != host_of(0):
            return _NO_PROCESS + rank
        sleeper = subprocess.Popen(["sleep", str(_LONGEST_SECONDS)])
        self.sleepers.append(sleeper)
        return sleeper.pid

    def _outcome(self, rank: int, when: str, fails: str) -> Any:
        from pytest_gpucluster.agreement.exchange import RankOutcome
        from pytest_gpucluster.metrics.measurement import Measurement

        if when != "call":
            return RankOutcome(rank=rank, outcome="passed")
        if fails in ("equal", "different"):
            # A common text, and the address of an object, which differs.
            text = f"AssertionError: <Thing object at 0x{0x7F0000000000 + rank * 4096:x}>\n"
            message = "it is wrong"
            if fails == "different":
                text, message = f"AssertionError: {rank} of {self._world_size} is wrong\n", f"it is wrong by {rank}"
            return RankOutcome(rank=rank, outcome="failed", message=message, text=text * (TRACEBACK_BYTES // len(text)))
        is_judged = self._plan.failing == "slow"
        value = product_tflops(rank, self._world_size) if is_judged else 100.5
        samples = tuple(value + (rank * 7919 + number * 104729) % 1000003 / 1000003 for number in range(SAMPLES))
        found = Measurement(
            metric="matmul.bf16.tflops", value=value, unit="TFLOPS", samples=samples, record_only=not is_judged
        )
        return RankOutcome(rank=rank, outcome="passed", measurements=[found.to_json()])

    def _watch(self) -> None:
        """Read the event log and send heartbeats for each rank, evenly over the tick of a world of this size."""
        from pytest_gpucluster.agreement.watchdog import tick_seconds

        tick = tick_seconds(self._world_size)
        connected = list(self._connected.values())
        next_beat = dict.fromkeys(self._connected, 0.0)
        begin, turn = time.monotonic(), 0
        while not self._over.is_set():
            place = connected[turn % len(connected)]
            place.stores.side.add("ev/count", 0)
            if time.monotonic() >= next_beat[place.rank]:
                next_beat[place.rank] = time.monotonic() + 1.0
                place.stores.side.set(f"hb/{place.rank}", str(time.monotonic_ns()))
                place.stores.side.multi_get(["hb/0"])
            turn += 1
            self._over.wait(max(0.0, begin + turn * tick / len(connected) - time.monotonic()))


def main(world_size: int, first: int, last: int, plan: Plan, result: Path) -> int:
    """Run the ranks from ``first`` to ``last``, and write what was counted."""
    threading.stack_size(512 * 1024)
    crowd = Crowd(range(first, last + 1), world_size, plan)
    try:
        crowd.run()
    finally:
        for sleeper in crowd.sleepers:
            sleeper.kill()
            sleeper.wait()
    result_json = {
        "connected_between": crowd.connected_between,
        "operations": dict(crowd.operations()),
        "cpu_seconds": time.process_time(),
        "failures": crowd.failures[:1],
    }
    result.write_text(json.dumps(result_json), encoding="utf-8")
    sys.stdout.flush()
    os._exit(1 if crowd.failures else 0)  # the stores' threads need no shutdown


if __name__ == "__main__":
    _ranks, _first, _last, _suite, _tests, _failing, _result = sys.argv[1:]
    _plan = Plan(suite=_suite, tests=int(_tests), failing="" if _failing == "passing" else _failing)
    sys.exit(main(int(_ranks), int(_first), int(_last), _plan, Path(_result)))
