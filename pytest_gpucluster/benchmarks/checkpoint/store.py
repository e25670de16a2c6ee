"""Save and load a training by torch.distributed.checkpoint, so that an interruption at any moment destroys nothing.

A checkpoint is a folder ``step-00000010``: a shard per rank, torch's own index of them, and a manifest. It is written
under a name that begins with ``.partial-``, brought to stable storage, and renamed last. Renaming a folder is atomic on
POSIX file systems (Source: rename(2)), so what is called ``step-...`` is whole.

Only one group of ranks may write to a folder at a time.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

from pytest_gpucluster.benchmarks.checkpoint import manifest
from pytest_gpucluster.benchmarks.checkpoint.manifest import Manifest, Sealed
from pytest_gpucluster.benchmarks.checkpoint.shared_folder import wait_for
from pytest_gpucluster.benchmarks.checkpoint.together import first, together
from pytest_gpucluster.errors import EnvironmentBroken

KEPT = 2
"""Checkpoints that stay in a folder: one more than is needed, in case that the newest turns out to be broken."""

_PUBLISHED = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
_PARTIAL, _REPLACED = ".partial-", ".replaced-"


def write_shards(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Write each rank's part of the state into files of its own, and wait until they are on stable storage."""
    save_state(state, storage_writer=FileSystemWriter(folder, sync_files=True), process_group=group)


def publish(partial: Path, path: Path) -> None:
    """Give a whole checkpoint its name. One of that name steps aside first, and is there again until it is replaced."""
    aside = path.with_name(f"{_REPLACED}{path.name}")
    if path.exists():
        os.rename(path, aside)
    os.rename(partial, path)
    _sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)  # the next save tries again


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What saving is made of. A test puts one that is broken in the place of another."""

    write: Callable[[dict[str, Any], Path, dist.ProcessGroup], None] = write_shards
    publish: Callable[[Path, Path], None] = publish


PIECES = Pieces()


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that has been published.

    Attributes:
        path: its folder.
        step: of the training.
        stored_bytes: of all files of all ranks but the manifest.
        seconds: that saving took on this rank, verification of what was written included.
    """

    path: Path
    step: int
    stored_bytes: int
    seconds: float


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup,
    extra: Mapping[str, Any] | None = None,
    trained_only: bool = False,
    keep: int = KEPT,
    pieces: Pieces | None = None,
) -> Saved:
    """Save model and optimizer as the checkpoint of a step.

    Collective: every rank of the group must call this, with the same folder, step and settings.

    Until the new checkpoint is whole and on stable storage the older ones stay. Then all but the ``keep`` newest are
    removed, and what interrupted saves have left is removed at the start of the next one.

    Args:
        folder: where checkpoints of this training lie, on a file system that all ranks of the group share; made if it
            is not there. Nobody else may write to it.
        step: that was taken last; from 0.
        model: plain, in DistributedDataParallel or sharded by ``fully_shard``.
        optimizer: of the model; it must have taken a step.
        group: the ranks that hold the model together.
        extra: what else the training needs to go on, such as epoch, batches consumed and random state; must be JSON.
            The first rank's counts.
        trained_only: leave out weights that are frozen.
        keep: how many checkpoints stay, at least 1.
        pieces: by default ``PIECES`` of this module.

    Raises, on all ranks alike:
        EnvironmentBroken: the file system is full, not shared, or fails otherwise.
        ValueError: an argument is out of its range.
    """
    started = time.monotonic()
    try:
        whole, path = _save(
            folder, step, model, optimizer, group, dict(extra or {}), _options(trained_only), keep, pieces or PIECES
        )
        return Saved(path=path, step=step, stored_bytes=whole.stored_bytes, seconds=time.monotonic() - started)
    finally:
        # A traceback that is kept keeps this frame, and a gloo group that outlives its end aborts the process.
        del group, model, optimizer


