"""What `gpucluster node watch` reads, in a process of its own, and the state that is made of it."""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import fake_reader
import pytest
from each import of_each
from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node.health import node_reader
from pytest_gpucluster.node.health.node_reader import (
    QUERIES,
    STALE_SECONDS,
    NodeState,
    growth,
    read_host_load,
    sample_gpu,
)
from pytest_gpucluster.node.nvml import NotAvailable
from pytest_gpucluster.node.nvml_queries import QUERIES as KNOWN
from pytest_gpucluster.node.processes import Process
from pytest_gpucluster.node.sysfs import Tree

DEADLINE_SECONDS = 60.0


class Stopped(Exception):
    """Enough lines were written."""


def lines_of(read, *arguments, after):
    """Return the first lines, and stop there."""
    lines = []

    def say(one):
        lines.append(one)
        if len(lines) >= after:
            raise Stopped

    with contextlib.suppress(Stopped):
        read(*arguments[:1], say, *arguments[1:])
    return lines


def test_all_gpus_are_listed_and_those_that_answer_are_read_round_after_round():
    nvml = FakeNvml({"GPU-0": {"power.draw": 5.0}, "GPU-1": {}, "GPU-2": {}}, silent=["GPU-1"])
    first, *looks = lines_of(node_reader.read_gpus, lambda: nvml, 0.01, ("power_watts",), after=5)
    assert [(gpu["index"], gpu["uuid"]) for gpu in first["nvml"]["gpus"]] == [(0, "GPU-0"), (1, None), (2, "GPU-2")]
    assert first["nvml"]["driver"] == nvml.driver
    assert [look["gpu"]["uuid"] for look in looks] == ["GPU-0", "GPU-2", "GPU-0", "GPU-2"]
    assert looks[0]["gpu"]["power_watts"] == 5.0


class Listener:
    """Keeps the lines of the process."""

    def __init__(self):
        self.lines = []
        self._condition = threading.Condition()

    def take(self, one):
        with self._condition:
            self.lines.append(one)
            self._condition.notify_all()

    def wait_for(self, key):
        with self._condition:
            there = self._condition.wait_for(lambda: any(key in one for one in self.lines), DEADLINE_SECONDS)
            assert there, f"{key} was never written: {self.lines}"
            return next(one for one in self.lines if key in one)


@pytest.fixture
def started(tmp_path, monkeypatch):
    opened = []

    def start(gpus, take, **settings):
        monkeypatch.setattr(node_reader, "COMMAND", fake_reader.command(tmp_path, gpus, tmp_path))
        opened.append(node_reader.NodeReader(take, 0.05, **settings))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_driver_that_hangs_over_one_gpu_leaves_the_rest_of_the_node_fresh(started, tmp_path, monkeypatch):
    monkeypatch.setattr(node_reader, "STALE_SECONDS", 0.5)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("1.0 1.0 1.0 1/2 3\n")
    state = NodeState(0.05)
    hanging = fake_reader.h100(power__draw={"hang": 1000})
    started({"GPU-0": fake_reader.h100(), "GPU-1": hanging, "GPU-2": fake_reader.h100()}, state.take)
    until = time.monotonic() + DEADLINE_SECONDS
    while not (node := state.node()).gpus or not all(gpu.is_stale for gpu in node.gpus) or node.host.is_stale:
        assert time.monotonic() < until, "the host is as old as the GPUs, or they are not called stale"
        time.sleep(0.02)
    assert node.gpus[0].values["power_watts"] == 690.0, "the last value stays"
    assert [gpu.age_seconds is None for gpu in node.gpus] == [False, True, True]
    assert node.host.age_seconds is not None
    assert node.host.values["load"] == [1.0, 1.0, 1.0]


def test_a_reader_that_is_closed_has_not_ended_on_its_own(started):
    listener = Listener()
    opened = started({"GPU-0": fake_reader.h100()}, listener.take)
    listener.wait_for("gpu")
    opened.close()
    assert not any("ended" in one for one in listener.lines)


def test_a_reader_that_ends_on_its_own_says_so(monkeypatch):
    monkeypatch.setattr(
        node_reader, "COMMAND", (sys.executable, "-c", "print('cut'); print(3); raise SystemExit(3)", "--")
    )
    listener = Listener()
    opened = node_reader.NodeReader(listener.take, 1.0)
    assert listener.wait_for("ended") == {"ended": 3}
    opened.close()
    assert listener.lines == [{"ended": 3}], "other output is ignored"


