"""How much the loader's settings matter: two of them in turn, again and again, on the same images.

    python perf/loader.py                                  # JPEG files made for it; 4/8/4 against 2/4/2
    python perf/loader.py --data /data/imagenet 8/8/2 8/16/2
    python perf/loader.py --step 0.02                      # a consumer that takes 20 ms for each batch, as a GPU would

A setting is batch/workers/prefetch. The loader is the one of the vision criteria, and the images are really read and
decoded. Each pair is measured in one run, in turn, so that other load affects both alike; its ratio counts. Next to it
is the processor time of an image, in this process and its workers: other processes disturb that less, but it does not
include waiting.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from comparison import TEMPORARY, Conditions, median_text, parser_of

from pytest_gpucluster.benchmarks.vision.datasets import ImageBatches, Images, open_images

CLASSES, WIDTH, HEIGHT = 8, 500, 375
"""Of the images that are made here: a usual size of photographs in such data sets."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the loader."""

    batch: int
    workers: int
    prefetch: int

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read batch/workers/prefetch."""
        try:
            batch, workers, prefetch = (int(part) for part in text.split("/"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not batch/workers/prefetch, such as 4/8/4") from None
        return cls(batch=batch, workers=workers, prefetch=prefetch)

    def __str__(self) -> str:
        return f"{self.batch}/{self.workers}/{self.prefetch}"


def make_images(folder: Path, count: int) -> None:
    """Write JPEG files of smooth noise, which compress about as photographs do."""
    from PIL import Image

    draws = torch.Generator().manual_seed(0)
    for number in range(count):
        to = folder / f"class-{number % CLASSES}"
        to.mkdir(parents=True, exist_ok=True)
        coarse = torch.randint(0, 256, (HEIGHT // 4, WIDTH // 4, 3), dtype=torch.uint8, generator=draws)
        small = Image.frombytes("RGB", (WIDTH // 4, HEIGHT // 4), bytes(coarse.flatten().tolist()))
        small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(to / f"{number:05}.jpg", quality=85)


def processor_seconds() -> float:
    """Return the processor time of this process and its workers so far."""
    ticks = 0
    for worker in multiprocessing.active_children():
        # Source: proc_pid_stat(5), fields 14 and 15; the name before them may hold blanks.
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def rate(images: Images, setting: Setting, *, count: int, step_seconds: float) -> tuple[float, float]:
    """Read about ``count`` images, after the prefetched ones; return images/s and CPU ms of an image."""
    batches = ImageBatches(
        images,
        batch=setting.batch,
        workers=setting.workers,
        prefetch=setting.prefetch,
        rank=0,
        world_size=1,
        seed=0,
        pinned=torch.cuda.is_available(),
    )
    try:
        for _ in range(1 + setting.workers * setting.prefetch):
            next(batches)
        begin, spent, steps = time.perf_counter(), processor_seconds(), max(1, count // setting.batch)
        for _ in range(steps):
            next(batches)
            time.sleep(step_seconds)
        read = steps * setting.batch
        return read / (time.perf_counter() - begin), 1e3 * (processor_seconds() - spent) / read
    finally:
        batches.close()


def main() -> None:
    """Measure the pairs, and print a table."""
    parser = parser_of(__doc__)
    conditions = Conditions()
    parser.add_argument("settings", nargs="*", type=Setting.parse, help="two, as batch/workers/prefetch")
    parser.add_argument("--data", type=Path, help="images, as for --gpucluster-data; without it some are made")
    parser.add_argument("--side", type=int, default=224, help="pixels of a side")
    parser.add_argument("--pairs", type=int, default=8, help="how often both are measured; at least 6")
    parser.add_argument("--images", type=int, default=512, help="of each measurement")
    parser.add_argument("--step", type=float, default=0.0, help="seconds that the consumer takes for a batch")
    options = parser.parse_args()
    two = options.settings or [Setting(batch=4, workers=8, prefetch=4), Setting(batch=2, workers=4, prefetch=2)]
    if len(two) != 2 or options.pairs < 6:
        parser.error("two settings and at least 6 pairs are needed")
    # More workers than CPUs are a valid setting.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as made:
        if options.data is None:
            make_images(Path(made), 512)
        images = open_images(options.data or Path(made), side=options.side)
        rows: list[tuple[float, ...]] = []
        for pair in range(options.pairs):
            # A B, B A, A B ...: a drift affects both alike.
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            found = {at: rate(images, two[at], count=options.images, step_seconds=options.step) for at in order}
            rows.append((found[0][0], found[1][0], found[0][1], found[1][1]))
            print(f"pair {pair + 1}: {found[0][0]:.1f} and {found[1][0]:.1f} images/s", file=sys.stderr, flush=True)
    print_table(two, rows)
    what = f"{len(images)} images ({images.name}), {images.shape[1]} x {images.shape[0]} pixels"
    print(f"\n{what}; {conditions.line()}")


def print_table(two: list[Setting], rows: list[tuple[float, ...]]) -> None:
    """Print the table of all pairs and their medians."""
    first, second = two
    print(f"| pair | {first}, images/s | {second}, images/s | ratio | {first}, CPU ms | {second}, CPU ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for number, (a, b, c, d) in enumerate(rows, start=1):
        print(f"| {number} | {a:.1f} | {b:.1f} | {a / b:.3f} | {c:.2f} | {d:.2f} | {c / d:.3f} |")
    a, b, c, d = (statistics.median(column) for column in zip(*rows, strict=True))
    speed, effort = median_text([a / b for a, b, _, _ in rows]), median_text([c / d for _, _, c, d in rows])
    print(f"| median | {a:.1f} | {b:.1f} | {speed} | {c:.2f} | {d:.2f} | {effort} |")


if __name__ == "__main__":
    main()
