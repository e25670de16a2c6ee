from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import OptionError, ThresholdsError
from pytest_gpucluster.workload_file import Loaded, Override, find, key_tree, load
from pytest_gpucluster.workloads import KEYS, PROFILES

SECTIONS = ", ".join(dict.fromkeys(key.partition(".")[0] for key in KEYS))
SHIPPED = Path(__file__).parent.parent / "acceptance" / "workloads.yaml"
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


def flow(value: Any) -> str:
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


def read(tmp_path: Path, text: str, profile: str = "cpu", *overrides: str) -> Loaded:
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    given = [Override.parse(override, origin=f"command line: {override}") for override in overrides]
    return load(tmp_path / "my.yaml", profile=profile, overrides=given, name="my.yaml")


def errors_of(tmp_path: Path, text: str, *overrides: str, profile: str = "cpu") -> list[str]:
    with pytest.raises(ThresholdsError) as caught:
        read(tmp_path, text, profile, *overrides)
    return str(caught.value).splitlines()


# ---- the shipped file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_each_shipped_profile_is_complete_and_every_value_has_its_line(profile: str) -> None:
    loaded = load(SHIPPED, profile=profile, name="acceptance/workloads.yaml")
    assert loaded.workload.profile == profile
    lines = SHIPPED.read_text(encoding="utf-8").splitlines()
    for key in KEYS:
        file, line, column = loaded.record.origins[key].split(":")
        assert file == "acceptance/workloads.yaml"
        there = lines[int(line) - 1][int(column) - 1 :]
        first = loaded.record.values[key].split(",")[0]
        assert there.lstrip("[\"'").startswith(first), (key, there)
    assert loaded.record.overridden == []


def test_the_shipped_profiles_measure_what_the_limits_are_about() -> None:
    quick, full, soak, cpu = (load(SHIPPED, profile=profile).workload for profile in PROFILES)
    for profile in (quick, full, soak):
        assert profile.matmul.sizes == (4096, 8192, 16384)
        assert profile.matmul.sampling.tolerance_ratio == 0.01
    assert set(quick.all_reduce.sizes) == {"1 MB", "10 MB", "100 MB", "1 GB"}
    assert set(full.all_reduce.sizes) == {*quick.all_reduce.sizes, "512 MiB", "1 GiB", "2 GiB", "4 GiB", "8 GiB"}
    assert (max(quick.hbm.sizes_bytes), max(full.hbm.sizes_bytes)) == (8 * 2**30, 32 * 10**9)
    # A shape that was found elsewhere to be the fastest, and a square, in both layouts that models multiply in.
    for profile in (quick, full, soak):
        assert {(8192, 8192, 8192), (2048, 2048, 13312)} <= set(profile.matmul_search.shapes)
        assert {"nn", "nt"} <= set(profile.matmul_search.layouts)
    assert min(part.sampling.window_seconds for part in (soak.matmul, soak.hbm, soak.all_reduce)) >= 60
    assert max(part.sampling.longest_seconds for part in (cpu.matmul, cpu.hbm, cpu.all_reduce)) <= 3


# ---- reading -------------------------------------------------------------------------------------------------------


def test_values_are_kept_as_written_with_their_place(tmp_path: Path) -> None:
    record = read(tmp_path, COMPLETE).record
    assert (record.profile, record.file) == ("cpu", "my.yaml")
    assert record.values["matmul.sizes"] == "128, 256"
    assert record.values["hbm.sizes"] == "8 MiB"
    assert record.origins["matmul.sizes"] == "my.yaml:4:21"
    assert record.origins["nccl.all_reduce.latency_sizes"] == "my.yaml:8:41"


def test_one_value_may_stand_for_a_list_of_one(tmp_path: Path) -> None:
    assert read(tmp_path, COMPLETE).workload.hbm.sizes_bytes == (8 * 2**20,)


def test_a_profile_says_what_differs_and_inherits_the_rest(tmp_path: Path) -> None:
    text = (
        COMPLETE + "  full: {inherits: quick, health: {mig: on}}\n  quick:\n    inherits: cpu\n    hbm: {sizes: 1 GB}\n"
    )
    full = read(tmp_path, text, "full")
    assert full.workload.hbm.sizes_bytes == (10**9,)
    assert full.workload.hbm.sampling == full.workload.matmul.sampling
    assert (full.workload.health.mig, full.workload.health.product_size) == ("on", 64)
    assert full.record.origins["health.mig"] == f"my.yaml:{NEXT}:41"
    assert full.record.origins["hbm.sizes"] == f"my.yaml:{NEXT + 3}:18"
    assert full.record.origins["matmul.sizes"] == "my.yaml:4:21"
    assert read(tmp_path, text, "cpu").workload.health.mig == "off"


