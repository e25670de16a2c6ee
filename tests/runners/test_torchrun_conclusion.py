"""One exit code and one line of what was left: never better than any rank reports, and 0 only if all of it fits."""

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.journal.verdict import ExitNote
from pytest_gpucluster.runners.torchrun import AgentResult, RankExit, conclude

DONE = AgentResult(outcome="done")
ACCEPTED = ExitNote(
    rank=0,
    local_world_size=2,
    launcher=7,
    word="ACCEPTED",
    exit=0,
    reason="40 passed",
    kind="",
    host="gpu-01",
    directory="/r/1",
)
REJECTED = replace(ACCEPTED, word="REJECTED", exit=1, reason="hbm: slow")
LOST = replace(ACCEPTED, rank=1, word="BROKEN", exit=11, reason="rank 0 is lost")
BOTH = (ACCEPTED, replace(ACCEPTED, rank=1))
RECORDED = replace(REJECTED, local_world_size=1)


def failed(*codes):
    return AgentResult(outcome="ranks failed", ranks=tuple(RankExit(rank=i, code=code) for i, code in enumerate(codes)))


def concluded(agent, notes=(), journal=None, code=0, signals=()):
    found = conclude(agent, notes, journal, agent_code=code, signals=signals)
    return found.exit, found.line


def test_what_all_ranks_agreed_on_is_the_end():
    assert concluded(DONE, BOTH) == (0, "ACCEPTED, exit code 0: 40 passed (reports: /r/1)")
    both = (REJECTED, replace(REJECTED, rank=1))
    assert concluded(failed(1), both) == (1, "REJECTED, exit code 1: hbm: slow (reports: /r/1)")


def test_a_node_without_rank_0_says_where_the_reports_are():
    notes = tuple(replace(REJECTED, rank=rank, kind="REHEARSAL") for rank in (8, 9))
    line = "REHEARSAL, REJECTED, exit code 1: hbm: slow (reports: gpu-01:/r/1)"
    assert concluded(failed(1), notes) == (1, line)


def test_the_journal_speaks_for_a_rank_0_that_has_left_nothing():
    assert concluded(failed(-9), (LOST,), RECORDED) == (1, "REJECTED, exit code 1: hbm: slow (reports: /r/1)")


def test_rank_0_knows_more_than_the_journal_does_when_the_disk_was_full():
    broken = replace(ACCEPTED, word="BROKEN", exit=11, reason="no complete report")
    assert concluded(failed(11), (broken, LOST), replace(RECORDED, exit=0, word="ACCEPTED"))[0] == 11


def test_of_ranks_that_know_different_things_the_rejection_counts():
    notes = (replace(LOST, rank=2), replace(REJECTED, rank=3), replace(ACCEPTED, rank=4))
    assert concluded(failed(1), notes)[0] == 1


@pytest.mark.parametrize(
    ("agent", "notes", "code", "words"),
    [
        (failed(-11), BOTH, 1, "rank 0 killed by SIGSEGV"),
        (failed(1), BOTH, 1, "rank 0 ended with 1"),
        (AgentResult(outcome="signal", message="SIGTERM"), BOTH, 1, "torchrun was ended by SIGTERM"),
        (AgentResult(outcome="error", message="RuntimeError: x"), BOTH, 1, "torchrun failed: RuntimeError: x"),
        (None, BOTH, -9, "torchrun was killed by SIGKILL"),
        (None, BOTH, 0, "torchrun ended with 0 and no message"),
        (DONE, BOTH[:1], 0, "only rank 0 of 2 left a verdict"),
        (DONE, (ACCEPTED, LOST), 0, "rank 1 left exit code 11: rank 0 is lost"),
    ],
)
def test_nothing_is_accepted_whose_end_contradicts_its_verdict(agent, notes, code, words):
    found, line = concluded(agent, notes, code=code)
    assert found == 11
    assert line == f"BROKEN, exit code 11: {words}, after the verdict ACCEPTED (40 passed) (reports: /r/1)"


@pytest.mark.parametrize(
    ("agent", "code", "signals", "exit_code", "words"),
    [
        (DONE, 0, (), 11, ""),
        (failed(4, 4), 1, (), 4, "rank 0 ended with 4, "),
        (failed(2, -15), 1, (), 2, "rank 0 ended with 2"),
        # Python's own 1, where pytest is not installed, is no rejected hardware.
        (failed(1, 1), 1, (), 11, "rank 0 ended with 1, "),
        (failed(4, 1), 1, (), 11, "rank 0 ended with 4, "),
        (failed(-9, -15), 1, (), 11, "rank 0 killed by SIGKILL"),
        (AgentResult(outcome="usage", message="bad"), 0, (), 2, ": bad"),
        (AgentResult(outcome="signal", message="SIGINT"), 0, (), 2, "(SIGINT)"),
        # SIGHUP, forwarded to the agent as SIGTERM.
        (AgentResult(outcome="signal", message="SIGTERM"), 0, (signal.SIGHUP,), 2, "(SIGHUP)"),
        (None, -15, (signal.SIGTERM,), 2, "(SIGTERM)"),
        (None, -9, (), 11, "SIGKILL"),
        (AgentResult(outcome="error", message="RendezvousTimeoutError: "), 1, (), 11, "nodes have not met"),
        (AgentResult(outcome="error", message="E: EADDRINUSE"), 1, (), 11, "port"),
    ],
)
def test_without_any_verdict_the_line_states_what_happened(agent, code, signals, exit_code, words):
    found, line = concluded(agent, code=code, signals=signals)
    assert (found, words in line) == (exit_code, True), line


def test_texts_of_others_stay_on_one_line():
    hostile = replace(REJECTED, reason="a\x1b[2J\nb\u2028" + "x" * 10_000)
    line = concluded(failed(1), (hostile,))[1]
    assert line.splitlines() == [line]
    assert "\x1b" not in line
    assert len(line) == 2000


NOTES = st.builds(
    replace,
    st.just(ACCEPTED),
    rank=st.integers(0, 3),
    exit=st.sampled_from([0, 1, 2, 10, 11]),
    local_world_size=st.just(2),
)
ACCOUNTS = st.one_of(
    st.none(),
    st.sampled_from([DONE, AgentResult(outcome="signal"), AgentResult(outcome="error"), AgentResult(outcome="usage")]),
    st.builds(failed, st.integers(-20, 20).filter(bool)),
)


@given(ACCOUNTS, st.lists(NOTES, max_size=3, unique_by=lambda note: note.rank), st.integers(-15, 3))
def test_the_exit_code_is_0_only_if_every_rank_of_the_node_and_torchrun_agree(agent, notes, code):
    notes.sort(key=lambda note: note.rank)
    if concluded(agent, notes, code=code)[0] == 0:
        assert agent == DONE
        assert len(notes) >= 2
        assert {note.exit for note in notes} == {0}
