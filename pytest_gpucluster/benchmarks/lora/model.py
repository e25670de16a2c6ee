"""The models that LoRA is trained on: a tiny one, Qwen2-7B's sizes with random weights, and one that is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_gpucluster.benchmarks.lora.adapters import QWEN2, TINY, Adapters, trained_parameters, with_adapters
from pytest_gpucluster.benchmarks.lora.geometry import (
    QWEN2_7B,
    QWEN2_7B_PARAMETERS,
    QWEN2_7B_TRAINED,
    Geometry,
    tiny,
)
from pytest_gpucluster.benchmarks.lora.hub import ANSWER_SECONDS, local_only
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Of the frozen base, by precision."""

TINY_LABEL, RANDOM_LABEL, QWEN2_LABEL = "lora_tiny", "qwen2-7b-random", "qwen2-7b"


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model to put adapters on.

    Attributes:
        label: how reports call it.
        geometry: its sizes.
        adapters: what is put on it.
        folder: where its weights are; None: they are random.
        origin: which weights they are, for reports.
    """

    label: str
    geometry: Geometry
    adapters: Adapters
    folder: Path | None = None
    origin: str = "random weights from a seed"

    @property
    def is_random(self) -> bool:
        """Tell whether the frozen weights are random: then a loss says nothing about a language."""
        return self.folder is None


def tiny_base(vocab: int) -> Base:
    """Return the base of the criterion that needs no download."""
    return Base(label=TINY_LABEL, geometry=tiny(vocab), adapters=TINY)


def random_base(geometry: Geometry = QWEN2_7B, label: str = RANDOM_LABEL) -> Base:
    """Return a base of Qwen2-7B's sizes whose weights are random: for throughput and memory only."""
    return Base(label=label, geometry=geometry, adapters=QWEN2)


def given_base(name: str, *, path: Path | None = None, revision: str | None = None) -> Base:
    """Return a pretrained base from a folder, or from the hub at a revision.

    Only a model of Qwen2-7B's sizes is called ``qwen2-7b``. Another Qwen2 model keeps its own name, so that no report
    takes it for that.

    Args:
        name: as the operator wrote it.
        path: a folder with config.json and weights; None: ``name`` is one of the hub.
        revision: of the hub's repository: a commit, tag or branch. Without it the hub is refused, for nobody could tell
            later which weights were trained.

    Raises: EnvironmentBroken if it cannot be had, is no Qwen2 model, or transformers is missing.
    """
    folder = path if path is not None else _from_hub(name, revision)
    geometry = _geometry(folder)
    of_7b = not QWEN2_7B.differences(geometry)
    origin = str(folder) if path is not None else f"{name}@{revision}"
    return Base(
        label=QWEN2_LABEL if of_7b else folder.name if path is not None else name.rpartition("/")[2],
        geometry=geometry,
        adapters=QWEN2,
        folder=folder,
        origin=origin,
    )


def make_adapted(base: Base, device: torch.device, *, precision: str, dropout: bool, seed: int) -> Any:
    """Make a base with adapters on a device: the same on every rank, for the seed decides what is random.

    Returns peft's ``PeftModel``: the base in the dtype of the precision, what learns in fp32, in training mode.

    Raises:
        EnvironmentBroken: the weights cannot be read.
        WrongResult: it does not have as many weights as its sizes say.
        ImportError: transformers or peft is missing.
    """
    model = make_base(base, device, precision=precision, seed=seed)
    found = sum(weight.numel() for weight in model.parameters())
    _require_count(base, "the base has", found, base.geometry.parameters)
    torch.manual_seed(seed + 1)  # for the adapters' first values
    adapted = with_adapters(model, base.adapters, dropout=dropout).to(device)
    expected = base.geometry.adapter_parameters(base.adapters.rank)
    expected += len(base.adapters.saved) * base.geometry.vocab * base.geometry.hidden
    _require_count(base, "trained are", trained_parameters(adapted), expected)
    if base.geometry == QWEN2_7B or base.label == QWEN2_LABEL:
        _require_count(base, "the base has", found, QWEN2_7B_PARAMETERS)
        _require_count(base, "trained are", expected, QWEN2_7B_TRAINED)
    return adapted.train()


def make_base(base: Base, device: torch.device, *, precision: str, seed: int) -> Any:
    """Make the base alone, as transformers' ``Qwen2ForCausalLM`` in the dtype of the precision.

    Made on the device itself, never on meta: what has no values there, such as the rotary frequencies, would be in no
    state dict either.
    """
    from safetensors import SafetensorError
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if base.folder is not None:
        try:
            return Qwen2ForCausalLM.from_pretrained(
                base.folder,
                dtype=DTYPES[precision],
                device_map={"": device},
                attn_implementation="sdpa",
                local_files_only=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise EnvironmentBroken(f"{base.folder}: the weights cannot be loaded: {first_line(error)}") from error
    torch.manual_seed(seed)
    fields: dict[str, Any] = {**base.geometry.config_fields(), "attn_implementation": "sdpa"}
    make: Any = Qwen2ForCausalLM._from_config  # transformers leaves it untyped
    with device:
        return make(Qwen2Config(**fields), dtype=DTYPES[precision])


def _require_count(base: Base, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise WrongResult(
            f"{base.label}: {what} {found:,} parameters, expected {expected:,}: this is another model than its sizes "
            "say. Look at the versions of transformers and peft, and at the weights' folder"
        )


def _geometry(folder: Path) -> Geometry:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise EnvironmentBroken(
            f"{folder}: no model is there: {first_line(error)}. A folder as "
            "`hf download Qwen/Qwen2-7B --local-dir FOLDER` leaves it is expected"
        ) from error
    if config.model_type != "qwen2":
        raise EnvironmentBroken(
            f"{folder}: a model of type qwen2 is expected, and config.json says {config.model_type}"
        )
    if getattr(config, "use_sliding_window", False):
        raise EnvironmentBroken(f"{folder}: config.json asks for a sliding window, which Qwen2-7B does not have")
    rope: Mapping[str, Any] = config.rope_parameters
    try:
        return Geometry(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            vocab=config.vocab_size,
            positions=config.max_position_embeddings,
            rms_epsilon=config.rms_norm_eps,
            rope_base=float(rope["rope_theta"]),
            tied=bool(config.tie_word_embeddings),
        )
    except ValueError as error:
        raise EnvironmentBroken(f"{folder}: config.json contradicts itself: {error}") from error


def _from_hub(name: str, revision: str | None) -> Path:
    if revision is None:
        raise EnvironmentBroken(
            f"{name} names no revision, and the hub's files can change: write {name}@COMMIT, or a local folder"
        )
    import huggingface_hub
    from huggingface_hub import constants

    local = local_only(name, revision)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                etag_timeout=ANSWER_SECONDS,
                local_files_only=local,
                allow_patterns=["*.json", "*.safetensors", "*.txt"],
            )
        )
    except Exception as error:  # of huggingface_hub, httpx, requests and the socket, by version
        why = (
            "HF_HUB_OFFLINE is set, and it is not in the hub's cache; fetch it elsewhere, or name a folder"
            if constants.HF_HUB_OFFLINE
            else "the hub does not give it, and it is not in the hub's cache; name a folder instead"
        )
        raise EnvironmentBroken(f"{name}@{revision}: {why} ({type(error).__name__}: {first_line(error)})") from error


def first_line(error: Exception) -> str:
    """Return what an error says first, for a message."""
    return next((line.strip()[:300] for line in str(error).splitlines() if line.strip()), "no reason given")
