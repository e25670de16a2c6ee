"""LoRA's adapters on a model: which linear layers have one, how large it is, and in which dtype it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All seven of a block."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """What is put on a model.

    Attributes:
        rank, alpha: an adapter's product is scaled by alpha / rank.
        dropout: of the adapters' inputs, a part of 1.
        saved: modules that learn as a whole, beside the adapters.
        learning_rate: the highest.
    """

    rank: int
    alpha: int
    dropout: float
    learning_rate: float
    saved: tuple[str, ...] = ()

    @property
    def trains_head(self) -> bool:
        """Tell whether the head learns as a whole."""
        return "lm_head" in self.saved


QWEN2 = Adapters(rank=64, alpha=128, dropout=0.05, learning_rate=2e-5)
"""Source: acceptance of 2 nodes x 8 H100 SXM 80GB."""

TINY = Adapters(rank=16, alpha=32, dropout=0.05, learning_rate=5e-3, saved=("embed_tokens", "lm_head"))
"""On a random base adapters alone learn next to nothing, for its embedding and head say nothing about any token. With
both learning the loss of 100 steps stands clearly below 0.5, and without the adapters clearly above.
Source: this suite's rule, measured: 0.2 with and 0.8 without."""


def with_adapters(base: Any, adapters: Adapters, *, dropout: bool = True) -> Any:
    """Put adapters on a model; all else is frozen. Returns peft's ``PeftModel``.

    What is trained is fp32, whatever the dtype of the base is: at such learning rates bf16 would round most steps off
    to nothing.

    Args:
        base: a Qwen2 model of transformers, changed in place.
        adapters: which.
        dropout: False for steps that are compared with others.

    Raises: ImportError without peft.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        lora_dropout=adapters.dropout if dropout else 0.0,
        target_modules=list(LINEARS),
        modules_to_save=list(adapters.saved) or None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.float32)
    return model


def trained_parameters(model: nn.Module) -> int:
    """Count the weights that learn; of a sharded model those of all ranks."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def is_outer_factor(name: str) -> bool:
    """Tell whether a weight of this name is an adapter's B: it starts as 0, so that whoever has learned has moved it.

    Source: Hu et al., "LoRA" (arXiv:2106.09685), section 4.1.
    """
    return ".lora_B." in name
