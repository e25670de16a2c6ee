"""Notices reach the other ranks of the same phase, and no later one."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pytest_gpucluster.agreement.board import Board
from pytest_gpucluster.agreement.store import MemoryStore
from pytest_gpucluster.errors import StoreError


class Broken(MemoryStore):
    """A store that has gone."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer\nmore")

    def check(self, keys: Any) -> bool:
        raise RuntimeError("Connection reset by peer\nmore")


def boards(count: int = 3, number: int = 1) -> list[Board]:
    store = MemoryStore()
    return [Board(store, rank, lambda: number) for rank in range(count)]


def test_everyone_gets_the_notices_of_all_that_were_asked_for() -> None:
    first, second, third = boards()
    second.post("address", {"port": 7, "host": "node-ü"})
    third.post("address", None)
    assert first.gather("address", [1.5], [0, 1, 2], within_seconds=5) == {
        0: [1.5],
        1: {"port": 7, "host": "node-ü"},
        2: None,
    }


def test_a_rank_is_waited_for_and_not_longer_than_asked() -> None:
    first, second, _ = boards()
    threading.Timer(0.1, lambda: second.post("x", 1)).start()
    assert first.read("x", [1], within_seconds=30) == {1: 1}
    begin = time.monotonic()
    assert first.read("x", [1, 2], within_seconds=0.1) == {1: 1}
    assert time.monotonic() - begin < 10


def test_a_later_phase_does_not_see_an_earlier_one_s_notices() -> None:
    store, number = MemoryStore(), [1]
    mine, other = (Board(store, rank, lambda: number[0]) for rank in range(2))
    other.post("x", "old")
    number[0] = 2
    assert mine.read("x", [1], within_seconds=0) == {}
    other.post("x", "new")
    assert mine.read("x", [1], within_seconds=0) == {1: "new"}


class Asked(MemoryStore):
    """A store that keeps how many keys it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[int] = []

    def check(self, keys: Any) -> bool:
        self.keys.append(len(keys))
        return super().check(keys)


def test_many_ranks_that_wait_ask_the_store_for_little() -> None:
    store = Asked()
    boards_ = [Board(store, rank, lambda: 1) for rank in range(200)]
    for board in boards_[:150]:
        board.post("x", board._rank)
    threading.Timer(0.3, lambda: [board.post("x", 7) for board in boards_[150:]]).start()  # type: ignore[func-returns-value]
    came = boards_[0].read("x", range(200), within_seconds=30)
    assert len(came) == 200
    assert (came[149], came[150]) == (149, 7)
    assert sum(keys > 1 for keys in store.keys) < 20
    assert sum(store.keys) < 1000


def test_a_rank_that_is_silent_hides_no_notice_of_a_later_one() -> None:
    first, second, third = boards()
    first.post("x", 1)
    third.post("x", 3)
    assert second.read("x", [0, 1, 2], within_seconds=0.1) == {0: 1, 2: 3}
    assert second.read("x", [1, 2], within_seconds=0.0) == {2: 3}


def test_notices_of_earlier_phases_are_removed() -> None:
    store, number = MemoryStore(), [1]
    board = Board(store, 0, lambda: number[0])
    board.post("x", 1)
    board.post("y", 1)
    assert len(store._values) == 2
    number[0] = 4
    board.post("x", 2)
    assert list(store._values) == ["board/4/x/0"]


def test_a_round_trip_is_timed() -> None:
    assert 0 < boards()[0].round_trip_seconds() < 10


def test_a_store_that_is_gone_is_an_error_of_the_run() -> None:
    board = Board(Broken(), 0, lambda: 1)
    with pytest.raises(StoreError, match=r"stopped answering: Connection reset by peer$"):
        board.post("x", 1)
    with pytest.raises(StoreError, match=r"stopped answering: Connection reset by peer$"):
        board.read("x", [0], within_seconds=1)
