"""The rates of copies between the host and all GPUs of a node at once, as bytes of each in a common window."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.group import Ranks, Samples
from pytest_gpucluster.benchmarks.host_link import TOGETHER, HostLinkResult, check_sizes, host_memory
from pytest_gpucluster.benchmarks.host_link_copies import DIRECTIONS, KEPT_WORDS, HostCopies, words_on_host
from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.clock import Clock
from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement, WrongResult
from pytest_gpucluster.metrics.sampling import MIN_SAMPLES, Sampling
from pytest_gpucluster.metrics.time_budget import MEASURING, WARM_UP, counted, verified
from pytest_gpucluster.metrics.units import require_one_of, show_bytes

SAMPLE_SECONDS = 0.25
"""Maximum time of all windows of a sample."""

_MOST_WINDOWS = 1000
_WARM_UP_SAMPLES = 3
"""A minimum: the first copy takes far longer than the others, and the number of copies grows by steps."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much each rank copies in a window, by its number in the group, and how many windows make a sample."""

    copies: tuple[int, ...]
    windows: int = 1

    def after(self, seconds: Sequence[float], *, most: int, sampling: Sampling) -> Plan:
        """Plan the next sample, from the time of one copy on each rank: all are to end at about the same time.

        The fastest rank makes as many copies as are kept, the others as many as they can in that time. Growth is by
        steps, for the first copies take far longer. Pure: all ranks get the same plan from the same seconds.

        >>> from pytest_gpucluster.metrics.sampling import Sampling
        >>> times = Sampling(warmup_seconds=0, window_seconds=2, longest_seconds=2, tolerance_ratio=1)
        >>> Plan(copies=(8, 8)).after([0.01, 0.02], most=8, sampling=times)
        Plan(copies=(8, 4), windows=3)
        """
        common = most * min(seconds)
        copies = tuple(
            max(1, min(most, 10 * before, round(common / each)))
            for before, each in zip(self.copies, seconds, strict=True)
        )
        window = max(count * each for count, each in zip(copies, seconds, strict=True))
        target = min(SAMPLE_SECONDS, sampling.window_seconds / MIN_SAMPLES)
        return Plan(copies=copies, windows=max(1, min(_MOST_WINDOWS, round(target / window))))


@releases_memory()
def measure_host_links_concurrently(
    group: dist.ProcessGroup,
    device: torch.device,
    direction: str,
    *,
    payload_bytes: int,
    copies: int,
    sampling: Sampling,
    cpus: frozenset[int] | None = None,
    during: AbstractContextManager[object] | None = None,
) -> HostLinkResult:
    """Measure copies in one direction on all ranks of a group at once, in bytes a second of this rank.

    Collective: every rank of the group must call this, with the same direction, sizes and sampling.

    A window is a barrier and then a number of copies on each rank, chosen so that all end at about the same time. The
    window is as long as the slowest rank takes, and the rate of each rank is its bytes over that: no rank's rate gains
    from copies after others have ended. The first rank decides for all whether more samples are needed, by the slowest
    rank's rate; the time of the windows counts.

    Args:
        group: the ranks that copy at once, as a rule those of a node.
        device: this rank's GPU. On cpu both sides are host memory.
        direction: "h2d" or "d2h".
        payload_bytes: of one copy, a multiple of 8.
        copies: kept in buffers, and verified after each window.
        sampling: how long to warm up and to measure, and the required confidence.
        cpus: near this rank's device: host memory is placed on their NUMA node.
        during: entered while samples are taken.

    Returns: the result; its series is inconclusive on all ranks where the slowest rank's is.

    Raises:
        WrongResult: a copy on this rank is wrong; raised after the last collective.
        InconclusiveMeasurement: a rank's clock did not advance; on all ranks.
        EnvironmentBroken: the ranks do not measure the same, or one has too little memory; on all ranks.
        ValueError: there is no such direction.
    """
    require_one_of("direction", direction, DIRECTIONS)
    ranks, by = Ranks(group, device), accelerator(device)
    name = f"{device}: host link {direction} together, {show_bytes(payload_bytes)}"
    with ExitStack() as stack:
        host, failure = None, None
        try:
            words = by.kept(check_sizes(device, (direction,), payload_bytes, copies), KEPT_WORDS)
            wanted = words_on_host(words, copies, (direction,))
            host = stack.enter_context(host_memory(device, wanted, cpus=cpus))
        except EnvironmentBroken as error:  # the others must know of it before they wait
            failure = error
        ranks.raise_failure(failure)
        ranks.require_same(f"copies {direction} {copies} x {show_bytes(payload_bytes)}", sampling)
        assert host is not None  # or the failure has been raised
        work = HostCopies(by, host.words, words, copies, (direction,), name=name)
        copying = _ConcurrentCopies(ranks, by.clock(), sampling, work, by.now)
        try:
            rates = copying.rates(payload_bytes, during or nullcontext())
        except InconclusiveMeasurement:
            if copying.wrong:  # it matters more, and may be the cause
                raise WrongResult(copying.wrong) from None
            raise
        nodes = host.nodes
    if copying.wrong:
        raise WrongResult(copying.wrong)
    return HostLinkResult(
        bytes_per_second=rates.series(),
        directions=(direction,),
        mode=TOGETHER,
        payload_bytes=payload_bytes,
        nodes=nodes,
    )


