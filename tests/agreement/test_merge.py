import json
from dataclasses import asdict, replace

import pytest

from pytest_gpucluster.agreement.exchange import AbortReason, RankOutcome, merge, rehearsed_too_slowly
from pytest_gpucluster.text import MESSAGE_CHARACTERS

NAMES = {rank: f"rank {rank} (gpu-{rank:02d})" for rank in range(8)}


def outcome(rank, kind, message="", text="", **more):
    return RankOutcome(rank=rank, outcome=kind, message=message, text=text or message, **more)


def world(*kinds):
    """Ranks 0, 1, ... with these outcomes; each that is not passed says which rank it is."""
    return [outcome(rank, kind, "" if kind == "passed" else f"m{rank}") for rank, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "expected", "culprits", "released"),
    [
        pytest.param(["passed"] * 3, "passed", [], [], id="all pass"),
        pytest.param(["skipped"] * 3, "skipped", [], [], id="all skip"),
        pytest.param(["passed", "failed", "passed"], "failed", [1], [], id="one fails"),
        pytest.param(
            ["released", "failed", "released"], "failed", [1], [0, 2], id="one fails, the others are released"
        ),
        pytest.param(["passed", "error"], "error", [1], [], id="one breaks"),
        pytest.param(["released", "hung"], "error", [1], [0], id="one hangs"),
        pytest.param(["released", "lost"], "error", [1], [0], id="one is lost"),
        pytest.param(["error", "failed"], "failed", [0, 1], [], id="hardware outweighs the environment"),
        pytest.param(["lost", "failed"], "failed", [0, 1], [], id="hardware outweighs a loss"),
        pytest.param(["released", "released"], "error", [], [0, 1], id="nobody is to blame, and nobody passes"),
        pytest.param(["released", "passed"], "error", [], [0], id="one did not finish, for no known reason"),
        pytest.param(["skipped", "passed"], "error", [0], [], id="one skips alone"),
        pytest.param(["skipped", "released"], "error", [0], [1], id="one skips, the other waited for it"),
        pytest.param(["skipped", "failed"], "failed", [1], [], id="a failure tells more than a skip"),
        pytest.param(["slow", "passed"], "skipped", [], [0], id="one is too slow for a rehearsal"),
        pytest.param(
            ["slow", "cut"], "skipped", [], [0, 1], id="one is too slow, and its peer was cut off by its release"
        ),
        pytest.param(["slow", "released"], "skipped", [], [0, 1], id="one is, and its peer waited for it"),
        pytest.param(["slow", "skipped"], "error", [1], [], id="one is, and the other one has skipped"),
        pytest.param(["slow", "failed"], "failed", [1], [], id="a failure tells more than slowness"),
        pytest.param(["slow", "hung"], "error", [1], [], id="and so does a hang"),
        pytest.param(["cut", "failed"], "failed", [1], [0], id="a failure explains a cut connection"),
        pytest.param(["cut", "lost"], "error", [1], [0], id="a loss explains it"),
        pytest.param(["cut", "hung"], "error", [1], [0], id="a hang explains it"),
        pytest.param(["cut", "skipped"], "error", [1], [0], id="a skip explains it"),
        pytest.param(["cut", "passed"], "error", [0], [], id="where nothing explains it, it is blamed"),
    ],
)
def test_the_ranks_outcomes_become_one(kinds, expected, culprits, released):
    merged = merge(world(*kinds), NAMES)
    assert (merged.outcome, list(merged.culprits), list(merged.released)) == (expected, culprits, released)
    assert merged.too_slow == (expected == "skipped" and "slow" in kinds)


def test_ranks_left_in_different_places_make_the_group_dirty():
    assert not merge(world("passed", "passed"), NAMES).group_invalid
    assert not merge(world("skipped", "skipped"), NAMES).group_invalid
    for kinds in (["passed", "failed"], ["released", "released"], ["skipped", "passed"]):
        assert merge(world(*kinds), NAMES).group_invalid, kinds


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        pytest.param(["error", "failed"], "rank 1 (gpu-01): m1 (and rank 0 failing)", id="a verdict before an error"),
        pytest.param(["failed", "hung"], "rank 1 (gpu-01): m1 (and rank 0 failing)", id="a hang before its victims"),
        pytest.param(["hung", "lost"], "rank 1 (gpu-01): m1 (and rank 0 failing)", id="a loss before all"),
        pytest.param(["failed", "failed"], "rank 0 (gpu-00): m0 (and rank 1 failing)", id="else the lowest rank"),
    ],
)
def test_the_message_names_what_explains_the_rest(kinds, message):
    assert merge(world(*kinds), NAMES).message == message


def test_a_failure_that_all_share_is_told_once():
    ranks = [outcome(rank, "failed", "RuntimeError: boom", "Traceback of boom") for rank in range(8)]
    merged = merge(ranks, NAMES)
    assert merged.message == "ranks 0-7: RuntimeError: boom"
    assert merged.text == "ranks 0-7 (first: rank 0 (gpu-00)): failed\nTraceback of boom"


