"""What the node's sampler costs: its share of a core, and what a matmul loses beside it, in one run.

    python perf/sampler.py                       # no GPU: NVML calls that burn processor time and return
    python perf/sampler.py --rows judged         # the first table without the rows that are held against nothing
    python perf/sampler.py --device cuda         # the GPU and its NVML

It is the product's own process, asked through its own windows. Without a GPU its NVML is replaced by one whose calls
take a given time of a processor. How long real ones take differs: 2.5 us for utilisation, 12 us for memory and 137 us
for the fan were measured on one laptop's card, and others wait for the GPU's own processor.
Source: https://github.com/flightlessmango/MangoHud/pull/2104. So the table has several.

Then matmul with an open window and without, in turn: in each pair twice without and once with, in an order that
changes from pair to pair. The ratio is that of the rates, with to without; beside it stands that of without to without
(A/A). On cpu the median ratio must lie inside the A/A band, the smallest to the largest of these ratios; on a GPU the
lower end of the 95 % interval of the median ratio must be 0.99 or more. The process must take less than 1 % of a core
in the row that is judged: 8 GPUs, 20 us a call; on a GPU the GPUs of this host.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from pytest_gpucluster.metrics.stats import median_interval
from pytest_gpucluster.node.health import telemetry
from pytest_gpucluster.node.health.telemetry import Link, NodeSampler

MOST_OF_A_CORE = 0.01
LEAST_ON_GPU = 0.99
LEAST_PAIRS = 20
JUDGED = (8, 20.0)
"""GPUs, and microseconds of a call."""
ROWS = ((1, 0.0), (1, 20.0), (8, 0.0), JUDGED, (8, 50.0))
VALUES: dict[str, Any] = {"throttle.reasons": ("sw_power_cap",)}
_AS_SAMPLER = "--as-sampler"


class Burning:
    """NVML whose calls take so much time of a processor, and answer."""

    def __init__(self, call_seconds: float) -> None:
        self._call_seconds = call_seconds

    def find(self, uuid: str) -> Any:
        return uuid

    def read(self, uuid: str, query: str) -> Any:
        end = time.thread_time() + self._call_seconds
        while self._call_seconds and time.thread_time() < end:
            continue
        return VALUES.get(query, 1000)


# ---- the share of a core


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far. Source: proc_pid_stat(5), fields 14 and 15."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started(call_us: float | None) -> NodeSampler:
    """Start a sampler; None: with the NVML of this host."""
    if call_us is not None:
        telemetry.COMMAND = (sys.executable, __file__, _AS_SAMPLER, str(call_us))
    sampler = telemetry.start_sampler()
    time.sleep(2.0)  # its own start is not its cost
    return sampler


def share_of_a_core(uuids: list[str], call_us: float | None, *, seconds: float, interval: float) -> tuple[float, float]:
    """Watch GPUs for a while; return the process's share of a core, and the readings a second of each GPU."""
    sampler = started(call_us)
    links = [Link(sampler.address, uuid, interval, answer_seconds=30.0) for uuid in uuids]
    try:
        windows = [link.window().__enter__() for link in links]
        begin, spent = time.monotonic(), processor_seconds(sampler.pid)
        time.sleep(seconds)
        spent, took = processor_seconds(sampler.pid) - spent, time.monotonic() - begin
        for window in windows:
            window.__exit__(None, None, None)
        told = [window.summary() for window in windows]
        if any(each["not_available"] for each in told):
            raise RuntimeError(f"not everything was read: {told[0]['not_available']}")
        return spent / took, statistics.mean(each["samples"] / each["seconds"] for each in told)
    finally:
        for link in links:
            link.close()
        sampler.close()


# ---- a matmul beside it


class Products:
    """Products of two n x n matrices on a device."""

    def __init__(self, device: str, n: int) -> None:
        import torch

        self._torch = torch
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._a, self._b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        self._device = device
        self.rate(1.0)

    def rate(self, seconds: float) -> float:
        """Multiply for so long; return products a second."""
        count, begin = 0, time.perf_counter()
        while True:
            for _ in range(4):
                self._torch.mm(self._a, self._b)
            if self._device == "cuda":
                self._torch.cuda.synchronize()
            count += 4
            took = time.perf_counter() - begin
            if took >= seconds:
                return count / took


