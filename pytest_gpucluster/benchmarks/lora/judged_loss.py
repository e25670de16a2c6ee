"""A model whose forward pass ends in its losses: so no rank ever has to keep all logits of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**30
"""Logits that are made at a time: 4 GiB in fp32. What is beyond is made in parts, which the backward pass makes again:
3 % more operations at Qwen2-7B's sizes. A batch of one block of 4096 tokens fits, with its 152,064 x 4096."""


class JudgedLoss(nn.Module):
    """A causal language model of transformers with peft's adapters, and the losses of its next tokens.

    It is the root that is sharded, so head and embedding are gathered for the losses too.

    Args:
        adapted: peft's ``PeftModel`` of a Qwen2 model.
    """

    def __init__(self, adapted: Any) -> None:
        super().__init__()
        self.adapted = adapted

    @property
    def causal(self) -> Any:
        """The Qwen2 model with the adapters in it. peft's own forward would add nothing for LoRA."""
        return self.adapted.get_base_model()

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of attention and MLP."""
        blocks: nn.ModuleList = self.causal.model.layers
        return blocks

    def forward(self, tokens: torch.Tensor, judged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two sums in nats, fp32: the cross entropy of the judged targets, and, detached, of all targets.

        Attention is plainly causal over each row: documents that were packed together see each other. Resetting the
        positions would need a mask, and lose flash attention.

        Args:
            tokens: int64, batch x (positions + 1): each token is the target of the one before it.
            judged: bool, batch x positions: which targets count.
        """
        hidden = self.causal.model(
            input_ids=tokens[:, :-1],
            # A mapping is taken as it is: no mask is made, and nothing asks the device what is in it.
            attention_mask={"full_attention": None},
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)
        targets, counts = tokens[:, 1:].flatten(), judged.flatten()
        at_once = max(1, LOGITS_AT_ONCE // self.causal.config.vocab_size)
        parts = list(
            zip(torch.split(hidden, at_once), torch.split(targets, at_once), torch.split(counts, at_once), strict=True)
        )
        if len(parts) == 1:
            return self._sums(*parts[0])
        sums = [checkpoint(self._sums, *part, use_reentrant=False) for part in parts]
        of_judged, of_all = zip(*sums, strict=True)
        return torch.stack(of_judged).sum(), torch.stack(of_all).sum()

    def _sums(
        self, hidden: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses = functional.cross_entropy(self.causal.lm_head(hidden).float(), targets, reduction="none")
        # Not a product with the mask: an infinite loss that does not count would make NaN of it.
        return losses.masked_fill(~counts, 0.0).sum(), losses.detach().sum()
