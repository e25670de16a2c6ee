"""torchrun's agent: how its end is put into words. What it does with ranks is in ``test_run_command``."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from pytest_gpucluster.journal import verdict
from pytest_gpucluster.runners import torchrun_agent
from pytest_gpucluster.runners.torchrun import Account, RankEnd

SUITE = ["--nproc-per-node=2", "-m", "pytest", "."]


def test_wrong_usage_of_torchrun_is_one_line(capfd):
    for arguments, named in (
        (["--bogus=1", *SUITE], "--bogus=1"),
        (["--nproc-per-node=x", "-m", "pytest", "."], "nproc_per_node value: x"),
        (["train.py", *SUITE], "'train.py' "),
        (["-m", "unittest"], "'unittest' "),
    ):
        account = torchrun_agent.run(arguments)
        assert (account.how, named in account.message) == ("usage", True), account
        assert "\n" not in account.message
    assert "usage:" not in capfd.readouterr().err


def test_an_error_of_torch_without_words_is_told_by_its_place():
    account = torchrun_agent.run(["--nproc-per-node=0", "-m", "pytest", "."])
    assert account.how == "error"
    assert re.fullmatch(r"AssertionError: /\S+/torch/\S+\.py, line \d+", account.message)


def test_a_node_without_gpus_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    account = torchrun_agent.run(["--nproc-per-node=gpu", "-m", "pytest", "."])
    assert account.how == "usage"
    assert "--gpucluster-device=cpu" in account.message


def failures(**ends: tuple[int, int]) -> ChildFailedError:
    """rN=(exit code, when it failed)."""
    told = {}
    for name, (code, at) in ends.items():
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="<N/A>")
        failure.timestamp = at
        told[int(name[1:])] = failure
    return ChildFailedError("pytest", told)


@pytest.mark.parametrize(
    ("error", "account"),
    [
        (
            failures(r0=(-15, 5), r3=(1, 5)),
            Account(how="ranks failed", ranks=(RankEnd(rank=3, code=1), RankEnd(rank=0, code=-15))),
        ),
        (SignalException("told to", sigval=15), Account(how="signal", message="SIGTERM")),
        (RendezvousTimeoutError("late"), Account(how="error", message="RendezvousTimeoutError: late")),
        (RuntimeError("EADDRINUSE"), Account(how="error", message="RuntimeError: EADDRINUSE")),
        (None, Account(how="done")),
    ],
    ids=["ranks", "signal", "rendezvous", "error", "done"],
)
def test_each_end_of_torchrun_is_told_apart(monkeypatch, error, account):
    def run(arguments: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.distributed.run, "run", run)
    assert torchrun_agent.run(SUITE) == account


@pytest.mark.parametrize(
    ("options", "log_dir"),
    [
        ([], "{notes}/torchrun"),
        (["--log-dir=/logs"], "/logs"),
        (["--tee=3"], None),
        (["--redirects=0:1"], None),
        (["--logs-specs=site"], None),
    ],
    ids=["nothing was asked for", "a folder", "tee", "redirects", "a plugin of torchrun's that keeps them"],
)
def test_torchruns_folder_of_logs_goes_with_the_account_where_nobody_has_asked_for_logs(
    options, log_dir, monkeypatch, tmp_path
):
    told = []
    monkeypatch.setenv(verdict.VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.distributed.run, "run", told.append)
    assert torchrun_agent.run([*options, *SUITE]).how == "done"
    assert told[0].log_dir == (None if log_dir is None else log_dir.format(notes=tmp_path))


def test_an_account_is_read_as_it_was_written_or_not_at_all(tmp_path):
    account = Account(how="ranks failed", message="\x1b é", ranks=(RankEnd(rank=3, code=-9),))
    assert Account.read(tmp_path) is None
    account.write(tmp_path)
    assert Account.read(tmp_path) == account
    for text in ("", "{", "[]", '{"how": "done"}', '{"how": "done", "message": "", "ranks": [{}]}'):
        (tmp_path / "agent.json").write_text(text)
        assert Account.read(tmp_path) is None
