"""What is measured twice: by this suite's own functions, and by a loop that does nothing but the work.

Each subject has ``take(number)``, the seconds of one operation of both, ``each`` and ``unit``, the amount of one
operation, and ``name``. Shapes, dtypes and the number of operand sets are the same on both sides. So is the warm-up: on
a GPU the clocks follow the load, and a measurement after a pause is too high.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch
from comparison import in_turn

from pytest_gpucluster.benchmarks.dtypes import arithmetic
from pytest_gpucluster.benchmarks.hbm import measure_hbm
from pytest_gpucluster.benchmarks.matmul import Shape, measure_matmul, prepare_shape
from pytest_gpucluster.benchmarks.memory_budget import sets_beyond_cache
from pytest_gpucluster.benchmarks.memory_passes import Copies
from pytest_gpucluster.benchmarks.training.data import endless_batches
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.step import BETAS, LARGEST_NORM
from pytest_gpucluster.benchmarks.training.throughput import LEARNING_RATE, throughput
from pytest_gpucluster.benchmarks.training.throughput_setup import Setup
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.products import numerics
from pytest_gpucluster.metrics.sampling import Sampling
from pytest_gpucluster.metrics.stats import median


def sampling_of(warmup_seconds: float, window_seconds: float) -> Sampling:
    """Measure once, for one window: the confidence of a single figure does not matter here."""
    return Sampling(
        warmup_seconds=warmup_seconds,
        window_seconds=window_seconds,
        longest_seconds=window_seconds,
        tolerance_ratio=3.0,
    )


BLOCKS = 8
"""A stall spoils one of them. Ours are medians of blocks, too: the mean of a whole window would favour ours."""


class BareLoop:
    """Calls some work again and again between looks at the clock: CUDA events on a GPU, the host's on cpu."""

    def __init__(self, device: torch.device, start: Callable[[int], object], sampling: Sampling) -> None:
        self._device, self._start, self._sampling = device, start, sampling

    def seconds(self) -> float:
        """Warm up, then return the seconds of one call: the median of the blocks of the window."""
        self._run(2)
        each, warm = self._run(3) / 3, self._sampling.warmup_seconds
        if warm:
            self._run(self._calls(warm, each))
        calls = self._calls(self._sampling.window_seconds / BLOCKS, each)
        return median([self._block(number * calls, calls) for number in range(BLOCKS)])

    def _calls(self, seconds: float, each: float) -> int:
        return max(1, round(seconds / each))

    def _run(self, calls: int, first: int = 0) -> float:
        begin = time.perf_counter()
        for index in range(first, first + calls):
            self._start(index)
        self._wait()
        return time.perf_counter() - begin

    def _block(self, first: int, calls: int) -> float:
        if self._device.type == "cpu":
            return self._run(calls, first) / calls
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        begin.record()
        for index in range(first, first + calls):
            self._start(index)
        end.record()
        self._wait()
        return begin.elapsed_time(end) / 1e3 / calls

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


_INSTEAD = "choose a smaller n"


class Matmul:
    """``measure_matmul``, and a loop of the library's product with the same kind of result."""

    unit = "TFLOPS"

    def __init__(self, device: torch.device, shape: Shape, *, dtype: str, sampling: Sampling) -> None:
        self.name = f"matmul {dtype} " + (f"n={shape.n}" if shape.m == shape.n == shape.k else str(shape))
        self.each = shape.flops / 1e12
        self._device, self._shape, self._dtype, self._sampling = device, shape, dtype, sampling
        kind = arithmetic(dtype)
        self._precision = kind.float32_precision
        buffers = prepare_shape(device, shape, dtype=dtype, instead=_INSTEAD)
        random = torch.Generator(device).manual_seed(1)

        def operand(rows: int, columns: int, layout: str) -> torch.Tensor:
            size = (columns, rows) if layout == "t" else (rows, columns)
            made = torch.randn(size, generator=random, device=device).to(kind.operands)
            if kind.cleared_bits:  # as ours: the power of a product depends on its bits
                made.view(torch.int32).bitwise_and_(-(1 << kind.cleared_bits))
            return made.t() if layout == "t" else made

        self._operands = [
            (operand(shape.m, shape.k, shape.layout[0]), operand(shape.k, shape.n, shape.layout[1]))
            for _ in range(buffers.sets)
        ]
        # As many results as ours keeps until they are verified: fewer would fit into a cache that ours exceeds.
        self._results = [
            torch.zeros(shape.m, shape.n, dtype=kind.result, device=device) for _ in range(buffers.results)
        ]
        self._multiply = accelerator(device).product(scaled=kind.is_scaled)

    def take(self, number: int) -> dict[str, float]:
        """Return the seconds of one product."""
        return in_turn(number, self._ours, self._bare)

    def _ours(self) -> float:
        found = measure_matmul(self._device, self._shape, dtype=self._dtype, sampling=self._sampling, instead=_INSTEAD)
        return self.each / found.tflops.median

    def _bare(self) -> float:
        with numerics(self._precision):
            return BareLoop(self._device, self._product, self._sampling).seconds()

    def _product(self, index: int) -> None:
        a, b = self._operands[index % len(self._operands)]
        self._multiply(a, b, self._results[index % len(self._results)])


