"""A file of packed blocks: made once from rows, with the held-out conversations and the origin of all of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_gpucluster.benchmarks.lora.dataset import Row, Rows, held_out_split, is_safetensors, row_of
from pytest_gpucluster.benchmarks.lora.packing import Packed, Statistics, pack, rendering_of, tokenizer_fingerprint
from pytest_gpucluster.errors import EnvironmentBroken

SCHEMA_VERSION = 4
_ENTRY = "pytest-gpucluster packed blocks"
_PARTS = ("train", "held_out")
_ROWS = "held_out.rows"
_AGAIN = "make it again with `gpucluster lora prepare`"


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """Packed blocks to train on, and held-out ones.

    Attributes:
        train: the blocks to train on.
        held_out: blocks of the other conversations.
        held_out_rows: these conversations, for the evaluation of function calls.
        context: the origin: source, its sha256 and revision, malformed rows, the tokenizer and its sha256, sequence,
            seed, the held-out part and the rendering.
    """

    train: Packed
    held_out: Packed
    held_out_rows: tuple[Row, ...]
    context: Mapping[str, str]


def prepare(
    rows: Rows,
    tokenizer: Any,
    *,
    name: str,
    sequence: int,
    held_out: float,
    seed: int,
    rendering: str = "glaive",
) -> Prepared:
    """Hold a part of the rows out, and pack both parts.

    Args:
        rows: of a source.
        tokenizer: of transformers, with an end token.
        name: of the tokenizer, for the context.
        sequence: positions of a block.
        held_out: the part of the conversations to hold out, above 0 and below 1.
        seed: selects which are held out.
        rendering: as of :func:`packing.rendering_of`.

    Raises:
        EnvironmentBroken: a part does not fill one block, or cannot be written by the chat template.
        ValueError: nothing can be held out.
    """
    train, others = held_out_split(rows.rows, held_out, seed)
    render = rendering_of(rendering, tokenizer)
    try:
        packed = pack(others, tokenizer, sequence, render=render)
    except EnvironmentBroken as error:
        raise EnvironmentBroken(f"held out: {error}, or hold more out") from None
    context = {
        "source": rows.source,
        "sha256": rows.sha256,
        "revision": rows.revision or "",
        "malformed": str(len(rows.malformed)),
        "tokenizer": name,
        "tokenizer_sha256": tokenizer_fingerprint(tokenizer),
        "sequence": str(sequence),
        "seed": str(seed),
        "held_out": f"{held_out:g}",
        "rendering": rendering,
    }
    return Prepared(
        train=pack(train, tokenizer, sequence, render=render),
        held_out=packed,
        held_out_rows=tuple(others),
        context=context,
    )


def write(path: Path, prepared: Prepared) -> None:
    """Write a file of packed blocks: safetensors. An existing file is replaced atomically, or stays as it is.

    Raises: OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for part in _PARTS:
        packed: Packed = getattr(prepared, part)
        # Half the size; no vocabulary comes near 2^31.
        tensors |= {f"{part}.tokens": packed.tokens.to(torch.int32), f"{part}.loss_mask": packed.loss_mask}
    lines = "".join(json.dumps({"system": row.system, "chat": row.chat}) + "\n" for row in prepared.held_out_rows)
    tensors[_ROWS] = torch.frombuffer(bytearray(lines.encode()), dtype=torch.uint8)
    header = {
        "schema_version": SCHEMA_VERSION,
        "context": dict(prepared.context),
        "statistics": {part: asdict(getattr(prepared, part).statistics) for part in _PARTS},
    }
    # One entry only: safetensors writes several in any order, and the same blocks must give the same file.
    metadata = {_ENTRY: json.dumps(header)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, temporary, metadata)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except SafetensorError as error:  # safetensors' error for a full or missing file system
        raise OSError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def is_prepared(path: Path) -> bool:
    """Whether a path is a file that looks like one of packed blocks, and not like rows. Raises: OSError."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return is_safetensors(file.read(9))


def read(path: Path) -> Prepared:
    """Read a file of :func:`write`.

    Raises: EnvironmentBroken if it cannot be read, is cut off, is something else, is of another version, or is
    inconsistent.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            entry = (file.metadata() or {}).get(_ENTRY)
            if entry is None:
                raise EnvironmentBroken(f"{path}: no packed blocks; make them with `gpucluster lora prepare`")
            header = json.loads(entry)
            if header["schema_version"] != SCHEMA_VERSION:
                raise EnvironmentBroken(
                    f"{path}: schema_version {header['schema_version']}, and {SCHEMA_VERSION} is required; {_AGAIN}"
                )
            train, held_out = (_packed(file, part, header["statistics"][part]) for part in _PARTS)
            lines = file.get_tensor(_ROWS).numpy().tobytes().decode().splitlines()
            rows = tuple(row_of(json.loads(line)) for line in lines)
            context = {str(name): str(value) for name, value in header["context"].items()}
    except (OSError, SafetensorError) as error:
        raise EnvironmentBroken(f"{path}: cannot be read: {error}; {_AGAIN}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EnvironmentBroken(f"{path}: damaged: {error}; {_AGAIN}") from error
    return Prepared(train=train, held_out=held_out, held_out_rows=rows, context=context)


def require_fit(prepared: Prepared, tokenizer: Any, sequence: int, rendering: str) -> None:
    """Check that blocks have this length and rendering, and were made with this tokenizer.

    Raises: EnvironmentBroken otherwise: their numbers mean other tokens to another model.
    """
    made, length = prepared.context, prepared.train.loss_mask.shape[1]
    wrong = ""
    if made.get("tokenizer_sha256") != tokenizer_fingerprint(tokenizer):
        wrong = (
            f"were made with the tokenizer of {made.get('tokenizer')}, which differs from the model's; make them again "
            "with `gpucluster lora prepare --model` and this model"
        )
    elif made["rendering"] != rendering:
        wrong = (
            f"were made with --rendering {made['rendering']}, and lora.rendering is {rendering}: set it, or make them "
            "again"
        )
    elif length != sequence:
        wrong = (
            f"have {length} positions, and the workload has {sequence}; make them again with "
            f"`gpucluster lora prepare --sequence {sequence}`"
        )
    if wrong:
        raise EnvironmentBroken(f"the blocks {wrong}")


def _packed(file: Any, part: str, counts: Mapping[str, int]) -> Packed:
    tokens, loss_mask = (file.get_tensor(f"{part}.{name}") for name in ("tokens", "loss_mask"))
    blocks, length = tokens.shape
    if tokens.dtype != torch.int32 or loss_mask.dtype != torch.bool or loss_mask.shape != (blocks, length - 1):
        raise ValueError(
            f"{part}: tokens are {tokens.dtype} {tuple(tokens.shape)}, loss_mask {loss_mask.dtype}"
            f" {tuple(loss_mask.shape)}"
        )
    return Packed(tokens=tokens.long(), loss_mask=loss_mask, statistics=Statistics(**counts))
