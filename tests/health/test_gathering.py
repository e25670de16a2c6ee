from __future__ import annotations

from typing import Any

import pytest
from patient import PID, UUID, examined, nvml, sources, who

from pytest_gpucluster.health.finding import Identity, identity
from pytest_gpucluster.health.gathering import gather
from pytest_gpucluster.health.situation import UNDER_LOAD, take
from pytest_gpucluster.nvml import QUERIES, NotAvailable


def test_a_snapshot_has_each_query_as_a_value_or_as_missing() -> None:
    snapshot = take(nvml({"power.draw": NotAvailable("asleep", "failed")}), UUID)
    assert set(snapshot.values) | set(snapshot.missing) == set(QUERIES)
    assert not set(snapshot.values) & set(snapshot.missing)
    assert (snapshot.missing["power.draw"].reason, snapshot.missing["power.draw"].kind) == ("asleep", "failed")
    assert snapshot.get("power.draw") is None


def test_a_lost_gpu_is_not_asked_again() -> None:
    asked = []
    fake = nvml(silent=[UUID])
    read = fake.read
    fake.read = lambda uuid, query: asked.append(query) or read(uuid, query)  # type: ignore[method-assign]
    snapshot = take(fake, UUID)
    assert len(asked) == 1
    assert {missing.kind for missing in snapshot.missing.values()} == {"lost"}
    assert set(snapshot.missing) == set(QUERIES)


def test_what_means_something_under_load_only_is_read_under_load() -> None:
    fake, asked = nvml(), []
    read = fake.read
    fake.read = lambda uuid, query: asked.append(query) or read(uuid, query)  # type: ignore[method-assign]

    def load(look: Any) -> None:
        asked.clear()
        look()
        assert asked == list(UNDER_LOAD)

    situation = examined(fake=fake, load=load).situation
    assert len(situation.under_load) == 1
    assert situation.loaded("clock.sm") == [1755]


def test_the_rank_that_asks_finds_itself_and_the_ranks_of_its_node() -> None:
    others = [{**who(rank), "host": "gpu-08" if rank == 2 else "gpu-07", "node_rank": rank // 2} for rank in (1, 2)]
    situation = gather(
        sources(nvml()),
        [*others, {**who(), "rank": 7}],
        rank=7,
        sku="H100 SXM",
        mig="off",
        load=lambda look: look(),
        held_bytes=5,
    )
    assert situation.gpu.uuid == UUID
    assert situation.own_pids == {PID, PID + 1}
    assert situation.held_bytes == 5
    assert situation.promise is not None


def test_a_gpu_that_nvml_does_not_find_any_more_keeps_its_names() -> None:
    situation = examined(fake=nvml(silent=[UUID])).situation
    assert situation.gpu == identity(who())


@pytest.mark.parametrize(
    ("gpu", "text"),
    [
        pytest.param(
            Identity(host="gpu-07", index=3, uuid="GPU-a", serial="165", pci="00000000:3B:00.0"),
            "GPU 3 (GPU-a, serial 165, PCI 00000000:3B:00.0) on gpu-07",
            id="all names",
        ),
        pytest.param(
            Identity(host="gpu-07", pci="0000:3b:00.0"),
            "GPU (UUID unknown, serial unknown, PCI 0000:3b:00.0) on gpu-07",
            id="only its address",
        ),
        pytest.param(Identity(host="gpu-07"), "gpu-07", id="none in particular"),
        pytest.param(identity({**who(), "gpu": None}), "gpu-07", id="a rehearsal"),
    ],
)
def test_a_gpu_is_named_by_all_that_is_known(gpu: Identity, text: str) -> None:
    assert str(gpu) == text
