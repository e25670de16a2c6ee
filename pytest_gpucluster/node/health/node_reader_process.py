"""The process that reads a node for the program that started it, and writes samples to its standard output.

Each line is a JSON object with one sample and the time of the monotonic clock at which it was read:

    {"nvml": {"driver": "580.65.06", "gpus": [{"index": 0, "uuid": "GPU-...", "name": "NVIDIA H100"}]}, "at": 12.3}
    {"nvml": {"why_not": "NVML is not available: ..."}, "at": 12.3}
    {"gpu": {"uuid": "GPU-...", "utilization_percent": 98, ..., "not_available": {}, "lost": ""}, "at": 12.4}
    {"host": {"load": [1.0, 0.9, 0.8], ...}, "at": 12.4}
    {"ports": [{"name": "mlx5_0/1", ...}], "why_not": "", "at": 12.4}

One thread queries NVML, another reads the kernel's files: where NVML hangs, the other continues, and the reader of the
lines sees by their times which samples are old. The process exits with its parent, and when its output is closed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.node import infiniband
from pytest_gpucluster.node.health import node_reader
from pytest_gpucluster.node.health.sampler_process import wait_for_end
from pytest_gpucluster.node.nvml import Nvml, PyNvml
from pytest_gpucluster.node.sysfs import Tree

Write = Callable[[Mapping[str, Any]], None]


def read_gpus(open_nvml: Callable[[], Nvml], write: Write, interval_seconds: float, keys: Collection[str]) -> None:
    """Write samples of all GPUs, round after round."""
    try:
        nvml = open_nvml()
        uuids = nvml.uuids()
        write({"nvml": {"driver": nvml.driver_version(), "gpus": [_gpu(nvml, *gpu) for gpu in enumerate(uuids)]}})
    except EnvironmentBroken as error:
        write({"nvml": {"why_not": str(error)}})
        return
    except Exception as error:  # bindings and drivers fail in many ways; without a line it would look like a hang
        write({"nvml": {"why_not": f"NVML failed: {type(error).__name__}: {error}"}})
        return
    answering = [uuid for uuid in uuids if uuid is not None]
    while answering:
        begin = time.monotonic()
        for uuid in answering:
            write({"gpu": node_reader.sample_gpu(nvml, uuid, keys)})
        spent = time.monotonic() - begin
        # Every call serialises with the driver's other work: at least half of the time there is none.
        time.sleep(max(interval_seconds - spent, spent))


def _gpu(nvml: Nvml, index: int, uuid: str | None) -> Mapping[str, Any]:
    found = None if uuid is None else nvml.find(uuid)
    return {
        "index": index if found is None else found.index,
        "uuid": uuid,
        "name": None if found is None else found.name,
        "pci_bus_id": None if found is None else found.pci_bus_id,
    }


def read_host(tree: Tree, write: Write, interval_seconds: float) -> None:
    """Write samples of the host and its ports, round after round."""
    while True:
        begin = time.monotonic()
        write({"host": node_reader.read_host_load(tree)})
        adapters = infiniband.read(tree.path("/sys"), gids=False, only_bytes=True)
        write({"ports": [_port(port) for port in adapters.ports], "why_not": adapters.why_not})
        time.sleep(max(0.0, interval_seconds - (time.monotonic() - begin)))


def _port(port: infiniband.Port) -> Mapping[str, Any]:
    return {
        "name": port.name,
        "link_layer": port.link_layer or None,
        "state": port.state or None,
        "rate_gbps": port.rate_gbps,
        **{name: port.counters.get(name) for name in infiniband.BYTES.values()},
    }


def line_writer(descriptor: int) -> Write:
    """Return a function that writes whole lines from any thread; it exits the process when nothing reads them."""
    lock = threading.Lock()

    def write(sample: Mapping[str, Any]) -> None:
        line = json.dumps({**sample, "at": time.monotonic()}).encode() + b"\n"
        with lock:
            try:
                while line:
                    line = line[os.write(descriptor, line) :]
            except OSError:
                os._exit(0)

    return write


def main(open_nvml: Callable[[], Nvml] = PyNvml, tree: Tree | None = None) -> NoReturn:
    """Run as the reader process."""
    detached_process.shield()
    parser = argparse.ArgumentParser(description="The reader of a node, started by gpucluster node watch, not by hand.")
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--few", action="store_true")
    options = parser.parse_args()
    write = line_writer(sys.stdout.fileno())
    keys = node_reader.FEW if options.few else tuple(node_reader.QUERIES)
    # The main thread only waits: NVML may hang in any other one, and the process still ends with its parent.
    threading.Thread(target=read_gpus, args=(open_nvml, write, options.interval, keys), daemon=True).start()
    if not options.few:
        threading.Thread(target=read_host, args=(tree or Tree(), write, options.interval), daemon=True).start()
    wait_for_end(options.parent)
    os._exit(0)


if __name__ == "__main__":
    main()
