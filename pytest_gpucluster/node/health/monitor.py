"""Monitoring of each test's body on this rank: telemetry from the node's sampler, and fault counters of GPU and node.

Telemetry is taken during every body. A criterion's counters are read before and after it: changes are recorded with
its measurements, and a counter that must never change (uncorrected memory errors, an Xid that demands action, a lost
link) fails the test on the rank that read it. A required counter of this SKU that is not available is an error. Nothing
here communicates with other ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.metrics.datasheets import ANY_GPU, promise_of
from pytest_gpucluster.metrics.measurement import Measurement
from pytest_gpucluster.node import nvml
from pytest_gpucluster.node.health import counters, telemetry
from pytest_gpucluster.node.health.counters import QUERIES, Changes, Counters, Sources
from pytest_gpucluster.node.health.telemetry import INTERVAL_SECONDS, Link, NodeSampler, Window
from pytest_gpucluster.node.infiniband import Adapters

READ_SECONDS = 30.0
"""Counters are read within milliseconds; a kernel log by journalctl takes seconds. A read that takes longer hangs."""


def sources_of(node: Sequence[Mapping[str, Any]], rank: int) -> Sources:
    """Return the sources of this rank's counters. Tests replace it."""
    if not any(who["rank"] == rank and who["gpu"] for who in node):
        return Sources.of(node, rank=rank)
    try:
        return Sources.of(node, rank=rank, nvml=nvml.open_nvml())
    except EnvironmentBroken as error:
        return Sources.of(node, rank=rank, why_no_nvml=str(error))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank this is, and how it is monitored."""

    node: Sequence[Mapping[str, Any]]
    rank: int
    sku: Callable[[], str | None]
    """The SKU, which determines the required counters."""
    interval_seconds: Callable[[], float] = lambda: INTERVAL_SECONDS
    reads_ports: bool = True
    """Each local worker (pytest-xdist) takes itself for the first rank of its node: one of them reads the node's ports,
    so that a link that goes down is one failure and not one for each GPU."""

    @property
    def me(self) -> Mapping[str, Any]:
        """This rank's inventory."""
        return next(who for who in self.node if who["rank"] == self.rank)


