"""How large a Qwen2 model is, what LoRA adds to it, and how many operations a token costs. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The size of a Qwen2 model. Each field is given: the defaults of transformers' configuration are another model.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width inside the MLP.
        layers: blocks of attention and MLP.
        heads, kv_heads: of the attention; several heads share one pair of key and value.
        vocab: tokens that there are.
        positions: the longest sequence that it is meant for.
        rms_epsilon, rope_base: of the norms and of the rotary positions.
        tied: whether the head is the embedding's own matrix.

    Raises: ValueError if a size is below 1, or the heads do not divide.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int
    rms_epsilon: float = 1e-6
    rope_base: float = 1e6
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "vocab", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden must be an even multiple of heads, and heads a multiple of kv_heads: {self.hidden}, "
                f"{self.heads}, {self.kv_heads}"
            )

    @property
    def kv_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def multiplied_parameters(self) -> int:
        """Weights that each token is multiplied with: the seven matrices of each block, and the head."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_width
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights of the base: also embedding, norms, and the biases of query, key and value."""
        embedding = 0 if self.tied else self.vocab * self.hidden
        biases = self.layers * (self.hidden + 2 * self.kv_width)
        return self.multiplied_parameters + embedding + biases + (2 * self.layers + 1) * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Weights of LoRA's matrices on all seven linear layers: rank x (inputs + outputs) each.

        Source: Hu et al., "LoRA" (arXiv:2106.09685), section 4.1.
        """
        return self.layers * rank * (9 * self.hidden + 2 * self.kv_width + 3 * self.intermediate)

    def flops_per_token(self, sequence: int, *, rank: int, head_trained: bool = False, recompute: bool = False) -> int:
        """Return the operations of forward and backward for one token.

        A frozen weight multiplies and adds once forward, and once backward, for the gradient of its input: 4. A trained
        one once more, for its own: 6. Attention is 6 layers hidden sequence, of which the causal mask has halved
        12. Recomputing repeats the forward pass of the blocks, not of the head.

        Source: as ``decoder.Geometry.training_flops_per_token``; Hu et al. (arXiv:2106.09685) for what is not trained.

        Args:
            sequence: positions of a block of tokens.
            rank: of the adapters.
            head_trained: whether the head learns as a whole.
            recompute: whether the backward pass makes the activations of the blocks anew.
        """
        head = self.vocab * self.hidden
        adapters = self.adapter_parameters(rank)
        attention = self.layers * self.hidden * sequence
        flops = 4 * self.multiplied_parameters + 6 * adapters + 6 * attention
        if head_trained:
            flops += 2 * head
        if recompute:
            flops += 2 * (self.multiplied_parameters - head + adapters + attention)
        return flops

    def full_flops_per_token(self, sequence: int) -> int:
        """Likewise where all weights learn."""
        return 6 * self.multiplied_parameters + 6 * self.layers * self.hidden * sequence

    def config_fields(self) -> dict[str, Any]:
        """Return every field of transformers' ``Qwen2Config`` that makes this model what it is."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.rms_epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_base},
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def differences(self, other: Geometry) -> list[str]:
        """Say in which sizes another model is not this one. How long its sequences may be does not matter."""
        return [
            f"{name} is {theirs}, expected {ours}"
            for name, ours in vars(self).items()
            if name != "positions" and (theirs := getattr(other, name)) != ours
        ]


QWEN2_7B = Geometry(hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, vocab=152064, positions=131072)
"""Source: config.json of https://huggingface.co/Qwen/Qwen2-7B."""

QWEN2_7B_PARAMETERS = 7_615_616_512
"""Of the base. Source: the sizes of the tensors of https://huggingface.co/Qwen/Qwen2-7B."""

QWEN2_7B_TRAINED = 161_480_704
"""Of LoRA with rank 64 on all seven linear layers: 2.076 % of all. Source: acceptance of 2 nodes x 8 H100 SXM 80GB,
"161M trainable (2.1 %)"."""


def tiny(vocab: int) -> Geometry:
    """Return the model of the rehearsal: two blocks, and a vocabulary that a tokenizer has made on the spot."""
    return Geometry(hidden=128, intermediate=384, layers=2, heads=4, kv_heads=2, vocab=vocab, positions=4096)
