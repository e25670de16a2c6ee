"""The exchange between the ranks of a group: numbers, fingerprints, and the results or errors of an action."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.clock import Clock
from pytest_gpucluster.errors import EnvironmentBroken, PeerGaveUp, WrongResult
from pytest_gpucluster.metrics.sampling import Sampling, Series, series, wants_more

T = TypeVar("T")


class Ranks:
    """The ranks of a group. Collective: every rank of the group must call each method, in the same order.

    Numbers are exchanged as fp64: whole ones are exact up to 2^53. Without a group it is this rank alone.

    Attributes:
        count: of the ranks.
        index: this rank's number in the group.
        group: None where it is this rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.count, self.index = 1, 0
        if group is not None:
            self.count, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.group, self._device, self._by = group, device, accelerator(device)

    def barrier(self) -> None:
        """Enqueue a wait for all ranks: on a GPU the work that is enqueued after it waits, and not the host."""
        if self.group is not None:
            self._by.barrier(self.group)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of each rank, in the order of the group's ranks. All must pass the same number of them."""
        if self.group is None:
            return [[float(number) for number in numbers]]
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        of_ranks: list[list[float]] = self._by.rows(mine, self.group).tolist()
        return of_ranks

    def gather_fingerprints(self, *fingerprints: int) -> list[list[int]]:
        """Return the fingerprints of each rank, each a number below 2^64: in halves, for numbers are sent as fp64."""
        halves = [half for number in fingerprints for half in (number >> 32, number & 0xFFFFFFFF)]
        return [
            [(int(high) << 32) + int(low) for high, low in zip(numbers[::2], numbers[1::2], strict=True)]
            for numbers in self.gather(halves)
        ]

    def gather_objects(self, mine: T) -> list[T]:
        """Return the value of each rank, in the order of the group's ranks. They are pickled for the exchange."""
        if self.group is None:
            return [mine]
        pickled = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = [int(size) for [size] in self.gather([len(pickled)])]
        padded = torch.nn.functional.pad(pickled, (0, max(sizes) - len(pickled)))
        rows = self._by.rows(padded.to(self._device), self.group).cpu().numpy()
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def raise_failure(self, failure: Exception | None) -> None:
        """Raise a rank's failure on that rank, and PeerGaveUp on the others, so that none waits for it."""
        failed = [index for index, [has] in enumerate(self.gather([failure is not None])) if has]
        if failure is not None:
            raise failure
        if failed:
            raise PeerGaveUp(f"{self.name(failed[0])} has failed, so no rank goes on: see its own error")

    def require_same(self, measured: str, *conditions: object) -> None:
        """Find on all ranks what would let some wait for others that do something else.

        Args:
            measured: what this rank measures, for the message.
            conditions: what else must be the same, such as times.

        Raises: EnvironmentBroken, on all ranks, if not all measure the same.
        """
        everyone = self.gather_objects((measured, repr(conditions)))
        first = everyone[0]
        for index, mine in enumerate(everyone):
            if mine != first:
                other = " with other settings or times" if mine[0] == first[0] else ""
                raise EnvironmentBroken(
                    f"the ranks do not measure the same: {self.name(index)} {mine[0]}{other}, {self.name(0)} {first[0]}"
                    ". Give all nodes the same suite, profile and workload"
                )

    @contextmanager
    def window(self, clock: Clock, launches: int, *, seconds: float) -> Iterator[None]:
        """Time the work that is started inside, on all ranks at once, as a region of the clock.

        Args:
            launches: of the work, and ``seconds`` its expected time: see ``Clock.get_ahead``.
        """
        clock.synchronize()
        # Ahead of the barrier: a wait that each GPU counts in cycles of its own clock would pull them apart after it.
        clock.get_ahead(1 + launches, seconds=seconds)
        self.barrier()
        with clock.region():
            yield

    def of_first(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers of the first rank of the group, on every rank."""
        return self.gather(numbers)[0]

    def name(self, index: int) -> str:
        """Return the name of the rank with this number in the group: its number in the world."""
        if self.group is None:
            return f"rank {dist.get_rank() if dist.is_initialized() else 0}"
        return f"rank {dist.get_global_rank(self.group, index)}"


class Samples:
    """Samples of all ranks, taken until the worst rank's are enough: the first rank decides for all.

    Args:
        ranks: that are measured together.
        sampling: how long to measure, and the required confidence.
        worst: selects the worst value of a sample: max of seconds, min of rates.

    Attributes:
        of_ranks: sample after sample, the value of each rank.
    """

    def __init__(self, ranks: Ranks, sampling: Sampling, worst: Callable[[Sequence[float]], float] = max) -> None:
        self._ranks, self._sampling, self._worst, self._spent = ranks, sampling, worst, 0.0
        self.of_ranks: list[list[float]] = []

    def wants_more(self, spent_seconds: float) -> bool:
        """Return whether another sample is needed. Collective: every rank must call this, after each sample."""
        worst = [self._worst(sample) for sample in self.of_ranks]
        wanted = wants_more(worst, spent_seconds=spent_seconds, sampling=self._sampling)
        self._spent, more = self._ranks.of_first([spent_seconds, wanted])
        return bool(more)

    @property
    def worst(self) -> Series:
        """The series of the worst rank of each sample: the same on all ranks."""
        return series(map(self._worst, self.of_ranks), self._sampling, spent_seconds=self._spent)

    def series(self, of: Callable[[list[float]], float] | None = None) -> Series:
        """Return the series of a value of each sample, by default this rank's. It is as inconclusive as the worst's."""
        value = of or (lambda sample: sample[self._ranks.index])
        return series(map(value, self.of_ranks), self._sampling, spent_seconds=self._spent).decided_by(self.worst)


_KINDS: dict[str, type[Exception]] = {"wrong": WrongResult, "value": ValueError, "broken": EnvironmentBroken}


def on_all_ranks(group: dist.ProcessGroup, act: Callable[[], T]) -> list[T]:
    """Run an action on each rank, on which no other rank waits; return all results, in the order of the group's ranks.

    Collective: every rank of the group must call this. ``act`` must not call anything collective. The results are
    pickled for the exchange.

    Raises: on every rank the error of the first rank that failed, with its name: ``WrongResult`` and ``ValueError`` as
        they are, another ``Exception`` as ``EnvironmentBroken``. A ``BaseException`` ends its own rank only.
    """
    mine, error = _outcome(act)
    outcomes: list[tuple[str, Any]] = [("", None)] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, mine, group=group)
    for place, (kind, text) in enumerate(outcomes):
        if kind:
            raise _KINDS[kind](f"rank {dist.get_global_rank(group, place)}: {text}") from error
    return [value for _, value in outcomes]


def on_first_rank(group: dist.ProcessGroup, act: Callable[[], T]) -> T:
    """Run an action on the first rank of the group, and return its result on every rank.

    Collective: every rank of the group must call this. ``act`` must not call anything collective.

    Raises: as :func:`on_all_ranks`.
    """
    result: T = on_all_ranks(group, lambda: act() if dist.get_rank(group) == 0 else cast(T, None))[0]
    return result


def _outcome(act: Callable[[], T]) -> tuple[tuple[str, Any], Exception | None]:
    """Return ("", the value) or (the kind of error, its text), and the error."""
    try:
        return ("", act()), None
    except Exception as error:  # it is raised again, on every rank
        kind = next((name for name, one in _KINDS.items() if isinstance(error, one)), "broken")
        known = isinstance(error, tuple(_KINDS.values()))
        return (kind, str(error) if known else f"{type(error).__name__}: {error}"), error
