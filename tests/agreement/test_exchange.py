import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from pytest_gpucluster.agreement import exchange
from pytest_gpucluster.agreement.exchange import Exchange, answer_for, answer_verdict, arrived, key_of, verdict_key
from pytest_gpucluster.agreement.store import Stores
from pytest_gpucluster.errors import OutOfStep, StoreError

DEADLINE = 20.0


def over(store):
    return Stores(main=store, side=store, for_group=lambda name: None)


def echo(bodies):
    """Decide by saying what all ranks said."""
    return {"said": [bodies[rank]["x"] for rank in sorted(bodies)]}


def together(world_size, rank):
    """Let each rank run in a thread of its own; return what each came to, in the order of ranks."""
    with ThreadPoolExecutor(world_size) as pool:
        return [future.result(timeout=30) for future in [pool.submit(rank, number) for number in range(world_size)]]


def one_round(numbers, body, decide=echo):
    numbers.begin()
    return numbers.run(body, decide, deadline_seconds=DEADLINE)


def memory(world_size):
    shared = HashStore()
    return lambda rank: shared


def tcp(world_size):
    import torch.distributed

    dist = torch.distributed
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # The server lives as long as somebody holds it.
    stores = [server, *(dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(world_size))]
    return lambda rank: stores[rank + 1]


@pytest.mark.parametrize("kind", [pytest.param(memory, id="in memory"), pytest.param(tcp, id="over torch's tcp store")])
def test_every_rank_gets_the_verdict_that_rank_0_made_of_what_all_said(kind):
    store_of = kind(4)
    deciders = []

    def decide(bodies):
        deciders.append(threading.current_thread().name)
        return echo(bodies)

    def rank(number):
        numbers = Exchange(over(store_of(number)), number, 4)
        return [one_round(numbers, {"x": f"{number}.{turn}"}, decide) for turn in range(10)]

    expected = [{"said": [f"{number}.{turn}" for number in range(4)]} for turn in range(10)]
    assert together(4, rank) == [expected] * 4
    assert len(deciders) == 10


def test_a_single_rank_decides_alone_and_leaves_nothing_in_the_store():
    store = HashStore()
    numbers = Exchange(over(store), 0, 1)
    assert one_round(numbers, {"x": "me"}) == {"said": ["me"]}
    assert store.num_keys() == 0


def test_a_rank_that_cannot_post_is_answered_for_which_never_replaces_its_own_answer():
    store = HashStore()
    assert not arrived(store, 1, 1)
    answer_for(store, 1, 1, {"x": "lost"})
    assert [arrived(store, *place) for place in ((1, 1), (2, 1), (1, 0))] == [True, False, False]
    assert one_round(Exchange(over(store), 0, 2), {"x": "me"}) == {"said": ["me", "lost"]}
    store = HashStore()
    store.set(key_of(1, 1), json.dumps({"x": "its own"}))
    answer_for(store, 1, 1, {"x": "lost"})
    assert one_round(Exchange(over(store), 0, 2), {"x": "me"}) == {"said": ["me", "its own"]}


def test_a_rank_whose_rank_0_is_gone_gets_a_verdict_from_its_own_watcher_if_there_is_no_other():
    store = HashStore()
    store.set(verdict_key(1), json.dumps({"outcome": "passed"}))
    answer_verdict(store, 1, {"ended": True})
    assert one_round(Exchange(over(store), 1, 2), {"x": "me"}) == {"outcome": "passed"}
    store = HashStore()
    answer_verdict(store, 1, {"ended": True})
    assert one_round(Exchange(over(store), 1, 2), {"x": "me"}) == {"ended": True}


def test_what_is_large_and_only_that_is_thrown_away_but_only_after_rank_0_is_done_with_it():
    store = HashStore()
    turns = 6

    def rank(number):
        numbers = Exchange(over(store), number, 3)
        for turn in range(3):
            one_round(numbers, {"x": turn})
        for turn in range(turns):
            one_round(numbers, {"x": f"{turn} " * 500})
        return numbers.number

    assert together(3, rank) == [3 + turns] * 3
    keys = [key_of(number, each) for number in range(4 + turns) for each in (1, 2)]
    large = {key for key in keys if store.check([key]) and len(store.get(key)) > 500}
    assert large == {key_of(3 + turns, 1), key_of(3 + turns, 2)}, (
        "large outcomes must not pile up with the number of tests"
    )


def test_the_wait_ends_by_itself_long_after_the_deadline(monkeypatch):
    monkeypatch.setattr(exchange, "_ANSWER_MARGIN_SECONDS", 0.05)
    for rank in (0, 1):
        numbers = Exchange(over(HashStore()), rank, 2)
        numbers.begin()
        with pytest.raises(StoreError, match="stopped answering"):
            numbers.run({"x": 0}, echo, deadline_seconds=0.01)


def test_where_ranks_are_at_different_points_all_learn_who_is_where():
    store = HashStore()
    points = ["test_a", "test_b", "test_a", "test_c", "test_a", "test_b"]

    def rank(number):
        numbers = Exchange(over(store), number, len(points))
        numbers.begin(points[number])
        with pytest.raises(OutOfStep) as caught:
            numbers.run({"x": number}, echo, deadline_seconds=DEADLINE)
        return str(caught.value), caught.value.culprits

    told = together(len(points), rank)
    assert told == told[:1] * len(points)
    text, astray = told[0]
    assert text.endswith(": ranks 1, 5 at test_b, rank 3 at test_c, the others at test_a")
    assert astray == [1, 3, 5]


class Gone(HashStore):
    def __init__(self, text):
        super().__init__()
        self._text = text

    def set_timeout(self, timeout):
        raise RuntimeError(self._text)


def test_a_store_that_is_gone_is_an_error_of_the_environment_in_one_line():
    for text in ("failed to recv, got 0 bytes\nException raised from recvBytes", ""):
        with pytest.raises(StoreError) as caught:
            one_round(Exchange(over(Gone(text)), 0, 2), {"x": 0})
        assert str(caught.value).endswith(": " + text.partition("\n")[0])
