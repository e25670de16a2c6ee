"""Write docs/corruption.md: which rate of flipped bits each profile finds with a probability of 95 %.

python perf/corruption.py                        # rewrites the page, in some 15 minutes on two cores
python perf/corruption.py --trials 5 --only "products bf16,copy"    # quick, to the terminal: shares alone

What is planted, where and in which checks is in corruption_trials.py: it says which share of the flips a check finds.
How many operations a profile verifies follows from the shipped workloads, and, where they are given a time, from the
rates that are published of an H100 SXM. The same seed gives the same page, on machines that compute alike.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corruption_trials import (
    LIMITS,
    LOOKS_AT_BF16,
    LOOKS_AT_MOVED,
    SEED,
    SKU,
    TRIALS,
    Found,
    measured,
    simulated,
    workload,
)
from page_text import bullets, paragraph, table
from rates import bounded

from pytest_gpucluster.benchmarks.collectives import MOVES, busbw_factor
from pytest_gpucluster.benchmarks.matmul import flops_of
from pytest_gpucluster.benchmarks.memory_patterns import PATTERNS
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.config.workload import Workload, duration_text, predict
from pytest_gpucluster.judge.evidence import support_of
from pytest_gpucluster.metrics.datasheets import SKUS
from pytest_gpucluster.metrics.units import parse

PAGE = Path(__file__).parent.parent / "docs" / "corruption.md"
TRIALS_EACH = 100
PROFILES = ("quick", "full", "soak")
MISSED = 0.05
GPUS = 8
"""Of one node, on which the collectives are measured."""
GIB, GB, TB = 2**30, 10**9, 10**12
BUSY = 0.97
"""The part of a burn-in in which it multiplies. Source: ``Products.verify``."""
SIMULATED = ("products bf16", "write")
_DEADLINE_SECONDS = 3600

Results = Mapping[str, Found]
"""Trial -> what it has found."""


@dataclass(kw_only=True)
class Exposure:
    """What a profile verifies of one kind of operation.

    Attributes:
        what: the operation of which a part is struck.
        per_second: how many a GPU does at its full rate.
        parts: how many are done where a check of that trial sees them.
    """

    what: str
    per_second: float
    parts: list[tuple[str, float]] = field(default_factory=list)


def least_rate(parts: Sequence[tuple[float, float]]) -> float:
    """Return the smallest chance of a flip, for each operation, that is found with a probability of 95 %.

    Missed is a run in which no flip is found: with so many operations, of whose flips a share is found, that has the
    probability (1 - rate * share) ** count. Of several checks these are multiplied. Infinite where even a flip in each
    operation is not found as surely.

    Args:
        parts: count of operations, and the share, of each check.
    """

    def missed(rate: float) -> float:
        return math.exp(
            sum(
                count * (math.log1p(-rate * share) if rate * share < 1 else -math.inf)
                for count, share in parts
                if count
            )
        )

    if missed(1.0) > MISSED:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if missed(middle) > MISSED else (low, middle)
    return high


# ---- how much each profile verifies


def typical(metric: str, *, world_size: int = 1, **labels: str) -> float:
    """Return the median that is published of healthy H100 SXM, in the metric's unit.

    Raises: LookupError where nothing is.
    """
    limit = LIMITS.limit(metric, sku=SKU, world_size=world_size, nnodes=1, labels=labels)
    support = support_of(limit, LIMITS) if limit is not None else None
    if support is None or support.typical is None:
        raise LookupError(f"nothing is published of {metric} on {SKU}")
    return support.typical


def seconds(test: str, criterion: str, asked: Workload) -> float:
    """Return how long a test measures at least, by the product's own prediction."""
    return predict([(test, criterion)], asked).span.least_seconds


