"""Training criteria: steps, DDP, FSDP, checkpoints, throughput, vision, scaling, failures, LoRA."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpucluster.config.declaration import DAY_SECONDS, KIB, TB, WEEK_SECONDS, Criterion, Section, series, value
from pytest_gpucluster.config.value_types import Amount, Choice, Duration, Ratio, Whole
from pytest_gpucluster.metrics.catalogue import read_metrics
from pytest_gpucluster.metrics.sampling import Sampling

_SWITCH = Choice(("off", "on"))
_PRECISION = Choice(("bf16", "fp32"))
_COMPILED = ("whether blocks are compiled (torch.compile)", _SWITCH)
_RECOMPUTE = ("whether activations are recomputed; auto: where the memory demands it", Choice(("auto", "off", "on")))


@dataclass(frozen=True, kw_only=True)
class FailurePropagation:
    """The end of a small training, that of `training`, of which a rank dies: a job of its own on each node."""

    deaths: tuple[str, ...] = value(
        "how the rank dies, one job each: it exits at once, raises an exception, or is killed by SIGKILL",
        Choice(("exit", "raise", "kill")),
    )
    steps: int = value("steps that are taken before", Whole(1, 1000))
    start_seconds: float = value("from the start of the job to that death, at most", Duration(1, DAY_SECONDS))
    end_seconds: float = value(
        "from that death to the end of the job, at most: then it is ended and rejected", Duration(1, DAY_SECONDS)
    )


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Training ResNets on images, which a multi-worker loader reads. Each worker keeps its batches in /dev/shm."""

    models: tuple[str, ...] = value("which are trained", Choice(("resnet18", "resnet50")))
    image_size: int = value(
        "pixels of a side, of synthetic images and of files with an image each; data sets of one size keep theirs",
        Whole(28, 4096),
    )
    batch: int = value("images of each GPU in a step", Whole(2, 65536))
    workers: int = value(
        "processes of each rank that read images ahead; 0: the rank reads them itself, without /dev/shm", Whole(0, 256)
    )
    prefetch: int = value("batches that each of them reads ahead", Whole(1, 1000))
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The sizes of a decoder, and of a step of its training."""

    layers: int = value("blocks of the decoder", Whole(1, 1000))
    # A head is an even part of the width.
    width: int = value("width of the decoder", Whole(64, 65536, multiple_of=64))
    heads: int = value("heads of its attention; width is an even multiple", Whole(1, 1024))
    vocab: int = value("tokens that there are", Whole(16, 1_000_000))
    sequence: int = value("tokens of a row, all of which are trained on", Whole(8, 1_000_000))
    batch: int = value("rows of each rank in a step", Whole(1, 65536))


@dataclass(frozen=True, kw_only=True)
class Training(Decoder):
    """Training a decoder to see that it is right: on each GPU alone, and on all ranks together."""

    steps: int = value("steps that are compared one by one", Whole(2, 1000))


@dataclass(frozen=True, kw_only=True)
class TrainingModel(Decoder):
    """A decoder whose training is timed."""

    inner: int = value("width inside its MLP; 0: 8/3 of the width, up to a multiple of 64", Whole(0, 1_000_000))
    key_heads: int = value("heads of its keys and values, of which heads is a multiple; 0: as heads", Whole(0, 1024))
    recompute: str = value("whether blocks keep only their input, and are computed again in backward", _SWITCH)


@dataclass(frozen=True, kw_only=True)
class TrainingThroughput:
    """Timing full training steps. The models are contract; large, of which each rank has all (ddp); and sharded, of
    which each rank has a part (fsdp)."""

    compiled: str = value(*_COMPILED)
    workers: int = value("processes of each rank that read data ahead; 0: none does", Whole(0, 256))
    prefetch: int = value("batches that each of them reads ahead", Whole(1, 1000))
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Fsdp(Training):
    """Training a decoder that is sharded over all ranks, to see that it is right; checkpoints are of the same."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving a sharded training and going on from it, and the speed of the file system that it is saved to."""

    steps: int = value("steps before the checkpoint, and as many after it", Whole(1, 1000))
    file_bytes: int = value(
        "what each rank writes to the shared file system, and reads of another rank",
        Amount(4 * KIB, TB, multiple_of=4096),
        key="size",
    )
    passes: int = value("how often all ranks write and read", Whole(1, 1000))