def latest(folder: Path) -> Path | None:
    """Return the published checkpoint of the highest step in a folder; None if there is none.

    Whether it is whole is seen when it is loaded. What an interrupted save has left is not looked at, but for a
    checkpoint that stepped aside for a new one of the same step which then did not come.
    """
    found = {int(match[1]): path for path in _entries(folder, _REPLACED) if (match := _PUBLISHED.search(path.name))}
    found |= {int(match[1]): path for path in _entries(folder, "step-") if (match := _PUBLISHED.fullmatch(path.name))}
    return found[max(found)] if found else None


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup,
    trained_only: bool = False,
) -> dict[str, Any]:
    """Give model and optimizer the values of a checkpoint, and return its ``extra`` with the ``step``.

    Collective: every rank of the group must call this, with the same checkpoint.

    All files are verified first, each by one of the ranks: torch reads none that is not what was written. The group may
    have another number of ranks than the one that has saved, and the model may be sharded otherwise.

    Args:
        path: a checkpoint, as :func:`latest` names it.
        model: of the same weights; plain, in DistributedDataParallel or sharded by ``fully_shard``.
        optimizer: of the model, of the same kind; its gradients are dropped.
        group: the ranks that hold the model together.
        trained_only: the checkpoint has no frozen weights; they stay as they are.

    Raises, on all ranks alike:
        WrongResult: a file is missing, truncated or changed. Names the file, what was found and what was expected.
        EnvironmentBroken: a file cannot be read, or the checkpoint is of another model.
    """
    try:
        return _load(path, model, optimizer, group, _options(trained_only))
    finally:
        del group, model, optimizer  # as in save()


def _save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    extra: dict[str, Any],
    options: StateDictOptions,
    keep: int,
    used: Pieces,
) -> tuple[Manifest, Path]:
    together(group, lambda: _examine(step, optimizer, extra, keep))
    partial = Path(first(group, lambda: str(_begin(folder, step))))
    together(group, lambda: wait_for(partial))
    state = _state(model, optimizer, options)
    with _alike(f"the checkpoint of step {step} could not be written to {partial}", group):
        used.write(state, partial, group)
    files = _sealed(partial, group)
    whole = Manifest(step=step, world_size=dist.get_world_size(group), extra=extra, files=files)
    path = partial.with_name(f"step-{step:08d}")
    first(group, lambda: _finish(partial, path, whole, used, keep))
    return whole, path


def _load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    options: StateDictOptions,
) -> dict[str, Any]:
    chosen = Path(first(group, lambda: str(path)))
    whole = first(group, lambda: manifest.read(chosen))
    together(group, lambda: _require_same(path, chosen))
    together(group, lambda: _require_share_sealed(path, whole, dist.get_rank(group), dist.get_world_size(group)))
    # Left over, they would keep torch from making the state that is then read.
    optimizer.zero_grad(set_to_none=True)
    state = _state(model, optimizer, options)
    reader = FileSystemReader(path)
    together(group, lambda: _require_same_model(path, reader.read_metadata(), state["model"]))
    with _alike(f"{path} could not be loaded", group):
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


def _examine(step: int, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any], keep: int) -> None:
    if step < 0 or keep < 1:
        raise ValueError(f"step must not be negative and keep must be at least 1, not {step} and {keep}")
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra must be JSON: {error}") from error
    if not optimizer.state:
        # torch would take a step of its own to have something to save, and count it.
        raise ValueError("the optimizer has not taken a step yet, so there is nothing to go on from: save after one")


