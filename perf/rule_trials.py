"""Made-up GPUs and fleets, and what the rules make of them: the simulations behind docs/simulations.md.

Only the noise is made up. The rules are the product's own: ``sampling`` says when to stop, ``stats`` how sure the
median is, ``stragglers``, ``misses`` and ``judge`` decide, by the shipped workloads.yaml and thresholds.yaml. Each
simulation seeds itself by its name: it gives the same whenever and beside whatever it runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean

from pytest_gpucluster.config import workload_loader
from pytest_gpucluster.judge import loader, misses
from pytest_gpucluster.judge import misses as stragglers
from pytest_gpucluster.judge.judge import judge
from pytest_gpucluster.judge.limits import Limit
from pytest_gpucluster.metrics import measurement as metrics
from pytest_gpucluster.metrics import sampling
from pytest_gpucluster.metrics.measurement import Measurement, measurement
from pytest_gpucluster.metrics.sampling import Series

SEED = 20260

WORKLOADS = Path(__file__).parent.parent / "acceptance" / "workloads.yaml"
SAMPLING = workload_loader.load(WORKLOADS, profile="full").workload.matmul.sampling
BLOCK_SECONDS = 0.25
LOOK_SECONDS = 1.0
"""After the window, how long matmul and HBM measure until they ask again. All-reduce asks after each block."""

LIMITS = loader.load()
SKU, METRIC = "H100 SXM", "matmul.bf16.tflops"
LABELS = {"best_of": "4096, 8192, 16384"}
"""What the criterion says of its measurement: the limit depends on it."""
HEALTHY_TFLOPS = 730.97
"""What a healthy H100 SXM reaches: the observation beside the shipped limit."""

LEVELS = (0.97, 0.98, 0.99, 0.995, 1.0, 1.005, 1.01, 1.02, 1.03)
"""Where the true median lies, as a part of the limit."""
MISSES, FALSE_ALARMS = (tuple(x for x in LEVELS if x < 1), tuple(x for x in LEVELS if x >= 1))

FLEETS = (2, 4, 8, 16, 64, 1024)
SPREADS = (0.005, 0.01, 0.02, 0.03)
SLOW = (0.95, 0.9, 0.8, 0.7, 0.5)
RATIOS = (0.75, 0.90, 0.93)

LATER_SECONDS = 8.0
"""So much longer is the warm-up of one kind of noise."""

Noise = Callable[[Random, int], list[float]]
"""Makes so many block means in a row, of a GPU whose true median is 1."""


def independent(sigma: float) -> Noise:
    """Return normal noise of relative standard deviation ``sigma``, each block for itself."""
    return lambda random, count: [1 + random.gauss(0, sigma) for _ in range(count)]


def correlated(sigma: float, rho: float) -> Noise:
    """Return normal noise in which each block resembles the one before: AR(1) with the correlation ``rho``."""

    def blocks(random: Random, count: int) -> list[float]:
        noise = [random.gauss(0, sigma)]
        while len(noise) < count:
            noise.append(rho * noise[-1] + math.sqrt(1 - rho**2) * random.gauss(0, sigma))
        return [1 + value for value in noise]

    return blocks


def drifting(by: float, seconds: float, sigma: float, *, gone_seconds: float = 0) -> Noise:
    """Return a GPU that is ``by`` too fast and slows down evenly within ``seconds``: the end is the truth.

    Of these, ``gone_seconds`` are over when the first block begins.
    """

    def blocks(random: Random, count: int) -> list[float]:
        at = (gone_seconds + (index + 0.5) * BLOCK_SECONDS for index in range(count))
        left = (max(0.0, 1 - now / seconds) for now in at)
        return [1 + by * part + random.gauss(0, sigma) for part in left]

    return blocks


def two_levels(low: float, share: float, sigma: float, runs: Callable[[Random, int], Sequence[bool]]) -> Noise:
    """Return noise around 1 and, in ``share`` of the blocks, around ``low``; ``runs`` says in which."""
    # With less than half of the blocks low, the median lies in the lower flank of the upper mode.
    median = NormalDist(1, sigma).inv_cdf((0.5 - share) / (1 - share))

    def blocks(random: Random, count: int) -> list[float]:
        return [((low if slow else 1) + random.gauss(0, sigma)) / median for slow in runs(random, count)]

    return blocks


def every(period: int) -> Callable[[Random, int], Sequence[bool]]:
    """Return runs in which one block of each ``period`` is low."""

    def runs(random: Random, count: int) -> list[bool]:
        first = random.randrange(period)
        return [index % period == first for index in range(count)]

    return runs


def switching(low_blocks: float, high_blocks: float) -> Callable[[Random, int], Sequence[bool]]:
    """Return runs that stay low and high for so many blocks on average."""

    def runs(random: Random, count: int) -> list[bool]:
        low = [random.random() < low_blocks / (low_blocks + high_blocks)]
        while len(low) < count:
            low.append(low[-1] != (random.random() < 1 / (low_blocks if low[-1] else high_blocks)))
        return low

    return runs


def disturbed(to: float, blocks_long: int, sigma: float) -> Noise:
    """Return noise with one disturbance, down to ``to``, somewhere in the window."""

    def blocks(random: Random, count: int) -> list[float]:
        begin = random.randrange(round(SAMPLING.window_seconds / BLOCK_SECONDS) - blocks_long + 1)
        hit = range(begin, begin + blocks_long)
        return [(to if index in hit else 1) + random.gauss(0, sigma) for index in range(count)]

    return blocks


NOISES: dict[str, Noise] = {
    **{f"independent, {100 * sigma:g} %": independent(sigma) for sigma in (0.001, 0.003, 0.01, 0.03, 0.10)},
    **{
        f"correlated {rho:g}, {100 * sigma:g} %": correlated(sigma, rho)
        for rho in (0.5, 0.9)
        for sigma in (0.003, 0.01)
    },
    "drift of -2 % in 10 s, 0.3 %": drifting(0.02, 10, 0.003),
    "the same drift, longer warm-up": drifting(0.02, 10, 0.003, gone_seconds=LATER_SECONDS),
    "5 % of blocks at 80 %, 0.3 %": two_levels(0.8, 0.05, 0.003, every(20)),
    "40 % of blocks at 96 %, mixed, 0.3 %": two_levels(0.96, 0.4, 0.003, switching(1 / 0.6, 1 / 0.4)),
    "40 % of blocks at 96 %, 2 s at a time, 0.3 %": two_levels(0.96, 0.4, 0.003, switching(8, 12)),
    "1 s at 70 %, 0.3 %": disturbed(0.7, 4, 0.003),
}


def take(blocks: Sequence[float], *, look_seconds: float = LOOK_SECONDS) -> tuple[Series, float]:
    """Take blocks for as long as the rule wants more; return the series and the seconds it took.

    Like ``benchmarks.blocks.measure_rate``, without its clock: the window first, then ``look_seconds`` at a time.
    """
    taken, batch = 0, SAMPLING.window_seconds
    while sampling.wants_more(blocks[:taken], spent_seconds=taken * BLOCK_SECONDS, sampling=SAMPLING):
        until = min(taken * BLOCK_SECONDS + batch, SAMPLING.at_most_seconds)
        taken, batch = max(taken + 1, round(until / BLOCK_SECONDS)), look_seconds
    spent = taken * BLOCK_SECONDS
    return sampling.series(blocks[:taken], SAMPLING, spent_seconds=spent), spent


def ours(series: Series, level: float) -> bool:
    """Tell whether ``judge`` accepts a GPU whose true median is ``level`` times the shipped limit."""
    limit = shipped_limit().min
    assert limit is not None  # the shipped file has one
    return accepted([measurement(METRIC, series.scaled(level * limit), unit="TFLOPS", labels=LABELS)])


def shipped_limit() -> Limit:
    """Return the shipped entry that decides here."""
    limit = LIMITS.limit(METRIC, sku=SKU, world_size=8, nnodes=1, labels=LABELS)
    assert limit is not None  # the shipped file has one
    return limit


def accepted(by_rank: Sequence[Measurement]) -> bool:
    """Let ``judge`` decide, by the shipped limits, about one measurement of each rank."""
    judgement = judge(
        {rank: [measured] for rank, measured in enumerate(by_rank)},
        world={rank: f"rank {rank}" for rank in range(len(by_rank))},
        node_of={rank: rank // 8 for rank in range(len(by_rank))},
        limits=LIMITS,
        sku=SKU,
        gpu_name=None,
    )
    return judgement.outcome == "passed"


def windows(blocks: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    """Yield windows of blocks, one after the other."""
    long = round(SAMPLING.window_seconds / BLOCK_SECONDS)
    return (blocks[begin : begin + long] for begin in range(0, count * long, long))


RULES: dict[str, Callable[[Sequence[float], Series, float], bool]] = {
    "this suite": lambda blocks, series, level: ours(series, level),
    "one block": lambda blocks, series, level: blocks[0] * level >= 1,
    "mean of the window": lambda blocks, series, level: fmean(next(windows(blocks, 1))) * level >= 1,
    "best of 3 windows": lambda blocks, series, level: any(fmean(w) * level >= 1 for w in windows(blocks, 3)),
}
"""Whether a GPU is accepted: from all blocks there could be, from the series that this suite took of them."""


@dataclass
class Sampled:
    """What became of the trials with one kind of noise."""

    trials: int
    ends: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    covered: Counter[str] = field(default_factory=Counter)
    wrong: Counter[tuple[str, float]] = field(default_factory=Counter)


def sample(name: str, trials: int, *, rules: Iterable[str] = tuple(RULES)) -> Sampled:
    """Measure so many GPUs with one kind of noise, and judge each with every rule at every level."""
    random, result = Random(f"{SEED} {name}"), Sampled(trials)
    for _ in range(trials):
        blocks = NOISES[name](random, round(SAMPLING.at_most_seconds / BLOCK_SECONDS))
        series, seconds = take(blocks)
        end = "window" if seconds <= SAMPLING.window_seconds else "time"
        end = end if seconds <= SAMPLING.longest_seconds else "extension"
        end = "inconclusive" if series.inconclusive else end
        result.ends[end] += 1
        result.seconds += seconds
        result.covered["ended"] += series.low <= 1 <= series.high
        looked_once = sampling.series(next(windows(blocks, 1)), SAMPLING, spent_seconds=SAMPLING.window_seconds)
        result.covered["window"] += looked_once.low <= 1 <= looked_once.high
        often, _ = take(blocks, look_seconds=BLOCK_SECONDS)
        result.covered["often"] += often.low <= 1 <= often.high
        for rule in rules:
            for level in LEVELS:
                result.wrong[rule, level] += RULES[rule](blocks, series, level) != (level >= 1)
    return result


@dataclass
class Compared:
    """What the straggler rule made of the trials with one kind of fleet: per ratio, failed runs and right names."""

    trials: int
    failed: Counter[float] = field(default_factory=Counter)
    named: Counter[float] = field(default_factory=Counter)


def fleet(random: Random, ranks: int, spread: float, slow: float, slow_ranks: int) -> list[float]:
    """Return the TFLOPS of each rank; the last ``slow_ranks`` do ``slow`` times what a healthy one does."""
    parts = [1.0] * (ranks - slow_ranks) + [slow] * slow_ranks
    return [HEALTHY_TFLOPS * part * (1 + random.gauss(0, spread)) for part in parts]


def behind(values: Sequence[float], ratios: dict[int, float], ratio: float) -> list[int]:
    """Return the ranks whose ratio to the others' median is too low, the slowest first; no other limit is set."""
    limit = dataclasses.replace(shipped_limit(), min=None, min_ratio_to_median=ratio)
    of = {rank: Measurement(metric=METRIC, value=value, unit="TFLOPS") for rank, value in enumerate(values)}
    found = misses.misses(metrics.known(METRIC), limit, of, ratios=ratios, transport=None)
    return [rank for miss in found for rank in miss.by_rank]