def exposures(asked: Workload) -> Mapping[str, Exposure]:
    """Return what a workload verifies on an H100 SXM: name of the row -> exposure."""
    found = {**_of_products(asked), **_of_memory(asked), **_of_collectives(asked)}
    sizes, tests = asked.throughput_large, asked.training
    geometry = Geometry(
        layers=sizes.layers, width=sizes.width, heads=sizes.heads, vocab=sizes.vocab, sequence=sizes.sequence
    )
    flops = geometry.training_flops_per_token * sizes.batch * sizes.sequence
    peaks = SKUS[SKU].peaks
    assert peaks is not None
    per_second = typical("training.mfu", world_size=GPUS, model="large") / 100 * peaks.bf16_tflops * 1e12 / flops
    for what in ("logit", "weight"):
        # On the device: in fp32 and bf16; by DDP in both; by FSDP twice in fp32, offloaded, and in bf16.
        parts = [(f"step {what}", 2 * tests.steps), (f"ddp {what}", 2 * tests.steps)]
        parts.append((f"fsdp {what}", 4 * asked.fsdp.steps))
        if what == "weight":
            lasted = seconds("test_throughput[ddp-large]", "training.throughput", asked)
            parts.append(("long training weight", lasted * per_second))
        found[f"training: a {what}"] = Exposure(what="step", per_second=per_second, parts=parts)
    return found


def _of_products(asked: Workload) -> Mapping[str, Exposure]:
    n, found = asked.burn_in.n, {}
    for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8"):
        rate = typical(f"matmul.{dtype}.tflops", best_of="4096, 8192, 16384") * 1e12 / flops_of(n)
        lasted = seconds(f"test_matmul[{dtype}]", "matmul", asked)
        if dtype == asked.burn_in.dtype:
            lasted += BUSY * seconds("test_burn_in", "burn_in", asked)
        parts = [(f"products {dtype}", lasted * rate)]
        found[f"products in {dtype}"] = Exposure(what=f"product of n={n}", per_second=rate, parts=parts)
    return found


def _of_memory(asked: Workload) -> Mapping[str, Exposure]:
    promise = SKUS[SKU].promise
    assert promise is not None
    patterns = asked.memory_patterns
    tested = min(patterns.share * promise.memory_gb * GB, patterns.most_bytes)
    writes = sum(step.writes is not None for pattern in PATTERNS for step in PATTERNS[pattern](patterns.rounds, 0))
    copied, read = (typical(f"hbm.{kind}.bandwidth") * TB for kind in ("copy", "read"))
    found = {
        "memory: patterns": Exposure(
            what="GiB written and read", per_second=copied / 2 / GIB, parts=[("patterns", writes * tested / GIB)]
        )
    }
    for kind, rate in (("copy", copied / 2 / GIB), ("read", read / GIB), ("write", copied / GIB)):
        lasted = seconds(f"test_hbm[{kind}]", "hbm", asked)
        found[f"memory: {kind}"] = Exposure(what="GiB", per_second=rate, parts=[(kind, lasted * rate)])
    return found


def _of_collectives(asked: Workload) -> Mapping[str, Exposure]:
    """One node's, without what it does across nodes. Small messages do not count."""

    def rate(collective: str) -> float:
        busbw = typical(f"nccl.{collective}.busbw", world_size=GPUS, size="1 GB", transport="P2P")
        return busbw / busbw_factor(GPUS, collective)

    def large(sizes: Sequence[str]) -> list[float]:
        return [size for size in (parse(text).to("B") / GB for text in sizes) if size >= 1]

    summed, moved = asked.all_reduce, asked.collectives
    lasted = len(large(summed.sizes)) * (summed.sampling.warmup_seconds + summed.sampling.window_seconds)
    exact = ("all-reduce fp32", lasted * rate("all_reduce"))
    first = ("all-reduce bf16", len(LOOKS_AT_BF16) * sum(large(summed.sizes)))
    carried = 2 * len(MOVES) * len(LOOKS_AT_MOVED) * sum(large(moved.sizes))
    return {
        "collectives: all-reduce": Exposure(what="GB", per_second=rate("all_reduce"), parts=[exact, first]),
        "collectives: others": Exposure(what="GB", per_second=rate("all_gather"), parts=[("moved", carried)]),
    }


# ---- the trials