def replaced(old: str, new: str) -> str:
    assert old in COMPLETE
    return COMPLETE.replace(old, new, 1)


BROKEN = {
    "empty file": ("", ["1:1: the file is empty; it needs schema_version and profiles"]),
    "no mapping": ("- 1\n", ["1:1: the file is no mapping; it must be keys with values"]),
    "no version": (
        replaced("schema_version: 1\n", ""),
        ["1:1: schema_version is missing; this version reads schema_version: 1"],
    ),
    "newer version": (
        replaced("schema_version: 1", "schema_version: 2"),
        ["1:17: schema_version is '2'; this version reads 1"],
    ),
    "no profiles": (
        "schema_version: 1\n",
        ["1:1: profiles is missing; it maps quick, full, soak, cpu to sizes and times"],
    ),
    "empty profiles": ("schema_version: 1\nprofiles:\n", ["2:10: profiles is empty; it must be keys with values"]),
    "unknown top key": (
        "schema_version: 1\nprofile: {}\n",
        ["2:1: unknown key 'profile'; allowed are schema_version, profiles; did you mean 'profiles'?"],
    ),
    "unknown profile": (
        replaced("  cpu:", "  cpus:"),
        ["3:3: unknown key 'cpus'; allowed are quick, full, soak, cpu; did you mean 'cpu'?"],
    ),
    "a profile twice": (COMPLETE + "  cpu: {}\n", [f"{NEXT}:3: duplicate key 'cpu'; the first one is at line 3"]),
    "empty profile": (
        COMPLETE + "  full:\n",
        [f"{NEXT}:8: the profile 'full' is empty; it must be keys with values"],
    ),
    "unknown section": (
        replaced("    matmul:", "    matmlu:"),
        [f"4:5: unknown key 'matmlu'; allowed are inherits, {', '.join(key_tree())}; did you mean 'matmul'?"],
    ),
    "unknown key": (
        replaced("{sizes: 8 MiB,", "{size: 8 MiB,"),
        ["5:11: unknown key 'size'; allowed are sizes, warmup, window, longest, tolerance; did you mean 'sizes'?"],
    ),
    "duplicate key": (
        replaced("{sizes: 8 MiB,", "{sizes: 8 MiB, sizes: 8 MiB,"),
        ["5:25: duplicate key 'sizes'; the first one is at line 5"],
    ),
    "a section without its level": (
        replaced("      all_reduce:\n        {sizes:", "      {sizes:").replace(COLLECTIVES, ""),
        [
            f"7:{column}: unknown key {key!r}; allowed are all_reduce, collectives"
            for column, key in (
                *((8, "sizes"), (24, "latency_sizes"), (46, "warmup")),
                *((59, "window"), (75, "longest"), (89, "tolerance")),
            )
        ],
    ),
    "a value for a section": (
        replaced("    health: {load: 50 ms, mig: off, product_size: 64}", "    health: off"),
        ["11:13: health is no mapping; it must be keys with values"],
    ),
    "a missing key": (
        replaced("{load: 50 ms, ", "{"),
        ["3:3: the profile 'cpu' lacks health.load; write them, or inherits: another profile"],
    ),
    "missing sections": (
        COMPLETE + "  full: {health: {load: 1 s, mig: off, product_size: 64}, hbm: {sizes: 1 GB}}\n",
        [
            f"{NEXT}:3: the profile 'full' lacks "
            + ", ".join(key for key in KEYS if key != "hbm.sizes" and not key.startswith("health."))
            + "; write them, or inherits: another profile"
        ],
    ),
    "empty list": (replaced("[128, 256]", "[]"), ["4:21: the list is empty"]),
    "empty value": (replaced("load: 50 ms", "load:"), ["11:19: health.load is empty"]),
    "an empty item": (replaced("[128, 256]", "[128, ~]"), ["4:27: matmul.sizes is empty"]),
    "a list for a value": (
        replaced("load: 50 ms", "load: [50 ms]"),
        ["11:20: health.load must be a single value, not a list"],
    ),
    "a mapping in a list": (
        replaced("[128, 256]", "[128, {n: 256}]"),
        ["4:27: matmul.sizes must be a single value, not a mapping"],
    ),
    "no unit": (
        replaced("sizes: 8 MiB", "sizes: 8388608"),
        ["5:18: hbm.sizes: '8388608' has no unit: write '8388608 B'"],
    ),
    "a unit where none is": (
        replaced("[128, 256]", "[128 B, 256]"),
        ["4:22: matmul.sizes: '128 B' is not a multiple of 16 from 16 to 65536, in plain digits"],
    ),
    "wrong unit": (
        replaced("load: 50 ms", "load: 50 MB"),
        ["11:20: health.load: MB is a unit of amount of data; s or another unit of time is needed"],
    ),
    "unknown unit": (
        replaced("load: 50 ms", "load: 50 msec"),
        ["11:20: health.load: unknown unit 'msec'; did you mean 'ms'?"],
    ),
    "not a number": (
        replaced("tolerance: 50 %", "tolerance: .nan %"),
        [
            "4:87: matmul.tolerance: '.nan %' is no quantity: write a decimal number and a unit, such as '400 %'",
        ],
    ),
    "negative": (
        replaced("warmup: 0 s", "warmup: -1 s"),
        ["4:41: matmul.warmup: '-1 s' is not a time from 0 s to 24 h"],
    ),
    "no multiple": (
        replaced("[128, 256]", "[128, 250]"),
        ["4:27: matmul.sizes: 250 is not a multiple of 16 from 16 to 65536"],
    ),
    "a size twice": (
        replaced("[64 kB]", "[64 kB, 128 kB, 64000 B]"),
        ["8:33: nccl.all_reduce.sizes: 64000 B is the same as 64 kB; each value is measured once"],
    ),
    "a shape of two numbers": (
        replaced("64x64x64", "64x64"),
        [
            "4:111: matmul.search.shapes: '64x64' is not mxnxk, each a multiple of 16 from 16 to 65536",
        ],
    ),
    "a shape with a number that is none": (
        replaced("64x64x64", "64x6e1x64"),
        [
            "4:111: matmul.search.shapes: '64x6e1x64' is not mxnxk: '6e1' is not a multiple of 16 from 16 to 65536, in"
            " plain digits",
        ],
    ),
    "a shape that is no multiple": (
        replaced("64x64x64", "64x64x60"),
        [
            "4:111: matmul.search.shapes: '64x64x60' is not mxnxk: 60 is not a multiple of 16 from 16 to 65536",
        ],
    ),
    "a shape twice": (
        replaced("64x128x32", "64x64x64"),
        ["4:121: matmul.search.shapes: 64x64x64 comes twice; each value is measured once"],
    ),
    "no shape": (replaced("[64x64x64, 64x128x32]", "[]"), ["4:110: the list is empty"]),
    "a layout that is none": (
        replaced("[nn, nt]", "[nn, row]"),
        ["4:147: matmul.search.layouts: 'row' is not nn or nt or tn or tt"],
    ),
    "a look without a unit": (
        replaced("look: 10 ms", "look: 10"),
        ["4:158: matmul.search.look: '10' has no unit: write '10 s'"],
    ),
    "a word that is none": (
        replaced("mig: off", "mig: no"),
        ["11:32: health.mig: 'no' is not off or on"],
    ),
    "a window longer than its longest time": (
        replaced("window: 200 ms", "window: 2 s"),
        ["4:68: matmul.window is 2 s, and matmul.longest, which must not be shorter, is 1 s (line 4)"],
    ),
    "a window longer than an inherited longest time": (
        COMPLETE + "  full:\n    inherits: cpu\n    hbm: {window: 1 min}\n",
        [f"{NEXT + 2}:19: hbm.window is 1 min, and hbm.longest, which must not be shorter, is 1 s (line 5)"],
    ),
    "a window longer than its longest time in a profile that others inherit": (
        COMPLETE.replace("window: 200 ms", "window: 2 s", 1) + "  full: {inherits: cpu}\n  soak: {inherits: full}\n",
        ["4:68: matmul.window is 2 s, and matmul.longest, which must not be shorter, is 1 s (line 4)"],
    ),
    "inherits from nobody": (
        COMPLETE + "  full: {inherits: quick}\n",
        [f"{NEXT}:20: 'full' inherits the unknown profile 'quick'; allowed are cpu"],
    ),
    "inherits from itself": (
        COMPLETE + "  full: {inherits: full}\n",
        [f"{NEXT}:20: 'full' inherits itself; allowed are cpu"],
    ),
    "inherits in a circle": (
        COMPLETE + "  full: {inherits: quick}\n  quick: {inherits: soak}\n  soak: {inherits: full}\n",
        [f"{NEXT + 2}:20: soak inherits full inherits quick inherits soak: no profile is there to inherit from"],
    ),
    "inherits a misspelt profile": (
        COMPLETE + "  full: {inherits: cup}\n",
        [f"{NEXT}:20: 'full' inherits the unknown profile 'cup'; allowed are cpu; did you mean 'cpu'?"],
    ),
    "inherits from many": (
        COMPLETE + "  full: {inherits: [cpu]}\n",
        [f"{NEXT}:20: inherits must be a single value, not a list"],
    ),
    "all at once": (
        COMPLETE.replace("[128, 256]", "[100]").replace("50 ms", "soon").replace("8 B", "7 B").replace("50 %", "0 %"),
        [
            "4:22: matmul.sizes: 100 is not a multiple of 16 from 16 to 65536",
            *(
                f"{place}: {section}.tolerance: '0 %' is not a ratio from 0.01 % to 300 %"
                for place, section in (("4:82", "matmul"), ("5:79", "hbm"), ("8:102", "nccl.all_reduce"))
            ),
            "8:42: nccl.all_reduce.latency_sizes: '7 B' is 7 B, which is no multiple of 4 B",
            "11:20: health.load: 'soon' is no quantity: write a decimal number and a unit, such as '400 s'",
        ],
    ),
}


