"""The sections of a workload about training: decoders, vision, scaling, checkpoints, failure propagation, LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.config.value_types import Amount, Choice, Duration, Ratio, Whole
from pytest_gpucluster.config.workload_sections import DAY_SECONDS, TB, Spec
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
