import pytest
from complaints import in_order, require_complaints
from each import of_each
from hypothesis import given
from hypothesis import strategies as st
from workload_files import BROKEN, COMPLETE, NEXT, SECTIONS, SHIPPED

from pytest_gpucluster.config.workload import KEYS, PROFILES
from pytest_gpucluster.config.workload_loader import Override, find, load
from pytest_gpucluster.errors import OptionError, ThresholdsError


def read(tmp_path, text, profile="cpu", *overrides):
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    given = [Override.parse(override, origin=f"command line: {override}") for override in overrides]
    return load(tmp_path / "my.yaml", profile=profile, overrides=given, name="my.yaml")


def errors_of(tmp_path, text, *overrides, profile="cpu"):
    with pytest.raises(ThresholdsError) as caught:
        read(tmp_path, text, profile, *overrides)
    return str(caught.value).splitlines()


# ---- the shipped file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_each_shipped_profile_is_complete_and_every_value_has_its_line(profile):
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


def test_the_shipped_profiles_measure_what_the_limits_are_about():
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


def test_values_are_kept_as_written_with_their_place(tmp_path):
    record = read(tmp_path, COMPLETE).record
    assert (record.profile, record.file) == ("cpu", "my.yaml")
    assert record.values["matmul.sizes"] == "128, 256"
    assert record.values["hbm.sizes"] == "8 MiB"
    assert record.origins["matmul.sizes"] == "my.yaml:4:21"
    assert record.origins["nccl.all_reduce.latency_sizes"] == "my.yaml:8:41"
    assert read(tmp_path, COMPLETE).workload.hbm.sizes_bytes == (8 * 2**20,), "one value may stand for a list of one"


def test_a_profile_says_what_differs_and_inherits_the_rest(tmp_path):
    text = (
        COMPLETE + "  quick:\n    inherits: cpu\n    hbm: {sizes: 1 GB}\n  full: {inherits: quick, health: {mig: on}}\n"
    )
    full = read(tmp_path, text, "full")
    assert full.workload.hbm.sizes_bytes == (10**9,)
    assert full.workload.hbm.sampling == full.workload.matmul.sampling
    assert (full.workload.health.mig, full.workload.health.product_size) == ("on", 64)
    assert full.record.origins["health.mig"] == f"my.yaml:{NEXT + 3}:41"
    assert full.record.origins["hbm.sizes"] == f"my.yaml:{NEXT + 2}:18"
    assert full.record.origins["matmul.sizes"] == "my.yaml:4:21"
    assert read(tmp_path, text, "cpu").workload.health.mig == "off"


@of_each("case", BROKEN)
def test_what_is_wrong_is_reported_with_its_place_in_the_file_s_order(tmp_path, case):
    text, *wanted = case
    require_complaints(errors_of(tmp_path, text), wanted)


def test_a_file_that_cannot_be_read_and_a_profile_that_it_lacks_are_errors(tmp_path):
    with pytest.raises(ThresholdsError, match=r"none\.yaml:1:1: .*No such file"):
        load(tmp_path / "none.yaml", profile="cpu")
    [error] = errors_of(tmp_path, COMPLETE, profile="full")
    assert in_order(error, "my.yaml: 'full' the file has cpu; --gpucluster-profile")
    without = COMPLETE.replace("  cpu:", "  full:")
    [error] = errors_of(tmp_path, without, profile="cpu")
    assert in_order(error, "my.yaml: 'cpu' the file has full; rehearsal")
    assert "--gpucluster-profile" not in error


MADE_KEYS = "cpu full inherits matmul hbm sizes window nccl all_reduce health mig training layers"
VALUES = st.sampled_from(["1 s", "0 s", "1", "", "~", "[1, 2]", "[]", "8 GiB", "{a: b}", "nan %", "50 %", "off", "64"])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["  ", "    ", "      "]),
            st.sampled_from(MADE_KEYS.split()),
            VALUES,
        ),
        max_size=8,
    )
)
def test_any_file_is_read_or_refused_with_places(tmp_path_factory, made):
    text = "schema_version: 1\nprofiles:\n" + "".join(f"{indent}{key}: {value}\n" for indent, key, value in made)
    path = tmp_path_factory.getbasetemp() / "made.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ThresholdsError, match=r"made\.yaml:\d+:\d+: "):
        load(path, profile="cpu")


# ---- overrides -----------------------------------------------------------------------------------------------------


def test_an_override_is_laid_over_the_profile_in_force(tmp_path):
    loaded = read(
        tmp_path, COMPLETE, "cpu", "matmul.sizes=16,32", "nccl.all_reduce.sizes= 1 GB ,2 GiB", "health.load=1s"
    )
    assert loaded.workload.matmul.sizes == (16, 32)
    assert loaded.workload.all_reduce.sizes == ("1 GB", "2 GiB")
    assert loaded.workload.health.load_seconds == 1.0
    assert loaded.record.values["matmul.sizes"] == "16, 32"
    assert loaded.record.origins["matmul.sizes"] == "command line: matmul.sizes=16,32"
    assert set(loaded.record.overridden) == {
        "matmul.sizes=16, 32",
        "nccl.all_reduce.sizes=1 GB, 2 GiB",
        "health.load=1s",
    }


@of_each(
    "case",
    [
        ("matmul.sizes", "'matmul.sizes' KEY=VALUE"),
        ("hbm.size=16", "'hbm.size' hbm hbm.sizes, hbm.warmup, 'hbm.sizes'?"),
        ("links=16", "'links' links.size, links.round, 'links.size'?"),
        ("links.nowhere.size=1", "'links.nowhere.size' links.size, 'links.size'?"),
        ("=16", f"'' {SECTIONS}"),
        ("matmul.sizes=", "matmul.sizes: '' 16 16 65536"),
        ("matmul.sizes=16,17,x", "matmul.sizes: 17 16 65536; matmul.sizes: 'x' 16 65536"),
        ("matmul.sizes=16,16", "matmul.sizes: 16 twice"),
        ("matmul.window=5", "matmul.window: '5' '5 s'"),
        ("health.mig=maybe", "health.mig: 'maybe' off on"),
    ],
)
def test_an_override_is_read_as_strictly_as_the_file(case):
    text, words = case
    with pytest.raises(OptionError) as caught:
        Override.parse(text)
    assert in_order(str(caught.value), words)


def test_an_override_that_contradicts_the_file_names_both(tmp_path):
    for text, words in {
        "matmul.window=2s": "matmul.window 2s matmul.longest 1 s (my.yaml:4:71)",
        "hbm.longest=0.1 s": "hbm.window 200 ms hbm.longest 0.1 s (my.yaml:5:46)",
    }.items():
        [error] = errors_of(tmp_path, COMPLETE, text)
        assert error.startswith(f"command line: {text}: ")
        assert in_order(error, words)
    assert read(tmp_path, COMPLETE, "cpu", "matmul.window=2s", "matmul.longest=3s").workload.matmul.sampling


# ---- finding -------------------------------------------------------------------------------------------------------


def test_the_file_is_the_nearest_one_above_the_tests(tmp_path):
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
    # Tests outside of the root have their file in their own folder.
    outside = tmp_path / "outside" / "deep"
    outside.mkdir(parents=True)
    (tmp_path / "outside" / "workloads.yaml").write_text("")
    assert find(outside, root) is None
    (outside / "workloads.yaml").write_text("")
    assert find(outside, root) == outside / "workloads.yaml"
