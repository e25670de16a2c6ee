"""What is known of a node: ages, rates, and what is not known."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpucluster.node.health.node_state import STALE_SECONDS, NodeState, growth

LISTED = [
    {"index": 0, "uuid": "GPU-0", "name": "H100", "pci_bus_id": "00:1B"},
    {"index": 1, "uuid": "GPU-1", "name": "H100", "pci_bus_id": "00:2B"},
    {"index": 2, "uuid": None, "name": None, "pci_bus_id": None},
]
HOST = {"load": [1.0, 1.0, 1.0], "busy_ticks": 100, "all_ticks": 1000}


class Watched:
    """A state, and the lines that the reader would say."""

    def __init__(self) -> None:
        self.time = 100.0  # stands still until it is moved
        self.state = NodeState(1.0, now=lambda: self.time)

    def nvml(self, gpus: list[dict[str, Any]] | None = None) -> None:
        self.state.take({"nvml": {"driver": "580", "gpus": LISTED if gpus is None else gpus}, "at": self.time})

    def gpu(self, uuid: str = "GPU-0", **values: Any) -> None:
        values = {"uuid": uuid, "not_available": {}, "lost": "", **values}
        self.state.take({"gpu": values, "at": self.time})

    def ports(self, why_not: str = "", **sent: int | None) -> None:
        ports = [{"name": name, "port_xmit_bytes": count, "port_rcv_bytes": count} for name, count in sent.items()]
        self.state.take({"ports": ports, "why_not": why_not, "at": self.time})

    def host(self, **changes: Any) -> None:
        self.state.take({"host": {**HOST, **changes}, "at": self.time})


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_gpus_come_in_nvmls_order_also_those_that_do_not_answer(watched: Watched) -> None:
    watched.nvml()
    watched.gpu("GPU-1", power_watts=5)
    first, second, third = watched.state.node().gpus
    assert (first.values["index"], first.age_seconds, first.is_stale) == (0, None, False)
    assert (second.values["index"], second.values["power_watts"], second.age_seconds) == (1, 5, 0.0)
    assert "NVML" in third.values["lost"]


def test_what_is_not_read_any_more_becomes_stale_and_keeps_its_values(watched: Watched) -> None:
    watched.nvml()
    watched.gpu("GPU-0", power_watts=5)
    watched.host()
    watched.ports(a=1)
    watched.time += STALE_SECONDS
    node = watched.state.node()
    assert not any(part.is_stale for part in (node.gpus[0], node.gpus[1], node.host, *node.ports))
    watched.time += 0.1
    node = watched.state.node()
    assert all(part.is_stale for part in (node.gpus[0], node.gpus[1], node.host, *node.ports))
    assert node.gpus[0].values["power_watts"] == 5
    assert node.gpus[0].age_seconds == pytest.approx(STALE_SECONDS + 0.1)
    assert node.gpus[1].age_seconds is None, "this one was never read"
    watched.gpu("GPU-0", power_watts=6)
    assert not watched.state.node().gpus[0].is_stale


def test_rates_are_differences_of_counters_over_the_time_between(watched: Watched) -> None:
    watched.nvml()
    watched.gpu(nvlink_bytes={"sent": 1000, "received": 5000})
    watched.ports(a=100)
    watched.host()
    assert watched.state.node().gpus[0].rates == {}
    watched.time += 2
    watched.gpu(nvlink_bytes={"sent": 3000, "received": 5000})
    watched.ports(a=500)
    watched.host(busy_ticks=150, all_ticks=1100)
    node = watched.state.node()
    assert node.gpus[0].rates == {"nvlink_sent_bytes_per_second": 1000.0, "nvlink_received_bytes_per_second": 0.0}
    assert node.ports[0].rates == {"sent_bytes_per_second": 200.0, "received_bytes_per_second": 200.0}
    assert node.host.rates == {"busy_ratio": 0.5}


def test_a_counter_that_was_reset_or_is_missing_has_no_rate() -> None:
    assert [growth(2.0, 10, 30), growth(2.0, 30, 30)] == [10.0, 0.0]
    none: list[tuple[float, Any, Any]] = [(2.0, 30, 10), (0.0, 10, 30), (-1.0, 10, 30)]
    none += [(2.0, None, 30), (2.0, 10, None), (2.0, "10", 30)]
    assert [growth(*each) for each in none] == [None] * len(none)


def test_a_problem_of_the_reader_is_reported(watched: Watched) -> None:
    watched.time += 7
    node = watched.state.node()
    assert (node.gpus, node.silent_seconds, node.why_no_gpus) == ((), 7.0, "")
    watched.state.take({"nvml": {"why_not": "no driver library"}, "at": 1.0})
    node = watched.state.node()
    assert (node.why_no_gpus, node.silent_seconds, node.driver) == ("no driver library", None, None)
    watched.nvml([])
    assert watched.state.node().why_no_gpus.startswith("NVML ")
    watched.state.take({"ended": -11})
    assert "exited with code -11" in watched.state.node().problem
    watched.state.wait(2, 60)  # for nothing more that could come