def try_all(trials: int, names: Sequence[str] = tuple(TRIALS)) -> Results:
    """Plant flips in checks; those of several ranks in processes of their own.

    Raises: RuntimeError if ranks failed, or a check found something where nothing was planted.
    """
    found = {name: measured(name, trials) for name in names if TRIALS[name].ranks == 1}
    with tempfile.TemporaryDirectory(prefix="gpucluster-perf-") as folder:
        for ranks in sorted({TRIALS[name].ranks for name in names} - {1}):
            result = Path(folder) / f"{ranks}.json"
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
            command += [__file__, f"--trials={trials}", f"--only={','.join(names)}", f"--result={result}"]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_DEADLINE_SECONDS)
            if done.returncode != 0 or not result.exists():
                raise RuntimeError(f"{ranks} ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
            found |= {name: Found(*told) for name, told in json.loads(result.read_text(encoding="utf-8")).items()}
    return found


def child(trials: int, names: Sequence[str], result: Path) -> None:
    """Take the trials of as many ranks as there are; the last rank is struck, the first one writes what was found."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    struck = rank == ranks - 1
    found = {name: measured(name, trials, struck=struck) for name in names if TRIALS[name].ranks == ranks}
    if rank == 0:
        result.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # a process that still refers to a group at its end may be aborted by gloo


# ---- the page


def header(trials: int) -> str:
    """Return what was planted, and how often: the part of the page that follows from the parameters alone."""
    return "\n".join(
        [
            "# Silent corruption: what is found\n",
            *paragraph(
                "This page is made by `python perf/corruption.py`. Do not edit it. It states how seldom a GPU may"
                " compute, keep or send a wrong bit and still be found with a probability of 95 %, by profile. The"
                " flips are planted at the seams of the shipped checks, on CPU with small sizes; no GPU was at hand."
                " Which bit of which element, all alike likely, is drawn from a seed."
            ),
            *bullets(
                f"Seed {SEED}; {trials} flips for each row, of training a third. Collectives: 4 ranks over gloo;"
                " training: a decoder of 2 layers on 2 ranks; one rank is struck. In brackets 95 % bounds (Wilson).",
                "A profile finds a rate r with 95 % if (1 - r d)^N is 5 % or less: d is the share of the flips that the"
                " check finds, N the operations that it sees. Several checks of one kind are multiplied.",
                f"N is what the shipped workload asks for; where it gives a time, warm-up and window at the median rate"
                f" that is published of healthy {SKU} ([floors.md](floors.md)). Products of other sizes count by their"
                " operations, writes at the rate of copies. Of collectives messages of 1 GB and more count, in one"
                f" node of {GPUS} GPUs.",
            ),
        ]
    )


def page(found: Results, trials: int) -> str:
    """Return the whole page."""
    return "\n".join([header(trials), *rates_section(found), *_shares(found), *_checked(found, trials), *_reading()])


def _rate(exposure: Exposure, found: Results) -> float:
    return least_rate([(count, found[name].share) for name, count in exposure.parts])


def _cell(exposure: Exposure, found: Results) -> str:
    rate = _rate(exposure, found)
    if rate > 1:
        return "none"
    return f"1 in {_short(1 / rate)}: {_short(rate * exposure.per_second * 3600)} an hour"


def _short(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 10 else f"{number:.2g}"


def rates_section(found: Results) -> Iterator[str]:
    """Yield the table of the rates, with what it says."""
    yield "## The rates\n"
    yield from paragraph(
        '"1 in 1,000: 320 an hour" is found with 95 %: one of 1,000 operations is wrong in one bit, so that a GPU which'
        ' does nothing else, at its full rate, makes 320 of them in an hour. What is rarer may pass. "none": not even a'
        " flip in each operation is found as surely."
    )
    asked = [exposures(workload(profile)) for profile in PROFILES]
    yield from table(
        ("struck", "of", *PROFILES),
        ((name, row.what, *(_cell(of[name], found) for of in asked)) for name, row in asked[0].items()),
    )
    for row in ("products in bf16", "collectives: all-reduce"):
        apart = (duration_text(1 / (_rate(of[row], found) * of[row].per_second)) for of in asked)
        times = ", ".join(f"{time} by {profile}" for time, profile in zip(apart, PROFILES, strict=True))
        yield from paragraph(f"As times from one flip to the next, {row}: {times}.")


def _shares(found: Results) -> Iterator[str]:
    yield "## The share of the flips that is found\n"
    yield from paragraph(
        'Of one flip in a run of the check, in percent. "always": the same bit of the same element is wrong in every'
        " product, with 16384 terms; all other products have one flip in one of them."
    )
    yield from table(
        ("check", "flips", "operations of a run", "found"),
        ((name, str(one.planted), str(one.operations), bounded(one.count, one.planted)) for name, one in found.items()),
    )


def _checked(found: Results, trials: int) -> Iterator[str]:
    yield "## Planted at a rate\n"
    yield from paragraph(
        "The formula beside runs in which each operation is struck with the same chance: at the rate that it says is"
        " found in 95 % of them, and at a fifth of it. In percent of the runs."
    )
    rows = []
    for name in SIMULATED:
        share, operations = found[name].share, found[name].operations
        for part in (1.0, 0.2):
            rate = part * least_rate([(operations, share)])
            if rate < 1:
                expected = 100 * (1 - (1 - rate * share) ** operations)
                seen = bounded(simulated(name, trials, rate), trials)
                rows.append((name, str(operations), f"1 in {1 / rate:.3g}", f"{expected:.1f}", seen))
    yield from table(("check", "operations", "struck", "expected", "found"), rows)


def _reading() -> Iterator[str]:
    yield "## What this means\n"
    yield from bullets(
        "A product that is wrong once is found whichever bit it is: each is compared with the first one bit by bit. One"
        " that is always wrong in the same bit is compared with the reference alone, whose tolerance hides the lowest"
        " bits of the fraction: with fp32, TF32 and fp8 some four in ten flips. `gpu.determinism` compares GPUs with"
        " each other for that.",
        "A write of the criterion `hbm` is looked at whole only if it is the last of its burst; the patterns read"
        " everything that they write. ECC corrects single bits of memory before any program sees them: what is planted"
        " here is what passes it.",
        "An all-reduce in fp32 adds up what the one before has left, so that one look is at all calls, and only the"
        " lowest bits are rounded away. In bf16 the sums of 8 GPUs are not exact after the first call, and other"
        " collectives leave the last call only: they find a link that is often wrong, and no other.",
        "A training step is short of witnesses. A logit that is wrong moves the gradients of all ranks alike: the few"
        " steps that are taken twice find it, and the long ones only if it leaves no number. A weight that is wrong on"
        " one rank is nearly always found at the end of the long training. A larger model hides a logit better than"
        " the small one here does.",
        "Not planted: flips inside a kernel that leave its result right; several bits at once; what comes with heat,"
        " whose rate grows in the hours of `soak`; and the copies between host and GPU. Not counted: `matmul.search`,"
        " LoRA, scaling and checkpoints, which verify, too.",
    )


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=TRIALS_EACH, help=f"flips of each kind (default {TRIALS_EACH})")
    parser.add_argument("--print", action="store_true", help="print the page instead of writing it")
    parser.add_argument("--only", help="checks, separated by commas: print what they find, and no page (default: all)")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trials < 1:
        parser.error(f"--trials must be 1 or more, not {arguments.trials}")
    names = arguments.only.split(",") if arguments.only else list(TRIALS)
    if unknown := [name for name in names if name not in TRIALS]:
        parser.error(f"--only {unknown[0]!r}: allowed are {', '.join(map(repr, TRIALS))}")
    if arguments.result:
        child(arguments.trials, names, arguments.result)
    if arguments.only:
        print("\n".join(_shares(try_all(arguments.trials, names))))
        return
    made = page(try_all(arguments.trials), arguments.trials)
    if arguments.print:
        print(made)
    else:
        PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