def test_what_breaks_all_ranks_alike_is_no_ranks_own():
    ranks = [outcome(rank, "error", "ModuleNotFoundError: No module named 'x'", "Traceback") for rank in range(8)]
    merged = merge(ranks, NAMES)
    assert (merged.outcome, merged.message.startswith("all 8 ranks: ")) == ("error", True)
    assert (merged.culprits, merged.shared, merged.group_invalid, merged.text.count("Traceback")) == ([], True, True, 1)
    assert merge(ranks[:2], NAMES).shared
    named = merge([replace(ranks[0], about=(0, 1)), outcome(1, "passed")], NAMES)
    assert (named.culprits, named.shared) == ([0, 1], False), "one rank has found it for both"
    for others in (ranks[:1], [*ranks[:7], outcome(7, "passed")], [*ranks[:7], outcome(7, "error", "another")]):
        merged = merge(others, NAMES)
        assert (list(merged.culprits), merged.shared) == (
            [each.rank for each in others if each.outcome == "error"],
            False,
        )


def test_different_failures_keep_a_section_each_with_the_name_of_the_rank():
    merged = merge([outcome(0, "failed", "a", "text a"), outcome(1, "failed", "b", "text b")], NAMES)
    assert merged.text == "rank 0 (gpu-00): failed\ntext a\n\nrank 1 (gpu-01): failed\ntext b"
    merged = merge([outcome(0, "failed", "m", "same"), outcome(1, "error", "m", "same")], NAMES)
    assert merged.text.count("same") == 2, "equal texts of different kinds are not folded"


def test_tracebacks_are_one_section_where_only_addresses_differ_and_a_message_where_there_is_none():
    texts = (
        "at <Tensor at 0x7f12aa34bb50>: lost",
        "at <Tensor at 0x7f99cc120010>: lost",
        "at <Tensor at 0x7f12aa34bb50>: late",
    )
    found = merge([outcome(rank, "error", "same", text) for rank, text in enumerate(texts)], NAMES).text
    assert found.count("lost") == found.count("late") == 1
    only = [
        RankOutcome(rank=rank, outcome="error", message=message, text="") for rank, message in enumerate(("a", "b"))
    ]
    assert merge(only, NAMES).text.count("gpu-0") == 2


def test_what_a_rank_has_found_at_others_gpus_is_theirs():
    found = outcome(0, "failed", "Xid 64 of two GPUs", about=[2, 3])
    merged = merge([found, outcome(1, "passed"), outcome(2, "failed", "own"), outcome(3, "passed")], NAMES)
    assert merged.culprits == [2, 3]
    assert merged.message.startswith("ranks 2-3: Xid 64")
    assert [one["rank"] for one in merged.ranks] == [0, 2]  # each rank's own end stays


def test_released_ranks_are_listed_and_not_blamed():
    merged = merge(world("released", "failed", "released", "released"), NAMES)
    assert merged.text.endswith(": ranks 0, 2-3.")
    assert [(body["rank"], body["outcome"]) for body in merged.ranks][:2] == [(0, "released"), (1, "failed")]
    merged = merge(world("passed", "failed", "passed"), NAMES)
    assert merged.ranks == [{"rank": 1, "outcome": "failed", "message": "m1"}], "no bare passes"


def test_without_a_culprit_the_reason_of_the_release_is_told():
    merged = merge(world("released", "released"), NAMES, unfinished="not finished within 30 s")
    assert merged.message == "not finished within 30 s: ranks 0-1 did not finish"
    assert "m0" in merged.text
    assert "m1" in merged.text


def test_a_skip_of_some_ranks_only_names_both_sides_and_the_reason():
    merged = merge([outcome(0, "passed"), outcome(1, "skipped", "no such GPU"), outcome(2, "passed")], NAMES)
    assert merged.message == "ranks disagree: rank 1 skipped (no such GPU), ranks 0, 2 did not"
    assert "no such GPU\nrank 2 (gpu-02): passed" in merged.text
    merged = merge(world("skipped", "skipped"), NAMES)
    assert (merged.message, merged.text) == ("m0", "m0")


def test_the_message_is_one_line_of_bounded_length_whatever_the_ranks_say():
    said = [outcome(0, "failed", "word " * 100 + "\nnext line"), outcome(1, "released", "x" * 500)]
    for ranks in (said, [said[1]], [outcome(0, "skipped", "y" * 500), outcome(1, "passed")]):
        message = merge(ranks, NAMES, unfinished="z" * 500).message
        assert len(message) == MESSAGE_CHARACTERS
        assert "\n" not in message
        assert message.endswith("…")


def test_a_test_that_is_too_slow_to_rehearse_is_skipped_and_says_so():
    merged = rehearsed_too_slowly("it does not settle", released=[1])
    assert (merged.outcome, merged.too_slow, merged.group_invalid, merged.released) == ("skipped", True, True, [1])
    assert not rehearsed_too_slowly("it does not settle").group_invalid


def test_what_a_rank_tells_of_itself_travels_whole_and_a_bare_pass_is_small():
    told = RankOutcome(
        rank=3,
        outcome="failed",
        message="wrong",
        text="its traceback",
        measurements=[{"metric": "a.b"}],
        telemetry={"power_w": 300},
    )
    assert RankOutcome.from_json(3, json.loads(json.dumps(told.to_json()))) == told
    assert RankOutcome(rank=0, outcome="passed").to_json() == {"outcome": "passed"}


def test_why_a_run_ends_travels_whole_and_keys_of_another_version_are_left_alone():
    reason = AbortReason(name="rank lost", message="rank 1 is lost", exit=11, culprits=[1], text="its last words")
    body = json.loads(json.dumps(asdict(reason)))
    assert AbortReason.from_json(body | {"of_another_version": 1}) == reason
    assert AbortReason.from_json({"name": "x", "message": "y", "exit": 2}) == AbortReason(name="x", message="y", exit=2)
