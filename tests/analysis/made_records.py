"""Certificates for tests, from the example runs: journals of changed lines, and certificates of changed clusters."""

import copy
import functools

import example_runs
from journal_lines import journal_of

from pytest_gpucluster.analysis.certificate import certificate_content, read_certificate, seal
from pytest_gpucluster.journal.journal import encode

DIGEST = "ab" * 32


@functools.cache
def _lines(name):
    return example_runs.lines(name)


def lines(name="accepted"):
    """Return the lines of an example run, to be changed at will. Every GPU and node reports all fields."""
    found = copy.deepcopy(_lines(name))
    for line in found:
        for rank in line["ranks"] if line["type"] == "cluster" else ():
            if rank["gpu"]:
                rank["gpu"] |= {"board_part_number": "692-2G520", "inforom": "G520.0200", "gsp_firmware": "580.95.05"}
    first = next(line for line in found if line["type"] == "test")
    first["measurements"].append(
        {
            "metric": "fabric.active_ports",
            "status": "recorded",
            "value": 2,
            "telemetry": {"0": adapter_telemetry(0), "8": adapter_telemetry(1)},
        }
    )
    return found


def adapter_telemetry(node):
    """Return the telemetry in which a node lists its network adapters."""
    adapters = [
        {"name": f"mlx5_{n}", "board": "MT_838", "guid": f"a0:{node}{n}", "firmware": "28.39", "pci_bus_id": f"0:1{n}"}
        for n in range(2)
    ]
    return {"ports": ["mlx5_0/1"], "adapters": adapters}


def line_of(found, kind):
    return next(line for line in found if line["type"] == kind)


def write_journal(folder, found):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "journal.jsonl"
    path.write_bytes(b"".join(map(encode, found)))
    return path


def record(folder, name, change=lambda _: None):
    """Return the certificate of the accepted run, with its lines changed before."""
    found = lines()
    change(found)
    text, _ = seal(
        certificate_content(journal_of(found), sha256=DIGEST),
        at="2026-01-02T03:04:05Z",
        by="J. Doe",
        note="",
        version="0.1.0",
    )
    path = folder / f"{name}.json"
    path.write_text(text, encoding="utf-8")
    return read_certificate(path)
