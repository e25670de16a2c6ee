import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ranks import facts_of
from torch.distributed import HashStore

from pytest_gpucluster.agreement import rendezvous as module
from pytest_gpucluster.agreement.exchange import AbortReason
from pytest_gpucluster.agreement.rendezvous import Refused, RollCall, fetch_reports, join
from pytest_gpucluster.errors import LaunchError, PreflightError, StoreError

REFUSAL = AbortReason(
    name="preflight",
    message="rank 2 never reported",
    text="rank 2 never reported\nwhat to do: look",
    exit=11,
    culprits=[],
)
HOSTS = ("gpu-06", "gpu-06", "gpu-07", "gpu-07")


def facts(rank):
    return facts_of(
        rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2, node_rank=rank // 2, hostname=HOSTS[rank]
    )


def call(store, rank, *, check=lambda who: None, timeout_seconds=20.0, **more):
    me = {"rank": rank, "host": HOSTS[rank], **more}
    shared = {"recorder_pid": 77} if rank == 0 else {}
    return join(store, facts(rank), me, timeout_seconds=timeout_seconds, check=check, shared=shared)


def all_of(store, ranks, **settings):
    """Let these ranks report at once, each in a thread; return what each came to."""

    def one(rank):
        try:
            return call(store, rank, **settings)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(one, ranks, timeout=30), strict=True))


def test_when_all_have_come_every_rank_knows_the_hosts_and_what_rank_0_shares():
    seen = []

    def check(who):
        seen.append(sorted(who))

    found = all_of(HashStore(), [3, 2, 1, 0], check=check)
    for rank, joined in found.items():
        assert isinstance(joined, RollCall), (rank, joined)
        assert list(joined.hosts) == list(HOSTS)
        assert joined.shared == {"recorder_pid": 77}
    known = {rank: sorted(joined.who) for rank, joined in found.items() if isinstance(joined, RollCall)}
    assert known == {0: [0, 1, 2, 3], 1: [0, 1], 2: [0, 2, 3], 3: [0, 2, 3]}
    assert seen == [[0, 1, 2, 3]], "the check runs once, on rank 0"


def test_a_second_process_of_a_rank_is_refused_and_changes_nothing():
    store = HashStore()
    found = all_of(store, [0, 1, 2, 3])
    with pytest.raises(LaunchError, match="rank 1 on gpu-06"):
        call(store, 1, pid="another")
    assert isinstance(found[0], RollCall)
    assert fetch_reports(store, [1]) == {1: found[0].who[1]}


def test_what_a_rank_says_of_itself_arrives_unchanged_and_can_be_fetched_later():
    store = HashStore()
    found = all_of(store, [0, 1, 2, 3], gpu=None, versions={"torch": "2.13", "driver": None}, name="g\udcffpu")
    expected = {"gpu": None, "versions": {"torch": "2.13", "driver": None}, "name": "g\udcffpu"}
    joined = found[0]
    assert isinstance(joined, RollCall)
    assert joined.who[2] == {"rank": 2, "host": "gpu-07", **expected}
    assert fetch_reports(store, [3]) == {3: {"rank": 3, "host": "gpu-07", **expected}}


def test_a_refusal_is_told_to_every_rank_alike_and_none_is_called_lost_later():
    store = HashStore()
    found = all_of(store, [0, 1, 2, 3], check=lambda who: REFUSAL)
    for rank, error in found.items():
        assert isinstance(error, Refused), (rank, error)
        assert isinstance(error, PreflightError)
        assert error.refusal == REFUSAL
        assert str(error) == REFUSAL.text
    assert store.check([f"bye/{rank}" for rank in (1, 2, 3)])


def test_a_rank_that_never_comes_is_missing_from_the_roll_at_the_deadline_and_no_earlier():
    seen = []

    def check(who):
        seen.append(sorted(who))
        return REFUSAL

    begin = time.perf_counter()
    found = all_of(HashStore(), [0, 1, 3], check=check, timeout_seconds=0.2)
    assert 0.2 <= time.perf_counter() - begin < 10
    assert seen == [[0, 1, 3]]
    assert all(isinstance(error, Refused) for error in found.values())


def test_nobody_waits_longer_than_the_last_rank_needs():
    store = HashStore()
    begin = time.perf_counter()
    late = threading.Timer(0.1, call, (store, 3))
    late.start()
    found = all_of(store, [0, 1, 2], timeout_seconds=30)
    late.join()
    assert all(isinstance(joined, RollCall) for joined in found.values())
    assert time.perf_counter() - begin < 10


def test_without_a_word_of_rank_0_the_others_give_up_and_say_where_to_look(monkeypatch):
    monkeypatch.setattr(module, "_VERDICT_MARGIN_SECONDS", 0.05)
    with pytest.raises(StoreError) as caught:
        call(HashStore(), 2, timeout_seconds=0.01)
    message = str(caught.value)
    assert re.match(r"rank 2 on gpu-07: rank 0 .* 0\.01 s", message)


class Gone(HashStore):
    def __init__(self, at):
        super().__init__()
        self._at = at

    def set(self, key, value):
        if key.startswith(self._at):
            raise RuntimeError("Broken pipe\nException raised from sendBytes")
        super().set(key, value)

    def check(self, keys):
        if self._at == "check":
            raise RuntimeError("Connection reset by peer\nException raised from recvBytes")
        return super().check(keys)


@pytest.mark.parametrize(
    ("rank", "at", "told"),
    [
        pytest.param(1, "who/", "rank 1 on gpu-06: the rendezvous store .*: Broken pipe$", id="at the report"),
        pytest.param(
            0,
            "join",
            "rank 0 on gpu-06: the rendezvous store has stopped answering: Broken pipe",
            id="at rank 0's word",
        ),
        pytest.param(1, "check", "the rendezvous store .*: Connection reset by peer$", id="while waiting"),
    ],
)
def test_a_store_that_goes_away_is_an_error_of_the_environment_in_one_line(rank, at, told):
    with pytest.raises(StoreError) as caught:
        call(Gone(at), rank, timeout_seconds=0.01)
    assert re.search(told, str(caught.value))
    assert "\n" not in str(caught.value)
