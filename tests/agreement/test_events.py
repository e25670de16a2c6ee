import threading
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from pytest_gpucluster.agreement import store as module
from pytest_gpucluster.agreement.store import EventLog, post_event


@pytest.fixture
def clock(monkeypatch):
    fake = SimpleNamespace(now=1000.0, monotonic=lambda: fake.now)
    monkeypatch.setattr(module, "time", fake)
    return fake


def kinds(log):
    return [event["kind"] for event in log.unread()]


def test_events_are_read_once_and_in_the_order_in_which_they_were_posted():
    store = HashStore()
    log = EventLog(store)
    assert log.unread() == []
    post_event(store, "absent", rank=1, number=4, message="m\nwith \x00 bytes")
    post_event(store, "overdue", number=4)
    assert log.unread() == [
        {"kind": "absent", "rank": 1, "number": 4, "message": "m\nwith \x00 bytes"},
        {"kind": "overdue", "number": 4},
    ]
    assert log.unread() == []
    assert kinds(EventLog(store)) == ["absent", "overdue"], "of one that comes late"


def test_no_event_is_lost_where_many_ranks_post_at_once():
    store = HashStore()

    def rank(number):
        for _ in range(50):
            post_event(store, "absent", rank=number)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks = [event["rank"] for event in EventLog(store).unread()]
    assert sorted(ranks) == sorted([0, 1, 2, 3] * 50)


def test_an_event_that_is_being_posted_is_waited_for_so_that_the_order_holds(clock):
    store = HashStore()
    log = EventLog(store)
    ticket = store.add("ev/count", 1)  # a rank has drawn a ticket, and its text is under way
    post_event(store, "later")
    assert kinds(log) == []
    clock.now += 1.9
    assert kinds(log) == []
    store.set(f"ev/{ticket}", '{"kind": "earlier"}')
    assert kinds(log) == ["earlier", "later"]


def test_a_rank_that_died_between_ticket_and_text_holds_nobody_up_for_long(clock):
    store = HashStore()
    log = EventLog(store)
    store.add("ev/count", 1)
    post_event(store, "lost")
    assert kinds(log) == []
    clock.now += 2.1
    assert kinds(log) == ["lost"]
    store.add("ev/count", 1)  # the next one that never comes gets its own time
    post_event(store, "end")
    assert kinds(log) == []
    clock.now += 2.1
    assert kinds(log) == ["end"]