class HbmCopy:
    """``measure_hbm``'s copy, and the best of torch's, cudaMemcpy's and a Triton kernel's; on cpu torch's.

    ``missing`` names the one that is not available.
    """

    unit = "GB/s"

    def __init__(self, device: torch.device, *, payload_bytes: int, sampling: Sampling) -> None:
        words = payload_bytes // 8
        self.each = Copies.touched_bytes(words) / 1e9
        self._device, self._bytes, self._sampling = device, payload_bytes, sampling
        count = sets_beyond_cache(Copies.touched_bytes(words), accelerator(device).cache_bytes())
        self._sets = [(self._empty(words), self._empty(words)) for _ in range(count)]
        ways = self._ways()
        seconds = {way: BareLoop(device, call, sampling).seconds() for way, call in ways.items()}
        for way, call in reversed(ways.items()):  # again in another order: later ones may be faster
            seconds[way] = min(seconds[way], BareLoop(device, call, sampling).seconds())
        self.missing = "no Triton here" if device.type == "cuda" and "triton" not in ways else ""
        best = min(seconds, key=lambda way: seconds[way])
        self._copy = ways[best]
        others = ", ".join(f"{way} {self.each / found:.0f}" for way, found in seconds.items())
        self.name = f"HBM copy {payload_bytes / 2**20:g} MiB against {best} (GB/s, better of two: {others})"

    def take(self, number: int) -> dict[str, float]:
        """Return the seconds of one copy."""
        return in_turn(number, self._ours, lambda: BareLoop(self._device, self._copy, self._sampling).seconds())

    def _ours(self) -> float:
        found = measure_hbm(self._device, "copy", payload_bytes=self._bytes, sampling=self._sampling)
        return found.bytes_per_pass / found.bytes_per_second.median

    def _empty(self, words: int) -> torch.Tensor:
        return torch.full((words,), 1, dtype=torch.int64, device=self._device)

    def _pair(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sets[index % len(self._sets)]

    def _ways(self) -> dict[str, Callable[[int], object]]:
        def by_torch(index: int) -> None:
            source, target = self._pair(index)
            target.copy_(source)

        ways: dict[str, Callable[[int], object]] = {"torch": by_torch}
        if self._device.type == "cuda":
            ways["cudaMemcpy"] = self._by_runtime()
            kernel = self._by_triton()
            if kernel is not None:
                ways["triton"] = kernel
        return ways

    def _by_runtime(self) -> Callable[[int], object]:
        """cudaMemcpyAsync of the runtime that torch has loaded, device to device, on the current stream."""
        runtime = ctypes.CDLL(None)
        if not hasattr(runtime, "cudaMemcpyAsync"):
            major = str(torch.version.cuda).partition(".")[0]
            runtime = ctypes.CDLL(f"libcudart.so.{major}")
        runtime.cudaMemcpyAsync.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        stream, device_to_device = torch.cuda.current_stream(self._device).cuda_stream, 3

        def copy(index: int) -> None:
            source, target = self._pair(index)
            code = runtime.cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), self._bytes, device_to_device, stream)
            if code:
                raise RuntimeError(f"cudaMemcpyAsync: error {code}")

        return copy

    def _by_triton(self) -> Callable[[int], object] | None:
        try:
            from fidelity_kernel import copy_words
        except ImportError:  # the other two are left, and the row is not good
            return None

        def copy(index: int) -> None:
            source, target = self._pair(index)
            copy_words(source, target)

        return copy


class TrainingStep:
    """``throughput`` on one rank, and a training loop written by hand around the same decoder and loader."""

    unit = "tokens/s"

    def __init__(
        self, device: torch.device, *, geometry: Geometry, batch: int, compiled: bool, sampling: Sampling
    ) -> None:
        self._device, self._geometry, self._batch, self._compiled = device, geometry, batch, compiled
        self._sampling = sampling
        self.each = batch * geometry.sequence
        shape = f"{geometry.parameters / 1e6:.3g}M parameters, {batch} x {geometry.sequence} tokens"
        self.name = f"training step, {shape}, {'compiled' if compiled else 'eager'}"

    def take(self, number: int) -> dict[str, float]:
        """Return the seconds of one step."""
        return in_turn(number, self._ours, self._bare)

    def _ours(self) -> float:
        setup = Setup(
            geometry=self._geometry,
            strategy="ddp",
            batch=self._batch,
            compiled=self._compiled,
            recompute=False,
            workers=0,
            prefetch=1,
        )
        found = throughput(None, self._device, setup, sampling=self._sampling, in_parts=False)
        return found.step_seconds.median

    def _bare(self) -> float:
        model = make_decoder(self._geometry, self._device, seed=1, drawn_on=self._device)
        if self._compiled:
            for name, block in model.blocks.named_children():
                setattr(model.blocks, name, torch.compile(block))
        weights = list(model.parameters())
        optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
        batches = endless_batches(
            self._geometry, self._device, rank=0, count=1, batch=self._batch, workers=0, prefetch=1
        )

        def step(index: int) -> None:
            rows = next(batches)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                logits = model(rows[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, LARGEST_NORM)
            optimizer.step()

        return BareLoop(self._device, step, self._sampling).seconds()
