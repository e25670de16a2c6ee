"""What is stored, what an interruption leaves, and what is refused: on one rank. With more,
tests/acceptance/test_acceptance_checkpoint.py."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from each import of_each
from forked_ranks import on_ranks
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from pytest_gpucluster.benchmarks.storage import checkpoint
from pytest_gpucluster.benchmarks.storage import checkpoint as manifest
from pytest_gpucluster.benchmarks.storage.checkpoint import latest, load, make_unique_folder, save, wait_for
from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.sharding import local, mesh_of, shard
from pytest_gpucluster.benchmarks.training.step import Training, replicate
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)
DATA = PackedTokens(rows=64, sequence=16, vocab=64, seed=0)


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


WRITE_SHARDS = checkpoint.write_shards


def saved(training, folder, group, step=2, write=WRITE_SHARDS, **more):
    with patch.object(checkpoint, "write_shards", write):
        return save(folder, step, training.model, training.optimizer, group=group, **more)


def loaded(training, path, group, **more):
    return load(path, training.model, training.optimizer, group=group, **more)


def largest(path):
    return max(path.glob("*.distcp"), key=lambda one: one.stat().st_size)


KINDS = ("plain", "replicated", "sharded")


@pytest.mark.parametrize(("kind", "into"), [("plain", "sharded"), ("sharded", "replicated"), ("replicated", "plain")])
def test_model_and_optimizer_come_back_bit_by_bit_however_they_are_wrapped(group, tmp_path, kind, into):
    training = made(kind, group, steps=1)
    training.optimizer.param_groups[0]["lr"] = 0.25
    train(training, 1)
    found = saved(training, tmp_path / "new" / "folder", group, extra={"epoch": 1, "seen": [3, 4]})
    assert found == tmp_path / "new" / "folder" / "step-00000002"
    other = made(into, group, seed=1, steps=1)  # with moments and gradients of its own
    assert loaded(other, found, group) == {"epoch": 1, "seen": [3, 4], "step": 2}
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    assert state(other) == state(training)
    assert train(other, 2) == train(training, 2)
    assert state(other) == state(training)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_can_be_left_out_and_stay_as_they_are(group, tmp_path, kind):
    training = made(kind, group, steps=2, frozen=True)
    path = saved(training, tmp_path, group, trained_only=True)
    other = made(kind, group, seed=1, frozen=True)
    before = local(next(other.model.parameters()).detach()).clone()
    loaded(other, path, group, trained_only=True)
    assert state(other)[1] == state(training)[1]
    pairs = zip(training.model.parameters(), other.model.parameters(), strict=True)
    same = [torch.equal(local(one.detach()), local(its.detach())) for one, its in pairs]
    assert same == [False] + [True] * (len(same) - 1)
    assert torch.equal(local(next(other.model.parameters()).detach()), before)


def test_the_newest_ones_are_kept_and_a_step_that_is_saved_again_takes_the_place_of_the_first(group, tmp_path):
    training = made("plain", group, steps=1)
    for step in (5, 20, 100, 3):
        saved(training, tmp_path, group, step)
    # The highest step is the latest; what was just saved stays in any case.
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000003", "step-00000100"]
    assert latest(tmp_path).name == "step-00000100"
    saved(training, tmp_path, group, 200, keep=1)
    train(training, 1)
    path = saved(training, tmp_path, group, 200, extra={"again": True})
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000200"]
    other = made("plain", group, seed=1)
    assert loaded(other, path, group)["again"]
    assert state(other) == state(training)


def test_of_no_folder_there_is_no_latest(tmp_path):
    (tmp_path / ".partial-step-00000009-abc").mkdir()
    (tmp_path / "step-9.old").mkdir()
    assert [latest(tmp_path), latest(tmp_path / "none")] == [None, None]


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
    ("fault", "step", "message"),
    [
        ({"write": interrupted_write}, 3, r"could not be written to .*rank 0: OSError: \[Errno 5\]"),
        ({"publish": interrupted_publish}, 3, "InterruptedError: just before"),
        ({"publish": interrupted_between_names}, 2, "InterruptedError: in between"),
    ],
    ids=["while it writes", "before it publishes", "while it replaces"],
)
def test_an_interrupted_save_leaves_the_one_before(group, tmp_path, fault, step, message):
    training = made("sharded", group, steps=2)
    saved(training, tmp_path, group)
    before = state(training)
    train(training, 2)
    with pytest.raises(EnvironmentBroken, match=message):
        saved(training, tmp_path, group, step, **fault)
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
        saved(made("plain", group, steps=1), tmp_path, group, write=interrupted_write)


def save_until_killed(rank, folder, when):
    def kill(*given):
        if when == "write":
            WRITE_SHARDS(*given)
            [shard] = given[1].glob("*.distcp")
            os.truncate(shard, 100)
        os.kill(os.getpid(), signal.SIGKILL)

    training = made("plain", dist.group.WORLD, steps=1)
    saved(training, folder, dist.group.WORLD, 1)
    saved(training, folder, dist.group.WORLD, 2, **{when: kill})


@of_each("when", ["write", "publish"])
def test_a_process_that_is_killed_while_it_saves_leaves_the_one_before(group, tmp_path, when):
    with pytest.raises(AssertionError, match="rank 0: has ended without"):
        on_ranks(1, save_until_killed, tmp_path / when, when)
    assert [one.name for one in (tmp_path / when).iterdir() if one.name.startswith(".partial-step-00000002")]
    assert latest(tmp_path / when).name == "step-00000001"
    training = made("plain", group, seed=1)
    assert loaded(training, latest(tmp_path / when), group) == {"step": 1}
    assert state(training) == state(made("plain", group, steps=1))


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


@of_each("case", [(name, how) for name in ("__0_0.distcp", ".metadata") for how in DAMAGES])
def test_a_broken_file_is_named_with_what_was_found_and_expected(group, tmp_path, case):
    name, how = case
    path = saved(made("plain", group, steps=1), tmp_path / how, group)
    whole = (path / name).stat().st_size
    DAMAGES[how](path / name)
    training = made("plain", group, seed=1, steps=1)
    before = state(training)
    with pytest.raises(WrongResult, match=rf"^rank 0: {path / name} is {how}.* {whole} bytes") as caught:
        loaded(training, path, group)
    if how in ("truncated", "longer"):
        assert f"{(path / name).stat().st_size} bytes found" in str(caught.value)
    assert state(training) == before


@of_each(
    "broken",
    [
        (truncate, r"is truncated or changed: \d+ bytes found"),
        (os.unlink, "is missing, so"),
        (lambda path: path.write_bytes(b""), "is truncated or changed: 0 bytes found"),
        (lambda path: path.write_text("[1]"), "is truncated or changed: 3 bytes found"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is truncated or changed: 2 bytes found"),
        (
            lambda path: path.write_text(path.read_text().replace('"step": 2', '"step": 3')),
            "is truncated or changed: .* they have the sha256 ",
        ),
    ],
)
def test_a_broken_manifest_is_named(group, tmp_path, broken):
    path = saved(made("plain", group, steps=1), tmp_path, group)
    broken[0](path / manifest.NAME)
    with pytest.raises(WrongResult, match=rf"{path / manifest.NAME} {broken[1]}"):
        loaded(made("plain", group), path, group)


def test_a_checkpoint_of_another_model_or_format_is_refused(group, tmp_path, monkeypatch):
    checkpoint = saved(made("plain", group, steps=1), tmp_path, group)
    for change, message in [
        ({"layers": 2}, r"another model: 6 of 9 weights differ \(blocks\.1\."),
        ({"vocab": 128}, r"embedding\.weight: saved \(64, 64\), requested \(128, 64\)"),
    ]:
        model = make_decoder(replace(GEOMETRY, **change), CPU, seed=0)
        with pytest.raises(EnvironmentBroken, match=message):
            loaded(Training(model, CPU, precision="fp32"), checkpoint, group)
    whole = manifest.read_manifest(checkpoint)
    monkeypatch.setattr(manifest, "FORMAT", 2)
    manifest.write_manifest(checkpoint, whole)
    monkeypatch.undo()
    body = {"format": 2, "files": {"a": {"bytes": 1, "sha512": "0"}}, "of a later version": True}
    later = json.dumps({**body, "sha256": manifest._digest(body)})
    for text in ((checkpoint / manifest.NAME).read_text(), later):
        (checkpoint / manifest.NAME).write_text(text)
        with pytest.raises(ValueError, match=r"another format.* 1"):
            loaded(made("plain", group), checkpoint, group)


def test_a_shard_that_is_gone_right_after_it_was_written_is_no_checkpoint(group, tmp_path):
    def write(state, folder, group):
        WRITE_SHARDS(state, folder, group)
        largest(folder).unlink()

    with pytest.raises(EnvironmentBroken, match=r"__0_0\..*missing right"):
        saved(made("plain", group, steps=1), tmp_path, group, write=write)
    assert latest(tmp_path) is None


def test_wrong_arguments_are_refused(group, tmp_path):
    training = made("plain", group, steps=1)
    for more, message in [
        ({"step": -1}, "step must"),
        ({"keep": 0}, "keep must.* 1"),
        ({"extra": {"tensor": torch.ones(1)}}, "extra must.* JSON"),
        ({"extra": {"loss": float("nan")}}, "extra must.* JSON"),
    ]:
        with pytest.raises(ValueError, match=message):
            saved(training, tmp_path, group, **more)
    with pytest.raises(ValueError, match=r"not taken"):
        saved(made("plain", group), tmp_path, group)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentBroken, match="NotADirectoryError"):
        saved(training, tmp_path / "file" / "folder", group)


def test_each_run_has_a_folder_of_its_own_beside_what_is_there(tmp_path):
    scratch = tmp_path / "not" / "there"
    first, second = make_unique_folder(scratch), make_unique_folder(scratch)
    assert first != second
    assert set(scratch.iterdir()) == {first, second}
    assert list(first.iterdir()) == []


def test_a_file_that_comes_late_is_waited_for(tmp_path):
    path = tmp_path / "late"
    later = threading.Timer(0.1, path.touch)
    later.start()
    wait_for(path)
    later.join()
    assert path.exists()


def test_a_folder_that_is_not_shared_is_the_environment_s_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VISIBILITY_SECONDS", 0.1)
    with pytest.raises(EnvironmentBroken, match=r"host after 0\.1 s.*--gpucluster-scratch"):
        wait_for(tmp_path / "none")
