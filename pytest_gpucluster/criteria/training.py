"""Training criteria: steps, DDP, FSDP, checkpoints, throughput, vision, scaling, failures, LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.config.declaration import (
    DAY_SECONDS,
    TB,
    Criterion,
    Section,
    Spec,
    series,
)
from pytest_gpucluster.config.value_types import Amount, Choice, Duration, Ratio, Whole
from pytest_gpucluster.metrics.catalogue import Metric, errors
from pytest_gpucluster.metrics.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class FailurePropagation:
    """The end of a small training, that of `training`, of which a rank dies: a job of its own on each node."""

    deaths: Annotated[
        tuple[str, ...],
        Spec(
            doc="how the rank dies, one job each: it exits at once, raises an exception, or is killed by SIGKILL",
            kind=Choice(words=("exit", "raise", "kill")),
            is_list=True,
        ),
    ]
    steps: Annotated[int, Spec(doc="steps that are taken before", kind=Whole(least=1, most=1000))]
    start_seconds: Annotated[
        float,
        Spec(
            key="start",
            doc="from the start of the job to that death, at most",
            kind=Duration(least_seconds=1, most_seconds=DAY_SECONDS),
        ),
    ]
    end_seconds: Annotated[
        float,
        Spec(
            key="end",
            doc="from that death to the end of the job, at most: then it is ended and rejected",
            kind=Duration(least_seconds=1, most_seconds=DAY_SECONDS),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Training ResNets on images, which a multi-worker loader reads. Each worker keeps its batches in /dev/shm."""

    models: Annotated[
        tuple[str, ...],
        Spec(doc="which are trained", kind=Choice(words=("resnet18", "resnet50")), is_list=True),
    ]
    image_size: Annotated[
        int,
        Spec(
            doc="pixels of a side, of synthetic images and of files with an image each; data sets of one size keep "
            "theirs",
            kind=Whole(least=28, most=4096),
        ),
    ]
    batch: Annotated[int, Spec(doc="images of each GPU in a step", kind=Whole(least=2, most=65536))]
    workers: Annotated[
        int,
        Spec(
            doc="processes of each rank that read images ahead; 0: the rank reads them itself, without /dev/shm",
            kind=Whole(least=0, most=256),
        ),
    ]
    prefetch: Annotated[int, Spec(doc="batches that each of them reads ahead", kind=Whole(least=1, most=1000))]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The sizes of a decoder, and of a step of its training."""

    layers: Annotated[int, Spec(doc="blocks of the decoder", kind=Whole(least=1, most=1000))]
    # A head is an even part of the width.
    width: Annotated[int, Spec(doc="width of the decoder", kind=Whole(least=64, most=65536, multiple_of=64))]
    heads: Annotated[int, Spec(doc="heads of its attention; width is an even multiple", kind=Whole(least=1, most=1024))]
    vocab: Annotated[int, Spec(doc="tokens that there are", kind=Whole(least=16, most=1_000_000))]
    sequence: Annotated[
        int, Spec(doc="tokens of a row, all of which are trained on", kind=Whole(least=8, most=1_000_000))
    ]
    batch: Annotated[int, Spec(doc="rows of each rank in a step", kind=Whole(least=1, most=65536))]


@dataclass(frozen=True, kw_only=True)
class Training(Decoder):
    """Training a decoder to see that it is right: on each GPU alone, and on all ranks together."""

    steps: Annotated[int, Spec(doc="steps that are compared one by one", kind=Whole(least=2, most=1000))]


@dataclass(frozen=True, kw_only=True)
class TrainingModel(Decoder):
    """A decoder whose training is timed."""

    inner: Annotated[
        int,
        Spec(
            doc="width inside its MLP; 0: 8/3 of the width, up to a multiple of 64", kind=Whole(least=0, most=1_000_000)
        ),
    ]
    key_heads: Annotated[
        int,
        Spec(
            doc="heads of its keys and values, of which heads is a multiple; 0: as heads",
            kind=Whole(least=0, most=1024),
        ),
    ]
    recompute: Annotated[
        str,
        Spec(
            doc="whether blocks keep only their input, and are computed again in backward",
            kind=Choice(words=("off", "on")),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class TrainingThroughput:
    """Timing full training steps. The models are contract; large, of which each rank has all (ddp); and sharded, of
    which each rank has a part (fsdp)."""

    compiled: Annotated[str, Spec(doc="whether blocks are compiled (torch.compile)", kind=Choice(words=("off", "on")))]
    workers: Annotated[
        int, Spec(doc="processes of each rank that read data ahead; 0: none does", kind=Whole(least=0, most=256))
    ]
    prefetch: Annotated[int, Spec(doc="batches that each of them reads ahead", kind=Whole(least=1, most=1000))]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Fsdp(Decoder):
    """Training a decoder that is sharded over all ranks, to see that it is right; checkpoints are of the same."""

    steps: Annotated[int, Spec(doc="steps that are compared one by one", kind=Whole(least=2, most=1000))]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving a sharded training and going on from it, and the speed of the file system that it is saved to."""

    steps: Annotated[int, Spec(doc="steps before the checkpoint, and as many after it", kind=Whole(least=1, most=1000))]
    file_bytes: Annotated[
        int,
        Spec(
            key="size",
            doc="what each rank writes to the shared file system, and reads of another rank",
            # As O_DIRECT asks for.
            kind=Amount(least_bytes=4096, most_bytes=TB, multiple_of=4096),
        ),
    ]
    passes: Annotated[int, Spec(doc="how often all ranks write and read", kind=Whole(least=1, most=1000))]


