"""Notices reach the other ranks of the same phase, and no later one."""

import threading
import time

import pytest
from torch.distributed import HashStore

from pytest_gpucluster.agreement.store import Board
from pytest_gpucluster.errors import StoreError


class Broken(HashStore):
    def set(self, key, value):
        raise RuntimeError("Connection reset by peer\nmore")

    def check(self, keys):
        raise RuntimeError("Connection reset by peer\nmore")


def boards(count=3, number=1):
    store = HashStore()
    return [Board(store, rank, lambda: number) for rank in range(count)]


def test_everyone_gets_the_notices_of_all_that_were_asked_for():
    first, second, third = boards()
    second.post("address", {"port": 7, "host": "node-ü"})
    third.post("address", None)
    assert first.gather("address", [1.5], [0, 1, 2], within_seconds=5) == {
        0: [1.5],
        1: {"port": 7, "host": "node-ü"},
        2: None,
    }


def test_a_rank_is_waited_for_and_not_longer_than_asked():
    first, second, _ = boards()
    threading.Timer(0.1, lambda: second.post("x", 1)).start()
    assert first.read("x", [1], within_seconds=30) == {1: 1}
    begin = time.monotonic()
    assert first.read("x", [1, 2], within_seconds=0.1) == {1: 1}
    assert time.monotonic() - begin < 10


def test_a_later_phase_does_not_see_an_earlier_one_s_notices():
    store, number = HashStore(), [1]
    mine, other = (Board(store, rank, lambda: number[0]) for rank in range(2))
    other.post("x", "old")
    number[0] = 2
    assert mine.read("x", [1], within_seconds=0) == {}
    other.post("x", "new")
    assert mine.read("x", [1], within_seconds=0) == {1: "new"}


def test_a_rank_that_is_silent_hides_no_notice_of_a_later_one():
    first, second, third = boards()
    first.post("x", 1)
    third.post("x", 3)
    assert second.read("x", [0, 1, 2], within_seconds=0.1) == {0: 1, 2: 3}
    assert second.read("x", [1, 2], within_seconds=0.0) == {2: 3}


def test_notices_of_earlier_phases_are_removed():
    store, number = HashStore(), [1]
    board = Board(store, 0, lambda: number[0])
    board.post("x", 1)
    board.post("y", 1)
    assert store.check(["board/1/x/0", "board/1/y/0"])
    number[0] = 4
    board.post("x", 2)
    assert store.check(["board/4/x/0"])
    assert not store.check(["board/1/x/0"])
    assert not store.check(["board/1/y/0"])


def test_a_store_that_is_gone_is_an_error_of_the_run():
    board = Board(Broken(), 0, lambda: 1)
    with pytest.raises(StoreError, match=r"reset by peer$"):
        board.post("x", 1)
    with pytest.raises(StoreError, match=r"reset by peer$"):
        board.read("x", [0], within_seconds=1)