@dataclass(frozen=True, kw_only=True)
class Scaling(TrainingModel, TrainingThroughput):
    """Training the same model by ddp in groups of different sizes: one GPU, a node, the world. Tokens per GPU and step,
    which are batch times sequence, decide how much of the exchange can show."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Fine-tuning with LoRA until it has learned, and what shows that it has learned rightly."""

    steps: int = value("steps of the optimizer", Whole(12, 1_000_000))
    stop_after: int = value(
        "of these, steps that are taken, and judged by a reference curve; 0: all of them", Whole(0, 1_000_000)
    )
    warmup_steps: int = value("steps in which the learning rate rises; fewer than steps", Whole(1, 1_000_000))
    global_batch: int = value(
        "blocks of a step, of all ranks that train one model together, however many they are", Whole(1, 65536)
    )
    micro_batch: int = value("blocks that a GPU takes at once, at most", Whole(1, 65536))
    sequence: int = value("tokens of a block", Whole(16, 1_000_000))
    rows: int = value("conversations, at most", Whole(20, 10_000_000))
    held_out_ratio: float = value("part of the conversations kept from training", Ratio(0.001, 0.5))
    held_out_blocks: int = value("blocks of these whose loss is taken, at most", Whole(1, 100_000))
    precision: str = value("of products, of the base, and of what is gathered", _PRECISION)
    recompute: str = value(*_RECOMPUTE)
    compiled: str = value(*_COMPILED)
    parity_steps: int = value("steps that one rank repeats alone, to be compared", Whole(2, 1000))
    parity_batch: int = value("blocks of these steps; as many as ranks at least", Whole(1, 65536))
    parity_sequence: int = value("tokens of their blocks, at most sequence", Whole(16, 1_000_000))
    parity_precisions: tuple[str, ...] = value("precisions of these steps", _PRECISION, key="parity")
    checkpoint_every: int = value(
        "steps from one checkpoint to the next; those after the last one are taken twice", Whole(1, 1_000_000)
    )
    calls: int = value("function calls that are asked for after the training; 0: none", Whole(0, 100_000))
    call_tokens: int = value("tokens of an answer, at most", Whole(1, 4096))
    tolerance_ratio: float = value(
        "certain is a rate whose median's 95 % interval is no wider than this part of it", Ratio(0.0001, 3)
    )
    deadline_seconds: float = value(
        "how long all of it may take; for a given model besides 1.5 times the predicted time of its steps",
        Duration(10, WEEK_SECONDS),
    )


@dataclass(frozen=True, kw_only=True)
class LoraTraining:
    """How conversations are learned, of the tiny model and of a given one."""

    recipe: str = value(
        "packed: the assistant's tokens, in full blocks; contract: all tokens of conversations one by one, with "
        "weight decay 0.01, 3 warm-up steps, 2 conversations at once",
        Choice(("contract", "packed")),
    )
    rendering: str = value(
        "how the conversations of a given model are written: glaive's texts, or its tokenizer's chat template",
        Choice(("chat", "glaive")),
    )


@dataclass(frozen=True, kw_only=True)
class LoraThroughput:
    """Timing the steps of LoRA fine-tuning at Qwen2-7B's sizes, with random weights."""

    sequence: int = value("tokens of a block", Whole(16, 1_000_000))
    micro_batch: int = value("blocks that a GPU takes at once", Whole(1, 65536))
    accumulation: int = value("how often it does before the optimizer's step", Whole(1, 65536))
    recompute: str = value(*_RECOMPUTE)
    compiled: str = value(*_COMPILED)
    sampling: Sampling


_CALLS = {
    "well_formed": "are a function call that a program can read",
    "right_function": "call the function that is due",
    "right_arguments": "call it with the arguments that are due",
    "intent_accuracy": "are a call where one is due, and none where none is",
    "intent_precision": "are a due call, of those that are a call",
    "intent_recall": "are a call, of those where one is due",
    "intent_f1": "count for the harmonic mean of precision and recall of the intent to call",
}


_CALL = """
lora.calls.{kind}: ratio, higher
    Part of the answers to held-out prompts that {doc}, written greedily after the training.
    recorded: no figure to judge by; the limits of the loss decide
"""
_OF_A_RANK = """
{prefix}loss_error: ratio, lower
    Difference of the loss of a rank's share{where}, before the exchange, to that of the same rows on this and two other
    ranks.
{prefix}gradient_error: ratio, lower
    Likewise for the share's gradients{where}: their distance; or that of the exchanged gradients from the mean of all
    shares, or of their clipping, if that is larger.
"""
_PREFIXES = {
    **{f"{name}.{bf16}": " in bf16" if bf16 else "" for name in ("ddp", "fsdp") for bf16 in ("", "bf16_")},
    "lora.": " in some steps",
}
"""Beginning of the names of such metrics -> where in the training that is."""


