"""Files of workloads: a complete one, and broken ones with what is wrong in them."""

from pathlib import Path

import yaml

from pytest_gpucluster.config.workload import KEYS

SECTIONS = ", ".join(dict.fromkeys(key.partition(".")[0] for key in KEYS))
SHIPPED = Path(__file__).parents[1] / "acceptance" / "workloads.yaml"
COLLECTIVES = """\
      collectives:
        {sizes: [64 kB], latency_sizes: [16 B], warmup: 0 s, window: 200 ms, longest: 1 s, tolerance: 300 %}
"""
SEARCH = (
    "{shapes: [64x64x64, 64x128x32], layouts: [nn, nt], look: 10 ms, warmup: 0 s, window: 100 ms, longest: 1 s, "
    "tolerance: 60 %}"
)
FIRST = f"""\
schema_version: 1
profiles:
  cpu:
    matmul: {{sizes: [128, 256], warmup: 0 s, window: 200 ms, longest: 1 s, tolerance: 50 %, search: {SEARCH}}}
    hbm: {{sizes: 8 MiB, warmup: 0 s, window: 200 ms, longest: 1 s, tolerance: 50 %}}
    nccl:
      all_reduce:
        {{sizes: [64 kB], latency_sizes: [8 B], warmup: 0 s, window: 200 ms, longest: 1 s, tolerance: 50 %}}
{COLLECTIVES}    health: {{load: 50 ms, mig: off, product_size: 64}}
"""