@pytest.mark.parametrize(("text", "expected"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_is_told_with_its_place_and_what_is_allowed(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    told = errors_of(tmp_path, text)
    assert sorted(told) == sorted(f"my.yaml:{line}" for line in expected)


def test_the_errors_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    places = [tuple(map(int, line.split(":")[1:3])) for line in errors_of(tmp_path, BROKEN["all at once"][0])]
    assert places == sorted(places)
    assert len(places) == 6


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ThresholdsError, match=r"none\.yaml:1:1: the file cannot be read: No such file"):
        load(tmp_path / "none.yaml", profile="cpu")


def test_a_profile_that_the_file_lacks_is_told(tmp_path: Path) -> None:
    assert errors_of(tmp_path, COMPLETE, profile="full") == [
        "my.yaml: the profile 'full' is asked for, and the file has cpu; add it to the file, or choose another with"
        " --gpucluster-profile"
    ]
    without = COMPLETE.replace("  cpu:", "  full:")
    assert errors_of(tmp_path, without, profile="cpu") == [
        "my.yaml: the profile 'cpu' is asked for, and the file has full; add it to the file: a rehearsal on cpu takes"
        " no other"
    ]


VALUES = st.sampled_from(["1 s", "0 s", "1", "", "~", "[1, 2]", "[]", "8 GiB", "{a: b}", "nan %", "50 %", "off", "64"])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["  ", "    ", "      "]),
            st.sampled_from(
                [
                    "cpu",
                    "full",
                    "inherits",
                    "matmul",
                    "hbm",
                    "sizes",
                    "window",
                    "nccl",
                    "all_reduce",
                    "health",
                    "mig",
                    "training",
                    "layers",
                ]
            ),
            VALUES,
        ),
        max_size=8,
    )
)
def test_any_file_is_read_or_refused_with_places(tmp_path_factory: pytest.TempPathFactory, made: list[Any]) -> None:
    text = "schema_version: 1\nprofiles:\n" + "".join(f"{indent}{key}: {value}\n" for indent, key, value in made)
    path = tmp_path_factory.getbasetemp() / "made.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ThresholdsError, match=r"made\.yaml:\d+:\d+: "):
        load(path, profile="cpu")


