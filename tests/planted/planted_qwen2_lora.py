"""The faults that a training with LoRA can have."""

import importlib.util
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.lora import experiment, packed_file, reference_curve, trainer, training_plan
from pytest_gpucluster.benchmarks.lora.dataset import Rows
from pytest_gpucluster.benchmarks.lora.model import make_adapted, make_base, tiny_base
from pytest_gpucluster.benchmarks.lora.packing import share, tiny_tokenizer, tokenizer_for
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.benchmarks.lora.trainer import COMPONENTS, token_mean
from pytest_gpucluster.benchmarks.lora.training_plan import cosine
from pytest_gpucluster.benchmarks.storage import checkpoint
from pytest_gpucluster.benchmarks.training.sharding import mesh_of, shard
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.metrics.loss_curve import read_csv
from pytest_gpucluster.session.selection import Source

HERE = Path(__file__).parent.parent
ON_RANK_1 = os.environ["RANK"] == "1"
steps_taken = [0]


def in_training(step):
    # Of faults beside which nothing is compared with one rank. The steps taken again come after these.
    steps_taken[0] += 1
    return steps_taken[0] == step


def unsynchronized(model, mesh, **how):
    alone = dist.new_group([int(os.environ["RANK"])], use_local_synchronization=True)
    return shard(model, mesh_of(alone, torch.device("cpu")), **how)


def same(blocks, *, rank, world_size):
    return share(blocks, rank=0, world_size=world_size)


def flip(weight):
    local = weight.to_local().detach()
    local.view(torch.int16 if local.element_size() == 2 else torch.int32).flatten()[0] ^= 1


def flipped(model, optimizer):
    optimizer.step()
    if in_training(4) and ON_RANK_1:
        flip(next(weight for weight in model.parameters() if weight.requires_grad))


def based(model, optimizer):
    optimizer.step()
    if in_training(1) and ON_RANK_1:
        flip(next(weight for weight in model.parameters() if not weight.requires_grad))


def scaled(of_judged, targets):
    return 2 * token_mean(of_judged, targets)


def doubled(of_judged, targets):
    return (1 + ON_RANK_1) * token_mean(of_judged, targets)


def infinite(of_judged, targets):
    return token_mean(of_judged, targets) * (math.inf if ON_RANK_1 else 1.0)


def later(of_judged, targets):
    return token_mean(of_judged, targets) * (math.inf if in_training(3) and ON_RANK_1 else 1.0)


