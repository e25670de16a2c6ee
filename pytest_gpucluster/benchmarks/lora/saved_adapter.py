"""An adapter as a training has saved it, on the model that it belongs to."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_gpucluster.benchmarks.lora.hub import INSTALL, local_only
from pytest_gpucluster.benchmarks.lora.tokenizer import tokenizer_for
from pytest_gpucluster.errors import EnvironmentBroken

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OF_A_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedAdapter:
    """A model with an adapter that was loaded from a folder.

    Attributes:
        model: peft's ``PeftModel``, frozen, in evaluation mode.
        tokenizer: from the adapter's folder if it has one, else the base's.
        base: the folder or hub name of the model that the adapter is on.
    """

    model: Any
    tokenizer: Any
    base: str


def load(folder: Path, device: torch.device, *, base: str | None = None) -> SavedAdapter:
    """Load an adapter's folder, as peft's ``save_pretrained`` leaves it, and the model beneath it.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        device: where the model shall be.
        base: folder or hub name of the model beneath; by default the one that adapter_config.json names.

    Raises: EnvironmentBroken: a package, file or weight is missing, or adapter and base do not fit together.
    """
    try:
        from peft import PeftModel
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise EnvironmentBroken(f"{error.name} is not installed; install it with {INSTALL}") from None
    # Looked at first: what is missing in the folder, peft would look for on the hub.
    base, saved = _base(folder, base), _saved_weights(folder)
    local = local_only(base)
    models: Any = AutoModelForCausalLM  # its types leave out what output_loading_info adds
    try:
        below, told = models.from_pretrained(
            base,
            dtype="auto",
            device_map={"": device},
            local_files_only=local,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise EnvironmentBroken(f"{base}: the model beneath the adapter cannot be loaded: {_first(error)}") from error
    if missing := sorted(told["missing_keys"]):
        raise EnvironmentBroken(
            f"{base}: {len(missing)} weights are not in its files, such as {missing[0]}: they would be random"
        )
    try:
        with warnings.catch_warnings():
            # Weights that are missing are looked for below: an error, not a warning.
            warnings.filterwarnings("ignore", message=".*missing adapter keys")
            model = PeftModel.from_pretrained(below, str(folder))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise EnvironmentBroken(f"{folder}: does not fit on {base}: {_first(error)}") from error
    _require_all_weights(model, saved, folder, base)
    has_tokenizer = any((folder / name).is_file() for name in _OF_A_TOKENIZER)
    return SavedAdapter(
        model=model.to(device).eval(), tokenizer=tokenizer_for(folder if has_tokenizer else base), base=base
    )


def _base(folder: Path, named: str | None) -> str:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise EnvironmentBroken(
            f"{folder / CONFIG}: {error.strerror or error}; name the folder of a saved adapter, such as final/"
        ) from None
    except ValueError as error:
        raise EnvironmentBroken(f"{folder / CONFIG}: no JSON: {error}") from None
    named = named or (config.get("base_model_name_or_path") if isinstance(config, dict) else None)
    if not named:
        raise EnvironmentBroken(f"{folder / CONFIG}: names no model beneath the adapter; name it with --base")
    return str(named)


def _saved_weights(folder: Path) -> set[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise EnvironmentBroken(f"{folder / WEIGHTS}: cannot be read: {_first(error)}") from error


def _require_all_weights(model: Any, saved: set[str], folder: Path, base: str) -> None:
    """Make sure that each weight of the adapter was in the file, and that each in the file was used."""
    from peft import get_peft_model_state_dict

    # Without looking for changed embeddings: that would ask the hub.
    needed = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    for names, what in ((needed - saved, "are not in the file"), (saved - needed, "have no place on this model")):
        if names:
            raise EnvironmentBroken(
                f"{folder / WEIGHTS}: {len(names)} weights {what}, such as {min(names)}: it does not belong to {base}"
            )


def _first(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line[:200] for line in lines if line), type(error).__name__)