# ---- overrides -----------------------------------------------------------------------------------------------------


def test_an_override_is_laid_over_the_profile_in_force(tmp_path: Path) -> None:
    loaded = read(
        tmp_path, COMPLETE, "cpu", "matmul.sizes=16,32", "nccl.all_reduce.sizes= 1 GB ,2 GiB", "health.load=1s"
    )
    assert loaded.workload.matmul.sizes == (16, 32)
    assert loaded.workload.all_reduce.sizes == ("1 GB", "2 GiB")
    assert loaded.workload.health.load_seconds == 1.0
    assert loaded.record.values["matmul.sizes"] == "16, 32"
    assert loaded.record.origins["matmul.sizes"] == "command line: matmul.sizes=16,32"
    assert loaded.record.overridden == ["matmul.sizes=16, 32", "nccl.all_reduce.sizes=1 GB, 2 GiB", "health.load=1s"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "matmul.sizes",
            "'matmul.sizes' is no KEY=VALUE, such as matmul.sizes=8192,16384 or matmul.window=5s",
        ),
        (
            "hbm.size=16",
            "unknown key 'hbm.size'; allowed in hbm are hbm.sizes, hbm.warmup, hbm.window, hbm.longest, hbm.tolerance; "
            "did you mean 'hbm.sizes'?",
        ),
        (
            "links=16",
            "unknown key 'links'; allowed in links are links.size, links.round, links.repeats; "
            "did you mean 'links.size'?",
        ),
        (
            "links.nowhere.size=1",
            "unknown key 'links.nowhere.size'; allowed in links are links.size, links.round, links.repeats; "
            "did you mean 'links.size'?",
        ),
        ("=16", f"unknown key ''; allowed are keys of {SECTIONS}, such as matmul.sizes"),
        ("matmul.sizes=", "matmul.sizes: '' is not a multiple of 16 from 16 to 65536, in plain digits"),
        (
            "matmul.sizes=16,17,x",
            "matmul.sizes: 17 is not a multiple of 16 from 16 to 65536;"
            " matmul.sizes: 'x' is not a multiple of 16 from 16 to 65536, in plain digits",
        ),
        ("matmul.sizes=16,16", "matmul.sizes: 16 comes twice; each value is measured once"),
        ("matmul.window=5", "matmul.window: '5' has no unit: write '5 s'"),
        ("health.mig=maybe", "health.mig: 'maybe' is not off or on"),
    ],
    ids=[
        *("no value", "unknown key", "a section", "unknown section", "no key", "empty", "two wrong items"),
        *("an item twice", "no unit", "no such word"),
    ],
)
def test_an_override_is_read_as_strictly_as_the_file(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Override.parse(text)
    assert str(caught.value) == message


def test_an_override_that_contradicts_the_file_names_both(tmp_path: Path) -> None:
    assert errors_of(tmp_path, COMPLETE, "matmul.window=2s") == [
        "command line: matmul.window=2s: matmul.window is 2s, and matmul.longest, which must not be shorter,"
        " is 1 s (my.yaml:4:71)"
    ]
    assert errors_of(tmp_path, COMPLETE, "hbm.longest=0.1 s") == [
        "command line: hbm.longest=0.1 s: hbm.window is 200 ms, and hbm.longest, which must not be shorter,"
        " is 0.1 s (my.yaml:5:46)"
    ]
    assert read(tmp_path, COMPLETE, "cpu", "matmul.window=2s", "matmul.longest=3s").workload.matmul.sampling


def test_an_override_made_by_hand_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(COMPLETE)
    loaded = load(tmp_path / "my.yaml", profile="cpu", overrides=[Override.parse("health.mig=on")])
    assert loaded.record.origins["health.mig"] == "override health.mig=on"
    assert loaded.record.file == str(tmp_path / "my.yaml")


# ---- finding -------------------------------------------------------------------------------------------------------


def test_the_file_is_the_nearest_one_above_the_tests(tmp_path: Path) -> None:
    root, deep = tmp_path / "root", tmp_path / "root" / "a" / "b"
    deep.mkdir(parents=True)
    assert find(deep, root) is None
    (tmp_path / "workloads.yaml").write_text("")
    assert find(deep, root) is None
    (root / "workloads.yaml").write_text("")
    assert find(deep, root) == root / "workloads.yaml"
    (root / "a" / "workloads.yaml").write_text("")
    assert find(deep, root) == root / "a" / "workloads.yaml"
    (deep / "workloads.yaml").mkdir()
    assert find(deep, root) == root / "a" / "workloads.yaml"


def test_tests_outside_the_root_have_their_file_beside_them(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside" / "deep"
    root.mkdir()
    outside.mkdir(parents=True)
    (tmp_path / "outside" / "workloads.yaml").write_text("")
    assert find(outside, root) is None
    (outside / "workloads.yaml").write_text("")
    assert find(outside, root) == outside / "workloads.yaml"