@dataclass(frozen=True, kw_only=True)
class Scaling(TrainingModel, TrainingThroughput):
    """Training the same model by ddp in groups of different sizes: one GPU, a node, the world. Tokens per GPU and step,
    which are batch times sequence, decide how much of the exchange can show."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Fine-tuning with LoRA until it has learned, and what shows that it has learned rightly."""

    steps: Annotated[int, Spec(doc="steps of the optimizer", kind=Whole(least=12, most=1_000_000))]
    warmup_steps: Annotated[
        int, Spec(doc="steps in which the learning rate rises; fewer than steps", kind=Whole(least=1, most=1_000_000))
    ]
    global_batch: Annotated[
        int,
        Spec(
            doc="blocks of a step, of all ranks that train one model together, however many they are",
            kind=Whole(least=1, most=65536),
        ),
    ]
    micro_batch: Annotated[int, Spec(doc="blocks that a GPU takes at once, at most", kind=Whole(least=1, most=65536))]
    sequence: Annotated[int, Spec(doc="tokens of a block", kind=Whole(least=16, most=1_000_000))]
    rows: Annotated[int, Spec(doc="conversations, at most", kind=Whole(least=20, most=10_000_000))]
    held_out_ratio: Annotated[
        float,
        Spec(key="held_out", doc="part of the conversations kept from training", kind=Ratio(least=0.001, most=0.5)),
    ]
    held_out_blocks: Annotated[
        int, Spec(doc="blocks of these whose loss is taken, at most", kind=Whole(least=1, most=100_000))
    ]
    precision: Annotated[
        str, Spec(doc="of products, of the base, and of what is gathered", kind=Choice(words=("bf16", "fp32")))
    ]
    recompute: Annotated[
        str,
        Spec(
            doc="whether activations are recomputed; auto: where the memory demands it",
            kind=Choice(words=("auto", "off", "on")),
        ),
    ]
    compiled: Annotated[str, Spec(doc="whether blocks are compiled (torch.compile)", kind=Choice(words=("off", "on")))]
    parity_steps: Annotated[
        int, Spec(doc="steps that one rank repeats alone, to be compared", kind=Whole(least=2, most=1000))
    ]
    parity_batch: Annotated[
        int, Spec(doc="blocks of these steps; made a multiple of the ranks", kind=Whole(least=1, most=65536))
    ]
    parity_sequence: Annotated[
        int, Spec(doc="tokens of their blocks, at most sequence", kind=Whole(least=16, most=1_000_000))
    ]
    parity_precisions: Annotated[
        tuple[str, ...],
        Spec(key="parity", doc="precisions of these steps", kind=Choice(words=("bf16", "fp32")), is_list=True),
    ]
    checkpoint_every: Annotated[
        int,
        Spec(
            doc="steps from one checkpoint to the next; those after the last one are taken twice",
            kind=Whole(least=1, most=1_000_000),
        ),
    ]
    calls: Annotated[
        int, Spec(doc="function calls that are asked for after the training", kind=Whole(least=1, most=100_000))
    ]
    call_tokens: Annotated[int, Spec(doc="tokens of an answer, at most", kind=Whole(least=1, most=4096))]
    tolerance_ratio: Annotated[
        float,
        Spec(
            key="tolerance",
            doc="certain is a rate whose median's 95 % interval is no wider than this part of it",
            kind=Ratio(least=0.0001, most=3),
        ),
    ]
    deadline_seconds: Annotated[
        float,
        Spec(
            key="deadline",
            doc="how long all of it may take",
            kind=Duration(least_seconds=10, most_seconds=7 * DAY_SECONDS),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class LoraThroughput:
    """Timing the steps of LoRA fine-tuning at Qwen2-7B's sizes, with random weights."""

    sequence: Annotated[int, Spec(doc="tokens of a block", kind=Whole(least=16, most=1_000_000))]
    micro_batch: Annotated[int, Spec(doc="blocks that a GPU takes at once", kind=Whole(least=1, most=65536))]
    accumulation: Annotated[
        int, Spec(doc="how often it does before the optimizer's step", kind=Whole(least=1, most=65536))
    ]
    recompute: Annotated[
        str,
        Spec(
            doc="whether activations are recomputed; auto: where the memory demands it",
            kind=Choice(words=("auto", "off", "on")),
        ),
    ]
    compiled: Annotated[str, Spec(doc="whether blocks are compiled (torch.compile)", kind=Choice(words=("off", "on")))]
    sampling: Sampling


def _calls(docs: Mapping[str, str]) -> Iterator[Metric]:
    for kind, doc in docs.items():
        yield Metric(
            name=f"lora.calls.{kind}",
            unit="ratio",
            better="higher",
            recorded="no figure to judge by; the limits of the loss decide",
            doc=f"Part of the answers to held-out prompts that {doc}, written greedily after the training.",
        )


_TRAINING = (
    *errors(
        {
            "training.step.loss_error": "Difference of the loss to that of the CPU's same steps, all in fp32.",
            "training.step.gradient_error": "Likewise for the gradients: of their norm before clipping, or their "
            "distance.",
            "training.step.weight_error": "Distance of the weights to the CPU's, as a part of the way that those have "
            "gone.",
            "training.step.bf16_loss_error": "Difference of the loss in bf16 to that of the same device in fp32.",
            "training.step.bf16_gradient_error": "Likewise for the gradients: of their norm, or their distance.",
            "training.step.bf16_weight_error": "Distance of the weights after steps in bf16 to those in fp32, as "
            "above.",
            "ddp.loss_error": "Difference of a rank's loss to that of one process with the same global batch.",
            "ddp.gradient_error": "Likewise for the gradients that the ranks share: of their norm, or their distance.",
            "ddp.bf16_loss_error": "Difference of a rank's loss in bf16 to that of one process in bf16.",
            "ddp.bf16_gradient_error": "Likewise for the gradients: of their norm, or their distance.",
            "fsdp.loss_error": "Difference of a rank's loss, the model being sharded, to that of one process.",
            "fsdp.gradient_error": "Likewise for the gradients: of their norm before clipping, or their distance.",
            "fsdp.bf16_loss_error": "Difference of a rank's loss in bf16 to that of one process in bf16.",
            "fsdp.bf16_gradient_error": "Likewise for the gradients: of their norm, or their distance.",
            "fsdp.ddp_loss_error": "Difference of a rank's loss to that of DistributedDataParallel on the same ranks.",
            "fsdp.share": "Bytes of weights and moments on a rank over those of 1/N of each, rounded up to rows.",
            "checkpoint.resume_error": "Difference of the losses after a checkpoint to those without a break, on the "
            "same ranks.",
            "checkpoint.reshard_error": "Likewise on fewer ranks with the same global batch, or without sharding.",
        }
    ),
    Metric(
        name="fsdp.memory",
        unit="GB",
        better="lower",
        recorded="it depends on the model; fsdp.share compares what is divided with 1/N",
        doc="Memory of a rank in training; the label counted says whether it is the most that torch had allocated, or "
        "weights, gradients and moments.",
    ),
    Metric(
        name="checkpoint.verified",
        unit="ratio",
        better="higher",
        doc="Bytes read from another rank's files that are as they were written, over all bytes of these files.",
    ),
    Metric(
        name="checkpoint.write_bandwidth",
        unit="GB/s",
        better="higher",
        recorded="file systems differ; set a limit by what yours was bought for",
        doc="Bytes of a rank's file over the time until they are on stable storage, all ranks writing at once.",
    ),
    Metric(
        name="checkpoint.read_bandwidth",
        unit="GB/s",
        better="higher",
        recorded="file systems differ; set a limit by what yours was bought for",
        doc="Bytes of another rank's file over the time until they are read and verified, all ranks reading at once.",
    ),
    Metric(
        name="training.tokens_per_second",
        unit="tokens/s",
        better="higher",
        doc="Tokens that a GPU trains on, none of which is padding, over the time of a full step. The slowest rank "
        "decides.",
    ),
    Metric(
        name="training.mfu",
        unit="%",
        better="higher",
        doc="Model FLOPs utilisation: tokens/s times FLOPs per token over the dense bf16 peak; what is recomputed does "
        "not count.",
    ),
    Metric(
        name="training.tflops",
        unit="TFLOPS",
        better="higher",
        peak="bf16_tflops",
        recorded="training.mfu carries the limit; it is compared with the data sheet peak only",
        doc="The same before it is divided by the peak.",
    ),
    Metric(
        name="training.step_time",
        unit="ms",
        better="lower",
        recorded="training.tokens_per_second carries the limit",
        doc="Median time of a full training step.",
    ),
    Metric(
        name="training.step_time_p99",
        unit="ms",
        better="lower",
        recorded="training.tokens_per_second carries the limit",
        doc="99th percentile of the same steps; of fewer than 100 nearly the longest.",
    ),
    Metric(
        name="training.parts",
        unit="ms",
        better="lower",
        recorded="they explain a step that is slow",
        doc="Median time of one part of a step, which the label part names, in steps of their own.",
    ),
    Metric(
        name="lora.finite_steps",
        unit="%",
        better="higher",
        doc="Steps of LoRA fine-tuning in which what a rank contributes to loss and gradients is finite.",
    ),
    *errors(
        {
            "lora.loss_error": "Difference of the loss of some steps to that of one rank with the same global batch.",
            "lora.gradient_error": "Likewise of the gradients' norm before clipping.",
        }
    ),
    Metric(
        name="lora.final_loss",
        unit="nats",
        better="lower",
        doc="Mean loss of the last 10 steps, over the tokens of the assistant.",
    ),
    Metric(
        name="lora.held_out_loss",
        unit="nats",
        better="lower",
        recorded="lora.held_out_ratio decides whether it falls",
        doc="Mean loss of held-out blocks when the training has ended, over the tokens of the assistant.",
    ),
    Metric(
        name="lora.moved_adapters",
        unit="%",
        better="higher",
        doc="The adapters' B matrices, which start as 0, that have moved.",
    ),
    Metric(
        name="lora.unchanged_base",
        unit="%",
        better="higher",
        doc="Frozen tensors that are the same bit by bit after the training, in the part that a rank keeps.",
    ),
    Metric(
        name="lora.replayed_steps",
        unit="%",
        better="higher",
        doc="Steps taken again from the newest checkpoint after which a rank's weights are the same bit by bit.",
    ),
    *errors(
        {
            "lora.held_out_ratio": "Held-out loss after the training as a part of that before it.",
            "lora.resume_error": "Largest difference of a loss when steps are taken again from the newest checkpoint.",
            "lora.reload_error": "Difference of the held-out loss when the saved adapters are read into a new model.",
            "lora.group_error": "Largest difference of a loss to that of the first group that trained at once.",
            "lora.reference_deviation": "Largest distance of the loss curve from the reference, in widths of its band.",
        }
    ),
    Metric(
        name="lora.tokens_per_second",
        unit="tokens/s",
        better="higher",
        doc="Tokens that a GPU fine-tunes on, none of which is padding, over the time of a step. The slowest rank "
        "decides.",
    ),
    Metric(
        name="lora.mfu",
        unit="%",
        better="higher",
        doc="The same times FLOPs per token over the dense bf16 peak; what is recomputed does not count.",
    ),
    Metric(
        name="lora.peak_memory",
        unit="GB",
        better="lower",
        recorded="a run that needs more memory than there is ends in an error that states it",
        doc="Most memory that torch held on a GPU.",
    ),
    *_calls(
        {
            "well_formed": "are a function call that a program can read",
            "right_function": "call the function that is due",
            "right_arguments": "call it with the arguments that are due",
        }
    ),
)


_SCALING = (
    Metric(
        name="scaling.tokens_per_second",
        unit="tokens/s",
        better="higher",
        doc="Tokens that this rank's GPU trains on, while all groups of `group_size` ranks train at once.",
    ),
    Metric(
        name="scaling.efficiency",
        unit="ratio",
        better="higher",
        scope="world",
        doc="Weak scaling: tokens/s per GPU of the slowest rank in larger groups over those of the median rank in "
        "smaller ones. `kind` is node (a node over one GPU), fabric (the world over a node) or total (the world over "
        "one GPU).",
    ),
    Metric(
        name="scaling.busbw_retention",
        unit="ratio",
        better="higher",
        scope="world",
        doc="All-reduce busbw of the world over that of a node, of the slowest rank each; no word about training.",
    ),
    Metric(
        name="failure_propagation.seconds",
        unit="s",
        better="lower",
        scope="node",
        doc="From the death of a rank in training until no process of its job is left on the node.",
    ),
)


_VISION = (
    Metric(
        name="vision.images_per_second",
        unit="images/s",
        better="higher",
        recorded="no measurement to set a limit by; ranks in step are equally fast",
        doc="Images that a GPU is trained on, over the time of its steps, the wait for the next batch included. The "
        "slowest rank decides.",
    ),
    Metric(
        name="vision.data_wait",
        unit="%",
        better="lower",
        recorded="it says whether the loader or the GPU is the slower one",
        doc="Part of that time in which a rank's device waits for the next batch.",
    ),
    Metric(
        name="vision.loss_ratio",
        unit="ratio",
        better="lower",
        doc="Mean of a rank's last losses over its first one.",
    ),
)


METRICS = (*_TRAINING, *_SCALING, *_VISION)


SECTIONS = (
    Section("training", Training),
    Section("fsdp", Fsdp),
    Section("checkpoint", Checkpoint),
    Section("training.throughput", TrainingThroughput, attribute="throughput"),
    Section("training.throughput.contract", TrainingModel, attribute="throughput_contract"),
    Section("training.throughput.large", TrainingModel, attribute="throughput_large"),
    Section("training.throughput.sharded", TrainingModel, attribute="throughput_sharded"),
    Section("scaling", Scaling),
    Section("failure_propagation", FailurePropagation),
    Section("vision", Vision),
    Section("lora.tiny", Lora),
    Section("lora.qwen2", Lora, attribute="qwen2_lora"),
    Section("lora.throughput", LoraThroughput),
)


CRITERIA = (
    Criterion("training.step", "training.step.*"),
    Criterion("ddp", "ddp.*"),
    Criterion("fsdp", "fsdp.*"),
    Criterion("checkpoint", "checkpoint.resume_error", "checkpoint.reshard_error"),
    Criterion("checkpoint.bandwidth", "checkpoint.verified", "checkpoint.write_bandwidth", "checkpoint.read_bandwidth"),
    Criterion(
        "training.throughput",
        "training.tokens_per_second",
        "training.mfu",
        "training.tflops",
        "training.parts",
        "training.step_time",
        "training.step_time_p99",
        span=lambda workload, name: series(workload.throughput.sampling),
    ),
    Criterion("vision.throughput", "vision.*"),
    Criterion("vision.data", "vision.*"),
    Criterion("failure_propagation", "failure_propagation.*"),
    Criterion("scaling", "scaling.efficiency", "scaling.tokens_per_second"),
    Criterion("scaling.busbw_retention", "scaling.busbw_retention"),
    Criterion(
        "lora_tiny",
        "lora.finite_steps",
        "lora.loss_error",
        "lora.gradient_error",
        "lora.final_loss",
        "lora.held_out_*",
        "lora.moved_adapters",
        "lora.unchanged_base",
        "lora.replayed_steps",
        "lora.resume_error",
        "lora.reload_error",
        "lora.group_error",
        "lora.reference_deviation",
        "lora.calls.*",
    ),
    Criterion("qwen2_lora", "lora.final_loss", "lora.tokens_per_second", "lora.mfu", "lora.peak_memory"),
    Criterion("qwen2_lora.throughput", "lora.tokens_per_second", "lora.mfu", "lora.peak_memory"),
)
