"""The models of LoRA: sizes and FLOPs, the base, its adapters, and a forward pass that ends in losses.

The sizes are those of Qwen2, with the FLOPs of a token as pure arithmetic. The base is a tiny model, one of Qwen2-7B's
sizes with random weights, or a given one; the adapters define which linear layers are trained, at which rank and dtype.
The forward pass ends in the losses, so that no rank ever has to keep all logits of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytest_gpucluster.benchmarks.group import on_first_rank
from pytest_gpucluster.benchmarks.lora.hub import fetch
from pytest_gpucluster.benchmarks.training import model as decoder
from pytest_gpucluster.device.interface import Accelerator
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.text import first_line

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All seven of a block."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        rank, alpha: an adapter's product is scaled by alpha / rank.
        dropout: of the adapters' inputs, a part of 1.
        saved: modules that are trained as a whole, besides the adapters.
        learning_rate: the highest.
    """

    rank: int
    alpha: int
    dropout: float
    learning_rate: float
    saved: tuple[str, ...] = ()


QWEN2 = Adapters(rank=64, alpha=128, dropout=0.05, learning_rate=2e-5)
"""Source: acceptance of 2 nodes x 8 H100 SXM 80GB."""

TINY = Adapters(rank=16, alpha=32, dropout=0.05, learning_rate=5e-3, saved=("embed_tokens", "lm_head"))
"""On a random base, adapters alone learn almost nothing, for its embedding and head carry no information about tokens.
With both trained, the loss of 100 steps is clearly below 0.5, and without the adapters clearly above.
Source: this suite's rule, measured: 0.2 with and 0.8 without."""


def trained_parameters(model: nn.Module) -> int:
    """Count the trained weights; of a sharded model those of all ranks."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def is_outer_factor(name: str) -> bool:
    """Whether a weight of this name is an adapter's B: it starts as 0, so any training changes it.

    Source: Hu et al., "LoRA" (arXiv:2106.09685), section 4.1.
    """
    return ".lora_B." in name


LOGITS_AT_ONCE = 2**30
"""Logits that are computed at a time: 4 GiB in fp32. More are computed in parts, which the backward pass recomputes:
3 % more operations at Qwen2-7B's sizes. A batch of one block of 4096 tokens fits, with its 152,064 x 4096."""


