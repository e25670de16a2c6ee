"""A decoder-only transformer, as language models are trained today: what the training criteria train."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

INITIAL_DEVIATION = 0.02
"""Standard deviation of the initial weights. Source: Radford et al., "Language Models are Unsupervised Multitask
Learners" (GPT-2), whose released code uses it for every matrix."""

ROTARY_BASE = 10_000.0
"""Source: Su et al., "RoFormer" (arXiv:2104.09864), section 3.2.2."""

NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The size of a decoder.

    Attributes:
        layers: blocks of attention and MLP.
        width: of the residual stream.
        heads: of the attention; each is width / heads wide, which must be even.
        vocab: tokens that there are.
        sequence: positions of a block of tokens.

    Raises: ValueError if a number is below 1, or the width is no even multiple of the heads.

    >>> Geometry(layers=12, width=768, heads=12, vocab=50257, sequence=512).parameters
    162148608
    """

    layers: int
    width: int
    heads: int
    vocab: int
    sequence: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be an even multiple of heads, and {self.width} is none of {self.heads}")

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP: 8/3 of the residual stream's, up to the next multiple of 64.

        Three matrices of this width hold as many weights as two of four times the width. Source: Shazeer, "GLU Variants
        Improve Transformer" (arXiv:2002.05202), section 3. The multiple suits the tiles of tensor cores.
        """
        return -(-8 * self.width // (3 * 64)) * 64

    @property
    def multiplied_parameters(self) -> int:
        """Weights that each token is multiplied with: all matrices but the embedding, which is only looked up."""
        block = 4 * self.width**2 + 3 * self.width * self.mlp_width
        return self.layers * block + self.vocab * self.width

    @property
    def parameters(self) -> int:
        """All weights. The head is not tied to the embedding."""
        return self.multiplied_parameters + self.vocab * self.width + (2 * self.layers + 1) * self.width

    @property
    def training_flops_per_token(self) -> int:
        """Operations of forward and backward for one token, without recomputing anything.

        Each weight multiplies and adds once forward and twice backward: 6. Attention multiplies queries with keys and
        weights with values: 12 layers width sequence in forward and backward, and half of it counts, for the other half
        lies above the diagonal and is masked.

        Source: Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B, which counts all of the attention; Dao,
        "FlashAttention-2" (arXiv:2307.08691), section 4.1, halves it for a causal mask.
        """
        return 6 * self.multiplied_parameters + 6 * self.layers * self.width * self.sequence


class Decoder(nn.Module):
    """A decoder with pre-norm RMSNorm, rotary positions, causal attention and a SwiGLU MLP; no biases, no dropout.

    Weights are fp32. Made by :func:`make_decoder`, which gives them their values.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.embedding = nn.Embedding(geometry.vocab, geometry.width)
        self.blocks = nn.ModuleList(_Block(geometry) for _ in range(geometry.layers))
        self.norm = nn.RMSNorm(geometry.width, eps=NORM_EPSILON)
        self.head = nn.Linear(geometry.width, geometry.vocab, bias=False)
        cosine, sine = _rotary(geometry)
        # Not persistent: they follow from the geometry and belong in no checkpoint.
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after each one.

        Args:
            tokens: int64, batch x positions, no more positions than the geometry's.

        Returns: batch x positions x vocab, in the dtype of the autocast that is in force, else fp32.
        """
        positions = tokens.shape[1]
        cosine, sine = self.get_buffer("cosine")[:positions], self.get_buffer("sine")[:positions]
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream, cosine, sine)
        logits: torch.Tensor = self.head(self.norm(stream))
        return logits


def make_decoder(geometry: Geometry, device: torch.device, *, seed: int) -> Decoder:
    """Make a decoder whose initial weights follow from the seed alone: they are drawn on the CPU for every device."""
    random = torch.Generator().manual_seed(seed)
    # On meta first: torch's own initial values would be drawn from its global generator, for nothing.
    with torch.device("meta"):
        decoder = Decoder(geometry)
    decoder = decoder.to_empty(device=torch.device("cpu"))
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.dim() > 1:
                weight.normal_(std=INITIAL_DEVIATION, generator=random)
            else:
                weight.fill_(1.0)
        # What was made on meta has no values, those of the positions neither.
        for name, values in zip(("cosine", "sine"), _rotary(geometry), strict=True):
            decoder.get_buffer(name).copy_(values)
    return decoder.to(device)


class _Block(nn.Module):
    """Attention and MLP, each added to the stream."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        width, inner = geometry.width, geometry.mlp_width
        self.heads = geometry.heads
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.gate_and_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, stream: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        stream = stream + self.attended(self._attention(self.attention_norm(stream), cosine, sine))
        gate, up = self.gate_and_up(self.mlp_norm(stream)).chunk(2, dim=-1)
        added: torch.Tensor = stream + self.down(functional.silu(gate) * up)
        return added

    def _attention(self, stream: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, positions, width = stream.shape
        by_head = self.query_key_value(stream).view(batch, positions, 3, self.heads, width // self.heads)
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            _turned(query, cosine, sine), _turned(key, cosine, sine), value, is_causal=True
        )
        return mixed.transpose(1, 2).reshape(batch, positions, width)


def _rotary(geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of each position's angles: positions x half of a head."""
    half = geometry.width // geometry.heads // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(geometry.sequence, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def _turned(head: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn each pair of components, of which one is in either half, by its position's angle; the dtype is kept."""
    first, second = head.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return turned.to(head.dtype)