class RankMonitor:
    """The monitoring of this rank, for the whole session."""

    def __init__(self) -> None:
        self._process: NodeSampler | None = None
        self._address: str | None = None
        self._why_not = "no sampler was started on this node"
        self._place: Place | None = None
        self._link: Link | None = None
        self._sources: Sources | None = None

    def start(self) -> dict[str, Any]:
        """Start this node's sampler; return how to reach it, for :meth:`use_sampler` on the node's ranks."""
        try:
            self._process = telemetry.start_sampler()
        except OSError as error:
            return {"address": None, "why_not": f"the node's sampler could not be started: {error}"}
        return {"address": self._process.address, "why_not": ""}

    def use_sampler(self, sampler: Mapping[str, Any] | None) -> None:
        """Use the sampler that :meth:`start` started, on this rank or on the node's first one."""
        if sampler is not None:
            self._address, self._why_not = sampler["address"], str(sampler["why_not"])

    def join(self, place: Place) -> None:
        """Set this rank's place. Call it before the first test."""
        self._place = place

    def window(self) -> Window:
        """Return a window on this rank's GPU, not yet open."""
        if self._link is not None and self._link.is_unseen and self._process is None:
            # Slurm's --gpus-per-task shows each rank its own GPU only, NVML's too: then each has a sampler of its own.
            self.use_sampler(self.start())
            self._link.close()
            self._link = None
        if self._link is None:
            gpu = self._place.me["gpu"] if self._place is not None else None
            interval = self._place.interval_seconds() if self._place is not None else INTERVAL_SECONDS
            self._link = Link(self._address, gpu["uuid"] if gpu else None, interval, why_not=self._why_not)
        return self._link.window()

    def test_monitor(self, *, counters: bool) -> TestMonitor:
        """Return the monitor of one test. ``counters``: its counters are read, as a criterion's are."""
        sources = self._own_sources() if counters else None
        return TestMonitor(window=self.window(), sources=sources, required=self._required if sources else tuple)

    def close(self) -> None:
        """Disconnect from the sampler; end it if this rank started it."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.close()
            self._process = None

    def _own_sources(self) -> Sources | None:
        if self._sources is None and self._place is not None:
            self._sources = sources_of(self._place.node, self._place.rank)
            if not self._place.reads_ports:
                self._sources = replace(self._sources, adapters=Adapters, of_switches=False)
        return self._sources

    def _required(self) -> tuple[str, ...]:
        """Return the counters that this SKU must have, as in the health criterion."""
        if self._place is None or not self._place.me["gpu"]:
            return ()
        promise = promise_of(self._place.sku())
        return tuple(query for query in (promise.required_queries if promise else ANY_GPU) if query in QUERIES)


@dataclass(kw_only=True)
class TestMonitor:
    """The monitoring of one test: :meth:`begin` before its body, :meth:`end` after it, however it ends.

    Neither raises. Both wait a bounded time.
    """

    __test__ = False  # pytest must not collect it

    window: Window
    sources: Sources | None
    required: Callable[[], Sequence[str]]
    read_seconds: float = READ_SECONDS
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    """Telemetry and changed counters of the body; empty where there is no GPU and no change."""
    fault: HardwareFault | None = None
    _problem: EnvironmentBroken | None = None
    _before: Counters | str | None = None
    _is_open: bool = False

    def begin(self) -> None:
        """Read the counters, then open the telemetry window."""
        if self.sources is not None:
            self._before = self._read(self.sources)
        self.window.__enter__()
        self._is_open = True

    def end(self) -> None:
        """Close the telemetry window, then read the counters again. Further calls do nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self.window.__exit__(None, None, None)
        telemetry = self.window.summary()
        if self.sources is not None:
            telemetry |= self._compare(self._read(self.sources))
        self.telemetry = telemetry

    def require_healthy(self) -> None:
        """Raise the fault that the counters show for this body.

        Raises:
            HardwareFault: a counter grew that must not; each finding names GPU or host.
            EnvironmentBroken: a required counter is not available.
        """
        problem = self.fault or self._problem
        if problem is not None:
            raise problem

    def require_no_fault(self) -> None:
        """Raise a hardware fault counted during a body without a verdict of its own, such as a skip.

        Raises: HardwareFault.
        """
        if self.fault is not None:
            raise self.fault

    def annotate(self, measured: Sequence[Measurement]) -> list[Measurement]:
        """Return the measurements, each with the changed counters, which may explain its value."""
        changed = self.telemetry.get("counters")
        if not changed:
            return list(measured)
        return [replace(one, telemetry={**one.telemetry, "counters": changed}) for one in measured]

    def _read(self, sources: Sources) -> Counters | str:
        """Read the counters in another thread, for a driver may hang; return the reason where that fails."""
        results: list[Counters | str] = []

        def read() -> None:
            try:
                results.append(counters.read(sources))
            except Exception as error:  # drivers and file systems fail in many ways; the message is reported
                results.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=read, name="gpucluster-counters", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            return str(error)
        thread.join(self.read_seconds)
        return results[0] if results else f"no answer within {self.read_seconds:g} s"

    def _compare(self, after: Counters | str) -> dict[str, Any]:
        """Compare the counters with those before; return what is recorded."""
        for when, result in (("before", self._before), ("after", after)):
            if not isinstance(result, Counters):
                missing = f"the counters could not be read {when} the test: {result}"
                if self.required():
                    self._problem = EnvironmentBroken(f"{missing}\nwhat to do: look at `nvidia-smi -q` on this host")
                return {"counters_not_available": {"all": missing}}
        assert isinstance(self._before, Counters)
        assert isinstance(after, Counters)
        found = counters.changes(self._before, after)
        self._judge(found)
        changed = {name: counters.whole(by) for name, by in found.changed.items()}
        record: dict[str, Any] = {"counters": changed, "counter_notes": list(found.notes)}
        if self.sources is not None and self.sources.has_gpu:  # a rehearsal on cpu needs no counters
            record |= {"counters_not_available": dict(found.missing)}
        return {key: value for key, value in record.items() if value}

    def _judge(self, found: Changes) -> None:
        try:
            found.require_no_fault()
        except HardwareFault as fault:
            self.fault = fault
            return
        lacking = [query for query in self.required() if query in found.missing]
        if lacking:
            where = f" on {self.sources.gpu}" if self.sources is not None else ""
            self._problem = EnvironmentBroken(
                f"NVML does not report {lacking[0]}{where}: {found.missing[lacking[0]]}; it is unknown whether it"
                " changed during this test"
                + "".join(f"\n- {query}: {found.missing[query]}" for query in lacking)
                + "\nwhat to do: as for the criterion gpu.health, which requires the same"
            )