class MaskedLoss(nn.Module):
    """A causal language model of transformers with peft's adapters, and the losses of its next tokens.

    It is the root module of the sharding, so head and embedding are gathered for the losses too.

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

    def forward(self, tokens: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two sums in nats, fp32: the cross entropy of the targets in the mask, and, detached, of all targets.

        Attention is plainly causal over each row: documents that were packed together see each other. Resetting the
        positions would need a mask, and lose flash attention.

        Args:
            tokens: int64, batch x (positions + 1): each token is the target of the one before it.
            loss_mask: bool, batch x positions: which targets count.
        """
        hidden = self.causal.model(
            input_ids=tokens[:, :-1],
            # A mapping is passed through: no mask is made, and no value is read from the device.
            attention_mask={"full_attention": None},
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)
        targets, counts = tokens[:, 1:].flatten(), loss_mask.flatten()
        at_once = max(1, LOGITS_AT_ONCE // self.causal.config.vocab_size)
        parts = list(
            zip(torch.split(hidden, at_once), torch.split(targets, at_once), torch.split(counts, at_once), strict=True)
        )
        if len(parts) == 1:
            return self._sums(*parts[0])
        sums = [checkpoint(self._sums, *part, use_reentrant=False) for part in parts]
        masked, total = zip(*sums, strict=True)
        return torch.stack(masked).sum(), torch.stack(total).sum()

    def _sums(
        self, hidden: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses = functional.cross_entropy(self.causal.lm_head(hidden).float(), targets, reduction="none")
        # Not a product with the mask: an infinite loss outside of it would become NaN.
        return losses.masked_fill(~counts, 0.0).sum(), losses.detach().sum()


class TransformersLoss(MaskedLoss):
    """The same with the loss of transformers itself, which shifts the labels by its own code, to compare with.

    It has no label for the last position, so the last target must not be in the mask.
    """

    def forward(self, tokens: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the cross entropy of the targets in the mask, and again, detached."""
        labels = tokens[:, :-1].clone()
        labels[:, 1:][~loss_mask[:, :-1]] = _IGNORED
        summed = self.causal(
            input_ids=tokens[:, :-1],
            attention_mask={"full_attention": None},
            labels=labels,
            num_items_in_batch=1,  # it divides by this
            use_cache=False,
        ).loss
        return summed, summed.detach()


_IGNORED = -100
"""A label that does not count. Source: torch.nn.functional.cross_entropy, ignore_index."""


@dataclass(frozen=True, kw_only=True)
class Geometry(decoder.Geometry):
    """The size of a Qwen2 or Qwen3 model: that of the suite's own decoder, with what these have besides. Each field is
    given: the defaults of transformers' configuration are another model.

    Attributes:
        sequence: the longest supported one.
        rms_epsilon, rope_base: of the norms and of the rotary positions.
        tied: whether the head is the embedding's own matrix.
        head_width: of a head of the attention; 0: width / heads.
        biased: whether query, key and value have biases, as in Qwen2.
        normed: whether the heads of queries and keys have norms, as in Qwen3.
    """

    rms_epsilon: float = 1e-6
    rope_base: float = 1e6
    tied: bool = False
    head_width: int = 0
    biased: bool = True
    normed: bool = False

    @property
    def query_width(self) -> int:
        """Width of all queries of a position together."""
        return self.head_width * self.heads or self.width

    @property
    def parameters(self) -> int:
        """All weights of the base: also embedding, norms, and the biases of query, key and value."""
        embedding = 0 if self.tied else self.vocab * self.width
        biases = self.biased * (self.query_width + 2 * self.key_width)
        norms = 2 * self.width + self.normed * 2 * self.query_width // self.heads
        return self.multiplied_parameters + embedding + self.layers * (biases + norms) + self.width

    def adapter_parameters(self, rank: int) -> int:
        """Weights of LoRA's matrices on all seven linear layers: rank x (inputs + outputs) each.

        Source: Hu et al., "LoRA" (arXiv:2106.09685), section 4.1.
        """
        widths = 7 * self.width + 2 * self.query_width + 2 * self.key_width + 3 * self.mlp_width
        return self.layers * rank * widths

    def flops_per_token(self, sequence: int, *, rank: int, head_trained: bool = False) -> int:
        """Return the operations of forward and backward for one token, without recomputing anything.

        A frozen weight multiplies and adds once forward, and once backward, for the gradient of its input: 4. A trained
        one once more, for its own: 6. Attention is 6 layers queries sequence, of which the causal mask has halved 12.

        Source: as ``Geometry.training_flops_per_token`` of ``training.model``; Hu et al. (arXiv:2106.09685) for frozen
        weights.

        Args:
            sequence: positions of a block of tokens.
            rank: of the adapters.
            head_trained: whether the head is trained as a whole.
        """
        head = 2 * self.vocab * self.width if head_trained else 0
        trained = self.adapter_parameters(rank) + self.layers * self.query_width * sequence
        return 4 * self.multiplied_parameters + 6 * trained + head

    def config_fields(self) -> dict[str, Any]:
        """Return every field of transformers' ``Qwen2Config`` that defines this model."""
        return {
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.sequence,
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


QWEN2_7B = Geometry(width=3584, inner=18944, layers=28, heads=28, key_heads=4, vocab=152064, sequence=131072)
"""Source: config.json of https://huggingface.co/Qwen/Qwen2-7B."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Of the frozen base, by precision."""

TINY_LABEL, RANDOM_LABEL, QWEN2_LABEL = "lora_tiny", "qwen2-7b-random", "qwen2-7b"


_KEPT_VOCAB = 256


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model to train adapters on.

    Attributes:
        label: its name in reports.
        geometry: its sizes.
        adapters: the adapters to add.
        folder: where its weights are; None: they are random.
        origin: the origin of its weights, for reports.
        weights: of the folder, where the ranks of a node share them.
    """

    label: str
    geometry: Geometry
    adapters: Adapters
    folder: Path | None = None
    origin: str = "random weights from a seed"
    weights: NodeWeights | None = None

    def flops_per_token(self, sequence: int) -> int:
        """Return ``Geometry.flops_per_token`` with these adapters, nothing being recomputed."""
        return self.geometry.flops_per_token(
            sequence, rank=self.adapters.rank, head_trained="lm_head" in self.adapters.saved
        )

    def kept(self, by: Accelerator) -> Base:
        """Return what a device really trains of it: all, but of random weights a simulated device a tiny model."""
        tiny = tiny_base(_KEPT_VOCAB).geometry
        width = self.geometry.width
        return self if self.folder or by.kept(width, tiny.width) == width else replace(self, geometry=tiny)


def tiny_base(vocab: int) -> Base:
    """Return the base of the criterion that needs no download: two blocks, and the vocabulary of a tokenizer trained on
    its data."""
    geometry = Geometry(width=128, inner=384, layers=2, heads=4, key_heads=2, vocab=vocab, sequence=4096)
    return Base(label=TINY_LABEL, geometry=geometry, adapters=TINY)


def random_base() -> Base:
    """Return a base of Qwen2-7B's sizes whose weights are random: for throughput and memory only."""
    return Base(label=RANDOM_LABEL, geometry=QWEN2_7B, adapters=QWEN2)


def given_base(name: str, *, path: Path | None = None, revision: str | None = None) -> Base:
    """Return a pretrained base from a folder, or from the hub at a revision: Qwen2, Qwen2.5 or Qwen3.

    Only a model of Qwen2-7B's sizes has the label ``qwen2-7b``, -Instruct among them. Another one has its own name, so
    that no report confuses the two.

    Args:
        name: as the operator wrote it.
        path: a folder with config.json and weights; None: ``name`` is one of the hub.
        revision: of the hub's repository: a commit, tag or branch. Without one the hub is refused, for the trained
            weights could not be identified later.

    Raises: EnvironmentBroken if it cannot be loaded, is another model, or transformers is missing.
    """
    if path is None and revision is None:
        raise EnvironmentBroken(
            f"{name} names no revision, and the hub's files can change: write {name}@COMMIT, or a local folder"
        )
    wanted = ["*.json", "*.safetensors", "*.txt"]
    folder = path if path is not None else fetch("model", name, str(revision), lambda files: wanted)
    geometry = _geometry(folder)
    of_7b = replace(geometry, sequence=QWEN2_7B.sequence) == QWEN2_7B
    origin = str(folder) if path is not None else f"{name}@{revision}"
    return Base(
        label=QWEN2_LABEL if of_7b else folder.name if path is not None else name.rpartition("/")[2],
        geometry=geometry,
        adapters=QWEN2,
        folder=folder,
        origin=origin,
    )


def make_adapted(base: Base, device: torch.device, *, precision: str, dropout: bool, seed: int) -> Any:
    """Create a base with adapters on a device: the same on every rank, for the seed decides what is random.

    Returns peft's ``PeftModel`` in training mode: the base frozen and in the dtype of the precision, trained weights in
    fp32, for at such learning rates bf16 would round most updates to nothing.

    Args:
        base: the model to train, and the adapters to add.
        device: where it is placed.
        precision: ``fp32`` or ``bf16``.
        dropout: False for steps that are compared with others.
        seed: other seeds make other weights.

    Raises:
        EnvironmentBroken: the weights cannot be read.
        WrongResult: the number of its weights differs from that of its sizes.
        ImportError: transformers or peft is missing.
    """
    from peft import LoraConfig, get_peft_model

    model = make_base(base, device, precision=precision, seed=seed)
    found = sum(weight.numel() for weight in model.parameters())
    _require_count(base, "the base has", found, base.geometry.parameters)
    torch.manual_seed(seed + 1)  # for the adapters' first values
    config = LoraConfig(
        r=base.adapters.rank,
        lora_alpha=base.adapters.alpha,
        lora_dropout=base.adapters.dropout if dropout else 0.0,
        target_modules=list(LINEARS),
        modules_to_save=list(base.adapters.saved) or None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    adapted: Any = get_peft_model(model, config)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.float32)
    adapted.to(device)
    expected = base.geometry.adapter_parameters(base.adapters.rank)
    expected += len(base.adapters.saved) * base.geometry.vocab * base.geometry.width
    _require_count(base, "trained are", trained_parameters(adapted), expected)
    return adapted.train()


def make_base(base: Base, device: torch.device, *, precision: str, seed: int) -> Any:
    """Create the base alone, as a causal language model of transformers in the dtype of the precision.

    It is created on the device itself, never on meta: what has no values there, such as the rotary frequencies, is in
    no state dict either.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if base.weights is not None:
        return base.weights.model(device, DTYPES[precision])
    if base.folder is not None:
        return read_model(base.folder, device, DTYPES[precision])
    torch.manual_seed(seed)
    fields: dict[str, Any] = {**base.geometry.config_fields(), "attn_implementation": "sdpa"}
    make: Any = Qwen2ForCausalLM._from_config  # transformers leaves it untyped
    with device:
        return make(Qwen2Config(**fields), dtype=DTYPES[precision])


def read_model(source: str | Path, device: torch.device, dtype: torch.dtype | str, *, local: bool = True) -> Any:
    """Return a causal language model of transformers from a folder, or if not ``local`` from the hub.

    Raises: EnvironmentBroken if it cannot be loaded, or a weight of it is missing.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM  # its types leave out what output_loading_info adds
    try:
        model, loading = models.from_pretrained(
            source,
            dtype=dtype,
            device_map={"": device},
            attn_implementation="sdpa",
            local_files_only=local,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise EnvironmentBroken(f"{source}: the weights cannot be loaded: {first_line(str(error))}") from error
    if missing := sorted(loading["missing_keys"]):
        raise EnvironmentBroken(
            f"{source}: {len(missing)} weights are not in its files, such as {missing[0]}: they would be random"
        )
    return model


class NodeWeights:
    """The weights of a folder, which the first rank of a node reads once, and sends whenever a model is made.

    Collective: every rank of the group must create it, and call :meth:`model` equally often.

    Args:
        folder: with the weights.
        group: the ranks of a node.

    Raises: EnvironmentBroken on every rank, if they cannot be loaded.
    """

    def __init__(self, folder: Path, group: dist.ProcessGroup) -> None:
        self._folder, self._group = folder, group
        self._read: Any = None

        def read() -> None:
            self._read = read_model(folder, torch.device("cpu"), "auto")

        on_first_rank(group, read)

    def model(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return a model with these weights, on a device."""
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        config = AutoConfig.from_pretrained(self._folder, local_files_only=True)
        make: Any = AutoModelForCausalLM.from_config  # transformers leaves it untyped
        with device:
            made = make(config, dtype=dtype, attn_implementation="sdpa")
        if (self._folder / "generation_config.json").is_file():
            made.generation_config = GenerationConfig.from_pretrained(self._folder, local_files_only=True)
        read = self._read.state_dict() if self._read is not None else {}
        for name, weight in made.state_dict().items():
            if read:
                weight.copy_(read[name])
            dist.broadcast(weight, group=self._group, group_src=0)
        return made.eval()


def _require_count(base: Base, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise WrongResult(
            f"{base.label}: {what} {found:,} parameters, expected {expected:,}: the model does not match its sizes. "
            "Check the versions of transformers and peft, and the weights' folder"
        )


def _geometry(folder: Path) -> Geometry:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise EnvironmentBroken(
            f"{folder}: no model is there: {first_line(str(error))}. Expected is a folder as "
            "`hf download Qwen/Qwen2-7B --local-dir FOLDER` creates it"
        ) from error
    if config.model_type not in ("qwen2", "qwen3"):
        raise EnvironmentBroken(
            f"{folder}: a model of type qwen2 or qwen3 is expected, and config.json has {config.model_type}"
        )
    if getattr(config, "use_sliding_window", False):
        raise EnvironmentBroken(f"{folder}: config.json asks for a sliding window, which Qwen2-7B does not have")
    rope: Mapping[str, Any] = config.rope_parameters
    head_width = getattr(config, "head_dim", None) or 0
    try:
        return Geometry(
            width=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            vocab=config.vocab_size,
            sequence=config.max_position_embeddings,
            rms_epsilon=config.rms_norm_eps,
            rope_base=float(rope["rope_theta"]),
            tied=bool(config.tie_word_embeddings),
            head_width=0 if head_width * config.num_attention_heads == config.hidden_size else head_width,
            biased=bool(getattr(config, "attention_bias", True)),
            normed=config.model_type == "qwen3",
        )
    except (ValueError, ZeroDivisionError) as error:  # of 0 heads
        raise EnvironmentBroken(f"{folder}: config.json contradicts itself: {error}") from error