def beside(products: Products, links: list[Link], *, pairs: int, seconds: float) -> list[dict[str, float]]:
    """Take the rates of some pairs: without, with all GPUs watched, and without again."""
    found = []
    for pair in range(pairs):
        order = ["without", "with", "again"]
        order = order[pair % 3 :] + order[: pair % 3]
        rates: dict[str, float] = {}
        for way in order:
            if way == "with":
                windows = [link.window().__enter__() for link in links]
                rates[way] = products.rate(seconds)
                for window in windows:
                    window.__exit__(None, None, None)
                missing = [told for window in windows if (told := window.summary()["not_available"])]
                if missing:
                    raise RuntimeError(f"not everything was read: {missing[0]}")
            else:
                rates[way] = products.rate(seconds)
        found.append(rates)
    return found


def main() -> int:
    """Measure both, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row (default: 20)")
    parser.add_argument("--rows", choices=("all", "judged"), default="all", help="of those of made-up calls")
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between two looks (default: 0.1)")
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS, help=f"at least {LEAST_PAIRS}, which is the default")
    parser.add_argument("--window", type=float, default=0.5, help="seconds of each rate (default: 0.5)")
    parser.add_argument("--n", type=int, default=0, help="of the matrices (default: 512 on cpu, 16384 on cuda)")
    chosen = parser.parse_args()
    if chosen.pairs < LEAST_PAIRS:
        parser.error(f"at least {LEAST_PAIRS} pairs are needed")
    on_gpu = chosen.device == "cuda"
    load = [os.getloadavg()[0]]
    uuids = real_gpus() if on_gpu else [f"GPU-{number}" for number in range(8)]
    rows = [(len(uuids), None)] if on_gpu else [JUDGED] if chosen.rows == "judged" else list(ROWS)
    is_good = True
    print("| GPUs | an NVML call | readings a second of each | share of a core | |")
    print("| --- | --- | --- | --- | --- |")
    for count, call_us in rows:
        share, rate = share_of_a_core(uuids[:count], call_us, seconds=chosen.seconds, interval=chosen.interval)
        judged = on_gpu or (count, call_us) == JUDGED
        verdict = "" if not judged else "good" if share < MOST_OF_A_CORE else "MISSED"
        is_good &= verdict != "MISSED"
        call = "real" if call_us is None else f"burns {call_us:g} us (no GPU here)"
        print(f"| {count} | {call} | {rate:.1f} | {100 * share:.2f} % | {verdict} |", flush=True)
    products = Products(chosen.device, chosen.n or (16384 if on_gpu else 512))
    sampler = started(None if on_gpu else JUDGED[1])
    links = [Link(sampler.address, uuid, chosen.interval, answer_seconds=30.0) for uuid in uuids]
    try:
        pairs = beside(products, links, pairs=chosen.pairs, seconds=chosen.window)
    finally:
        for link in links:
            link.close()
        sampler.close()
    load.append(os.getloadavg()[0])
    with_it = [pair["with"] / pair["without"] for pair in pairs]
    same = [pair["again"] / pair["without"] for pair in pairs]
    middle, (low, high) = statistics.median(with_it), median_interval(with_it)
    good = low >= LEAST_ON_GPU if on_gpu else min(same) <= middle <= max(same)
    print(
        f"\nmatmul with an open window to without: {middle:.4f} ({low:.4f} to {high:.4f}); without to without: "
        f"{statistics.median(same):.4f} (band {min(same):.4f} to {max(same):.4f}): {'good' if good else 'MISSED'}"
    )
    print(
        f"\n{chosen.pairs} pairs; {os.cpu_count()} CPUs, load average {min(load):.1f} to {max(load):.1f}; "
        f"Python {platform.python_version()}"
    )
    return 0 if is_good and good else 1


def real_gpus() -> list[str]:
    """Return the UUIDs of this host's GPUs."""
    import torch

    from pytest_gpucluster.node.inventory import full_uuid

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [full_uuid(str(each.uuid), each.name) for each in properties]


if __name__ == "__main__":
    if _AS_SAMPLER in sys.argv:
        from pytest_gpucluster.node.health.sampler_process import main as serve

        call_us = float(sys.argv.pop(2))
        sys.argv.remove(_AS_SAMPLER)
        serve(lambda: Burning(call_us / 1e6))
    sys.exit(main())
