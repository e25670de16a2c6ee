from __future__ import annotations

from typing import Any

from patient import PID, UUID, examined, nvml, sources, who

from pytest_gpucluster.metrics.finding import identity
from pytest_gpucluster.node.health.snapshot import UNDER_LOAD, collect
from pytest_gpucluster.node.nvml import NotAvailable, read_values
from pytest_gpucluster.node.nvml_queries import QUERIES


def test_a_snapshot_has_each_query_as_a_value_or_as_missing() -> None:
    snapshot = read_values(nvml({"power.draw": NotAvailable("asleep", "failed")}), UUID)
    assert set(snapshot.values) | set(snapshot.missing) == set(QUERIES)
    assert not set(snapshot.values) & set(snapshot.missing)
    assert (snapshot.missing["power.draw"].reason, snapshot.missing["power.draw"].kind) == ("asleep", "failed")
    assert snapshot.get("power.draw") is None


def test_a_lost_gpu_is_not_asked_again() -> None:
    asked = []
    fake = nvml(silent=[UUID])
    read = fake.read
    fake.read = lambda uuid, query: asked.append(query) or read(uuid, query)  # type: ignore[method-assign]
    snapshot = read_values(fake, UUID)
    assert len(asked) == 1
    assert {missing.kind for missing in snapshot.missing.values()} == {"lost"}
    assert set(snapshot.missing) == set(QUERIES)
    assert examined(fake=nvml(silent=[UUID])).snapshot.gpu == identity(who()), "it keeps its names"


def test_what_means_something_under_load_only_is_read_under_load() -> None:
    fake, asked = nvml(), []
    read = fake.read
    fake.read = lambda uuid, query: asked.append(query) or read(uuid, query)  # type: ignore[method-assign]

    def load(look: Any) -> None:
        asked.clear()
        look()
        assert asked == list(UNDER_LOAD)

    snapshot = examined(fake=fake, load=load).snapshot
    assert len(snapshot.under_load) == 1
    assert snapshot.loaded("clock.sm") == [1755]


def test_the_rank_that_asks_finds_itself_and_the_ranks_of_its_node() -> None:
    others = [{**who(rank), "host": "gpu-08" if rank == 2 else "gpu-07", "node_rank": rank // 2} for rank in (1, 2)]
    snapshot = collect(
        sources(nvml()),
        [*others, {**who(), "rank": 7}],
        rank=7,
        sku="H100 SXM",
        mig="off",
        load=lambda look: look(),
        held_bytes=5,
    )
    assert snapshot.gpu.uuid == UUID
    assert snapshot.own_pids == {PID, PID + 1}
    assert snapshot.held_bytes == 5
    assert snapshot.promise is not None
