"""Offsets are those of the fastest answer, and of several clocks the one that is wrong stands out."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from complaints import in_order
from each import of_each
from torch.distributed import HashStore

from pytest_gpucluster.agreement.store import Board
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics import sampling
from pytest_gpucluster.node import network
from pytest_gpucluster.node.interfaces import Chosen, Nodes
from pytest_gpucluster.node.network import Offset, offset, skew, skew_of_nodes

INVENTORY = [{"rank": node, "node_rank": node, "local_rank": 0, "host": f"node-{'abc'[node]}"} for node in range(3)]


@pytest.mark.parametrize("by", [0.0, 3600.0, -0.25])
@pytest.mark.parametrize("there", [0.001, 0.004], ids=["equal ways", "a slow way there"])
def test_the_offset_is_right_within_its_error(by: float, there: float) -> None:
    back = 0.001
    sample = (100.0, 100.0 + there + by, 100.0 + there + by + 0.5, 100.0 + there + 0.5 + back)
    found = offset([sample])
    assert abs(found.seconds - by) <= found.error + 1e-9
    assert found.error == pytest.approx((there + back) / 2)


def test_of_several_answers_the_one_that_came_back_fastest_counts() -> None:
    slow, fast = (0.0, 5.9, 5.9, 1.0), (10.0, 15.001, 15.001, 10.002)
    assert offset([slow, fast, slow]) == Offset(seconds=5.0, error=0.001)
    assert offset([(10.0, 10.0, 10.5, 10.2)]).error == 0.0, "a clock that is set during the exchange"
    with pytest.raises(ValueError, match="no sample"):
        offset([])
    with pytest.raises(ValueError, match="no other clock"):
        skew(offsets(0.0), 0)


def offsets(*seconds: float) -> dict[int, Offset]:
    return {node: Offset(seconds=one, error=0.001) for node, one in enumerate(seconds)}


@of_each(
    "case",
    [
        ((0.0, 5.0), (5.0, 5.0)),
        ((0.0, 0.0, 5.0), (0.0, 0.0, 5.0)),
        ((0.0, 5.0, 5.0), (5.0, 0.0, 0.0)),
        ((0.0, 0.0, 5.0, 0.0), (0.0, 0.0, 5.0, 0.0)),
        ((0.0, 5.0, -5.0, 0.0, 0.0), (0.0, 5.0, 5.0, 0.0, 0.0)),
    ],
)
def test_each_clock_is_held_against_the_median_of_the_others(case: tuple[tuple[float, ...], ...]) -> None:
    seconds, skews = case
    assert [skew(offsets(*seconds), node) for node in range(len(seconds))] == [(value, 0.002) for value in skews]


def compared(monkeypatch: pytest.MonkeyPatch, choose: object = None) -> list[object]:
    store = HashStore()

    def loopback() -> Chosen:
        return Chosen(interface="lo", address="127.0.0.1", why="a test")

    def run(node: int) -> object:
        nodes = Nodes.of(INVENTORY, node)
        board = Board(store, nodes.representative, lambda: 1)
        try:
            return skew_of_nodes(board, nodes, choose or loopback, samples=4, deadline_seconds=0.3)  # type: ignore[arg-type]
        except EnvironmentBroken as error:
            return error

    monkeypatch.setattr(network, "_MARGIN_SECONDS", 0.5)
    with ThreadPoolExecutor(max_workers=3) as pool:
        return list(pool.map(run, range(3)))


def test_nodes_on_one_host_have_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for series in compared(monkeypatch):
        assert isinstance(series, sampling.Series)
        assert series.low <= series.median <= series.high < 1.0


def test_a_first_node_without_an_address_delays_no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Chosen:
        raise EnvironmentBroken("no interface")

    for error in compared(monkeypatch, none):
        assert isinstance(error, EnvironmentBroken)
        assert in_order(str(error), "node-a: no interface node-b: node-a: no interface node-c: node-a: no interface")


def test_a_first_node_that_does_not_answer_is_an_error_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: bytes) -> None:
        time.sleep(1)
        raise EOFError

    silence = SimpleNamespace(unpack=never, size=network._HEAD.size, pack=network._HEAD.pack)
    monkeypatch.setattr(network, "_HEAD", silence)
    found = compared(monkeypatch)
    for error in found:
        assert isinstance(error, EnvironmentBroken)
        assert in_order(str(error), "node-b node-a")
        assert in_order(str(error), "node-c node-a")
