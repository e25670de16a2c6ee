"""The sections of a workload: what can be set of each benchmark, what it means, how it is written and what is allowed.

All of that stands once, at the attribute that it fills: the loader, the command line, the JSON Schema and the documents
are made from it. A new key is one line; a new section is a class here and a line in ``workloads.Workload``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.workload_values import Amount, Choice, Duration, Kind, Ratio, Whole, repeated

_MB, _TB = 10**6, 10**12
_DAY_SECONDS = 86400
_WEEK_SECONDS = 7 * _DAY_SECONDS


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a key means and how its value is written."""

    doc: str
    kind: Kind
    key: str = ""
    """How the file calls it, if not like the attribute."""
    is_list: bool = False

    @property
    def allowed(self) -> str:
        """What is allowed, in a few words."""
        return f"a list; each item is {self.kind.allowed}" if self.is_list else self.kind.allowed

    def read(self, texts: Sequence[str]) -> tuple[Any, list[tuple[int, str]]]:
        """Return the value, and what is wrong with which of its texts. A list becomes a tuple."""
        values: list[Any] = []
        complaints: list[tuple[int, str]] = []
        for index, text in enumerate(texts):
            try:
                values.append(self.kind.read(text))
            except (ValueError, UnitError) as error:
                complaints.append((index, str(error)))
        if complaints:
            return None, complaints
        twice = repeated(texts, values)
        if twice is not None:
            index, text = twice
            return None, [(index, f"{text}; each value is measured once")]
        return (tuple(values) if self.is_list else values[0]), []


SAMPLING = {
    "warmup_seconds": Spec(
        key="warmup",
        doc="at least so long the load runs before the first sample counts",
        kind=Duration(least_seconds=0, most_seconds=_DAY_SECONDS),
    ),
    "window_seconds": Spec(
        key="window",
        doc="at least so long the samples take together",
        kind=Duration(least_seconds=0.01, most_seconds=_DAY_SECONDS),
    ),
    "longest_seconds": Spec(
        key="longest",
        doc="without certainty about the median no longer than this, and then once more; not below window",
        kind=Duration(least_seconds=0.01, most_seconds=_DAY_SECONDS),
    ),
    "tolerance_ratio": Spec(
        key="tolerance",
        doc="certain is a median whose 95 % interval is no wider than this part of it",
        kind=Ratio(least=0.0001, most=3),
    ),
}
"""Attribute of :class:`~pytest_gpucluster.sampling.Sampling` -> its key, in each section that has a ``sampling``."""


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Products of two n x n matrices, in every dtype."""

    sizes: Annotated[
        tuple[int, ...],
        Spec(
            doc="n of the n x n matrices; the largest is judged",
            # torch._scaled_mm, which multiplies fp8, takes no other sizes.
            kind=Whole(least=16, most=65536, multiple_of=16),
            is_list=True,
        ),
    ]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Hbm:
    """Copying, reading and writing the GPU's own memory."""

    sizes_bytes: Annotated[
        tuple[int, ...],
        Spec(
            key="sizes",
            doc="size of one buffer, and a copy has two; the largest is judged",
            kind=Amount(least_bytes=_MB, most_bytes=_TB, multiple_of=16),
            is_list=True,
        ),
    ]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """All-reduce between GPUs. Sizes stay as they are written: they are labels of the measurements, too."""

    sizes: Annotated[
        tuple[str, ...],
        Spec(
            doc="what each rank contributes; the limits say from which size on they hold",
            kind=Amount(least_bytes=4, most_bytes=_TB, multiple_of=4, as_written=True),
            is_list=True,
        ),
    ]
    latency_sizes: Annotated[
        tuple[str, ...],
        Spec(
            doc="what each rank contributes where the time of one all-reduce is recorded",
            kind=Amount(least_bytes=4, most_bytes=100 * _MB, multiple_of=4, as_written=True),
            is_list=True,
        ),
    ]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Health:
    """The look at the GPU itself."""

    load_seconds: Annotated[
        float,
        Spec(
            key="load",
            doc="how long the GPU is kept busy before its PCIe link is looked at",
            kind=Duration(least_seconds=0.01, most_seconds=3600),
        ),
    ]
    mig: Annotated[
        str,
        Spec(doc="whether the GPUs are meant to be partitioned (Multi-Instance GPU)", kind=Choice(words=("off", "on"))),
    ]
    product_size: Annotated[
        int,
        Spec(
            doc="n of the n x n products that are compared with the CPU's",
            kind=Whole(least=16, most=8192, multiple_of=16),
        ),
    ]


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
            kind=Duration(least_seconds=1, most_seconds=_DAY_SECONDS),
        ),
    ]
    end_seconds: Annotated[
        float,
        Spec(
            key="end",
            doc="from that death to the end of the job, at most: then it is ended and rejected",
            kind=Duration(least_seconds=1, most_seconds=_DAY_SECONDS),
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
            kind=Amount(least_bytes=4096, most_bytes=_TB, multiple_of=4096),
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
            kind=Duration(least_seconds=10, most_seconds=_WEEK_SECONDS),
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
