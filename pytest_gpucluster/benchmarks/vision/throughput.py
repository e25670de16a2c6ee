"""Images a second of each GPU in training, by all ranks together, and whether that training is right."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.blocks import BLOCK_SECONDS
from pytest_gpucluster.benchmarks.clock import Clock, clock_for
from pytest_gpucluster.benchmarks.group import Ranks, majority
from pytest_gpucluster.benchmarks.memory_budget import free_bytes, releases_memory
from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint
from pytest_gpucluster.benchmarks.vision.datasets import Images
from pytest_gpucluster.benchmarks.vision.loader import Batch, Batches, needed_bytes, require_shared_memory
from pytest_gpucluster.benchmarks.vision.throughput_setup import (
    CLASSES,
    COLOURS,
    COMPONENTS,
    NETWORKS,
    SMALLEST_SIDE,
    Components,
    ImageRate,
    Setup,
    as_input,
    outputs_of,
)
from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement, WrongResult
from pytest_gpucluster.metrics.sampling import MIN_SAMPLES, Sampling, Series, series, wants_more
from pytest_gpucluster.metrics.time_budget import MEASURING, VERIFYING, WARM_UP, counted

LEARNING_RATE = 1e-3

LEAST_STEPS = 16
"""A minimum, so that the loss has had time to fall. Source: this suite's rule."""

_WARMUP_STEPS = 3
"""A minimum: the first selects convolutions, and after it DistributedDataParallel reorders its buckets."""

_STATE_BYTES = 16
"""A weight, its gradient and both moments of AdamW, all fp32."""

_OUTPUT_BYTES = 4
"""Kept for each output of a layer: bf16, and as much again for gradients and a convolution's workspace.
An estimate from above. Source: this suite's rule."""


@releases_memory(cycles=True)  # DistributedDataParallel and its hooks refer to each other
def image_rate(
    group: dist.ProcessGroup | None,
    device: torch.device,
    setup: Setup,
    images: Callable[[], Images],
    *,
    node: int,
    sampling: Sampling,
    seed: int = 0,
    during: AbstractContextManager[object] | None = None,
    clock: Clock | None = None,
    components: Components | None = None,
    now: Callable[[], float] = time.monotonic,
) -> ImageRate | None:
    """Train a ResNet with DistributedDataParallel, products in bf16 by autocast, channels last, and AdamW.

    Collective: every rank of the group must call this, with the same setup, images, sampling and seed.

    A step takes the next batch from the loader, copies it to the device, and goes forward, backward and through the
    optimizer. A sample is a block of steps. Time is the device's own: it includes the device's wait for the next batch,
    and that part is returned. After each block the ranks exchange their results, and the first one decides for all
    whether another is needed, by the slowest rank. So all end together; the ranks at fault raise, and the others
    return None. At the end the ranks compare their weights.

    Args:
        group: the ranks that take part; None: this rank alone.
        device: where this rank trains.
        setup: of the training.
        images: opens the images; called on each rank, before anything else.
        node: number of this rank's node; its ranks share /dev/shm.
        sampling: how long to warm up and to measure, and the required confidence.
        seed: of weights and order.
        during: entered for the time of the blocks that count.
        clock: takes the time; by default the device's own.
        components: of the training; by default ``COMPONENTS`` of this module.
        now: the time of day of the first rank, in seconds.

    Returns: the result; None where another rank raises.

    Raises:
        WrongResult: on the rank at fault, or on every rank where none can be identified: a loss is not finite, or the
            ranks end with different weights.
        EnvironmentBroken: the images cannot be read, a worker died, or memory is too little, on the device or in
            /dev/shm; the ranks do not train the same.
        InconclusiveMeasurement: a rank's clock did not advance; on all ranks.
        ImportError: transformers is missing.
    """
    with _fastest_convolutions():
        return _Training(group, device, setup, seed, clock or clock_for(device), components or COMPONENTS, now).run(
            images, node, sampling, during or nullcontext()
        )


class _AnotherRankFailed(Exception):
    """This rank has no defect of its own: another one raises."""


