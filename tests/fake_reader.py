"""The reader of a node with GPUs and files that are not there. A test puts :func:`command` in its place.

    monkeypatch.setattr(reader, "COMMAND", fake_reader.command(tmp_path, {"GPU-0": {"utilization.gpu": 98}}))

Values are planted as for ``fake_sampler``. The kernel's files are those below the folder ``root``.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":  # a light process is started without the folder of its script
    sys.path.insert(0, str(Path(__file__).parent))

from fake_nvml import HEALTHY_H100


def command(folder, gpus, root=None):
    """Write down the GPUs (None: NVML cannot be opened), and return what is to be started."""
    path = folder / "planted-for-the-reader.json"
    path.write_text(json.dumps(gpus))
    return (sys.executable, __file__, str(path), str(root or folder / "no files"))


def h100(**changes):
    """Return what a busy H100 says, with these changes; a dot in a query's name is written ``__``."""
    told = {query: value for query, value in HEALTHY_H100.items() if isinstance(value, (int, float, tuple))}
    busy = {"memory.used": 76_450_000_000, "nvlink.bytes": {"turns": _growing()}, "processes": []}
    return {**told, **busy, **{name.replace("__", "."): value for name, value in changes.items()}}


def _growing():
    return [{"plain": {"sent": step * 300_000_000_000, "received": step * 290_000_000_000}} for step in range(400)]


if __name__ == "__main__":
    from fake_sampler import _open_nvml

    from pytest_gpucluster.node.health.node_reader import main
    from pytest_gpucluster.node.sysfs import Tree

    planted_gpus = json.loads(Path(sys.argv.pop(1)).read_text())
    planted_root = Path(sys.argv.pop(1))
    main(lambda: _open_nvml(planted_gpus), Tree(root=planted_root))