def test_without_a_thread_there_is_no_reader_and_its_process_is_ended(monkeypatch, tmp_path):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    started = []
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **named: started.append(real(*args, **named)) or started[0])
    monkeypatch.setattr(node_reader, "COMMAND", fake_reader.command(tmp_path, {}))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="new thread"):
        node_reader.NodeReader(print, 1.0)
    started[0].stdout.close()
    assert started[0].poll() is not None


def test_it_exits_when_its_output_is_closed_and_with_its_parent(tmp_path):
    command = [*fake_reader.command(tmp_path, {"GPU-0": {}}), "--interval", "0.05", "--parent", str(os.getpid())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    json.loads(process.stdout.readline())
    process.stdout.close()
    assert process.wait(timeout=DEADLINE_SECONDS) == 0
    script = "import subprocess, sys, os; print(subprocess.Popen([*sys.argv[1:], str(os.getpid())]).pid)"
    done = subprocess.run(
        [sys.executable, "-c", script, *command[:-1]],
        stdout=subprocess.PIPE,
        timeout=DEADLINE_SECONDS,
        check=True,
    )  # which only returns when the reader has let go of the pipe
    pid = int(next(line for line in done.stdout.splitlines() if not line.startswith(b"{")))
    assert not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("error", "why"),
    [(EnvironmentBroken("no driver library"), "no driver library"), (KeyError("x"), "NVML failed: KeyError: 'x'")],
)
def test_without_nvml_the_reason_is_written(error, why):
    def fail():
        raise error

    assert lines_of(node_reader.read_gpus, fail, 0.01, (), after=9) == [{"nvml": {"why_not": why}}]


GPU = "GPU-aa"
COMPLETE = {**HEALTHY_H100, "nvlink.bytes": {"sent": 5, "received": 7}}


def who(pid):
    return Process(pid=pid, user="ada", command="train \x1b[2J") if pid == 7 else Process(pid=pid, known=False)


def look(changes=None, **others):
    return sample_gpu(FakeNvml({GPU: {**COMPLETE, **(changes or {})}}), GPU, find_process=who, **others)


def test_every_value_has_a_query_and_a_json_type():
    assert set(QUERIES.values()) <= set(KNOWN)
    sample = look({"processes": ((7, 2**30), (9, None))})
    assert sample == json.loads(json.dumps(sample))
    assert {*QUERIES, "uuid", "not_available", "lost"} == set(sample)
    assert (sample["utilization_percent"], sample["memory_used_bytes"], sample["nvlink_bytes"]["received"]) == (
        100,
        520_000_000,
        7,
    )
    assert sample["processes"] == [
        {"pid": 7, "user": "ada", "command": "train \x1b[2J", "memory_bytes": 2**30},
        {"pid": 9, "user": None, "command": None, "memory_bytes": None},
    ]
    assert (sample["not_available"], sample["lost"]) == ({}, "")


@of_each(
    "case",
    [
        (NotAvailable("not supported by this GPU or driver"), "not supported by this GPU or driver"),
        (NotAvailable(""), "not available"),
        (RuntimeError("boom"), "RuntimeError: boom"),
        (math.nan, "ValueError: NVML gave nan"),
    ],
)
def test_a_missing_value_has_its_reason_and_the_others_are_there(case):
    answer, why = case
    sample = look({"temperature.gpu": answer})
    assert "temperature_celsius" not in sample
    assert sample["not_available"] == {"temperature_celsius": why}
    assert sample["power_watts"] == 690.0
    assert sample["lost"] == ""


def test_a_lost_gpu_is_asked_nothing_more():
    sample = look({"temperature.gpu": NotAvailable("off the bus", "lost")})
    assert sample["lost"] == "off the bus"
    asked = list(QUERIES)
    after = asked[asked.index("temperature_celsius") :]
    assert sample["not_available"] == dict.fromkeys(after, "off the bus")


