"""What is stored, what an interruption leaves, and what is refused: on one rank. tests/test_acceptance_checkpoint.py
has more of them."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from pytest_gpucluster.benchmarks.checkpoint import manifest, store
from pytest_gpucluster.benchmarks.checkpoint.store import PIECES, latest, load, save
from pytest_gpucluster.benchmarks.training.data_parallel import replicate
from pytest_gpucluster.benchmarks.training.decoder import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint
from pytest_gpucluster.benchmarks.training.packed_tokens import PackedTokens
from pytest_gpucluster.benchmarks.training.shard_layout import local
from pytest_gpucluster.benchmarks.training.sharding import mesh_of, shard
from pytest_gpucluster.benchmarks.training.step import Training
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)
DATA = PackedTokens(rows=64, sequence=16, vocab=64, seed=0)


@pytest.fixture
def group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    gc.collect()
    dist.destroy_process_group()


def wrapped(model, kind, group):
    if kind == "sharded":
        return shard(model, mesh_of(group, CPU), precision="fp32")
    return replicate(model, CPU, group) if kind == "replicated" else model


def made(kind, group, *, seed=0, steps=0, frozen=False):
    model = make_decoder(GEOMETRY, CPU, seed=seed)
    if frozen:
        model.embedding.requires_grad_(False)
    training = Training(wrapped(model, kind, group), CPU, precision="fp32")
    for step in range(steps):
        train(training, step)
    return training


def train(training, step):
    return float(training.step([torch.stack([DATA[row] for row in range(4 * step, 4 * step + 4)])]).losses.mean())


def state(training):
    """Return the fingerprints of the weights and of the moments."""
    weights = list(training.model.parameters())
    moments = [training.optimizer.state[weight] for weight in weights if weight.requires_grad]
    return (
        fingerprint(local(weight.detach()) for weight in weights),
        fingerprint(local(each[name]) for each in moments for name in sorted(each)),
    )


def saved(training, folder, group, step=2, **more):
    return save(folder, step, training.model, training.optimizer, group=group, **more)


def loaded(training, path, group, **more):
    return load(path, training.model, training.optimizer, group=group, **more)


@pytest.fixture
def checkpoint(group, tmp_path):
    """A checkpoint of two steps."""
    return saved(made("plain", group, steps=2), tmp_path / "run", group).path


def largest(path):
    return max(path.glob("*.distcp"), key=lambda one: one.stat().st_size)


KINDS = ("plain", "replicated", "sharded")


@pytest.mark.parametrize("into", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_model_and_optimizer_come_back_bit_by_bit_however_they_are_wrapped(group, tmp_path, kind, into):
    training = made(kind, group, steps=2)
    found = saved(training, tmp_path / "new" / "folder", group, extra={"epoch": 1, "seen": [3, 4]})
    assert found.path == tmp_path / "new" / "folder" / "step-00000002"
    assert found.stored_bytes == sum(one.stat().st_size for one in found.path.iterdir() if one.name != manifest.NAME)
    other = made(into, group, seed=1, steps=1)  # with moments and gradients of its own
    assert loaded(other, found.path, group) == {"epoch": 1, "seen": [3, 4], "step": 2}
    assert state(other) == state(training)
    assert train(other, 2) == train(training, 2)
    assert state(other) == state(training)


def test_the_learning_rate_comes_back(group, tmp_path):
    training = made("plain", group, steps=1)
    training.optimizer.param_groups[0]["lr"] = 0.25
    path = saved(training, tmp_path, group).path
    other = made("plain", group, seed=1)
    loaded(other, path, group)
    assert other.optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_can_be_left_out_and_stay_as_they_are(group, tmp_path, kind):
    training = made(kind, group, steps=2, frozen=True)
    path = saved(training, tmp_path, group, trained_only=True).path
    other = made(kind, group, seed=1, frozen=True)
    before = local(next(other.model.parameters()).detach()).clone()
    loaded(other, path, group, trained_only=True)
    assert state(other)[1] == state(training)[1]
    pairs = zip(training.model.parameters(), other.model.parameters(), strict=True)
    same = [torch.equal(local(one.detach()), local(its.detach())) for one, its in pairs]
    assert same == [False] + [True] * (len(same) - 1)
    assert torch.equal(local(next(other.model.parameters()).detach()), before)


def test_the_newest_ones_are_kept(group, tmp_path):
    training = made("plain", group, steps=1)
    for step in (5, 20, 100, 3):
        saved(training, tmp_path, group, step)
    # The highest step is the latest; what was just saved stays in any case.
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000003", "step-00000100"]
    assert latest(tmp_path).name == "step-00000100"
    saved(training, tmp_path, group, 200, keep=1)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000200"]


def test_a_step_that_is_saved_again_takes_the_place_of_the_first(group, tmp_path):
    saved(made("plain", group, steps=1), tmp_path, group)
    again = made("plain", group, steps=3)
    path = saved(again, tmp_path, group, extra={"again": True}).path
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000002"]
    other = made("plain", group, seed=1)
    assert loaded(other, path, group)["again"]
    assert state(other) == state(again)


def test_of_no_folder_there_is_no_latest(tmp_path):
    assert latest(tmp_path / "none") is None
    assert latest(tmp_path) is None
    (tmp_path / ".partial-step-00000009-abc").mkdir()
    (tmp_path / "step-9.old").mkdir()
    assert latest(tmp_path) is None


# ---- interruptions


class Interrupting(FileSystemWriter):
    """Writes all shards and then fails."""

    error: BaseException = OSError(errno.EIO, "Input/output error")

    def write_data(self, plan, planner):
        super().write_data(plan, planner)
        raise self.error


def interrupted_write(state, folder, group):
    save_state(state, storage_writer=Interrupting(folder), process_group=group)


def interrupted_publish(partial, path):
    raise InterruptedError("just before")


def interrupted_between_names(partial, path):
    """Ends where a checkpoint of the same step has stepped aside, and the new one has not taken its place."""
    os.rename(path, path.with_name(f".replaced-{path.name}"))
    raise InterruptedError("in between")


@pytest.mark.parametrize(
    ("pieces", "step", "told"),
    [
        (replace(PIECES, write=interrupted_write), 3, r"could not be written to .*rank 0: OSError: \[Errno 5\]"),
        (replace(PIECES, publish=interrupted_publish), 3, "InterruptedError: just before"),
        (replace(PIECES, publish=interrupted_between_names), 2, "InterruptedError: in between"),
    ],
    ids=["while it writes", "before it publishes", "while it replaces"],
)
def test_an_interrupted_save_leaves_the_one_before(group, tmp_path, pieces, step, told):
    training = made("sharded", group, steps=2)
    saved(training, tmp_path, group)
    before = state(training)
    train(training, 2)
    with pytest.raises(EnvironmentBroken, match=told):
        saved(training, tmp_path, group, step, pieces=pieces)
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".partial-")]
    other = made("sharded", group, seed=1)
    assert loaded(other, latest(tmp_path), group) == {"step": 2}
    assert state(other) == before
    # The next save tidies up.
    saved(training, tmp_path, group, 4)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]
    assert loaded(other, tmp_path / "step-00000002", group) == {"step": 2}


def test_a_rank_that_is_asked_to_end_while_it_writes_ends(group, tmp_path, monkeypatch):
    monkeypatch.setattr(Interrupting, "error", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        saved(made("plain", group, steps=1), tmp_path, group, pieces=replace(PIECES, write=interrupted_write))


KILLED = """
    import os, signal, sys
    from dataclasses import replace
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from pytest_gpucluster.benchmarks.checkpoint import store

    def kill(*arguments):
        if when == "publish":
            return os.kill(os.getpid(), signal.SIGKILL)
        store.write_shards(*arguments)
        [shard] = arguments[1].glob("*.distcp")
        os.truncate(shard, 100)
        os.kill(os.getpid(), signal.SIGKILL)

    when = sys.argv[2]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        pieces = store.PIECES if step == 1 else replace(store.PIECES, **{when: kill})
        store.save(Path(sys.argv[1]), step, model, optimizer, group=dist.group.WORLD, pieces=pieces)