METRICS = (
    *(
        metric
        for prefix, where in _PREFIXES.items()
        for metric in read_metrics(_OF_A_RANK.format(prefix=prefix, where=where))
    ),
    *(metric for kind, doc in _CALLS.items() for metric in read_metrics(_CALL.format(kind=kind, doc=doc))),
    *read_metrics("""
training.step.loss_error: ratio, lower
    Difference of the loss to that of the CPU's same steps, all in fp32.
training.step.gradient_error: ratio, lower
    Likewise for the gradients: of their norm before clipping, or their distance.
training.step.weight_error: ratio, lower
    Distance of the weights to the CPU's, as a part of the way that those have gone.
training.step.bf16_loss_error: ratio, lower
    Difference of the loss in bf16 to that of the same device in fp32.
training.step.bf16_gradient_error: ratio, lower
    Likewise for the gradients: of their norm, or their distance.
training.step.bf16_weight_error: ratio, lower
    Distance of the weights after steps in bf16 to those in fp32, as above.
fsdp.share: ratio, lower
    Bytes of weights and moments on a rank over those of 1/N of each, rounded up to rows.
checkpoint.resume_error: ratio, lower
    Difference of the losses after a checkpoint to those without a break, on the same ranks.
checkpoint.reshard_error: ratio, lower
    Likewise on fewer ranks with the same global batch, or without sharding.
lora.weight_error: ratio, lower
    Distance of a rank's weights after the optimizer's step to those of the same step on a copy, as a part of the
    step.
lora.held_out_ratio: ratio, lower
    Held-out loss after the training as a part of that before it.
lora.resume_error: ratio, lower
    Largest difference of a loss when steps are taken again from the newest checkpoint.
lora.reload_error: ratio, lower
    Difference of the held-out loss when the saved adapters are read into a new model.
lora.group_error: ratio, lower
    Largest difference of a loss to that of the first group that trained at once.
lora.reference_deviation: ratio, lower
    Largest distance of the loss curve from the reference, in widths of its band.
vision.loss_ratio: ratio, lower
    Mean of a rank's last losses over its first one.
lora.peak_memory: GB, lower
    Most memory that torch held on a GPU.
    recorded: a run that needs more memory than there is ends in an error that states it
checkpoint.verified: ratio, higher
    Bytes read from another rank's files that are as they were written, over all bytes of these files.
checkpoint.write_bandwidth: GB/s, higher
    Bytes of a rank's file over the time until they are on stable storage, all ranks writing at once.
    recorded: file systems differ; set a limit by what yours was bought for
checkpoint.read_bandwidth: GB/s, higher
    Bytes of another rank's file over the time until they are read and verified, all ranks reading at once.
    recorded: file systems differ; set a limit by what yours was bought for
training.tokens_per_second: tokens/s, higher, group
    Tokens that a GPU trains on, none of which is padding, over the time of a full step. The slowest rank decides.
lora.tokens_per_second: tokens/s, higher, group
    Tokens that a GPU fine-tunes on, none of which is padding, over the time of a step. The slowest rank decides.
scaling.tokens_per_second: tokens/s, higher
    Tokens that this rank's GPU trains on, while all groups of `group_size` ranks train at once.
training.mfu: %, higher, group
    Model FLOPs utilisation: tokens/s times FLOPs per token over the dense bf16 peak; what is recomputed does not
    count.
lora.finite_steps: %, higher
    Steps of LoRA fine-tuning in which what a rank contributes to loss and gradients is finite.
lora.moved_adapters: %, higher
    The adapters' B matrices, which start as 0, that have moved.
lora.unchanged_base: %, higher
    Frozen tensors that are the same bit by bit after the training, in the part that a rank keeps.
lora.replayed_steps: %, higher
    Steps taken again from the newest checkpoint after which a rank's weights are the same bit by bit.
lora.mfu: %, higher, group
    The same times FLOPs per token over the dense bf16 peak; what is recomputed does not count.
training.tflops: TFLOPS, higher, peak bf16_tflops
    The same before it is divided by the peak.
    recorded: training.mfu carries the limit; it is compared with the data sheet peak only
training.step_time: ms, lower
    Median time of a full training step.
    recorded: training.tokens_per_second carries the limit
training.step_time_p99: ms, lower
    99th percentile of the same steps; of fewer than 100 nearly the longest.
    recorded: training.tokens_per_second carries the limit
training.parts: ms, lower
    Median time of one part of a step, which the label part names, in steps of their own.
    recorded: they explain a step that is slow
lora.final_loss: nats, lower
    Mean loss of the last 10 steps, over the tokens of the assistant.
lora.all_token_loss: nats, lower
    Mean loss of the last 10 steps, over all tokens; padding does not count.
lora.held_out_loss: nats, lower
    Mean loss of held-out blocks when the training has ended, over the tokens of the assistant.
    recorded: lora.held_out_ratio decides whether it falls
scaling.efficiency: ratio, higher, world
    Weak scaling: tokens/s per GPU of the slowest rank in larger groups over those of the median rank in smaller
    ones. `kind` is node (a node over one GPU), fabric (the world over a node) or total (the world over one GPU).
scaling.busbw_retention: ratio, higher, world
    All-reduce busbw of the world over that of a node, of the slowest rank each; no word about training.
failure_propagation.seconds: s, lower, node
    From the death of a rank in training until no process of its job is left on the node.
vision.images_per_second: images/s, higher
    Images that a GPU is trained on, over the time of its steps, the wait for the next batch included. The slowest
    rank decides.
    recorded: no measurement to set a limit by; ranks in step are equally fast
vision.data_wait: %, lower
    Part of that time in which a rank's device waits for the next batch.
    recorded: it says whether the loader or the GPU is the slower one
"""),
)


