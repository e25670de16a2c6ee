"""A decoder-only transformer, as language models are trained today: what the training criteria train."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")

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
        vocab: number of tokens.
        sequence: positions of a block of tokens.
        key_heads: heads of keys and values, each shared by the same number of heads of queries; 0: one for each head.
            Source: Ainslie et al., "GQA" (arXiv:2305.13245).
        inner: width inside the MLP; 0: 8/3 of the width, see :attr:`mlp_width`.

    Raises: ValueError if the width is no even multiple of the heads, or these are no multiple of the heads of keys.

    >>> Geometry(layers=12, width=768, heads=12, vocab=50257, sequence=512).parameters
    162148608
    """

    layers: int
    width: int
    heads: int
    vocab: int
    sequence: int
    key_heads: int = 0
    inner: int = 0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be an even multiple of heads, and {self.width} is none of {self.heads}")
        if self.key_heads and self.heads % self.key_heads:
            raise ValueError(f"heads must be a multiple of key_heads, and {self.heads} is none of {self.key_heads}")

    @classmethod
    def of(cls, sizes: Any) -> Geometry:
        """Return that of a section of a workload, which has fields of these names."""
        return cls(**{one.name: getattr(sizes, one.name) for one in fields(cls) if hasattr(sizes, one.name)})

    @property
    def query_width(self) -> int:
        """Width of all queries of a position together."""
        return self.width

    @property
    def key_width(self) -> int:
        """Width of all keys of a position together, and of all values."""
        return self.query_width // self.heads * (self.key_heads or self.heads)

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP: by default 8/3 of the residual stream's, up to the next multiple of 64.

        Three matrices of this width hold as many weights as two of four times the width. Source: Shazeer, "GLU Variants
        Improve Transformer" (arXiv:2002.05202), section 3. The multiple suits the tiles of tensor cores.
        """
        return self.inner or -(-8 * self.width // (3 * 64)) * 64

    @property
    def block_parameters(self) -> int:
        """Weights of a block's matrices."""
        return 2 * self.width * (self.query_width + self.key_width) + 3 * self.width * self.mlp_width

    @property
    def multiplied_parameters(self) -> int:
        """Weights that each token is multiplied by: all matrices but the embedding, which is only looked up."""
        return self.layers * self.block_parameters + self.vocab * self.width

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

    def recompute(self) -> None:
        """Keep only a block's input from forward, and compute the rest again in backward.

        Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174). To be called before
        the blocks are compiled and sharded.
        """
        for block in self.blocks:
            block.recomputed = True  # type: ignore[assignment]  # to torch's types a module has tensors only

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


def make_decoder(geometry: Geometry, device: torch.device, *, seed: int, drawn_on: torch.device = CPU) -> Decoder:
    """Create a decoder whose initial weights depend on the seed alone.

    Args:
        geometry: its size.
        device: where it is placed.
        seed: other seeds make other weights.
        drawn_on: where the random numbers are drawn. On the CPU they are the same for every device. On a GPU, for which
            ``device`` is meant, that is some 100 times as fast, and only GPUs of one kind draw the same.
    """
    random = torch.Generator(drawn_on).manual_seed(seed)
    decoder = on_meta(geometry).to_empty(device=drawn_on)
    fill(decoder, random)
    return decoder.to(device)


def on_meta(geometry: Geometry) -> Decoder:
    """Create a decoder on the meta device: shapes without memory. It needs ``to_empty`` and :func:`fill` before use."""
    # torch's own initial values would be drawn from its global generator, for nothing.
    with torch.device("meta"):
        return Decoder(geometry)


def fill(decoder: Decoder, random: torch.Generator) -> None:
    """Give all weights of a decoder, or this rank's parts of them if it is sharded, their initial values in place.

    Args:
        decoder: with memory.
        random: on the device of the decoder.
    """
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.dim() > 1:
                part = weight.to_local() if isinstance(weight, DTensor) else weight
                part.normal_(std=INITIAL_DEVIATION, generator=random)
            else:
                weight.fill_(1.0)
        # Tensors made on meta have no values, those of the positions neither.
        for name, values in zip(("cosine", "sine"), _rotary(decoder.geometry), strict=True):
            decoder.get_buffer(name).copy_(values)


def missing_flash_attention(device: torch.device, geometry: Geometry) -> str:
    """Return why a decoder of this size cannot have flash attention in bf16 on a device: "" if it can.

    Without it attention keeps and reads a matrix of all positions by all positions. Source: Dao et al.,
    "FlashAttention" (arXiv:2205.14135).
    """
    keys, wide = geometry.key_heads or geometry.heads, geometry.width // geometry.heads
    query, key = (
        torch.zeros(1, heads, 16, wide, dtype=torch.bfloat16, device=device) for heads in (geometry.heads, keys)
    )
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            warnings.simplefilter("ignore")  # torch warns of each reason before it raises
            functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=keys != geometry.heads)
    except RuntimeError as error:  # torch's error where the requested kernel cannot be used
        return str(error).splitlines()[0]
    return ""


class _Block(nn.Module):
    """Attention and MLP, each added to the stream."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        width, inner = geometry.width, geometry.mlp_width
        self.heads, self.key_heads = geometry.heads, geometry.key_heads or geometry.heads
        self.recomputed = False
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.query_key_value = nn.Linear(width, width + 2 * geometry.key_width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.gate_and_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, stream: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        if self.recomputed and torch.is_grad_enabled():
            # Inside of the block, so that compiling and sharding the block come after it.
            again: torch.Tensor = checkpoint(self._compute, stream, cosine, sine, use_reentrant=False)
            return again
        return self._compute(stream, cosine, sine)

    def _compute(self, stream: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        stream = stream + self.attention_output(self._attention(self.attention_norm(stream), cosine, sine))
        gate, up = self.gate_and_up(self.mlp_norm(stream)).chunk(2, dim=-1)
        added: torch.Tensor = stream + self.down(functional.silu(gate) * up)
        return added

    def _attention(self, stream: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, positions, width = stream.shape
        by_head = self.query_key_value(stream).view(batch, positions, -1, width // self.heads).transpose(1, 2)
        query, key, value = by_head.split([self.heads, self.key_heads, self.key_heads], dim=1)
        mixed = functional.scaled_dot_product_attention(
            _rotated(query, cosine, sine),
            _rotated(key, cosine, sine),
            value,
            is_causal=True,
            enable_gqa=self.key_heads != self.heads,
        )
        return mixed.transpose(1, 2).reshape(batch, positions, width)


def _rotary(geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of each position's angles: positions x half of a head."""
    half = geometry.width // geometry.heads // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(geometry.sequence, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def _rotated(head: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of components, of which one is in either half, by its position's angle; the dtype is kept."""
    first, second = head.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return rotated.to(head.dtype)
