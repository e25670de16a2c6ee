import re
import threading
import time
from datetime import timedelta

import pytest
from ports import free_port
from ranks import facts_of

from pytest_gpucluster.agreement.store import connect
from pytest_gpucluster.errors import StoreError

HERE = {"rank": 1, "local_rank": 1, "local_world_size": 2, "nnodes": 1, "hostname": "gpu-07"}


def tcp_store():
    import torch.distributed

    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# ---- connecting ----------------------------------------------------------------------------------------------------


def test_a_single_process_needs_no_address():
    alone = facts_of(world_size=1, nnodes=1, launcher="single", master_addr=None, master_port=None)
    stores = connect(alone, timeout_seconds=1)
    stores.main.set("a", "1")
    assert stores.side.get("a") == b"1"
    stores.for_group("g").set("a", "2")
    assert stores.main.get("a") == b"1"


def facts(**changes):
    return facts_of(**{**HERE, "master_addr": "127.0.0.1", "agent_store": True, **changes})


@pytest.mark.parametrize(
    ("nnodes", "advice"),
    [
        (1, "All ranks are on this node: check that rank 0 has started, and that all were given the same MASTER_PORT"),
        (2, "Check that MASTER_ADDR and MASTER_PORT name the first node"),
    ],
)
def test_an_address_that_does_not_answer_is_named_with_the_rank_and_the_way_out(nnodes, advice):
    port = free_port()
    begin = time.perf_counter()
    with pytest.raises(StoreError) as caught:
        connect(facts(master_port=port, nnodes=nnodes), timeout_seconds=0.5)
    assert time.perf_counter() - begin < 10.0
    message = str(caught.value)
    assert re.match(rf"rank 1 on gpu-07: .* 127\.0\.0\.1:{port} within 0\.5 s \(", message)
    assert advice in message
    assert message.endswith("(launcher: torchrun)")
    assert "\n" not in message


def test_both_connections_of_a_rank_see_the_same_keys_and_no_other_run_does():
    server = tcp_store()
    here = connect(facts(master_port=server.port), timeout_seconds=10)
    peer = connect(facts(master_port=server.port, rank=0), timeout_seconds=10)
    here.main.set("a", "1")
    assert here.side.get("a") == b"1"
    assert peer.main.get("a") == b"1"
    groups = [here.for_group("world/1"), here.for_group("world/2")]
    groups[0].set("own", "1")
    assert not groups[1].check(["own"])
    assert not here.main.check(["own"])
    assert here.for_group("world/1").get("own") == b"1"
    for other in (facts(master_port=server.port, run_id="b2"), facts(master_port=server.port, restart_count=1)):
        assert not connect(other, timeout_seconds=10).main.check(["a"])


def test_a_blocked_main_connection_does_not_block_the_other():
    server = tcp_store()
    stores = connect(facts(master_port=server.port), timeout_seconds=10)
    stores.main.set_timeout(timedelta(seconds=20))
    blocked = threading.Thread(target=lambda: stores.main.get("late"), daemon=True)
    blocked.start()
    time.sleep(0.1)  # so that it is inside the blocking call
    begin = time.perf_counter()
    stores.side.set("other", "1")
    took = time.perf_counter() - begin
    stores.side.set("late", "1")
    blocked.join(10)
    assert not blocked.is_alive()
    assert took < 5.0
