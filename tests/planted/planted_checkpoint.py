"""The faults that saving, loading and a file system can have."""

import errno
import os
import shutil

import torch
from parts import plant_parts
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from pytest_gpucluster.benchmarks.storage import bandwidth as storage
from pytest_gpucluster.benchmarks.storage import checkpoint, resume
from pytest_gpucluster.errors import WrongResult

CASES = {
    "1x2": {
        "test_checkpoint": (
            *("none", "truncated", "missing", "changed", "full", "older"),
            *("moments", "rows", "rate", "lenient", "alone"),
        ),
        "test_checkpoint_bandwidth": ("none", "truncated", "changed", "slow", "unshared"),
    },
    "2x2": {"test_checkpoint": ("none",), "test_checkpoint_bandwidth": ("none",)},
}
ON_RANK_1 = os.environ["RANK"] == "1"
VISIBILITY_SECONDS = checkpoint.VISIBILITY_SECONDS
WRITE_FILE, WRITE_SHARDS = storage.write_file, checkpoint.write_shards


def damaging(damage):
    # What a file system has done to the shard of rank 1 by the time that it is read.
    def save(folder, *arguments, **more):
        saved = checkpoint.save(folder, *arguments, **more)
        if ON_RANK_1:
            damage(saved / "__1_0.distcp")
        return saved

    return save


def change(path):
    with path.open("r+b") as stream:
        stream.seek(5000)
        byte = stream.read(1)[0]
        stream.seek(5000)
        stream.write(bytes([byte ^ 1]))


def without_moments(path, model, optimizer, **more):
    told = checkpoint.load(path, model, optimizer, **more)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    return told


def other_rows(*arguments, **more):
    return checkpoint.load(*arguments, **more) | {"rows_consumed": 0}


def other_rate(path, model, optimizer, **more):
    told = checkpoint.load(path, model, optimizer, **more)
    for group in optimizer.param_groups:
        group["lr"] /= 10
    return told


def lenient(*arguments, **more):
    try:
        return checkpoint.load(*arguments, **more)
    except WrongResult:
        return {}


def wrong_alone(path, model, optimizer, *, group, **more):
    told = checkpoint.load(path, model, optimizer, group=group, **more)
    if group.size() == 1 and ON_RANK_1:
        next(model.parameters()).detach().to_local().zero_()
    return told


class Full(FileSystemWriter):
    def write_data(self, plan, planner):
        if ON_RANK_1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write_data(plan, planner)


def write_to_full(state, folder, group):
    save_state(state, storage_writer=Full(folder), process_group=group)


def write_over_older(state, folder, group):
    if torch.distributed.get_rank(group) == 0:
        for older in folder.parent.glob("step-*"):
            shutil.rmtree(older)
    WRITE_SHARDS(state, folder, group)


def writing(spoil, *, on_rank_1=True):
    def write(path, size_bytes, contents):
        seconds = WRITE_FILE(path, size_bytes, contents)
        if ON_RANK_1 or not on_rank_1:
            seconds = spoil(path) or seconds
        return seconds

    return write


RESUMING = {
    "truncated": {"save": damaging(lambda path: os.truncate(path, 1000))},
    "missing": {"save": damaging(os.unlink)},
    "changed": {"save": damaging(change)},
    "moments": {"load": without_moments},
    "rows": {"load": other_rows},
    "rate": {"load": other_rate},
    "lenient": {"load": lenient},
    "alone": {"load": wrong_alone},
}
STORING = {"full": {"write_shards": write_to_full}, "older": {"write_shards": write_over_older}}
WRITING = {
    "truncated": writing(lambda path: os.truncate(path, 8192)),
    "changed": writing(change),
    "slow": writing(lambda path: 1000.0),
    "unshared": writing(lambda path: os.rename(path, path.with_suffix(".elsewhere"))),
}


def plant(fault, request):
    checkpoint.VISIBILITY_SECONDS = 0.5 if fault == "unshared" else VISIBILITY_SECONDS
    plant_parts(request, resume, **RESUMING.get(fault, {}))
    plant_parts(request, checkpoint, **STORING.get(fault, {}))
    plant_parts(request, storage, write_file=WRITING.get(fault, WRITE_FILE))