class _Training:
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        setup: Setup,
        seed: int,
        clock: Clock,
        components: Components,
        now: Callable[[], float],
    ) -> None:
        self._group, self._device, self._setup, self._seed = group, device, setup, seed
        self._clock, self._components, self._now = clock, components, now
        self._ranks = Ranks(group, device)
        self._failure: EnvironmentBroken | None = None
        self._batches: Batches | None = None
        self._batch: Batch | None = None
        self._losses: list[float] = []

    def run(
        self,
        images: Callable[[], Images],
        node: int,
        sampling: Sampling,
        during: AbstractContextManager[object],
    ) -> ImageRate | None:
        try:
            opened = self._opened(images, sampling)
            self._require_shared_memory(opened, node)
            parameters = self._make(opened)
            try:
                self._start(opened)
                rates, waits = self._measure(sampling, during)
            finally:
                if self._batches is not None:
                    self._batches.close()
            with counted(VERIFYING):
                self._compare_weights()
        except _AnotherRankFailed:
            return None
        return ImageRate(
            images_per_second=rates,
            data_wait=waits,
            losses=tuple(self._losses),
            data=opened.name,
            rows=len(opened),
            parameters=parameters,
        )

    # ---- before the first step

    def _opened(self, images: Callable[[], Images], sampling: Sampling) -> Images:
        """Open the images, and find on all ranks what would let some wait for others."""
        opened, failure = None, None
        facts: list[float] = [0, 0, 0]
        try:
            opened = images()
            height, width, colours = opened.shape
            if min(height, width) < SMALLEST_SIDE or colours not in (1, COLOURS):
                raise EnvironmentBroken(
                    f"images of {height} x {width} pixels in {colours} colours cannot be trained on: at least "
                    f"{SMALLEST_SIDE} x {SMALLEST_SIDE} in 1 or {COLOURS} are needed"
                )
            if opened.classes < 2:
                raise EnvironmentBroken(
                    f"the {len(opened)} images have {opened.classes} class, and at least 2 are needed"
                )
            facts = [len(opened), zlib.crc32(repr((opened.name, opened.classes, opened.shape)).encode()), 0]
        except EnvironmentBroken as error:
            failure = error
        except OSError as error:
            failure = EnvironmentBroken(f"the images cannot be read: {error}")
        facts[2] = zlib.crc32(repr((self._setup, sampling, self._seed)).encode())
        of_ranks = self._share(failure, facts)
        assert opened is not None  # or the failure has been raised
        for index, mine in enumerate(of_ranks):
            if mine != of_ranks[0]:
                what = "setups" if mine[2] != of_ranks[0][2] else f"images ({mine[0]:.0f} and {of_ranks[0][0]:.0f})"
                raise EnvironmentBroken(
                    f"{self._ranks.name(index)} and {self._ranks.name(0)} train with different {what}. Give all nodes "
                    "the same suite, profile, workload and data"
                )
        return opened

    def _require_shared_memory(self, images: Images, node: int) -> None:
        setup = self._setup
        sizes = (setup.batch * math.prod(images.shape), 8 * setup.batch)  # uint8 and int64
        needed = needed_bytes(sizes, workers=setup.workers, prefetch=setup.prefetch)
        require_shared_memory(self._ranks, node=node, needed=needed, inspect=self._components.inspect)

    def _make(self, images: Images) -> int:
        """Create network, replica and optimizer; return the number of parameters."""
        setup = self._setup
        classes = head_of(images)
        side = max(images.shape[:2])
        parameters = NETWORKS[setup.network].parameters_with(classes)
        needed = parameters * _STATE_BYTES + setup.batch * outputs_of(setup.network, side) * _OUTPUT_BYTES
        free = free_bytes(self._device)
        failure = None
        if free is not None and free < needed:
            failure = EnvironmentBroken(
                f"{self._device}: training a {setup.network} with {setup.batch} images of {side} x {side} needs "
                f"{needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free. End what else uses it, or "
                f"choose a smaller batch: --gpucluster-workload vision.batch={max(2, setup.batch // 2)}"
            )
        self._share(failure, [])
        self._model = self._components.make(setup.network, self._device, classes=classes, seed=self._seed)
        self._replica = self._model
        if self._group is not None:
            self._replica = self._components.replicate(self._model, self._device, self._group)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        return sum(weight.numel() for weight in self._model.parameters())

    def _start(self, images: Images) -> None:
        """Start the workers, and wait for the first batch of every rank."""
        setup = self._setup
        try:
            self._batches = self._components.batches(
                images,
                batch=setup.batch,
                workers=setup.workers,
                prefetch=setup.prefetch,
                rank=self._ranks.index,
                world_size=self._ranks.count,
                seed=self._seed,
                # Only from pinned memory can a copy overlap with the host's work.
                pinned=self._device.type == "cuda",
                inspect=self._components.inspect,
            )
            self._take()
        except OSError as error:
            self._failure = EnvironmentBroken(f"the workers of the DataLoader cannot be started: {error}")
        self._share(self._failure, [])

    # ---- steps

    def _take(self) -> Batch:
        """Return the next batch. Where it fails, the last one again, until the ranks have exchanged the failure."""
        assert self._batches is not None  # they are made before the first step
        if self._failure is None:
            try:
                self._batch = next(self._batches)
            except EnvironmentBroken as error:
                self._failure = error
        return self._batch  # type: ignore[return-value]  # None only before the first step, and then none follows

    def _step(self, batch: Batch) -> torch.Tensor:
        """Take a step; return its loss, left on the device."""
        images, labels = (part.to(self._device, non_blocking=True) for part in batch)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            logits = self._replica(as_input(images))
        loss = self._components.loss(logits, labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._components.update(self._model, self._optimizer)
        return loss.detach()

    def _block(self, steps: int) -> list[tuple[float, float]]:
        """Take some steps; return the seconds of each rank, and the part of them that it waited for batches. The ranks
        exchange their results and failures.

        On a GPU the host runs ahead: a region around the wait for a batch is as long as the GPU is idle.
        """
        losses = []
        for _ in range(steps):
            with self._clock.region():
                batch = self._take()
            with self._clock.region():
                losses.append(self._step(batch))
        regions = self._clock.read()
        values = torch.stack(losses).tolist()
        first_bad = next((step for step, loss in enumerate(values) if not math.isfinite(loss)), steps)
        seconds = sum(regions)
        of_ranks = self._share(self._failure, [seconds, sum(regions[::2]), first_bad])
        self._require_finite([int(mine[2]) for mine in of_ranks], steps, values)
        self._losses += values
        stopped = [index for index, mine in enumerate(of_ranks) if not 0 < mine[0] < math.inf]
        if stopped:
            raise InconclusiveMeasurement(
                f"the clock of {self._ranks.name(stopped[0])} did not advance: {steps} steps took "
                f"{of_ranks[stopped[0]][0]} s"
            )
        return [(mine[0], mine[1] / mine[0]) for mine in of_ranks]

    def _require_finite(self, first_bad: list[int], steps: int, losses: list[float]) -> None:
        # One rank's NaN is in all ranks' gradients, and so in all losses from the next step on.
        earliest = min(first_bad)
        if earliest == steps:
            return
        if first_bad[self._ranks.index] != earliest:
            raise _AnotherRankFailed
        raise WrongResult(
            f"{self._ranks.name(self._ranks.index)} has a loss of {losses[earliest]} in step "
            f"{len(self._losses) + earliest + 1}, and it must be finite. Repeat test_training_step and the "
            "matmul tests on its GPU"
        )

    def _measure(self, sampling: Sampling, during: AbstractContextManager[object]) -> tuple[Series, tuple[float, ...]]:
        with counted(WARM_UP):
            steps = self._warm_up(sampling)
        blocks: list[list[tuple[float, float]]] = []
        images = steps * self._setup.batch
        slowest: list[float] = []
        begin, spent, more = self._now(), 0.0, 1.0
        with counted(MEASURING), during:
            while more:
                blocks.append(self._block(steps))
                slowest.append(images / max(blocks[-1])[0])
                spent = self._now() - begin
                wanted = len(self._losses) < LEAST_STEPS or wants_more(slowest, spent_seconds=spent, sampling=sampling)
                spent, more = self._ranks.of_first([spent, wanted])
        seconds, waits = zip(*(block[self._ranks.index] for block in blocks), strict=True)
        rates = series((images / mine for mine in seconds), sampling, spent_seconds=spent)
        return rates.decided_by(series(slowest, sampling, spent_seconds=spent)), waits

    def _warm_up(self, sampling: Sampling) -> int:
        """Take steps until the time is up; return the number of steps of a block."""
        wanted = min(BLOCK_SECONDS, sampling.window_seconds / MIN_SAMPLES)
        begin, steps, more = self._now(), 1, 1.0
        while more:
            each = max(self._block(steps))[0] / steps
            continues = len(self._losses) < _WARMUP_STEPS or self._now() - begin < sampling.warmup_seconds
            # The first step takes far longer than the others, so the number may only grow step by step.
            grown = max(1, min(10 * steps, round(wanted / each)))
            steps, more = (int(number) for number in self._ranks.of_first([grown, continues]))
        return steps

    # ---- between the ranks

    def _share(self, failure: EnvironmentBroken | None, numbers: list[float]) -> list[list[float]]:
        """Return every rank's numbers, unless a rank has failed: then it raises, and all others stop."""
        of_ranks = self._ranks.gather([failure is not None, *numbers])
        if failure is not None:
            raise failure
        if any(failed for failed, *_ in of_ranks):
            raise _AnotherRankFailed
        return [mine for _, *mine in of_ranks]

    def _compare_weights(self) -> None:
        found = [value for [value] in self._ranks.gather_fingerprints(fingerprint(self._model.parameters()))]
        most = majority(found)
        if not most.differing:
            return
        cause = "Check the all-reduce (nccl.all_reduce in this run), and what skips it"
        me = self._ranks.index
        if most.is_tied:
            raise WrongResult(
                f"{self._ranks.name(me)} has other weights at the end than other ranks: {len(found)} ranks have "
                f"{most.kinds} kinds, none of them most. {cause}"
            )
        if me not in most.differing:
            raise _AnotherRankFailed
        raise WrongResult(
            f"{self._ranks.name(me)} has other weights at the end than most ranks: fingerprint {found[me]:016x}, on "
            f"{most.count} of {len(found)} ranks it is {most.value:016x}. {cause}"
        )


def head_of(images: Images) -> int:
    """Return the classes of the network's head: those of ImageNet, or of the images if they have more.

    So the network is the same for all data, and the loss falls at once, when the network learns which classes occur.
    """
    return max(CLASSES, images.classes)


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Let cuDNN benchmark its convolutions for each shape, as a training does."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