def half(blocks, *, rank, world_size):
    mine = share(blocks, rank=rank, world_size=world_size)
    return mine[: len(mine) // 2] if ON_RANK_1 else mine


def never(model, optimizer):
    if not ON_RANK_1:
        optimizer.step()


def slowly(model, optimizer):
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer.step()
    if ON_RANK_1:
        for weight, its in zip(model.parameters(), before, strict=True):
            weight.detach().lerp_(its, 0.5)


def nan(*given, **more):
    model = make_adapted(*given, **more)
    if ON_RANK_1:
        # Of what only this rank computes: its weights are the others'.
        head = model.get_base_model().lm_head
        head.register_forward_hook(lambda module, inputs, logits: logits * math.nan)
    return model


def frozen(*given, **more):
    model = make_adapted(*given, **more)
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            weight.requires_grad_(False)
    return model


def other(*given, seed, **more):
    return make_adapted(*given, seed=seed + ON_RANK_1, **more)


def poisoned(model, optimizer):
    optimizer.step()
    if in_training(2) and ON_RANK_1:
        weight = next(weight for weight in model.parameters() if weight.requires_grad)
        weight.to_local().detach().fill_(math.nan)


def truncated(folder, step, *given, group, **more):
    saved = checkpoint.save(folder, step, *given, group=group, **more)
    dist.barrier(group)
    if ON_RANK_1:
        path = saved / "__1_0.distcp"
        os.truncate(path, path.stat().st_size // 2)
    dist.barrier(group)
    return saved


def drifting(model, optimizer):
    optimizer.step()
    if in_training(2) and ON_RANK_1:
        for weight in model.parameters():
            if weight.requires_grad:
                weight.to_local().detach().mul_(1.5)


def interrupted(model, optimizer):
    optimizer.step()
    if in_training(10):
        raise RuntimeError("the training is interrupted here")


COMPONENTS_OF = {
    "none": {},
    "nosync": {"shard": unsynchronized},
    "samedata": {"share": same},
    "bit": {"update": flipped},
    "scaled": {"loss": scaled},
    "doubled": {"loss": doubled},
    "half": {"share": half},
    "slowly": {"update": slowly},
    "never": {"update": never},
    "inf": {"loss": infinite},
    "later": {"loss": later},
    "rate": {"learning_rate": lambda step, recipe: cosine(step, recipe) / 10},
    "frozen": {"make": frozen},
    "nan": {"make": nan},
    "late": {"update": poisoned},
    "truncated": {"save": truncated},
    "base": {"update": based},
    "other": {"make": other},
    "groups": {},
    "drift": {"update": drifting},
    "contract": {},
    "idle": {"learning_rate": lambda step, recipe: 0.0},
    "foreign": {},
    "weights": {},
    "model": {},
    "noextra": {},
    "nomemory": {},
    "nolink": {},
    "nocurve": {},
    "start": {},
    "slowstart": {"learning_rate": lambda step, recipe: cosine(step, recipe) / 10},
    "interrupted": {"update": interrupted},
    "shortened": {},
    "resumed": {},
}

# The base and the data of the first fault, for all of them.
make_tiny, tiny = experiment.tiny_experiment, {}
experiment.tiny_experiment = lambda sizes, kind: tiny.get(kind) or tiny.setdefault(kind, make_tiny(sizes, kind))

# What the reference curve that is read is of.
CURVE_OF = {"foreign": {"model": "qwen2-7b"}, "weights": {"weights": "0" * 16}}
FIND, FREE = importlib.util.find_spec, Cpu.free_bytes
ELSEWHERE = ("model", "nomemory", "nolink", "nocurve")
CASES = {
    "1x2": {
        "test_lora_tiny": tuple(fault for fault in COMPONENTS_OF if fault not in ELSEWHERE),
        "test_qwen2_lora": ("model", "nolink", "nocurve"),
        "test_lora_of_model": ("model",),
        "test_qwen2_lora_throughput": ("model", "nomemory"),
    }
}
COMPARED_ONLY = {"steps": 2, "checkpoint_every": 1, "calls": 0}
TRAINED_ONLY = {"parity_precisions": (), "calls": 0}
FEW = {**TRAINED_ONLY, "steps": 4, "checkpoint_every": 2}
LORA_TINY = {
    **dict.fromkeys(("nosync", "samedata", "scaled", "doubled", "half", "slowly", "never", "frozen"), COMPARED_ONLY),
    **dict.fromkeys(("bit", "late", "later", "truncated", "base"), FEW),
    **dict.fromkeys(("interrupted", "resumed", "foreign", "weights"), TRAINED_ONLY),
    "rate": {"calls": 0},
    "groups": {**FEW, "steps": 10},  # a final loss is of ten
    "drift": FEW,
}
WORKLOADS = {fault: {"lora_tiny": sizes} for fault, sizes in LORA_TINY.items()}
CONTRACT = {"lora": {"recipe": "contract"}, "lora_tiny": {**TRAINED_ONLY, "steps": 10}}
WORKLOADS |= {"idle": CONTRACT, "contract": {**CONTRACT, "lora_tiny": {"calls": 0, "steps": 10}}}
WORKLOADS |= {fault: {"lora_tiny": {**TRAINED_ONLY, "stop_after": 10}} for fault in ("start", "slowstart")}
WORKLOADS["shortened"] = {"lora_tiny": {**TRAINED_ONLY, "stop_after": 5}}
WORKLOADS["nocurve"] = {"qwen2_lora": {"stop_after": 9}}
WORKLOADS["model"] = {"qwen2_lora": {"steps": 10, "checkpoint_every": 8, "parity_steps": 2}}


def reference_file():
    """That of the right training."""
    path = HERE / f"reference-{os.environ['RANK']}.json"
    [curve] = (HERE / "reports" / "latest").rglob("*test_lora_tiny_none*/curve-group-0.csv")
    reference_curve.write(path, [read_csv(curve)])
    return {"reference_curve": path}


def going_on():
    scratch = HERE / "scratch"
    scratch.mkdir(exist_ok=True)
    return {"resume": True, "scratch": scratch}


def small_model():
    """A model and data of its own, which the first rank makes."""
    folder, blocks = HERE / "small-qwen2", HERE / "blocks.safetensors"
    if not ON_RANK_1:
        rows = synthetic_rows(300, seed=5)
        tokenizer, made = tiny_tokenizer(rows), HERE / "made"
        make_base(tiny_base(len(tokenizer)), torch.device("cpu"), precision="bf16", seed=3).save_pretrained(made)
        tokenizer.save_pretrained(made)
        given = Rows(rows=tuple(rows), malformed=(), sha256="0" * 64, source="rows")
        of_tokens = packed_file.prepare(given, tokenizer_for(made), name="small", sequence=64, held_out=0.1, seed=0)
        packed_file.write(blocks, of_tokens)
        made.rename(folder)
    while not folder.exists():
        time.sleep(0.1)
    return {
        "model": Source(name=str(folder), path=folder),
        "data": {"function_calls": Source(name=str(blocks), path=blocks)},
        **reference_file(),
    }


NOWHERE = Source(name="none", path=None)
SETTINGS = {
    **dict.fromkeys(("rate", "foreign", "weights", "start", "slowstart"), reference_file),
    "interrupted": going_on,
    **dict.fromkeys(("shortened", "resumed"), lambda: going_on() | reference_file()),
    "model": small_model,
    **dict.fromkeys(("nolink", "nocurve"), lambda: {"model": NOWHERE, "data": {"function_calls": NOWHERE}}),
}


def prepare(item):
    # So far as to look at the memory or the groups it needs no GPU.
    if item.callspec.params["fault"] in ("nomemory", "nolink", "nocurve"):
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name not in ("needs_gpu", "needs_hardware")]


def plant(fault, request):
    steps_taken[0] = 0
    alone = fault in ("groups", "drift", "nolink")
    request.module.group_size = (lambda nodes, global_batch: 1) if alone else training_plan.group_size
    if fault == "nocurve":
        request.module.given_base = lambda *given, **more: replace(tiny_base(64), label="qwen2-7b")
    missing = fault == "noextra"
    importlib.util.find_spec = lambda name, *more: None if missing and name == "peft" else FIND(name, *more)
    trainer.COMPONENTS = replace(COMPONENTS, **COMPONENTS_OF[fault])
    Cpu.free_bytes = (lambda device: 10**9) if fault == "nomemory" else FREE

    def read(path):
        curve = reference_curve.read(path)
        return replace(curve, context={**curve.context, **CURVE_OF.get(fault, {})})

    request.module.read = read
