"""The speed of this suite's LoRA trainer against that of transformers' Trainer, step by step in one run.

Both sides train the same adapters on the same weights with the same blocks in the same order, precision, micro-batch
and optimizer, without dropout and at one learning rate:

* ours: ``benchmarks.lora.trainer``, FSDP2 also on one rank, as the criterion runs it;
* trainer: ``transformers.Trainer``, the plain model on one rank, DDP on several. It logs once, at its end.

They take turns in the same processes: a step of the Trainer, then one of ours, and so on, so that both see the same
load. A step of the Trainer lasts from the end of our step to the end of its own, its data loading included; on a GPU
both ends wait for the device. A run with losses logged at each step comes first: different work is not compared.

Printed are tokens a second and GPU, the median over the steady steps with the quartiles, and the ratio of each pair of
steps. On cpu also the ratio of processor time, which other processes disturb less.

    python perf/training.py [--runs 3] [--steps 20] [--ranks 1] [--precision bf16] [--device cpu]
    python perf/training.py --device cuda --model qwen2-7b-random --compiled --recompute off
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison import TEMPORARY, Conditions, parser_of, run_child

GOALS = {"cpu": 1.0, "cuda": 1.1}
"""Of the median ratio, ours to trainer's."""
LOSS_ERRORS = {"fp32": 1e-4, "bf16": 1e-2}
"""The largest relative difference of a loss in the first steps at which both have done the same work: ten and two times
what the criterion allows between its trainer and one rank, for here two programs round in their own order."""
COMPARED_STEPS = 5
_DEADLINE_SECONDS = 900
_ROWS = 1500
_PASSED = ("device", "model", "precision", "sequence", "global_batch", "micro_batch", "recompute")


# ---- both sides, in processes of their own


def child(arguments: argparse.Namespace) -> None:
    """Train both sides in turn; rank 0 writes the seconds of each step, and the losses."""
    import torch
    import torch.distributed as dist

    from pytest_gpucluster.benchmarks.lora.model import random_base, tiny_base
    from pytest_gpucluster.benchmarks.lora.packing import pack, tiny_tokenizer
    from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
    from pytest_gpucluster.benchmarks.lora.trainer import Components, Trainer, trainable_blocks
    from pytest_gpucluster.benchmarks.lora.training_plan import Recipe

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if arguments.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rows = synthetic_rows(_ROWS, seed=1)
    packed = trainable_blocks(pack(rows, tiny_tokenizer(rows), arguments.sequence), arguments.sequence)
    base = tiny_base(512) if arguments.model == "tiny" else random_base()
    recipe = Recipe(
        steps=arguments.steps,
        warmup_steps=0,
        global_batch=arguments.global_batch,
        micro_batch=arguments.micro_batch,
        learning_rate=1e-3,
        precision=arguments.precision,
        dropout=False,
        recompute=arguments.recompute,
        compiled=arguments.compiled,
        seed=3,
    )

    def start() -> Trainer:
        if not dist.is_initialized():  # one rank: after the Trainer was made, which would take it for several
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        components = Components(learning_rate=lambda step, recipe: recipe.learning_rate)
        return Trainer(dist.group.WORLD, device, base, recipe, packed, components=components)

    turns = Turns(start, device)
    train(turns, base, recipe, packed, device, ranks, check=arguments.check)
    assert turns.trainer is not None
    found = {"notes": turns.notes, **turns.found}
    turns.trainer = None
    gc.collect()  # on gloo a process can abort at its end while sharded weights are alive
    dist.destroy_process_group()
    if rank == 0:
        Path(arguments.result).write_text(json.dumps(found))


