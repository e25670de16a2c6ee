"""What was seen of a collective: times, and the bandwidths that they amount to.

>>> busbw_factor(2), busbw_factor(8), busbw_factor(16)
(1.0, 1.75, 1.875)
>>> busbw_factor(8, "all_gather"), busbw_factor(8, "broadcast")
(0.875, 1.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pytest_gpucluster.metrics.sampling import Sampling, Series, series
from pytest_gpucluster.metrics.units import did_you_mean

# What each rank must send or get, in parts of the payload: (a, b) stands for a (n - 1) / n + b.
_FACTORS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "all_reduce": (2, 0),
        "all_gather": (1, 0),
        "reduce_scatter": (1, 0),
        "all_to_all": (1, 0),
        "broadcast": (0, 1),
        "send_recv": (0, 1),
    }
)


def busbw_factor(ranks: int, collective: str = "all_reduce") -> float:
    """Return the ratio of busbw to algbw for n ranks.

    2 (n - 1) / n for an all_reduce; (n - 1) / n for an all_gather, a reduce_scatter and an all_to_all; 1 for a
    broadcast and a send_recv.

    Raises:
        ValueError: there are fewer than two ranks, so nothing crosses a link; or no such collective is known.

    Source: nccl-tests, doc/PERFORMANCE.md, "Summary"; for send_recv src/sendrecv.cu, SendRecvGetBw.
    """
    if collective not in _FACTORS:
        known = ", ".join(_FACTORS)
        raise ValueError(f"a collective is one of {known}, not {collective!r}{did_you_mean(collective, _FACTORS)}")
    if ranks < 2:
        raise ValueError(f"busbw is defined for 2 ranks and more, not for {ranks}")
    shared, whole = _FACTORS[collective]
    return shared * (ranks - 1) / ranks + whole


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """What this rank saw of a collective, and what all ranks of the group saw together.

    All series are inconclusive together: it is the slowest rank's series that decides when enough is known.

    Attributes:
        collective: its name, such as ``all_reduce``.
        payload_bytes: its size as nccl-tests counts it (``collective_shape``): of an all_reduce, a broadcast and a
            send_recv what each rank gives; of the others all ranks' parts together.
        dtype: of the elements.
        ranks: size of the group.
        calls_per_window, windows_per_sample: how often it was called between two looks at the clock, and how many of
            such windows make a sample.
        latency: seconds per call on this rank.
        slowest_latency: seconds per call on the rank that was slowest in each sample; equal on all ranks.
        mean_latency: seconds per call, the mean of all ranks in each sample; equal on all ranks.
        verified_elements: elements that were compared with the expected ones, before, between and after the windows.
        sampling: by which it was measured.
    """

    collective: str
    payload_bytes: int
    dtype: str
    ranks: int
    calls_per_window: int
    windows_per_sample: int
    latency: Series
    slowest_latency: Series
    mean_latency: Series
    verified_elements: int
    sampling: Sampling

    @property
    def algbw(self) -> Series:
        """Payload over time on this rank, in bytes a second.

        Source: nccl-tests, doc/PERFORMANCE.md, "Algorithm bandwidth".
        """
        return self._bandwidth(self.latency)

    @property
    def busbw(self) -> Series | None:
        """What the slowest link must carry for this rank's ``algbw``, in bytes a second; None for one rank."""
        return self._on_bus(self.latency)

    @property
    def slowest_busbw(self) -> Series | None:
        """The same from the slowest rank's time in each sample. Equal on all ranks."""
        return self._on_bus(self.slowest_latency)

    @property
    def average_busbw(self) -> Series | None:
        """The same from the mean of all ranks' times, as nccl-tests prints it by default. Equal on all ranks.

        Source: nccl-tests, README.md, option ``-a``: "Report performance as an average across all ranks", default 1.
        """
        return self._on_bus(self.mean_latency)

    def _on_bus(self, latency: Series) -> Series | None:
        if self.ranks < 2:
            return None
        return self._bandwidth(latency).scaled(busbw_factor(self.ranks, self.collective))

    def _bandwidth(self, latency: Series) -> Series:
        rates = (self.payload_bytes / seconds for seconds in latency.samples)
        return series(rates, self.sampling, spent_seconds=0).decided_by(latency)