def compare(ranks: int, spread: float, slow: float, trials: int, *, slow_ranks: int = 1) -> Compared:
    """Compare the ranks of so many fleets at each ratio. ``slow_ranks`` 0: every rank is healthy."""
    random, result = Random(f"{SEED} {ranks} {spread} {slow} {slow_ranks}"), Compared(trials)
    for _ in range(trials):
        values = fleet(random, ranks, spread, slow, slow_ranks)
        ratios = stragglers.straggler_ratios(dict(enumerate(values)), "higher")
        for ratio in RATIOS:
            named = behind(values, ratios, ratio)
            result.failed[ratio] += bool(named)
            result.named[ratio] += bool(named) and named[0] >= ranks - slow_ranks
    return result


def slow_fleet(ranks: int, slow_ranks: int, slow: float, trials: int, *, spread: float) -> tuple[Compared, int]:
    """Return what each ratio alone makes of the fleets, and how many the whole shipped entry refuses."""
    found = compare(ranks, spread, slow, trials, slow_ranks=slow_ranks)
    random = Random(f"{SEED} {ranks} {spread} {slow} {slow_ranks}")  # the same fleets once more
    refused = 0
    for _ in range(trials):
        values = fleet(random, ranks, spread, slow, slow_ranks)
        refused += not accepted([measurement(METRIC, value, unit="TFLOPS", labels=LABELS) for value in values])
    return found, refused
