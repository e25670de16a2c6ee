"""What monitors each test's body on this rank: the node's sampler, and the counters of GPU and node.

Every body is watched. A criterion's counters are taken before and after it: what has changed is recorded with its
measurements, and what must never change (uncorrected memory errors, an Xid that demands action, a lost link) makes the
test fail on the rank that has counted it. A counter without which the health of this kind of GPU cannot be judged, and
which is not reported, is an error. Nothing here communicates with other ranks.
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

TAKING_SECONDS = 30.0
"""Counters are read within milliseconds; a kernel log by journalctl takes seconds. What takes longer hangs."""

Who = Mapping[str, Any]


def sources_of(node: Sequence[Who], rank: int) -> Sources:
    """Return whom this rank asks for its counters. Tests put their own in the place of this.

    Args:
        node: what the ranks of this node have said of themselves (``inventory.identify``), this rank among them.
        rank: of these.
    """
    if not any(who["rank"] == rank and who["gpu"] for who in node):
        return Sources.of(node, rank=rank)
    try:
        return Sources.of(node, rank=rank, nvml=nvml.PyNvml())
    except EnvironmentBroken as error:
        return Sources.of(node, rank=rank, why_no_nvml=str(error))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank this is, and how it is watched."""

    node: Sequence[Who]
    rank: int
    sku: Callable[[], str | None]
    """The kind of GPU, which says what must be told of it."""
    interval_seconds: Callable[[], float] = lambda: INTERVAL_SECONDS
    looks_at_ports: bool = True
    """Of local workers each is a world of its own, and the first rank of its node: one of them looks at the node's
    ports, so that a link that goes down is one failure and not one of each GPU."""

    @property
    def me(self) -> Who:
        """What this rank has said of itself."""
        return next(who for who in self.node if who["rank"] == self.rank)


