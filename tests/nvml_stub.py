"""NVML's library for tests: nvml_stub.c, compiled for a branch of the driver, below the real nvidia-ml-py.

As a program (``python tests/nvml_stub.py``, in ``Driver.environment``) it prints as JSON what the product reads of each
GPU and what the health checks find, of one rank on each; ``python tests/nvml_stub.py count UUID ANSWERS`` what the
counters of a GPU say after each of the lists of answers in the JSON was planted, compared with before.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

from programs import require_program

from pytest_gpucluster.metrics.finding import Identity, decisive
from pytest_gpucluster.node.health import counters, snapshot
from pytest_gpucluster.node.health.checks import examine_gpu
from pytest_gpucluster.node.health.counters import Sources
from pytest_gpucluster.node.kernel_log import KernelLog
from pytest_gpucluster.node.nvml import PyNvml

BRANCHES = {
    525: "525.147.05",
    535: "535.161.08",
    550: "550.90.07",
    570: "570.172.08",
    580: "580.82.07",
}
"""Branch of the driver -> a version of it."""

_LINKS = {
    f"{key}.{link}": value for link in range(18) for key, value in (("link", 1), ("link.version", 6), ("link.end", 2))
}
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "vbios": "96.00.74.00.01",
    "part": "900-2G520-0000-000",
    "inforom": "G520.0200.00.05",
    "ecc": 1,
    "ecc.corrected.volatile": 0,
    "ecc.uncorrected.volatile": 0,
    "ecc.uncorrected.aggregate": 0,
    "rows.corrected": 0,
    "rows.uncorrected": 0,
    "rows.pending": 0,
    "rows.failed": 0,
    "mig": 0,
    "persistence": 1,
    "memory.total": 85_520_809_984,
    "memory.reserved": 600_000_000,
    "memory.used": 520_000_000,
    "clock.1": 1755,
    "clock.2": 2619,
    "clock.max.1": 1980,
    "clock.max.2": 2619,
    "power": 690_000,
    "power.limit": 700_000,
    "power.default": 700_000,
    "temperature.0": 61,
    "temperature.margin": 26,
    "threshold.1": 89,
    "utilization": 100,
    "throttle": 0,
    "pcie.generation": 5,
    "pcie.width": 16,
    "pcie.generation.max": 5,
    "pcie.width.max": 16,
    "pcie.replays": 0,
    "ancestor": 50,
    "link.pci": "00000000:00:00.0",
    "link.errors": 0,
    **_LINKS,
    "field.138.4294967295": 0,
    "field.139.4294967295": 0,
    "field.147": 18,
    "field.230": 0,
    "fabric.state": 3,
    "fabric.status": 0,
    "fabric.mask": 0b10_10_10_10,
}
"""What each healthy H100 SXM answers; the keys are those of nvml_stub.c, numbers in them those of nvml.h."""


class Driver:
    """A driver of one branch with healthy H100s; faults are planted at any time, also while a process reads it."""

    def __init__(self, folder, branch, *, gpus=8):
        library, source = folder / str(branch) / "libnvidia-ml.so.1", Path(__file__).with_suffix(".c")
        if not library.exists():
            library.parent.mkdir(parents=True)
            flags = ["-shared", "-fPIC", f"-DBRANCH={branch}", f"-Wl,-soname,{library.name}"]
            subprocess.run([require_program("cc"), *flags, "-o", str(library), str(source)], check=True)
        self._file = library.parent / "answers.txt"
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "NVML_STUB": str(self._file)}
        self.answers = {"gpus": gpus, "driver": BRANCHES[branch], "gsp": BRANCHES[branch], **H100}
        for gpu in range(gpus):
            self.answers |= {
                f"{gpu}.uuid": uuid(gpu),
                f"{gpu}.serial": f"165012345678{gpu}",
                f"{gpu}.pci": f"00000000:{0x1B + 0x10 * gpu:02X}:00.0",
            }
        self.plant()

    def plant(self, answers=MappingProxyType({})):
        """Change answers, in one step for whoever reads. A key without a number is every GPU's; None removes it."""
        self.answers = {key: value for key, value in {**self.answers, **answers}.items() if value is not None}
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{key} {value}\n" for key, value in self.answers.items()))
        new.replace(self._file)

    def run(self, *arguments, code=0):
        """Run Python with this driver; return its output, after its exit code was compared."""
        command = [sys.executable, *arguments]
        ended = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=100, check=False)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout

    def count(self, uuid, plantings):
        """Return what has changed of a GPU's counters after each of these plantings, by the product's comparison."""
        return json.loads(self.run(__file__, "count", uuid, json.dumps(plantings)))

    def examine(self, *slices):
        """Return what a rank on each GPU that answers, or on each of these MIG slices, reads, misses and finds."""
        return json.loads(self.run(__file__, *slices))


def uuid(gpu):
    return f"GPU-{gpu:08x}-0000-4000-8000-000000000000"


def _examine(gpus, rank, nvml):
    ranks = [
        {
            "rank": number,
            "host": "gpu-00",
            "node_rank": 0,
            "local_rank": number,
            "local_world_size": len(gpus),
            "pid": os.getpid() if number == rank else 0,
            "gpu": {"index": gpu.index, "uuid": gpu.uuid, "pci_bus_id": gpu.pci_bus_id, "name": gpu.name},
        }
        for number, gpu in enumerate(gpus)
    ]
    quiet = KernelLog(source="dmesg")
    sources = snapshot.Sources(nvml=nvml, kernel_log=lambda: quiet, unlisted=lambda _: ())
    look = {"sku": "H100 SXM", "mig": "off", "load": lambda look: look(), "held_bytes": 0}
    found = snapshot.collect(sources, ranks, rank=rank, **look)
    return {
        "gpu": gpus[rank].index,
        "values": dict(found.before.values),
        "missing": {query: missing.kind for query, missing in found.before.missing.items()},
        "wrong": {one.code: one.kind for one in decisive(examine_gpu(found))},
    }


def _count(uuid, plantings):
    file = Path(os.environ["NVML_STUB"])
    healthy, found = file.read_text(), []
    sources = Sources(gpu=Identity(host="gpu-00", uuid=uuid), nvml=PyNvml())
    before = counters.read(sources)
    for answers in plantings:
        file.write_text("".join(f"{key} {value}\n" for key, value in answers.items()) + healthy)
        changes = counters.changes(before, counters.read(sources))
        faults = [fault.code for fault in changes.faults]
        found.append({"changed": changes.changed, "faults": faults, "missing": sorted(changes.missing)})
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["count"]:
        print(json.dumps(_count(sys.argv[2], json.loads(sys.argv[3]))))
        sys.exit()
    _nvml = PyNvml()
    _gpus = [gpu for gpu in map(_nvml.find, sys.argv[1:]) if gpu] or [gpu for gpu in _nvml.gpus() if gpu]
    print(json.dumps([_examine(_gpus, rank, _nvml) for rank in range(len(_gpus))]))
