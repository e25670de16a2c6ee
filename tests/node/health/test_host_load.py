"""How busy the host is."""

from __future__ import annotations

import tempfile
from pathlib import Path

from each import of_each

from pytest_gpucluster.node.health.node_reader import read_host_load
from pytest_gpucluster.node.sysfs import Tree

FILES = {
    "proc/loadavg": "12.30 11.00 9.80 3/1234 999\n",
    "proc/stat": "cpu  100 20 30 1000 50 5 6 7 99 9\ncpu0 1 2 3 4\nintr 1\n",
    "proc/meminfo": "MemTotal:       2000 kB\nMemFree:  1 kB\nMemAvailable:    500 kB\n",
    "sys/devices/system/cpu/online": "0-127\n",
}


def plant(root: Path, changes: dict[str, str | None]) -> Tree:
    for name, text in {**FILES, **changes}.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return Tree(root=root)


def test_load_cpus_time_and_memory_are_read(tmp_path: Path) -> None:
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
def test_what_the_kernel_does_not_report_is_none(tmp_path: Path, case: tuple[dict[str, str | None], set[str]]) -> None:
    changes, missing = case
    load = read_host_load(plant(Path(tempfile.mkdtemp(dir=tmp_path)), changes))
    assert {key for key, value in load.items() if value is None} == missing
