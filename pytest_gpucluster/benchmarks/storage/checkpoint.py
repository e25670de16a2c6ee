"""Checkpoints: saved and loaded by all ranks, verified by a manifest, and always either whole or absent.

torch.distributed.checkpoint saves them, so that an interruption at any moment destroys nothing. A checkpoint is a
folder ``step-00000010``: a shard per rank, torch's own index of them, and a manifest with the length and sha256 of each
file. It is written under a name that begins with ``.partial-``, brought to stable storage, and renamed last. Renaming a
folder is atomic on POSIX file systems (Source: rename(2)), so a folder with the name ``step-...`` is whole.

Only one group of ranks may write to a folder at a time; the ranks may be on any hosts that share it. An error on one
rank is raised on every rank of the group, so that none waits for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from pytest_gpucluster.benchmarks.group import on_all_ranks, on_first_rank
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

NAME = "manifest.json"
FORMAT = 1
_AT_ONCE = 2**22
"""Bytes that are read at a time."""


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """The length and digest of a file.

    Attributes:
        size_bytes: its length.
        sha256: of its bytes, in hexadecimal.
    """

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        step: of the saved training.
        world_size: ranks that have saved it.
        extra: further state that the training needs to resume, JSON.
        files: name in the folder -> its length and digest.
    """

    step: int
    world_size: int
    extra: Mapping[str, Any]
    files: Mapping[str, FileDigest]


def digest_file(path: Path) -> FileDigest:
    """Read a whole file and return its length and digest.

    Raises: OSError.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_AT_ONCE):
            digest.update(chunk)
            size += len(chunk)
    return FileDigest(size_bytes=size, sha256=digest.hexdigest())


def verify_file(path: Path, expected: FileDigest) -> None:
    """Check that a file has its expected length and digest.

    Raises:
        WrongResult: it is missing, has another size or other bytes; names the file, what was found and expected.
        OSError: it cannot be read.
    """
    wanted = f"{expected.size_bytes} bytes with sha256 {expected.sha256} were written. {_WHAT_TO_DO}"
    try:
        found = digest_file(path)
    except FileNotFoundError:
        raise WrongResult(f"{path} is missing; {wanted}") from None
    if found != expected:
        less = found.size_bytes < expected.size_bytes
        what = "truncated" if less else "changed" if found.size_bytes == expected.size_bytes else "longer than it was"
        raise WrongResult(f"{path} is {what}: {found.size_bytes} bytes found, with sha256 {found.sha256}; {wanted}")


_WHAT_TO_DO = "Resume from an older checkpoint, and check the file system"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder of its checkpoint, and wait until it is on stable storage.

    Raises: OSError.
    """
    body = {"format": FORMAT, **asdict(manifest)}
    text = json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n"
    with (folder / NAME).open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> Manifest:
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
        raise WrongResult(f"{path} is missing, so the checkpoint's contents are unknown. {_WHAT_TO_DO}") from None
    try:
        body = json.loads(text)
        stated = body.pop("sha256")
        if stated != _digest(body):
            raise ValueError(f"they have the sha256 {_digest(body)} and state {stated}")
        if body.pop("format") == FORMAT:
            files = {name: FileDigest(**one) for name, one in body.pop("files").items()}
            return Manifest(files=files, **body)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise WrongResult(
            f"{path} is truncated or changed: {len(text)} bytes found, and they are no whole manifest "
            f"({type(error).__name__}: {error}). {_WHAT_TO_DO}"
        ) from error
    raise ValueError(f"{path} is of another format than {FORMAT}; use the version that has written it")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


VISIBILITY_SECONDS = 90.0
"""How long a network file system may take to show on one host what another one has created. An NFS client may cache a
missing name for as long as the attributes of the folder, by default up to 60 s (Source: nfs(5), acdirmax and
lookupcache)."""


def make_unique_folder(folder: Path) -> Path:
    """Create a folder in another one, under a name that no other run has.

    Raises: OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="gpucluster-checkpoint-", dir=folder))


def wait_for(path: Path) -> Path:
    """Wait until a file or folder that another rank has created is visible, and return it.

    Raises: EnvironmentBroken if it is not in time.
    """
    until = time.monotonic() + VISIBILITY_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            raise EnvironmentBroken(
                f"{path}, which another rank has created, is not visible on this host after {VISIBILITY_SECONDS:g} s. "
                "Choose a folder on a file system that all hosts share (--gpucluster-scratch)"
            )
        time.sleep(0.02)
    return path


KEEP = 2
"""Checkpoints that stay in a folder: one more than needed, in case the newest is broken."""

_PUBLISHED = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
_PARTIAL, _REPLACED = ".partial-", ".replaced-"


def write_shards(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Write each rank's part of the state into files of its own, and wait until they are on stable storage."""
    save_state(state, storage_writer=FileSystemWriter(folder, sync_files=True), process_group=group)