class Turns:
    """Runs a step of ours after each of the Trainer's, and measures both."""

    def __init__(self, start: Callable[[], Any], device: Any) -> None:
        self._start, self._device = start, device
        self.trainer: Any = None
        self.found: dict[str, list[float]] = {
            name: [] for name in ("ours", "trainer", "ours_cpu", "trainer_cpu", "ours_losses", "trainer_losses")
        }
        self.notes = ""
        self._begin = (0.0, 0.0)

    def _now(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter(), time.process_time()

    def begin(self) -> None:
        """Make our side. The Trainer's first step begins."""
        self.trainer = self._start()
        self.notes = f"recompute {'on' if self.trainer.recomputes else 'off'}, " + (
            f"not compiled ({self.trainer.not_compiled})" if self.trainer.not_compiled else "compiled"
        )
        self._begin = self._now()

    def step(self, number: int) -> None:
        """Measure the Trainer's step, and run and measure one of ours."""
        for side in ("trainer", "ours"):
            if side == "ours":
                self.found["ours_losses"].append(self.trainer.step(number).loss)
            now = self._now()
            for name, then, at in zip((side, f"{side}_cpu"), self._begin, now, strict=True):
                self.found[name].append(at - then)
            self._begin = now


def train(turns: Turns, base: Any, recipe: Any, packed: Any, device: Any, ranks: int, *, check: bool) -> None:
    """Train with transformers' Trainer, with our steps in turn."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from pytest_gpucluster.benchmarks.lora.model import make_adapted
    from pytest_gpucluster.benchmarks.lora.packing import global_batch
    from pytest_gpucluster.benchmarks.lora.training_plan import micro_batches
    from pytest_gpucluster.benchmarks.training.step import BETAS, LARGEST_NORM

    order = [
        block
        for step in range(recipe.steps)
        for block in global_batch(step, size=recipe.global_batch, blocks=len(packed), seed=recipe.seed)
    ]

    class Blocks(torch.utils.data.Dataset):  # type: ignore[type-arg]  # torch leaves it untyped
        """The blocks in the order in which our trainer takes them."""

        def __len__(self) -> int:
            return len(order)

        def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
            tokens, loss_mask = packed.tokens[order[place]], packed.loss_mask[order[place]]
            targets = tokens[1:].masked_fill(~loss_mask, -100)
            return {"input_ids": tokens[:-1], "labels": targets, "shift_labels": targets}

    class Watch(TrainerCallback):
        """Runs our steps, and collects the logged losses."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.step(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                turns.found["trainer_losses"].append(logs["loss"])

    accumulation, micro = micro_batches(recipe, ranks)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=recipe.steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=LARGEST_NORM,
            optim="adamw_torch_fused",
            bf16=recipe.precision == "bf16",
            gradient_checkpointing=recipe.recompute == "on",
            gradient_checkpointing_kwargs={"use_reentrant": False},
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            use_cpu=device.type == "cpu",
            dataloader_pin_memory=device.type == "cuda",
            ddp_backend=("nccl" if device.type == "cuda" else "gloo") if ranks > 1 else None,
            logging_steps=1 if check else recipe.steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = make_adapted(base, device, precision=recipe.precision, dropout=False, seed=recipe.seed)
        Trainer(model=model, args=settings, train_dataset=Blocks(), callbacks=[Watch()]).train()


# ---- what is printed


def run(arguments: argparse.Namespace, *, check: bool = False) -> dict[str, Any]:
    """Let both sides train once."""
    words = [f"--steps={COMPARED_STEPS if check else arguments.steps}", *(["--check"] if check else [])]
    words += [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in _PASSED]
    words += ["--compiled"] if arguments.compiled else []
    return run_child(__file__, words, ranks=arguments.ranks, deadline_seconds=_DEADLINE_SECONDS)


def quartiles(values: list[float], digits: int = 0) -> str:
    """Return "median (lower to upper quarter)"."""
    lower, middle, upper = statistics.quantiles(values, n=4)
    return f"{middle:,.{digits}f} ({lower:,.{digits}f} to {upper:,.{digits}f})"


def compare(arguments: argparse.Namespace) -> int:
    """Run both sides and print the result; return 1 if the goal is missed or it was not the same work."""
    from pytest_gpucluster.benchmarks.lora.trainer import STARTING_STEPS

    conditions = Conditions()
    if arguments.steps < STARTING_STEPS + 4:
        print(f"--steps {arguments.steps}: at least {STARTING_STEPS + 4}, for the first {STARTING_STEPS} do not count")
        return 2
    print(
        f"{arguments.model}, {arguments.precision}, {arguments.ranks} x {arguments.device}; "
        f"global batch {arguments.global_batch} x {arguments.sequence} tokens, {arguments.micro_batch} at once; "
        f"{arguments.runs} runs of {arguments.steps} steps of each side in turn"
    )
    checked = run(arguments, check=True)
    losses = list(zip(checked["ours_losses"], checked["trainer_losses"], strict=True))
    error = max(abs(ours - theirs) / abs(theirs) for ours, theirs in losses)
    allowed = LOSS_ERRORS[arguments.precision]
    same = len(losses) == COMPARED_STEPS and error <= allowed
    print(
        f"losses of the first {len(losses)} steps: {', '.join(f'{ours:.5f}' for ours, _ in losses)}; the Trainer's "
        f"differ by {error:.1e} at most, allowed {allowed:g}: {'the same work' if same else 'NOT THE SAME WORK'}"
    )
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", "trainer", "ours_cpu", "trainer_cpu")}
    for _ in range(arguments.runs):
        found = run(arguments)
        for name, values in seconds.items():
            values += found[name][STARTING_STEPS:]
    tokens = arguments.global_batch // arguments.ranks * arguments.sequence
    rates = {side: [tokens / value for value in seconds[side]] for side in ("ours", "trainer")}
    ratios = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds["trainer"], strict=True)]
    goal = GOALS[arguments.device]
    met = same and statistics.median(ratios) >= goal
    print("tokens/s a GPU, median (quarters):")
    for side, values in rates.items():
        print(f"  {side:8} {quartiles(values)}")
    print(f"  ratio    {quartiles(ratios, 3)}, goal {goal}: {'met' if met else 'MISSED'}")
    if arguments.device == "cpu":
        of_cpu = [theirs / ours for ours, theirs in zip(seconds["ours_cpu"], seconds["trainer_cpu"], strict=True)]
        print(f"  ratio of processor time {quartiles(of_cpu, 3)}")
    print(f"ours: {found['notes']}\n{conditions.line()}")
    return 0 if met else 1


def main() -> int:
    """Read the arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=("tiny", "qwen2-7b-random"), default="tiny")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="bf16", help="(default: bf16, as the criteria)"
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--runs", type=int, default=3, help="(default: 3)")
    parser.add_argument("--steps", type=int, default=20, help="of each side in a run; three do not count (default: 20)")
    parser.add_argument("--sequence", type=int, help="tokens of a block (default: 256 of the tiny model, else 4096)")
    parser.add_argument("--global-batch", type=int, default=16, help="blocks of a step (default: 16)")
    parser.add_argument("--micro-batch", type=int, help="blocks at once (default: 8 of the tiny model, else 2)")
    parser.add_argument("--recompute", choices=("auto", "on", "off"), default="off")
    parser.add_argument("--compiled", action="store_true", help="compile each block of ours")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.sequence = arguments.sequence or (256 if arguments.model == "tiny" else 4096)
    arguments.micro_batch = arguments.micro_batch or (8 if arguments.model == "tiny" else 2)
    if arguments.result:
        child(arguments)
        return 0
    return compare(arguments)


if __name__ == "__main__":
    sys.exit(main())
