"""A file of packed blocks: made once from rows, with what was held out, and where all of it comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_gpucluster.benchmarks.lora.dataset import Row, Rows, held_out_split, row_of
from pytest_gpucluster.benchmarks.lora.hub import INSTALL
from pytest_gpucluster.benchmarks.lora.packing import Packed, Statistics, pack, tokenizer_fingerprint
from pytest_gpucluster.errors import EnvironmentBroken

SCHEMA_VERSION = 1
_ENTRY = "pytest-gpucluster packed blocks"
_PARTS = ("train", "held_out")
_ROWS = "held_out.rows"
# A length in 8 bytes, then a JSON object. Source: https://huggingface.co/docs/safetensors/index, "Format".
_LENGTH_BYTES = 8
_LONGEST_HEADER = 2**40
"""Eight characters of text are a far larger number, and no header is as long."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """Blocks to train on, and what was held out.

    Attributes:
        train: the blocks to train on.
        held_out: blocks of the other conversations.
        held_out_rows: these conversations, to ask for their calls.
        context: where it comes from: source, its sha256 and revision, malformed rows, the tokenizer and its sha256,
            sequence, seed and the held-out part.
    """

    train: Packed
    held_out: Packed
    held_out_rows: tuple[Row, ...]
    context: Mapping[str, str]


def prepare(rows: Rows, tokenizer: Any, *, name: str, sequence: int, held_out: float, seed: int) -> Prepared:
    """Hold a part of the rows out, and pack both parts.

    Args:
        rows: what a source holds.
        tokenizer: of transformers, with an end token.
        name: of the tokenizer, for the context.
        sequence: positions of a block.
        held_out: the part of the conversations to hold out, above 0 and below 1.
        seed: of which are held out.

    Raises:
        EnvironmentBroken: a part does not fill one block.
        ValueError: nothing can be held out.
    """
    train, others = held_out_split(rows.rows, held_out, seed)
    try:
        packed = pack(others, tokenizer, sequence)
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
    }
    return Prepared(
        train=pack(train, tokenizer, sequence), held_out=packed, held_out_rows=tuple(others), context=context
    )


def write(path: Path, prepared: Prepared) -> None:
    """Write a file of packed blocks: safetensors. A file of that name is replaced in one moment, or stays as it is.

    Raises:
        EnvironmentBroken: safetensors is not installed.
        OSError: it cannot be written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise _missing() from None
    tensors: dict[str, torch.Tensor] = {}
    for part in _PARTS:
        packed: Packed = getattr(prepared, part)
        # Half the size; no vocabulary comes near 2^31.
        tensors |= {f"{part}.tokens": packed.tokens.to(torch.int32), f"{part}.judged": packed.judged}
    lines = "".join(json.dumps({"system": row.system, "chat": row.chat}) + "\n" for row in prepared.held_out_rows)
    tensors[_ROWS] = torch.frombuffer(bytearray(lines.encode()), dtype=torch.uint8)
    told = {
        "schema_version": SCHEMA_VERSION,
        "context": dict(prepared.context),
        "statistics": {part: asdict(getattr(prepared, part).statistics) for part in _PARTS},
    }
    # One entry only: safetensors writes several in any order, and the same blocks shall give the same file.
    metadata = {_ENTRY: json.dumps(told)}
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, beside, metadata)
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    except SafetensorError as error:  # how safetensors tells of a full or missing file system
        raise OSError(str(error)) from error
    finally:
        beside.unlink(missing_ok=True)


def is_prepared(path: Path) -> bool:
    """Tell whether a file looks like one of packed blocks, and not like rows. Raises: OSError."""
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES + 1)
    return start[_LENGTH_BYTES:] == b"{" and int.from_bytes(start[:_LENGTH_BYTES], "little") < _LONGEST_HEADER


def read(path: Path) -> Prepared:
    """Read a file that ``write`` has made.

    Raises: EnvironmentBroken if it cannot be read, is cut off, is something else, is of another version, or contradicts
    itself.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise _missing() from None
    try:
        with safe_open(path, framework="pt") as file:
            entry = (file.metadata() or {}).get(_ENTRY)
            if entry is None:
                raise EnvironmentBroken(f"{path}: no packed blocks; make them with `gpucluster lora prepare`")
            told = json.loads(entry)
            if told["schema_version"] != SCHEMA_VERSION:
                raise EnvironmentBroken(
                    f"{path}: schema_version {told['schema_version']}, and {SCHEMA_VERSION} is read here; make it anew"
                    " with `gpucluster lora prepare`"
                )
            train, held_out = (_packed(file, part, told["statistics"][part]) for part in _PARTS)
            lines = file.get_tensor(_ROWS).numpy().tobytes().decode().splitlines()
            rows = tuple(row_of(json.loads(line)) for line in lines)
            context = {str(name): str(value) for name, value in told["context"].items()}
    except (OSError, SafetensorError) as error:
        raise EnvironmentBroken(
            f"{path}: cannot be read: {error}; make it anew with `gpucluster lora prepare`"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EnvironmentBroken(f"{path}: damaged: {error}; make it anew with `gpucluster lora prepare`") from error
    return Prepared(train=train, held_out=held_out, held_out_rows=rows, context=context)


def require_fit(prepared: Prepared, tokenizer: Any, sequence: int) -> None:
    """Make sure that blocks are of this length and were made with this tokenizer.

    Raises: EnvironmentBroken if they are others: another model would read nonsense in them.
    """
    made = prepared.context
    if made.get("tokenizer_sha256") != tokenizer_fingerprint(tokenizer):
        raise EnvironmentBroken(
            f"the blocks were made with the tokenizer of {made.get('tokenizer')}, which is another than the model's;"
            " make them anew with `gpucluster lora prepare --model` and this model"
        )
    if prepared.train.judged.shape[1] != sequence:
        raise EnvironmentBroken(
            f"the blocks have {prepared.train.judged.shape[1]} positions, and {sequence} are asked for; make them anew"
            f" with `gpucluster lora prepare --sequence {sequence}`"
        )


def _packed(file: Any, part: str, told: Mapping[str, int]) -> Packed:
    tokens, judged = (file.get_tensor(f"{part}.{name}") for name in ("tokens", "judged"))
    statistics = Statistics(**told)
    blocks, length = tokens.shape
    if tokens.dtype != torch.int32 or judged.dtype != torch.bool or judged.shape != (blocks, length - 1):
        raise ValueError(
            f"{part}: tokens are {tokens.dtype} {tuple(tokens.shape)}, judged {judged.dtype} {tuple(judged.shape)}"
        )
    if blocks != statistics.blocks or int(judged.sum()) != statistics.judged_targets:
        raise ValueError(f"{part}: {blocks} blocks, of which the statistics say otherwise")
    return Packed(tokens=tokens.long(), judged=judged, statistics=statistics)


def _missing() -> EnvironmentBroken:
    return EnvironmentBroken(f"safetensors is not installed; install it with {INSTALL}")