SECTIONS = (
    Section("training", Training, metrics=("training.*", "ddp.*", "failure_propagation.*")),
    Section("fsdp", Fsdp, metrics=("fsdp.*", "checkpoint.*")),
    Section("checkpoint", Checkpoint, metrics=("checkpoint.*",)),
    Section("training.throughput", TrainingThroughput, attribute="throughput", metrics=("training.*",)),
    Section("training.throughput.contract", TrainingModel, attribute="throughput_contract", metrics=("training.*",)),
    Section("training.throughput.large", TrainingModel, attribute="throughput_large", metrics=("training.*",)),
    Section("training.throughput.sharded", TrainingModel, attribute="throughput_sharded", metrics=("training.*",)),
    Section("scaling", Scaling, metrics=("scaling.*",)),
    Section("failure_propagation", FailurePropagation, metrics=("failure_propagation.*",)),
    Section("vision", Vision, metrics=("vision.*",)),
    Section("lora", LoraTraining, metrics=("lora.*",)),
    Section("lora.tiny", Lora, metrics=("lora.*",)),
    Section("lora.qwen2", Lora, attribute="qwen2_lora", metrics=("lora.*",)),
    Section("lora.throughput", LoraThroughput, metrics=("lora.*",)),
)


CRITERIA = (
    Criterion("training.step", "training.step.*", group="training"),
    Criterion("ddp", "ddp.*", group="training"),
    Criterion("fsdp", "fsdp.*", group="training"),
    Criterion("checkpoint", "checkpoint.resume_error", "checkpoint.reshard_error", group="storage"),
    Criterion(
        "checkpoint.bandwidth",
        "checkpoint.verified",
        "checkpoint.write_bandwidth",
        "checkpoint.read_bandwidth",
        group="storage",
    ),
    Criterion(
        "training.throughput",
        *("training.tokens_per_second", "training.mfu", "training.tflops", "training.parts"),
        *("training.step_time", "training.step_time_p99"),
        group="training",
        span=lambda workload, name: series(workload.throughput.sampling),
    ),
    Criterion("vision.throughput", "vision.*", group="training"),
    Criterion("vision.data", "vision.*", group="training"),
    Criterion("failure_propagation", "failure_propagation.*", group="training"),
    Criterion("scaling", "scaling.efficiency", "scaling.tokens_per_second", group="training"),
    Criterion("scaling.busbw_retention", "scaling.busbw_retention", group="communication"),
    Criterion(
        "lora_tiny",
        *("lora.finite_steps", "lora.loss_error", "lora.gradient_error", "lora.weight_error", "lora.final_loss"),
        *("lora.all_token_loss", "lora.held_out_*", "lora.moved_adapters", "lora.unchanged_base"),
        *("lora.replayed_steps", "lora.resume_error", "lora.reload_error", "lora.group_error"),
        *("lora.reference_deviation", "lora.calls.*"),
        group="training",
    ),
    Criterion(
        "qwen2_lora",
        *("lora.final_loss", "lora.all_token_loss", "lora.tokens_per_second", "lora.mfu", "lora.peak_memory"),
    ),
    Criterion(
        "qwen2_lora.throughput",
        "lora.tokens_per_second",
        "lora.mfu",
        "lora.peak_memory",
        span=lambda workload, name: series(workload.lora_throughput.sampling),
    ),
)
