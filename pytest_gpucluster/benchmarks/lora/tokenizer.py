"""Tokenizers: a tiny one that is trained on the spot, and those that come with a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.benchmarks.lora.conversation import END
from pytest_gpucluster.benchmarks.lora.hub import INSTALL, local_only
from pytest_gpucluster.benchmarks.lora.rendering import text_of
from pytest_gpucluster.benchmarks.lora.rows import Row
from pytest_gpucluster.errors import EnvironmentBroken

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"


def tiny_tokenizer(rows: Iterable[Row], vocab: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the rows: any text can be written in it, and equal rows give equal tokenizers.

    Args:
        rows: what it learns from.
        vocab: tokens that it has, all 256 bytes and the two for the end and for padding included.

    Raises:
        EnvironmentBroken: transformers is not installed.
        ValueError: the rows are too few for so many tokens.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise _missing() from None
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bare.train_from_iterator((text_of(row) for row in rows), trainer)
    if bare.get_vocab_size() != vocab:
        raise ValueError(f"the rows give {bare.get_vocab_size()} tokens, and {vocab} are asked for: give more rows")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it so
        tokenizer_object=bare, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def tokenizer_for(model: str | Path, revision: str | None = None) -> Any:
    """Load the tokenizer of a model, from a folder or from the hub.

    With HF_HUB_OFFLINE, or where the hub does not answer, only the hub's cache is looked at.

    Raises: EnvironmentBroken: transformers is not installed, there is no such tokenizer, or it has no end token.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise _missing() from None
    local = local_only(model, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(model), revision=revision, local_files_only=local, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        where = "" if Path(model).exists() else "it is no folder here and not in the hub's cache; "
        raise EnvironmentBroken(
            f"{model}: no tokenizer can be loaded from it ({first[:200]}); {where if local else ''}name the folder of a"
            " model, with its tokenizer.json and tokenizer_config.json"
        ) from error
    if tokenizer.eos_token_id is None:
        raise EnvironmentBroken(f"{model}: its tokenizer has no end token (eos_token), which ends each answer")
    return tokenizer


def fingerprint(tokenizer: Any) -> str:
    """Return a sha256 of what a tokenizer makes of texts: its tokens, merges and rules."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    told = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{told}\0{tokenizer.eos_token_id}".encode()).hexdigest()


def _missing() -> EnvironmentBroken:
    return EnvironmentBroken(f"transformers is not installed; install it with {INSTALL}")