def flow(value):
    """Write a value as YAML on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {flow(below)}' for key, below in value.items())}}}"
    return f"[{', '.join(map(flow, value))}]" if isinstance(value, list) else str(value)


# The sections that stand above are what is tried here; the others are as they are shipped, a line each.
SHIPPED_CPU = yaml.load(SHIPPED.read_text(encoding="utf-8"), yaml.BaseLoader)["profiles"]["cpu"]
OTHERS = {name: body for name, body in SHIPPED_CPU.items() if f"\n    {name}:" not in FIRST}
COMPLETE = FIRST + "".join(f"    {name}: {flow(body)}\n" for name, body in OTHERS.items())
NEXT = COMPLETE.count("\n") + 1
"""The line of what is appended."""


def replaced(old, new):
    assert old in COMPLETE
    return COMPLETE.replace(old, new, 1)


BROKEN = [
    ("", "1:1: empty schema_version profiles"),
    ("- 1\n", "1:1: mapping keys"),
    (replaced("schema_version: 1\n", ""), "1:1: schema_version missing schema_version 1"),
    (replaced("schema_version: 1", "schema_version: 2"), "1:17: schema_version '2' 1"),
    ("schema_version: 1\n", "1:1: profiles missing quick full soak cpu sizes"),
    ("schema_version: 1\nprofiles:\n", "2:10: profiles empty"),
    ("schema_version: 1\nprofile: {}\n", "2:1: 'profile' 'profiles'"),
    (replaced("  cpu:", "  cpus:"), "3:3: 'cpus' 'cpu'"),
    (COMPLETE + "  cpu: {}\n", f"{NEXT}:3: duplicate 'cpu' 3"),
    (COMPLETE + "  full:\n", f"{NEXT}:8: 'full' empty"),
    (replaced("    matmul:", "    matmlu:"), "4:5: 'matmlu' 'matmul'"),
    (replaced("{sizes: 8 MiB,", "{size: 8 MiB,"), "5:11: 'size' 'sizes'"),
    (replaced("{sizes: 8 MiB,", "{sizes: 8 MiB, sizes: 8 MiB,"), "5:25: duplicate 'sizes' 5"),
    (
        replaced("      all_reduce:\n        {sizes:", "      {sizes:").replace(COLLECTIVES, ""),
        "7:8: 'sizes'",
        "7:24: 'latency_sizes'",
        "7:46: 'warmup'",
        "7:59: 'window'",
        "7:75: 'longest'",
        "7:89: 'tolerance'",
    ),
    (replaced("    health: {load: 50 ms, mig: off, product_size: 64}", "    health: off"), "11:13: health mapping"),
    (replaced("{load: 50 ms, ", "{"), "3:3: 'cpu' lacks health.load inherits"),
    (
        COMPLETE + "  full: {health: {load: 1 s, mig: off, product_size: 64}, hbm: {sizes: 1 GB}}\n",
        f"{NEXT}:3: 'full' lacks {', '.join(key for key in KEYS if key != 'hbm.sizes' and key[:7] != 'health.')};",
    ),
    (replaced("[128, 256]", "[]"), "4:21: list empty"),
    (replaced("load: 50 ms", "load:"), "11:19: health.load empty"),
    (replaced("[128, 256]", "[128, ~]"), "4:27: matmul.sizes empty"),
    (replaced("load: 50 ms", "load: [50 ms]"), "11:20: health.load list"),
    (replaced("[128, 256]", "[128, {n: 256}]"), "4:27: matmul.sizes mapping"),
    (replaced("sizes: 8 MiB", "sizes: 8388608"), "5:18: hbm.sizes '8388608' '8388608 B'"),
    (replaced("[128, 256]", "[128 B, 256]"), "4:22: matmul.sizes '128 B' 16 65536"),
    (replaced("load: 50 ms", "load: 50 MB"), "11:20: health.load MB s"),
    (replaced("load: 50 ms", "load: 50 msec"), "11:20: health.load 'msec' 'ms'"),
    (replaced("tolerance: 50 %", "tolerance: .nan %"), "4:87: matmul.tolerance '.nan %'"),
    (replaced("warmup: 0 s", "warmup: -1 s"), "4:41: matmul.warmup '-1 s' 0 s 24 h"),
    (replaced("[128, 256]", "[128, 250]"), "4:27: matmul.sizes 250 16 65536"),
    (replaced("[64 kB]", "[64 kB, 128 kB, 64000 B]"), "8:33: nccl.all_reduce.sizes 64000 B 64 kB"),
    (replaced("64x64x64", "64x64"), "4:111: matmul.search.shapes '64x64' 16 65536"),
    (replaced("64x64x64", "64x6e1x64"), "4:111: matmul.search.shapes '64x6e1x64' '6e1' 16 65536"),
    (replaced("64x64x64", "64x64x60"), "4:111: matmul.search.shapes '64x64x60' 60 16 65536"),
    (replaced("64x128x32", "64x64x64"), "4:121: matmul.search.shapes 64x64x64 twice"),
    (replaced("[64x64x64, 64x128x32]", "[]"), "4:110: list empty"),
    (replaced("[nn, nt]", "[nn, row]"), "4:147: matmul.search.layouts 'row' nn nt tn tt"),
    (replaced("look: 10 ms", "look: 10"), "4:158: matmul.search.look '10' '10 s'"),
    (replaced("mig: off", "mig: no"), "11:32: health.mig 'no' off on"),
    (replaced("window: 200 ms", "window: 2 s"), "4:68: matmul.window 2 s matmul.longest 1 s 4"),
    (
        COMPLETE + "  full:\n    inherits: cpu\n    hbm: {window: 1 min}\n",
        f"{NEXT + 2}:19: hbm.window 1 min hbm.longest 1 s 5",
    ),
    (
        COMPLETE.replace("window: 200 ms", "window: 2 s", 1) + "  full: {inherits: cpu}\n  soak: {inherits: full}\n",
        "4:68: matmul.window 2 s matmul.longest 1 s 4",
    ),
    (COMPLETE + "  full: {inherits: quick}\n", f"{NEXT}:20: 'full' inherits 'quick' cpu"),
    (COMPLETE + "  full: {inherits: full}\n", f"{NEXT}:20: 'full' inherits cpu"),
    (
        COMPLETE + "  full: {inherits: quick}\n  quick: {inherits: soak}\n  soak: {inherits: full}\n",
        f"{NEXT}:20: 'full' inherits 'quick' cpu",
        f"{NEXT + 1}:21: 'quick' inherits 'soak' cpu, full",
    ),
    (COMPLETE + "  full: {inherits: cup}\n", f"{NEXT}:20: 'full' inherits 'cup' cpu 'cpu'"),
    (COMPLETE + "  full: {inherits: [cpu]}\n", f"{NEXT}:20: inherits list"),
    (
        COMPLETE.replace("[128, 256]", "[100]").replace("50 ms", "soon").replace("8 B", "7 B").replace("50 %", "0 %"),
        "4:22: matmul.sizes 100 16 65536",
        "4:82: matmul.tolerance '0 %' 0.01 % 300 %",
        "5:79: hbm.tolerance '0 %' 0.01 % 300 %",
        "8:42: nccl.all_reduce.latency_sizes '7 B' 7 B 4 B",
        "8:102: nccl.all_reduce.tolerance '0 %' 0.01 % 300 %",
        "11:20: health.load 'soon'",
    ),
]