def _begin(folder: Path, step: int) -> Path:
    """Remove what interrupted saves have left, and make the folder to write to."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in _entries(folder, _PARTIAL):
        shutil.rmtree(left)
    for aside in _entries(folder, _REPLACED):
        path = folder / aside.name.removeprefix(_REPLACED)
        if path.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, path)
    _sync(folder.parent)  # the folder may be new, and with it everything would be lost
    partial = folder / f"{_PARTIAL}step-{step:08d}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    return partial


def _sealed(partial: Path, group: dist.ProcessGroup) -> dict[str, Sealed]:
    """Return what is in each file: every rank reads those that it has written, the first one also the index."""
    mine = dist.get_rank(group)

    def sealed_here() -> dict[str, Sealed]:
        return {path.name: manifest.seal(path) for path in sorted(partial.iterdir()) if _writer(path.name) == mine}

    files = {name: one for of_rank in together(group, sealed_here) for name, one in of_rank.items()}
    first(group, lambda: _require_complete(partial, files))
    return files


def _writer(name: str) -> int:
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else 0


def _require_complete(partial: Path, files: Mapping[str, Sealed]) -> None:
    index = FileSystemReader(partial).read_metadata().storage_data
    lost = sorted({info.relative_path for info in index.values()} - set(files))
    if lost:
        raise EnvironmentBroken(f"{partial}: {', '.join(lost[:4])} is not there right after it was written")


def _finish(partial: Path, path: Path, whole: Manifest, used: Pieces, keep: int) -> None:
    manifest.write(partial, whole)
    _sync(partial)
    used.publish(partial, path)
    older = {int(match[1]): one for one in _entries(path.parent, "step-") if (match := _PUBLISHED.fullmatch(one.name))}
    older.pop(whole.step)
    for _, old in sorted(older.items())[: max(0, len(older) + 1 - keep)]:
        # Under its own name a checkpoint is always whole, also while it is removed.
        doomed = old.with_name(f"{_PARTIAL}removed-{old.name}-{uuid.uuid4().hex[:8]}")
        os.rename(old, doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # the next save tries again


def _require_share_sealed(path: Path, whole: Manifest, rank: int, ranks: int) -> None:
    """Verify this rank's share of the files: all ranks together read each once."""
    for name in sorted(whole.files)[rank::ranks]:
        manifest.require_sealed(path / name, whole.files[name])


def _require_same(path: Path, chosen: Path) -> None:
    if path != chosen:
        raise ValueError(f"the ranks must load the same checkpoint, and this one was given {path}, the first {chosen}")


def _require_same_model(path: Path, saved: Metadata, weights: Mapping[str, Any]) -> None:
    """Compare names and shapes, for torch itself overlooks what is saved and not asked for."""
    prefix = "model."
    there = {
        name.removeprefix(prefix): tuple(one.size)
        for name, one in saved.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(one, TensorStorageMetadata)
    }
    wanted = {name: tuple(one.shape) for name, one in weights.items() if isinstance(one, torch.Tensor)}
    odd = sorted(name for name in there.keys() | wanted.keys() if there.get(name) != wanted.get(name))
    if odd:
        shown = "; ".join(f"{name}: saved {there.get(name)}, asked for {wanted.get(name)}" for name in odd[:3])
        raise EnvironmentBroken(
            f"{path} is of another model: {len(odd)} of {len(there)} weights differ ({shown}). Load it into the model "
            "that was saved, with the same choice of trained weights"
        )


@contextmanager
def _alike(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turn torch's report of what went wrong on which ranks, which it raises on all of them, into one of ours."""
    # At DEBUG this logger writes usage statistics, which pytest would show under every failure.
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.INFO)
    try:
        yield
    except CheckpointException as error:
        mine = error.failures.get(dist.get_rank(group))
        if mine is not None and not isinstance(mine[0], Exception):
            raise mine[0] from None  # this rank is asked to end
        told = [
            f"rank {dist.get_global_rank(group, place)}: {type(cause).__name__}: {cause}"
            for place, (cause, _) in sorted(error.failures.items())
        ]
        more = f", and {len(told) - 4} more ranks" if len(told) > 4 else ""
        raise EnvironmentBroken(f"{what}: {'; '.join(told[:4])}{more}") from error


def _entries(folder: Path, prefix: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith(prefix)) if folder.is_dir() else []


def _sync(folder: Path) -> None:
    """Bring the names in a folder to stable storage."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