class _ConcurrentCopies:
    """All ranks of a group, copying at once."""

    def __init__(
        self, ranks: Ranks, clock: Clock, sampling: Sampling, work: HostCopies, now: Callable[[], float]
    ) -> None:
        self._ranks, self._clock, self._sampling, self._work, self._now = ranks, clock, sampling, work, now
        self.done, self.wrong = 0, ""
        self._each_seconds = 0.0  # unknown: then the clock prepares for the shortest

    def rates(self, payload_bytes: int, during: AbstractContextManager[object]) -> Samples:
        """Return the bytes a second of each rank."""
        with counted(WARM_UP):
            plan = self._warm_up()
        rates, spent = Samples(self._ranks, self._sampling, worst=min), 0.0
        with counted(MEASURING), during:
            while rates.wants_more(spent):
                common = sum(map(max, self._sample(plan)))
                spent += common
                rates.of_ranks.append([plan.windows * count * payload_bytes / common for count in plan.copies])
        return rates

    def _warm_up(self) -> Plan:
        """Copy until the time is up; return the plan of all ranks."""
        plan, begin, samples, more = Plan(copies=(1,) * self._ranks.count), self._now(), 0, 1.0
        while more:
            taken = self._sample(plan)
            each = [taken[-1][rank] / count for rank, count in enumerate(plan.copies)]
            plan = plan.after(each, most=self._work.max_in_flight, sampling=self._sampling)
            samples += 1
            continues = samples < _WARM_UP_SAMPLES or self._now() - begin < self._sampling.warmup_seconds
            [more] = self._ranks.of_first([continues])
        return plan

    def _sample(self, plan: Plan) -> list[list[float]]:
        """Return the seconds of each window, of each rank."""
        mine = [self._window(plan.copies[self._ranks.index]) for _ in range(plan.windows)]
        of_ranks = self._ranks.gather(mine)
        for rank, seconds in enumerate(of_ranks):
            if not all(0 < each < math.inf for each in seconds):
                raise InconclusiveMeasurement(
                    f"host links together: the clock of {self._ranks.name(rank)} did not advance: windows took "
                    f"{min(seconds)} to {max(seconds)} s"
                )
        return [list(window) for window in zip(*of_ranks, strict=True)]

    def _window(self, copies: int) -> float:
        real = self._clock.real(copies)
        batch = range(self.done, self.done + real)
        launched = self._ranks.window(self._clock, copies, seconds=copies * self._each_seconds)
        with self._clock.scaled(copies / real), launched:
            begun = time.perf_counter()
            for index in batch:
                self._work.start(index)
        started = time.perf_counter()
        self.done += real
        try:
            self._work.verify(batch)
        except WrongResult as error:  # raised after the last collective, so that the others do not wait
            self.wrong = self.wrong or str(error)
        verified_at = time.perf_counter()
        [seconds] = self._clock.read()
        verified(verified_at - started, still_busy=seconds - (started - begun))
        self._each_seconds = seconds / copies
        return seconds
