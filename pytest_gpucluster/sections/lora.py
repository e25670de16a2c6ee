"""Sections about fine-tuning by LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.sections.spec import DAY_SECONDS, Spec
from pytest_gpucluster.workload_values import Choice, Duration, Ratio, Whole


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