FILES = {
    "proc/loadavg": "12.30 11.00 9.80 3/1234 999\n",
    "proc/stat": "cpu  100 20 30 1000 50 5 6 7 99 9\ncpu0 1 2 3 4\nintr 1\n",
    "proc/meminfo": "MemTotal:       2000 kB\nMemFree:  1 kB\nMemAvailable:    500 kB\n",
    "sys/devices/system/cpu/online": "0-127\n",
}


def plant(root, changes):
    for name, text in {**FILES, **changes}.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return Tree(root=root)


def test_load_cpus_time_and_memory_are_read(tmp_path):
    assert read_host_load(plant(tmp_path, {})) == {
        "load": [12.3, 11.0, 9.8],
        "cpus": 128,
        "busy_ticks": 168,  # all but idle and iowait; guest times are in user and nice already
        "all_ticks": 1218,
        "memory_total_bytes": 2000 * 1024,
        "memory_available_bytes": 500 * 1024,
    }


@of_each(
    "case",
    [
        ({"proc/loadavg": None}, {"load"}),
        ({"proc/loadavg": "nonsense"}, {"load"}),
        ({"proc/stat": None}, {"busy_ticks", "all_ticks"}),
        ({"proc/stat": "cpu  1 2\n"}, {"busy_ticks", "all_ticks"}),
        ({"proc/meminfo": "MemTotal: many\n"}, {"memory_total_bytes", "memory_available_bytes"}),
        ({"sys/devices/system/cpu/online": "x"}, {"cpus"}),
        (dict.fromkeys(FILES), {*read_host_load(Tree(root=Path("/nowhere")))}),
    ],
)
def test_what_the_kernel_does_not_report_is_none(tmp_path, case):
    changes, missing = case
    load = read_host_load(plant(Path(tempfile.mkdtemp(dir=tmp_path)), changes))
    assert {key for key, value in load.items() if value is None} == missing


LISTED = [
    {"index": 0, "uuid": "GPU-0", "name": "H100", "pci_bus_id": "00:1B"},
    {"index": 1, "uuid": "GPU-1", "name": "H100", "pci_bus_id": "00:2B"},
    {"index": 2, "uuid": None, "name": None, "pci_bus_id": None},
]
HOST = {"load": [1.0, 1.0, 1.0], "busy_ticks": 100, "all_ticks": 1000}


class Watched:
    """A state, and the lines that the reader would say."""

    def __init__(self):
        self.time = 100.0  # stands still until it is moved
        self.state = NodeState(1.0, now=lambda: self.time)

    def nvml(self, gpus=None):
        self.state.take({"nvml": {"driver": "580", "gpus": LISTED if gpus is None else gpus}, "at": self.time})

    def gpu(self, uuid="GPU-0", **values):
        values = {"uuid": uuid, "not_available": {}, "lost": "", **values}
        self.state.take({"gpu": values, "at": self.time})

    def ports(self, why_not="", **sent):
        ports = [{"name": name, "port_xmit_bytes": count, "port_rcv_bytes": count} for name, count in sent.items()]
        self.state.take({"ports": ports, "why_not": why_not, "at": self.time})

    def host(self, **changes):
        self.state.take({"host": {**HOST, **changes}, "at": self.time})


@pytest.fixture
def watched():
    return Watched()


def test_gpus_come_in_nvmls_order_also_those_that_do_not_answer(watched):
    watched.nvml()
    watched.gpu("GPU-1", power_watts=5)
    first, second, third = watched.state.node().gpus
    assert (first.values["index"], first.age_seconds, first.is_stale) == (0, None, False)
    assert (second.values["index"], second.values["power_watts"], second.age_seconds) == (1, 5, 0.0)
    assert "NVML" in third.values["lost"]


def test_what_is_not_read_any_more_becomes_stale_and_keeps_its_values(watched):
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


def test_rates_are_differences_of_counters_over_the_time_between(watched):
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


def test_a_counter_that_was_reset_or_is_missing_has_no_rate():
    assert [growth(2.0, 10, 30), growth(2.0, 30, 30)] == [10.0, 0.0]
    none = [(2.0, 30, 10), (0.0, 10, 30), (-1.0, 10, 30)]
    none += [(2.0, None, 30), (2.0, 10, None), (2.0, "10", 30)]
    assert [growth(*each) for each in none] == [None] * len(none)


def test_a_problem_of_the_reader_is_reported(watched):
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
