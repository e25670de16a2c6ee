"""Faults of rank 1 (or 0) that end a test on that rank; each is followed by a test that needs all ranks."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from stamps import RANK, all_reduce, meet, stamp, then_meet


def test_first(cluster):
    meet(cluster, "nothing")


class Hostile(Exception):
    """Cannot be shown, cannot be pickled."""

    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__

    def __reduce__(self):
        raise TypeError("cannot be pickled")


BEFORE = {
    "surrogate": RuntimeError("half a \ud800 character"),  # the first to be listed in exclude.txt
    "before": RuntimeError("raised before the collective"),
    "before_on_rank_0": RuntimeError("raised before the collective"),
    "skip": pytest.skip.Exception("no NVLink here"),
    "huge": RuntimeError("first words\n" + "x" * 10_000_000 + "\nlast words"),
    "hostile": Hostile(threading.Lock()),
    "sys_exit": SystemExit(3),
}
"""What a rank raises before a collective that all others wait in."""


def failing(name, error):
    def test(cluster):
        stamp(name)
        if (0 if "rank_0" in name else 1) == RANK:
            raise error
        all_reduce(cluster)

    test.__name__ = f"test_{name}"
    return test


for _name, _error in BEFORE.items():
    then_meet(failing(_name, _error))


@then_meet
def test_inside(cluster):
    import torch

    stamp("inside")
    if RANK == 1:
        torch.distributed.all_reduce(torch.ones(1 << 20), group=cluster.group, async_op=True)
        raise RuntimeError("raised inside the collective")
    torch.distributed.all_reduce(torch.ones(1 << 20), group=cluster.group)
    torch.distributed.barrier(group=cluster.group)


@then_meet
def test_afterwards(cluster):
    all_reduce(cluster)
    stamp("afterwards")
    if RANK == 1:
        raise RuntimeError("raised after the collective")


@then_meet
def test_while_the_group_is_made(cluster):
    cluster.discard(epoch=10_000)
    stamp("while_the_group_is_made")
    if RANK == 1:
        raise RuntimeError("raised instead of making the group")
    all_reduce(cluster)


@pytest.fixture
def without_scratch_space():
    stamp("setup")
    if RANK == 1:
        raise RuntimeError("no scratch space")


@then_meet
def test_setup(cluster, without_scratch_space):
    stamp("body_entered_in_spite_of_the_setup")
    all_reduce(cluster)


@pytest.fixture
def not_cleaned_up():
    yield
    stamp("teardown")
    if RANK == 1:
        raise RuntimeError("cannot clean up")


@then_meet
def test_teardown(cluster, not_cleaned_up):
    all_reduce(cluster)


@pytest.fixture(scope="session")
def shared():
    stamp("shared_is_set_up")
    return object()


def test_with_a_session_fixture(cluster, shared):
    stamp("with_a_session_fixture")
    if RANK == 1:
        raise RuntimeError("broke what the session shares")
    all_reduce(cluster)


def test_after_with_a_session_fixture(cluster, shared):
    meet(cluster, "with_a_session_fixture")


@then_meet
def test_nan(cluster, measure):
    stamp("nan")
    measure("matmul.bf16.tflops", float("nan") if RANK == 1 else 1.0, unit="TFLOPS")


@then_meet
def test_alike_on_all_ranks(cluster):
    stamp("alike_on_all_ranks")
    raise RuntimeError("the same everywhere")


@then_meet
def test_swallowed_by_the_peer(cluster):
    stamp("swallowed_by_the_peer")
    if RANK == 1:
        raise RuntimeError("rank 1 fails")
    try:
        all_reduce(cluster)
    except Exception:
        stamp("swallowed")


@then_meet
def test_point_to_point(cluster):
    stamp("point_to_point")
    if RANK == 1:
        raise RuntimeError("rank 1 sends nothing")
    dist.recv(torch.zeros(4), src=1, group=cluster.group)


@then_meet
@pytest.mark.xfail(reason="a known weakness", raises=RuntimeError)
def test_expected_to_fail(cluster):
    stamp("expected_to_fail")
    if RANK == 1:
        raise RuntimeError("as expected")
    all_reduce(cluster)


@then_meet
def test_binary(cluster):
    garbage = bytes(range(256)) * 4
    for descriptor in (1, 2):
        os.write(descriptor, garbage)
    print("\x00\x1b[31m\ud800\ufffe]]>")
    stamp("binary")
    if RANK == 1:
        raise RuntimeError("\x00\x08\x1b[31m\ud800\ufffe ]]> <&>")
    all_reduce(cluster)


@then_meet
@pytest.mark.parametrize("text", ["\x00\x1b[31m", "\ud800", "]]><&\"'", "nul\\0", "ü " * 400, "\n\r\t", "\ufffe"])
def test_names(cluster, text):
    all_reduce(cluster)
    if text == "\ud800" and RANK == 1:
        raise RuntimeError(text)
