"""What was seen of a collective: times, and the bandwidths that they amount to.

>>> busbw_factor(2), busbw_factor(8), busbw_factor(16)
(1.0, 1.75, 1.875)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_gpucluster.sampling import Sampling, Series, series


def busbw_factor(ranks: int) -> float:
    """Return the ratio of busbw to algbw of an all-reduce: 2 (n - 1) / n.

    Raises:
        ValueError: there are fewer than two ranks, so nothing crosses a link.

    Source: nccl-tests, doc/PERFORMANCE.md, "AllReduce".
    """
    if ranks < 2:
        raise ValueError(f"busbw is defined for 2 ranks and more, not for {ranks}")
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """What this rank saw of a collective, and what all ranks of the group saw together.

    All series are inconclusive together: it is the slowest rank's series that decides when enough is known.

    Attributes:
        collective: its name, such as ``all_reduce``.
        payload_bytes, dtype: what each rank gave.
        ranks: size of the group.
        calls_per_window, windows_per_sample: how often it was called between two looks at the clock, and how many of
            such windows make a sample.
        latency: seconds per call on this rank.
        slowest_latency: seconds per call on the rank that was slowest in each sample; equal on all ranks.
        mean_latency: seconds per call, the mean of all ranks in each sample; equal on all ranks.
        verified_elements: sums that were compared with the expected ones, before the windows and after them.
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
        return self.algbw.scaled(busbw_factor(self.ranks)) if self.ranks > 1 else None

    @property
    def slowest_busbw(self) -> Series | None:
        """The same from the slowest rank's time in each sample. Equal on all ranks."""
        return self._bandwidth(self.slowest_latency).scaled(busbw_factor(self.ranks)) if self.ranks > 1 else None

    @property
    def average_busbw(self) -> Series | None:
        """The same from the mean of all ranks' times, as nccl-tests prints it by default. Equal on all ranks.

        Source: nccl-tests, README.md, option ``-a``: "Report performance as an average across all ranks", default 1.
        """
        return self._bandwidth(self.mean_latency).scaled(busbw_factor(self.ranks)) if self.ranks > 1 else None

    def _bandwidth(self, latency: Series) -> Series:
        rates = series((self.payload_bytes / seconds for seconds in latency.samples), self.sampling)
        return replace(rates, inconclusive=latency.inconclusive)
