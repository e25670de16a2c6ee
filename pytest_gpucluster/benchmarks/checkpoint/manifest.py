"""The manifest of a checkpoint: which files it has, how long each is and what its bytes are. Pure but for the files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import WrongResult

NAME = "manifest.json"
FORMAT = 1
_AT_ONCE = 2**22
"""Bytes that are read at a time."""


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """What a file holds.

    Attributes:
        size_bytes: how long it is.
        sha256: of its bytes, in hexadecimal.
    """

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: of the training that was saved.
        world_size: ranks that have saved it.
        extra: what the training needs besides to go on, JSON.
        files: name in the folder -> what is in it.
    """

    step: int
    world_size: int
    extra: Mapping[str, Any]
    files: Mapping[str, Sealed]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(one.size_bytes for one in self.files.values())


def seal(path: Path) -> Sealed:
    """Read a file from beginning to end and return what is in it.

    Raises: OSError.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_AT_ONCE):
            digest.update(chunk)
            size += len(chunk)
    return Sealed(size_bytes=size, sha256=digest.hexdigest())


def require_sealed(path: Path, expected: Sealed) -> None:
    """Make sure that a file is still what it was.

    Raises:
        WrongResult: it is missing, has another size or other bytes; names the file, what was found and expected.
        OSError: it cannot be read.
    """
    wanted = f"{expected.size_bytes} bytes were written"
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise WrongResult(f"{path} is missing; {wanted}. {_WHAT_TO_DO}") from None
    if size != expected.size_bytes:
        what = "truncated" if size < expected.size_bytes else "longer than it was"
        raise WrongResult(f"{path} is {what}: {size} bytes found, {wanted}. {_WHAT_TO_DO}")
    found = seal(path)
    if found != expected:
        raise WrongResult(
            f"{path} is changed: {found.size_bytes} bytes with sha256 {found.sha256}, expected {expected.size_bytes} "
            f"bytes with sha256 {expected.sha256}. {_WHAT_TO_DO}"
        )


_WHAT_TO_DO = "Go on from an older checkpoint, and look at the file system"


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder of its checkpoint, and wait until it is on stable storage.

    Raises: OSError.
    """
    body = {"format": FORMAT, **asdict(manifest)}
    text = json.dumps({**body, "sha256": _of(body)}, indent=1) + "\n"
    with (folder / NAME).open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        WrongResult: it is missing, truncated or changed; names the file.
        ValueError: a newer version has written it.
        OSError: it cannot be read.
    """
    path = folder / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise WrongResult(
            f"{path} is missing, so nobody knows what the checkpoint should hold. {_WHAT_TO_DO}"
        ) from None
    try:
        body = json.loads(text)
        told = body.pop("sha256")
        if told != _of(body):
            raise WrongResult(
                f"{path} is changed: its {len(text)} bytes have the sha256 {_of(body)} and name {told}. {_WHAT_TO_DO}"
            )
        if body.pop("format") != FORMAT:
            raise ValueError(f"{path} is of another format than {FORMAT}; use the version that has written it")
        files = {name: Sealed(**one) for name, one in body.pop("files").items()}
        return Manifest(files=files, **body)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise WrongResult(
            f"{path} is truncated or changed: {len(text)} bytes found, and they are no whole manifest "
            f"({type(error).__name__}: {error}). {_WHAT_TO_DO}"
        ) from error


def _of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