def publish(partial: Path, path: Path) -> None:
    """Rename a whole checkpoint to its final name. An older one of that name is renamed first, and removed last."""
    aside = path.with_name(f"{_REPLACED}{path.name}")
    if path.exists():
        os.rename(path, aside)
    os.rename(partial, path)
    _sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)  # the next save tries again


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup,
    extra: Mapping[str, Any] | None = None,
    trained_only: bool = False,
    keep: int = KEEP,
    publish: Callable[[Path, Path], None] = publish,
) -> Path:
    """Save model and optimizer as the checkpoint of a step, and return its folder.

    Collective: every rank of the group must call this, with the same folder, step and settings.

    Until the new checkpoint is whole and on stable storage the older ones stay. Then all but the ``keep`` newest are
    removed. The remains of interrupted saves are removed at the start of the next one.

    Args:
        folder: of this training's checkpoints, on a file system that all ranks of the group share; created if it is
            missing. No other process may write to it.
        step: the last one taken; from 0.
        model: plain, in DistributedDataParallel or sharded by ``fully_shard``.
        optimizer: of the model; it must have taken a step.
        group: the ranks that hold the model together.
        extra: further state that the training needs to resume, such as epoch, batches consumed and random state; must
            be JSON. The first rank's counts.
        trained_only: leave out weights that are frozen.
        keep: number of checkpoints to keep, at least 1.
        publish: renames the whole checkpoint to its final name.

    Raises, on all ranks alike:
        EnvironmentBroken: the file system is full, not shared, or fails otherwise.
        ValueError: an argument is out of its range.
    """
    given = dict(extra or {})
    on_all_ranks(group, lambda: _check_arguments(step, optimizer, given, keep))
    partial = Path(on_first_rank(group, lambda: str(_begin(folder, step))))
    on_all_ranks(group, lambda: wait_for(partial))
    state = _state(model, optimizer, _options(trained_only))
    with _same_error(f"the checkpoint of step {step} could not be written to {partial}", group):
        write_shards(state, partial, group)
    files = _digest_files(partial, group)
    whole = Manifest(step=step, world_size=dist.get_world_size(group), extra=given, files=files)
    path = partial.with_name(f"step-{step:08d}")
    on_first_rank(group, lambda: _finish(partial, path, whole, publish, keep))
    return path


def latest(folder: Path) -> Path | None:
    """Return the published checkpoint of the highest step in a folder; None if there is none.

    Whether it is whole is checked when it is loaded. The remains of an interrupted save are ignored, except for a
    checkpoint that was renamed for a new one of the same step, where the new one is missing.
    """
    found = _published(folder, _REPLACED) | _published(folder)
    return found[max(found)] if found else None


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup,
    trained_only: bool = False,
) -> dict[str, Any]:
    """Restore model and optimizer from a checkpoint, and return its ``extra`` with the ``step``.

    Collective: every rank of the group must call this, with the same checkpoint.

    All files are verified first, each by one of the ranks: torch reads only verified ones. The group may have another
    number of ranks than the one that has saved, and the model may be sharded otherwise.

    Args:
        path: a checkpoint, as :func:`latest` returns it.
        model: of the same weights; plain, in DistributedDataParallel or sharded by ``fully_shard``.
        optimizer: of the model, of the same kind; its gradients are dropped.
        group: the ranks that hold the model together.
        trained_only: the checkpoint has no frozen weights; they stay as they are.

    Raises, on all ranks alike:
        WrongResult: a file is missing, truncated or changed. Names the file, what was found and what was expected.
        EnvironmentBroken: a file cannot be read, or the checkpoint is of another model.
    """
    options = _options(trained_only)
    chosen = Path(on_first_rank(group, lambda: str(path)))
    whole = on_first_rank(group, lambda: read_manifest(chosen))
    on_all_ranks(group, lambda: _verify_share(path, chosen, whole, dist.get_rank(group), dist.get_world_size(group)))
    # Gradients would keep torch from creating the state to read into.
    optimizer.zero_grad(set_to_none=True)
    state = _state(model, optimizer, options)
    reader = FileSystemReader(path)
    on_all_ranks(group, lambda: _require_same_model(path, reader.read_metadata(), state["model"]))
    with _same_error(f"{path} could not be loaded", group):
        load_state(state, storage_reader=reader, process_group=group)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    return {**whole.extra, "step": whole.step}


def _options(trained_only: bool) -> StateDictOptions:
    return StateDictOptions(ignore_frozen_params=trained_only, strict=not trained_only)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> dict[str, Any]:
    """Return the state of both under names that do not depend on how the model is wrapped or sharded."""
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": moments}


def _check_arguments(step: int, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any], keep: int) -> None:
    if step < 0 or keep < 1:
        raise ValueError(f"step must not be negative and keep must be at least 1, not {step} and {keep}")
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra must be JSON: {error}") from error
    if not optimizer.state:
        # torch would take a step of its own to have something to save, and count it.
        raise ValueError("the optimizer has not taken a step yet, so there is nothing to resume: save after one")