"""


@pytest.mark.parametrize("when", ["write", "publish"])
def test_a_process_that_is_killed_while_it_saves_leaves_the_one_before(group, tmp_path, when):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), when]
    ended = subprocess.run(command, timeout=100, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert latest(tmp_path).name == "step-00000001"
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    assert load(latest(tmp_path), model, optimizer, group=group) == {"step": 1}
    assert {int(each["step"]) for each in optimizer.state.values()} == {1}


# ---- what is broken


def change(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "truncated": truncate,
    "missing": os.unlink,
    "changed": change,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_broken_file_is_named_with_what_was_found_and_expected(group, checkpoint, name, how):
    whole = (checkpoint / name).stat().st_size
    DAMAGES[how](checkpoint / name)
    training = made("plain", group, seed=1, steps=1)
    before = state(training)
    with pytest.raises(WrongResult) as caught:
        loaded(training, checkpoint, group)
    text = str(caught.value)
    assert text.startswith(f"rank 0: {checkpoint / name} is {how}")
    assert f"{whole} bytes" in text
    if how in ("truncated", "longer"):
        assert f"{(checkpoint / name).stat().st_size} bytes found" in text
    assert state(training) == before


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, r"is truncated or changed: \d+ bytes found, and they are no whole manifest"),
        (os.unlink, "is missing, so nobody knows what the checkpoint should hold"),
        (lambda path: path.write_bytes(b""), "is truncated or changed: 0 bytes found"),
        (lambda path: path.write_text("[1]"), "is truncated or changed: 3 bytes found"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is truncated or changed: 2 bytes found"),
        (
            lambda path: path.write_text(path.read_text().replace('"step": 2', '"step": 3')),
            r"is changed: its \d+ bytes have the sha256",
        ),
    ],
    ids=["truncated", "missing", "empty", "no manifest", "no text", "changed"],
)
def test_a_broken_manifest_is_named(group, checkpoint, damage, told):
    damage(checkpoint / manifest.NAME)
    with pytest.raises(WrongResult, match=told) as caught:
        loaded(made("plain", group), checkpoint, group)
    assert str(checkpoint / manifest.NAME) in str(caught.value)


def test_a_manifest_of_a_newer_format_is_refused(group, checkpoint, monkeypatch):
    whole = manifest.read(checkpoint)
    monkeypatch.setattr(manifest, "FORMAT", 2)
    manifest.write(checkpoint, whole)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is of another format than 1"):
        loaded(made("plain", group), checkpoint, group)


def test_a_shard_that_is_gone_right_after_it_was_written_is_no_checkpoint(group, tmp_path):
    def write(state, folder, group):
        store.write_shards(state, folder, group)
        largest(folder).unlink()

    with pytest.raises(EnvironmentBroken, match=r"__0_0\.distcp is not there right after it was written"):
        saved(made("plain", group, steps=1), tmp_path, group, pieces=replace(PIECES, write=write))
    assert latest(tmp_path) is None


def test_a_checkpoint_of_another_model_is_refused(group, checkpoint):
    model = make_decoder(replace(GEOMETRY, layers=2), CPU, seed=0)
    with pytest.raises(EnvironmentBroken, match=r"is of another model: 6 of 9 weights differ \(blocks\.1\."):
        loaded(Training(model, CPU, precision="fp32"), checkpoint, group)
    model = make_decoder(replace(GEOMETRY, vocab=128), CPU, seed=0)
    with pytest.raises(EnvironmentBroken, match=r"embedding\.weight: saved \(64, 64\), asked for \(128, 64\)"):
        loaded(Training(model, CPU, precision="fp32"), checkpoint, group)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"step": -1}, "step must not be negative"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"extra": {"tensor": torch.ones(1)}}, "extra must be JSON"),
        ({"extra": {"loss": float("nan")}}, "extra must be JSON"),
    ],
    ids=["step", "keep", "extra", "nan"],
)
def test_wrong_arguments_are_refused(group, tmp_path, more, told):
    with pytest.raises(ValueError, match=told):
        saved(made("plain", group, steps=1), tmp_path, group, **more)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_that_has_not_taken_a_step_is_refused(group, tmp_path):
    with pytest.raises(ValueError, match="has not taken a step yet"):
        saved(made("plain", group), tmp_path, group)


def test_a_folder_that_cannot_be_made_is_the_environment_s_fault(group, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentBroken, match="NotADirectoryError"):
        saved(made("plain", group, steps=1), tmp_path / "file" / "folder", group)


def test_the_manifest_is_plain_json(checkpoint):
    body = json.loads((checkpoint / manifest.NAME).read_text())
    assert (body["format"], body["step"], body["world_size"], body["extra"]) == (1, 2, 1, {})
    assert set(body["files"]) == {".metadata", "__0_0.distcp"}
    assert body["files"]["__0_0.distcp"]["size_bytes"] == largest(checkpoint).stat().st_size