class Accompaniment:
    """This rank's part in it, for the whole session."""

    def __init__(self) -> None:
        self._process: NodeSampler | None = None
        self._address: str | None = None
        self._why_not = "no sampler was started on this node"
        self._place: Place | None = None
        self._link: Link | None = None
        self._sources: Sources | None = None

    def start(self) -> dict[str, Any]:
        """Start this node's sampler; return what the other ranks of the node must be told (see :meth:`told`)."""
        try:
            self._process = telemetry.start_sampler()
        except OSError as error:
            return {"address": None, "why_not": f"the node's sampler could not be started: {error}"}
        return {"address": self._process.address, "why_not": ""}

    def told(self, sampler: Mapping[str, Any] | None) -> None:
        """Take what :meth:`start` has returned, on this rank or on the node's first one."""
        if sampler is not None:
            self._address, self._why_not = sampler["address"], str(sampler["why_not"])

    def join(self, place: Place) -> None:
        """Take this rank's place. Before the first test."""
        self._place = place

    def window(self) -> Window:
        """Return a window on this rank's GPU, not yet open."""
        if self._link is not None and self._link.is_unseen and self._process is None:
            # Slurm's --gpus-per-task shows each rank its own GPU only, NVML's too: then each has a sampler of its own.
            self.told(self.start())
            self._link.close()
            self._link = None
        if self._link is None:
            gpu = self._place.me["gpu"] if self._place is not None else None
            interval = self._place.interval_seconds() if self._place is not None else INTERVAL_SECONDS
            self._link = Link(self._address, gpu["uuid"] if gpu else None, interval, why_not=self._why_not)
        return self._link.window()

    def company(self, *, counts: bool) -> Company:
        """Return what goes along with one test. ``counts``: its counters are taken, as a criterion's are."""
        sources = self._my_sources() if counts else None
        return Company(window=self.window(), sources=sources, required=self._required if sources else tuple)

    def close(self) -> None:
        """Leave the sampler; end it, if this rank has started it."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.close()
            self._process = None

    def _my_sources(self) -> Sources | None:
        if self._sources is None and self._place is not None:
            self._sources = sources_of(self._place.node, self._place.rank)
            if not self._place.looks_at_ports:
                self._sources = self._sources.without_ports()
        return self._sources

    def _required(self) -> tuple[str, ...]:
        """Return the counters without which this kind of GPU cannot be judged, as in the health criterion."""
        if self._place is None or not self._place.me["gpu"]:
            return ()
        promise = promise_of(self._place.sku())
        return tuple(query for query in (promise.required_queries if promise else ANY_GPU) if query in QUERIES)


@dataclass(kw_only=True)
class Company:
    """What goes along with one test's body: :meth:`begin` before it, :meth:`end` after it, however it ends.

    Neither raises. Both wait a bounded time.
    """

    window: Window
    sources: Sources | None
    required: Callable[[], Sequence[str]]
    taking_seconds: float = TAKING_SECONDS
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    """What the GPU did during the body, and what has changed; nothing where there is no GPU and no change."""
    fault: HardwareFault | None = None
    _problem: EnvironmentBroken | None = None
    _before: Counters | str | None = None
    _is_open: bool = False

    def begin(self) -> None:
        """Take the counters, then begin to watch."""
        if self.sources is not None:
            self._before = self._take(self.sources)
        self.window.__enter__()
        self._is_open = True

    def end(self) -> None:
        """Stop watching, then take the counters again. Once; further calls do nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self.window.__exit__(None, None, None)
        told = self.window.summary()
        if self.sources is not None:
            told |= self._compare(self._take(self.sources))
        self.telemetry = told

    def require_well(self) -> None:
        """Raise what the counters say of the body that has just passed.

        Raises:
            HardwareFault: something has been counted that must not be; each finding names GPU or host.
            EnvironmentBroken: a counter that must be told is not.
        """
        problem = self.fault or self._problem
        if problem is not None:
            raise problem

    def require_no_fault(self) -> None:
        """Raise a fault of the hardware that was counted during a body that decides nothing itself, such as a skip.

        Raises: HardwareFault.
        """
        if self.fault is not None:
            raise self.fault

    def beside(self, measured: Sequence[Measurement]) -> list[Measurement]:
        """Return the measurements with what has changed beside each: it may explain the value."""
        changed = self.telemetry.get("counters")
        if not changed:
            return list(measured)
        return [replace(one, telemetry={**one.telemetry, "counters": changed}) for one in measured]

    def _take(self, sources: Sources) -> Counters | str:
        """Take the counters in another thread, or return why they cannot be: a driver that hangs must not hang this."""
        taken: list[Counters | str] = []

        def take() -> None:
            try:
                taken.append(counters.take(sources))
            except Exception as error:  # whatever a driver or a file system comes up with; it is told
                taken.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=take, name="gpucluster-counters", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            return str(error)
        thread.join(self.taking_seconds)
        return taken[0] if taken else f"no answer within {self.taking_seconds:g} s"

    def _compare(self, after: Counters | str) -> dict[str, Any]:
        """Hold the counters against those before; return what goes on record."""
        for when, taken in (("before", self._before), ("after", after)):
            if not isinstance(taken, Counters):
                missing = f"the counters could not be taken {when} the test: {taken}"
                if self.required():
                    self._problem = EnvironmentBroken(f"{missing}\nwhat to do: look at `nvidia-smi -q` on this host")
                return {"counters_not_available": {"all": missing}}
        assert isinstance(self._before, Counters)
        assert isinstance(after, Counters)
        found = counters.changes(self._before, after)
        self._judge(found)
        told = {"counters": _plain(found), "counter_notes": list(found.notes)}
        if self.sources is not None and self.sources.has_gpu:  # a rehearsal lacks nothing
            told |= {"counters_not_available": dict(found.missing)}
        return {key: value for key, value in told.items() if value}

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
                f"NVML does not tell {lacking[0]}{where}: {found.missing[lacking[0]]}; whether it has changed during"
                " this test is not known, and must be"
                + "".join(f"\n- {query}: {found.missing[query]}" for query in lacking)
                + "\nwhat to do: as for the criterion gpu.health, which asks for the same"
            )


def _plain(found: Changes) -> dict[str, float]:
    return {name: int(by) if by == int(by) else by for name, by in found.changed.items()}