def _begin(folder: Path, step: int) -> Path:
    """Remove the remains of interrupted saves, and create the folder to write to."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in _entries(folder, _PARTIAL):
        shutil.rmtree(left)
    for aside in _entries(folder, _REPLACED):
        path = folder / aside.name.removeprefix(_REPLACED)
        if path.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, path)
    _sync(folder.parent)  # the folder may be new, and without this everything could be lost
    partial = folder / f"{_PARTIAL}step-{step:08d}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    return partial


def _digest_files(partial: Path, group: dist.ProcessGroup) -> dict[str, FileDigest]:
    """Return the digest of each file: every rank reads those that it has written, the first one also the index."""
    mine = dist.get_rank(group)

    def own_files() -> dict[str, FileDigest]:
        return {path.name: digest_file(path) for path in sorted(partial.iterdir()) if _writer(path.name) == mine}

    files = {name: one for of_rank in on_all_ranks(group, own_files) for name, one in of_rank.items()}
    on_first_rank(group, lambda: _require_complete(partial, files))
    return files


def _writer(name: str) -> int:
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else 0


def _require_complete(partial: Path, files: Mapping[str, FileDigest]) -> None:
    index = FileSystemReader(partial).read_metadata().storage_data
    missing = sorted({info.relative_path for info in index.values()} - set(files))
    if missing:
        raise EnvironmentBroken(f"{partial}: {', '.join(missing[:4])} is missing right after it was written")


def _finish(partial: Path, path: Path, whole: Manifest, publish: Callable[[Path, Path], None], keep: int) -> None:
    write_manifest(partial, whole)
    _sync(partial)
    publish(partial, path)
    older = _published(path.parent)
    older.pop(whole.step)
    for _, old in sorted(older.items())[: max(0, len(older) + 1 - keep)]:
        # Under its own name a checkpoint is always whole, also while it is removed.
        doomed = old.with_name(f"{_PARTIAL}removed-{old.name}-{uuid.uuid4().hex[:8]}")
        os.rename(old, doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # the next save tries again


def _verify_share(path: Path, chosen: Path, whole: Manifest, rank: int, ranks: int) -> None:
    """Verify this rank's share of the files: all ranks together read each once."""
    if path != chosen:
        raise ValueError(f"the ranks must load the same checkpoint, and this one was given {path}, the first {chosen}")
    for name in sorted(whole.files)[rank::ranks]:
        verify_file(path / name, whole.files[name])


def _require_same_model(path: Path, saved: Metadata, weights: Mapping[str, Any]) -> None:
    """Compare names and shapes, for torch itself ignores saved weights that are not requested."""
    prefix = "model."
    there = {
        name.removeprefix(prefix): tuple(one.size)
        for name, one in saved.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(one, TensorStorageMetadata)
    }
    wanted = {name: tuple(one.shape) for name, one in weights.items() if isinstance(one, torch.Tensor)}
    different = sorted(name for name in there.keys() | wanted.keys() if there.get(name) != wanted.get(name))
    if different:
        examples = "; ".join(f"{name}: saved {there.get(name)}, requested {wanted.get(name)}" for name in different[:3])
        raise EnvironmentBroken(
            f"{path} is of another model: {len(different)} of {len(there)} weights differ ({examples}). Load it into "
            "the model that was saved, with the same choice of trained weights"
        )


@contextmanager
def _same_error(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turn torch's error of what failed on which ranks, which it raises on all of them, into one of ours."""
    # At DEBUG this logger writes usage statistics, which pytest would show under every failure.
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.INFO)
    try:
        yield
    except CheckpointException as error:
        mine = error.failures.get(dist.get_rank(group))
        if mine is not None and not isinstance(mine[0], Exception):
            raise mine[0] from None  # this rank was interrupted
        failures = [
            f"rank {dist.get_global_rank(group, place)}: {type(cause).__name__}: {cause}"
            for place, (cause, _) in sorted(error.failures.items())
        ]
        more = f", and {len(failures) - 4} more ranks" if len(failures) > 4 else ""
        raise EnvironmentBroken(f"{what}: {'; '.join(failures[:4])}{more}") from error


def _published(folder: Path, prefix: str = "") -> dict[int, Path]:
    """Return the published checkpoints in a folder by their steps, or those with a prefix to their names."""
    names = {path: _PUBLISHED.fullmatch(path.name.removeprefix(prefix)) for path in _entries(folder, f"{prefix}step-")}
    return {int(match[1]): path for path, match in names.items() if match}


def _entries(folder: Path, prefix: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith(prefix)) if folder.is_dir() else []


def _sync(folder: Path) -> None:
    """Bring the names in a folder to stable storage."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
