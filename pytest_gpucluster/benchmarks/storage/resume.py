"""Whether a training resumes from a checkpoint without a difference: on the same ranks, on fewer, sharded or not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pytest_gpucluster.benchmarks.group import Ranks, on_all_ranks, on_first_rank
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free
from pytest_gpucluster.benchmarks.storage import checkpoint
from pytest_gpucluster.benchmarks.storage.checkpoint import load, make_unique_folder, save
from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.fingerprint import relative, state_fingerprint
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.sharding import mesh_of, shard
from pytest_gpucluster.benchmarks.training.step import Training, replicate
from pytest_gpucluster.benchmarks.training.step_check import needed_bytes
from pytest_gpucluster.device.products import deterministic, numerics
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.stats import largest
from pytest_gpucluster.metrics.time_budget import VERIFYING, counted


@releases_memory(cycles=True)
def check_resume(
    group: dist.ProcessGroup,
    device: torch.device,
    geometry: Geometry,
    folder: Path,
    *,
    fewer: dist.ProcessGroup | None,
    batch: int,
    steps: int,
) -> tuple[float, float, float | None]:
    """Train a sharded decoder, save it, train on; then resume others from the checkpoint, and compare the losses.

    Collective: every rank of the group must call this, with the same folder and sizes.

    Each time a decoder with other weights loads the checkpoint: sharded on the same ranks, replicated on them, and
    sharded on fewer. Then model and optimizer must have all the saved bits. The next rows are read from the checkpoint.
    A copy with a truncated shard, and one without it, must be rejected. A save that is interrupted before it is
    published must leave the checkpoint before it unchanged.

    Args:
        group: the ranks that save together.
        device: where this rank trains.
        geometry: of the decoder.
        folder: on a file system that all ranks share. The checkpoints lie in a new folder there, which is removed at
            the end; after an error it stays, for the diagnosis.
        fewer: a group that this rank is in, with a part of the ranks; all ranks are in one of this size.
        batch: rows of each rank in a step.
        steps: before the checkpoint, and as many after it.

    Returns: the largest error of a loss after the checkpoint, as a ratio, compared with those without an interruption:
        sharded on the same ranks, replicated on them, and sharded on fewer; None if there was no such group.

    Raises, on all ranks alike, and for the fewer ranks on those of the group in which it failed:
        WrongResult: the checkpoint, or what was loaded from it, differs from what was saved; or a broken one was
            loaded.
        EnvironmentBroken: the file system is full, not shared, or fails otherwise; too little memory is free.
    """
    # Fewer ranks take the same rows.
    most = batch * dist.get_world_size(group) // dist.get_world_size(fewer or group)
    require_free(
        device,
        needed_bytes(geometry, most),
        f"training {geometry.parameters / 1e6:.3g}M parameters",
        instead="choose a smaller one, such as --gpucluster-workload fsdp.width=256",
    )
    with counted(VERIFYING), numerics("highest"), deterministic():
        return _Check(group, device, geometry, folder, batch, steps).run(fewer)


@dataclass(eq=False)
class _Check:
    _group: dist.ProcessGroup
    _device: torch.device
    _geometry: Geometry
    _folder: Path
    _batch: int
    _steps: int

    def __post_init__(self) -> None:
        sizes, self._global_batch = self._geometry, self._batch * dist.get_world_size(self._group)
        rows = 2 * self._steps * self._global_batch
        self._data = PackedTokens(rows=rows, sequence=sizes.sequence, vocab=sizes.vocab, seed=0)

    def run(self, fewer: dist.ProcessGroup | None) -> tuple[float, float, float | None]:
        self._folder = Path(on_first_rank(self._group, lambda: str(make_unique_folder(self._folder))))
        training = self._sharded(self._group)
        consumed = self._steps * self._global_batch
        self._losses(training, self._group, consumed=0)
        extra = {"epoch": 0, "rows_consumed": consumed}
        saved = save(self._folder, self._steps, training.model, training.optimizer, group=self._group, extra=extra)
        state = _state_fingerprint(training)
        due = self._losses(training, self._group, consumed=consumed)
        self._interrupt(training, saved)
        del training

        def resume(other: Training, group: dist.ProcessGroup, how: str) -> float:
            loaded = load(saved, other.model, other.optimizer, group=group)
            found = _state_fingerprint(other)
            on_all_ranks(group, lambda: _require_same(found, state, loaded, extra, f"{saved}, {how}"))
            losses = self._losses(other, group, consumed=int(loaded["rows_consumed"]))
            return largest(relative(one, other) for one, other in zip(losses, due, strict=True))

        # Of another seed: no weight may be right by chance.
        same = resume(self._sharded(self._group, seed=1), self._group, "loaded by the same ranks")
        whole = make_decoder(self._geometry, self._device, seed=1)
        replica = Training(replicate(whole, self._device, self._group), self._device, precision="fp32")
        replicated = resume(replica, self._group, "loaded without sharding")
        self._check_rejection(replica, saved)
        del replica
        less, failure = None, None
        if fewer is not None:
            try:
                less = resume(self._sharded(fewer, seed=1), fewer, f"loaded by {fewer.size()} of the ranks")
            except (WrongResult, EnvironmentBroken) as error:  # the other groups do not see it
                failure = error
        # Also a barrier: after it no rank reads in the folder any more.
        if not any(on_all_ranks(self._group, lambda: failure is not None)):
            on_first_rank(self._group, lambda: shutil.rmtree(self._folder))
        if failure is not None:
            raise failure
        return same, replicated, less

    def _sharded(self, group: dist.ProcessGroup, seed: int = 0) -> Training:
        model = make_decoder(self._geometry, self._device, seed=seed)
        model = shard(model, mesh_of(group, self._device), precision="fp32")
        return Training(model, self._device, precision="fp32")

    def _losses(self, training: Training, group: dist.ProcessGroup, *, consumed: int) -> list[float]:
        """Train on from a row, and return the mean loss of the global batch in each step: the same on every rank."""
        ranks, rank = Ranks(group, self._device), dist.get_rank(group)
        part = self._global_batch // ranks.count
        losses = []
        for step in range(self._steps):
            begin = consumed + step * self._global_batch + rank * part
            rows = torch.stack([self._data[row] for row in range(begin, begin + part)]).to(self._device)
            loss = float(training.step([rows]).losses.mean())
            losses.append(sum(its for [its] in ranks.gather([loss])) / ranks.count)
        return losses

    def _interrupt(self, training: Training, saved: Path) -> None:
        """Start another save that fails before it is published: the existing checkpoint must not change."""
        try:
            checkpoint.save(
                self._folder,
                2 * self._steps,
                training.model,
                training.optimizer,
                group=self._group,
                publish=_interrupted,
            )
        except EnvironmentBroken as error:
            if _INTERRUPTED not in str(error):
                raise
        newest = on_first_rank(self._group, lambda: str(checkpoint.latest(self._folder)))
        if newest != str(saved):
            raise WrongResult(f"after a save that was interrupted the newest checkpoint is {newest}, not {saved}")

    def _check_rejection(self, training: Training, saved: Path) -> None:
        """Load broken copies of the checkpoint: each must be rejected, and the file named."""
        for how, damage in (("truncated", _truncate), ("missing", Path.unlink)):
            copy = self._folder / f"copy-{how}"
            name = on_first_rank(self._group, partial(_damaged, saved, copy, damage))
            try:
                load(copy, training.model, training.optimizer, group=self._group)
            except WrongResult as error:
                if f"{copy / name} is {how}" not in str(error):
                    raise
            else:
                raise WrongResult(f"{copy} was loaded, although {name} is {how} there. It must be rejected")


_INTERRUPTED = "interrupted on purpose, before the checkpoint is published"


def _interrupted(unpublished: Path, path: Path) -> None:
    raise InterruptedError(_INTERRUPTED)


def _damaged(whole: Path, copy: Path, damage: Callable[[Path], object]) -> str:
    """Copy a checkpoint, damage its largest shard and return its name."""
    shutil.copytree(whole, copy)
    files = checkpoint.read_manifest(copy).files
    name = max(files, key=lambda name: files[name].size_bytes)
    damage(copy / name)
    return name


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _state_fingerprint(training: Training) -> int:
    """Return one number for all weights and all of the optimizer's state, however they are divided. Collective."""

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    state = ("exp_avg", "exp_avg_sq", "step")
    return state_fingerprint(training.model.parameters(), training.optimizer, whole, state)


def _require_same(found: int, saved: int, loaded: Mapping[str, Any], extra: Mapping[str, Any], what: str) -> None:
    if found != saved:
        raise WrongResult(
            f"{what}: model and optimizer are not what was saved: fingerprint {found:016x}, expected {saved:016x}. The "
            "files are verified, so check the versions of torch, then the GPU"
        )
    found_extra = {name: value for name, value in loaded.items() if name in extra}
    if found_extra != extra:
        raise WrongResult(f"{what}: it contains {found_extra}, and {dict(extra)} was saved")
