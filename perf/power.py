"""How small a fault the comparison of LoRA's steps finds, with the limits of its errors of loss, gradient and weight.

Each fault is planted into the tiny model's training at three sizes, on the last rank or on all, in fp32 and in bf16. A
cell has the metric that misses its limit by the most, its value on the ranks at fault, and how many times that is of
the same value without a fault; "missed" where no limit is missed, or where another rank misses one too.

    python perf/power.py                      # the table of docs/lora.md
    python perf/power.py --ranks 2 --sizes 0.1
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison import Conditions, parser_of, row, run_child

FAULTS: Mapping[str, str] = {
    "loss": "one rank: smaller loss",
    "targets": "one rank: targets left out",
    "optimizer": "one rank: part of each update left out",
    "exchange": "all: smaller gradients after the exchange",
    "labels": "all: labels shifted by 2 at some positions",
    "rate": "all: smaller learning rate",
}
ON_LAST = ("loss", "targets", "optimizer")
PRECISIONS = ("fp32", "bf16")
METRICS = ("loss", "gradient", "weight")
_STEPS, _SEQUENCE, _DEADLINE_SECONDS = 4, 64, 600


def child(arguments: argparse.Namespace) -> None:
    """Compare a training with each fault; rank 0 writes the errors of each rank."""
    import torch
    import torch.distributed as dist

    from pytest_gpucluster.benchmarks.lora import trainer
    from pytest_gpucluster.benchmarks.lora.convergence import check_parity
    from pytest_gpucluster.benchmarks.lora.model import tiny_base
    from pytest_gpucluster.benchmarks.lora.packing import pack, tiny_tokenizer
    from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
    from pytest_gpucluster.benchmarks.lora.training_plan import Recipe
    from pytest_gpucluster.device.products import deterministic, numerics

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    rows = synthetic_rows(100, seed=1)
    tokenizer = tiny_tokenizer(rows)
    packed = trainer.trainable_blocks(pack(rows, tokenizer, _SEQUENCE), _SEQUENCE)
    base, components = tiny_base(len(tokenizer)), trainer.COMPONENTS
    recipe = Recipe(steps=_STEPS, warmup_steps=1, global_batch=2 * ranks, micro_batch=2, learning_rate=1.0)
    found = {}
    for name, size in [("", 0.0), *((fault, size) for fault in FAULTS for size in arguments.sizes)]:
        planted = {} if not name or (name in ON_LAST and rank < ranks - 1) else planted_as(name, size)
        trainer.COMPONENTS = replace(components, **planted)
        for precision in PRECISIONS:
            compared = recipe.compared(steps=_STEPS, global_batch=2 * ranks, precision=precision)
            with numerics("highest"), deterministic():
                parity, _ = check_parity(dist.group.WORLD, alone, torch.device("cpu"), base, compared, packed)
            of_ranks: list[Any] = [None] * ranks
            dist.all_gather_object(of_ranks, [getattr(parity, metric) for metric in METRICS])
            found[f"{name} {size:g} {precision}"] = of_ranks
    dist.barrier()
    if rank == 0:
        Path(arguments.result).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # on gloo a process can abort at its end while sharded weights are alive


def planted_as(name: str, size: float) -> dict[str, Callable[..., Any]]:
    """Return the components of a training with a fault."""
    from pytest_gpucluster.benchmarks.lora.model import MaskedLoss
    from pytest_gpucluster.benchmarks.lora.trainer import token_mean
    from pytest_gpucluster.benchmarks.lora.training_plan import cosine
    from pytest_gpucluster.benchmarks.training.sharding import shard

    class Fewer(MaskedLoss):
        def forward(self, tokens: Any, loss_mask: Any) -> Any:
            places = loss_mask.flatten().nonzero().flatten()
            fewer = loss_mask.clone()
            fewer.view(-1)[places[: max(1, round(size * len(places)))]] = False
            return super().forward(tokens, fewer)

    class Shifted(MaskedLoss):
        def _sums(self, hidden: Any, targets: Any, counts: Any) -> Any:
            shifted, some = targets.clone(), max(1, round(size * len(targets)))
            shifted[:some] = targets.roll(-2)[:some]
            return super()._sums(hidden, shifted, counts)

    def exchange(model: Any, mesh: Any, *, precision: str) -> None:
        shard(model, mesh, precision=precision)
        for weight in model.parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.mul_(1 - size))

    def optimizer(model: Any, optimizer: Any) -> None:
        before = [weight.detach().clone() for weight in model.parameters()]
        optimizer.step()
        for weight, its in zip(model.parameters(), before, strict=True):
            weight.detach().lerp_(its, size)

    components: dict[str, dict[str, Callable[..., Any]]] = {
        "loss": {"loss": lambda summed, targets: (1 - size) * token_mean(summed, targets)},
        "targets": {"model": Fewer},
        "optimizer": {"update": optimizer},
        "exchange": {"shard": exchange},
        "labels": {"model": Shifted},
        "rate": {"learning_rate": lambda step, recipe: (1 - size) * cosine(step, recipe)},
    }
    return components[name]


def cell(found: list[list[float]], clean: list[list[float]], precision: str, name: str) -> str:
    """Return what a limit makes of the errors of all ranks."""
    at_fault = [len(found) - 1] if name in ON_LAST else list(range(len(found)))
    limits = [limit_of(metric, precision) for metric in METRICS]
    on_others = [
        rank for rank, errors in enumerate(found) if rank not in at_fault and any(map(float.__gt__, errors, limits))
    ]
    ratios = [min(found[rank][number] for rank in at_fault) / limit for number, limit in enumerate(limits)]
    worst = max(range(len(METRICS)), key=lambda number: ratios[number])
    value, usual = ratios[worst] * limits[worst], max(errors[worst] for errors in clean)
    times = f", {value / usual:.0e} x" if usual else ""
    text = f"{METRICS[worst]} {value:.2g}{times}"
    return text if ratios[worst] > 1 and not on_others else f"missed: {text}"


def limit_of(metric: str, precision: str) -> float:
    """Return the shipped limit."""
    from pytest_gpucluster.judge import loader

    labels = {"model": "lora_tiny", "precision": precision}
    limit = loader.load().limit(f"lora.{metric}_error", sku="cpu-rehearsal", world_size=2, nnodes=1, labels=labels)
    assert limit is not None
    assert limit.max is not None
    return limit.max


def main() -> int:
    """Print the table; return 1 if a fault is missed, or a training without one is not."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 0.1, 0.01])
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.result:
        child(arguments)
    conditions = Conditions()
    sizes = ["--sizes", *map(str, arguments.sizes)]
    runs = [run_child(__file__, sizes, ranks=ranks, deadline_seconds=_DEADLINE_SECONDS) for ranks in arguments.ranks]
    columns = [(run, precision) for run in runs for precision in PRECISIONS]
    names = [f"{ranks} ranks, {precision}" for ranks in arguments.ranks for precision in PRECISIONS]
    lines = [row(["fault", "size", *names]), row(["---"] * (2 + len(names)))]
    clean = [run[f" 0 {precision}"] for run, precision in columns]
    largest = [[max(errors[number] for errors in its) for number in range(len(METRICS))] for its in clean]
    worst = [", ".join(f"{metric} {value:.1g}" for metric, value in zip(METRICS, its, strict=True)) for its in largest]
    lines.append(row(["none", "", *worst]))
    for fault, text in FAULTS.items():
        for size in arguments.sizes:
            cells = [
                cell(run[f"{fault} {size:g} {precision}"], its, precision, fault)
                for (run, precision), its in zip(columns, clean, strict=True)
            ]
            lines.append(row([text, f"{size:g}", *cells]))
    print("\n".join(lines))
    print(conditions.line())
    precisions = [precision for _, precision in columns]
    healthy = all(
        value <= limit_of(metric, precision)
        for its, precision in zip(largest, precisions, strict=True)
        for metric, value in zip(METRICS, its, strict=True)
    )
    return 0 if healthy and not any("missed" in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
