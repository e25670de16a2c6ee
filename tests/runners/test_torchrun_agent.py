"""torchrun's agent: how its end is reported. What it does with ranks is in ``test_run_command``."""

import dataclasses
import json
import re

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from pytest_gpucluster.journal import verdict
from pytest_gpucluster.runners import torchrun
from pytest_gpucluster.runners.torchrun import AgentResult, RankExit

SUITE = ["--nproc-per-node=2", "-m", "pytest", "."]


def test_wrong_usage_of_torchrun_is_one_line(capfd):
    for arguments, named in (
        (["--bogus=1", *SUITE], "--bogus=1"),
        (["--nproc-per-node=x", "-m", "pytest", "."], "nproc_per_node value: x"),
        (["train.py", *SUITE], "'train.py' "),
        (["-m", "unittest"], "'unittest' "),
    ):
        agent = torchrun.run_torchrun(arguments)
        assert (agent.outcome, named in agent.message) == ("usage", True), agent
        assert "\n" not in agent.message
    assert "usage:" not in capfd.readouterr().err


def test_an_error_of_torch_without_a_message_is_reported_by_its_line():
    agent = torchrun.run_torchrun(["--nproc-per-node=0", "-m", "pytest", "."])
    assert agent.outcome == "error"
    assert re.fullmatch(r"AssertionError: /\S+/torch/\S+\.py, line \d+", agent.message)


def test_without_gpus_the_message_has_a_remedy(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    agent = torchrun.run_torchrun(["--nproc-per-node=gpu", "-m", "pytest", "."])
    assert agent.outcome == "usage"
    assert "--gpucluster-device=cpu" in agent.message


def failures(**ends):
    """rN=(exit code, when it failed)."""
    failures = {}
    for name, (code, at) in ends.items():
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="<N/A>")
        failure.timestamp = at
        failures[int(name[1:])] = failure
    return ChildFailedError("pytest", failures)


@pytest.mark.parametrize(
    ("error", "agent"),
    [
        (
            failures(r0=(-15, 5), r3=(1, 5)),
            AgentResult(outcome="ranks failed", ranks=(RankExit(rank=3, code=1), RankExit(rank=0, code=-15))),
        ),
        (SignalException("requested", sigval=15), AgentResult(outcome="signal", message="SIGTERM")),
        (RendezvousTimeoutError("late"), AgentResult(outcome="error", message="RendezvousTimeoutError: late")),
        (RuntimeError("EADDRINUSE"), AgentResult(outcome="error", message="RuntimeError: EADDRINUSE")),
        (None, AgentResult(outcome="done")),
    ],
    ids=["ranks", "signal", "rendezvous", "error", "done"],
)
def test_each_end_of_torchrun_has_its_outcome(monkeypatch, error, agent):
    def run(arguments):
        if error is not None:
            raise error

    monkeypatch.setattr(torch.distributed.run, "run", run)
    assert torchrun.run_torchrun(SUITE) == agent


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
def test_torchruns_folder_of_logs_is_temporary_unless_logs_are_requested(options, log_dir, monkeypatch, tmp_path):
    started = []
    monkeypatch.setenv(verdict.VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.distributed.run, "run", started.append)
    assert torchrun.run_torchrun([*options, *SUITE]).outcome == "done"
    assert started[0].log_dir == (None if log_dir is None else log_dir.format(notes=tmp_path))


def test_an_account_is_read_as_it_was_written_or_not_at_all(tmp_path):
    agent = AgentResult(outcome="ranks failed", message="\x1b é", ranks=(RankExit(rank=3, code=-9),))
    path = tmp_path / torchrun.FILE_NAME
    assert verdict.read_note(path, AgentResult) is None
    path.write_text(json.dumps(dataclasses.asdict(agent)))
    assert verdict.read_note(path, AgentResult) == agent
    for text in ("", "{", "[]", '{"outcome": "odd"}', '{"outcome": "done", "ranks": [{}]}'):
        path.write_text(text)
        assert verdict.read_note(path, AgentResult) is None
