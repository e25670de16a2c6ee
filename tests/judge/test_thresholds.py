from pathlib import Path

import pytest
from complaints import require_complaints
from each import of_each

from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.judge import loader
from pytest_gpucluster.metrics.measurement import known

BUSBW, LATENCY = "nccl.all_reduce.busbw", "nccl.all_reduce.latency"


def entry(text, *, sku="H100 SXM", metric="matmul.bf16.tflops"):
    """Wrap one entry, given in flow style, into a whole file; it starts at line 5, column 27 for bf16."""
    return f"schema_version: 1\nskus:\n  {sku}:\n    limits:\n      {metric}: {text}\n"


def read(tmp_path, *files, shipped=False):
    paths = [loader.shipped_path()] if shipped else []
    for number, text in enumerate(files):
        paths.append(tmp_path / f"limits{number}.yaml")
        paths[-1].write_text(text, encoding="utf-8")
    return loader.load(*paths)


OK = "min: 700 TFLOPS, source: us"
EVERY_SKU = "schema_version: 1\nevery_sku: {limits: {%s}}\n"
RATIO = "min_ratio_to_median: 75 %"
BROKEN = [
    (
        f"schema_version: 1\ndefaults: {{{BUSBW}: {{{RATIO}}}}}\nskus: {{H200: {{nvml_name: mine}}}}\n",
        "2:35: min_ratio_to_median ratio_source",
    ),
    (entry("{" + OK + ", min_ratio_to_median: none}"), "5:78: min_ratio_to_median 'none'"),
    (
        entry("{" + OK + "}", metric="matmul.fp16.tflops, matmul.bf61.tflops"),
        "5:7: 'matmul.bf61.tflops' 'matmul.bf16.tflops'",
    ),
    (entry("{" + OK + "}", metric="matmul.bf16.tflops, matmul.bf16.tflops"), "5:7: duplicate 'matmul.bf16.tflops'"),
    ("", "1:1: empty schema_version every_sku skus"),
    ("# nothing\n", "1:1: empty schema_version every_sku skus"),
    ("- 1\n", "1:1: mapping keys"),
    ("schema_version: 1\n", "1:1: skus missing limits"),
    ("skus: {H200: {nvml_name: mine}}\n", "1:1: schema_version missing schema_version 1"),
    (entry("{" + OK + "}").replace(": 1", ": 2", 1), "1:17: schema_version '2' 1"),
    ("schema_version: 1\nevery_sku: {limit: {}}\n", "2:13: 'limit' 'limits'"),
    ("schema_version: 1\nevery_sku:\n", "2:11: every_sku empty"),
    (EVERY_SKU % ("matmul.bf16.tflops: {" + OK + "}"), "2:22: matmul.bf16.tflops peak limits under skus"),
    (entry("{" + OK + "}").replace(": 1", ": 01", 1), "1:17: schema_version '01' 1"),
    ("schema_version: 1\nskus:\n", "2:6: skus empty"),
    ("schema_version: 1\nsku: {}\n", "2:1: 'sku' 'skus'"),
    (entry("{" + OK + "}", sku="H100 SMX"), "3:3: 'H100 SMX' nvml_name 'H100 SXM'"),
    ("schema_version: 1\nskus:\n  H200:\n", "3:8: 'H200' empty"),
    (entry("{" + OK + "}", metric="matmul.bf61.tflops"), "5:7: 'matmul.bf61.tflops' 'matmul.bf16.tflops'"),
    (entry("{mim: 700 TFLOPS, source: us}"), "5:28: 'mim' 'min'"),
    (entry("{" + OK + ", min: 800 TFLOPS}"), "5:57: duplicate 'min' 5"),
    (
        entry("{" + OK + "}") + "      matmul.bf16.tflops: {min: 1 TFLOPS, source: us}\n",
        "6:7: duplicate 'matmul.bf16.tflops' 5",
    ),
    (entry("{<<: {" + OK + "}}"), "5:28: '<<'"),
    (entry("{min: 400 gb/s, source: us}", metric=BUSBW), "5:36: min 'gb/s' 'GB/s' 'Gb/s'"),
    (entry("{min: 400 GiB, source: us}", metric=BUSBW), "5:36: min GiB GB/s"),
    (entry("{min: 700, source: us}"), "5:33: min '700' '700 TFLOPS'"),
    (entry("{min: .nan TFLOPS, source: us}"), "5:33: min '.nan TFLOPS'"),
    (entry("{min: -1 TFLOPS, source: us}"), "5:33: min -1 TFLOPS above"),
    (entry("{min: 0 TFLOPS, source: us}"), "5:33: min 0 TFLOPS above"),
    (entry("{min: , source: us}"), "5:33: min empty"),
    (entry("{min: 700 TFLOPS, source: ~}"), "5:53: source empty"),
    (entry("{min: 700 TFLOPS}"), "5:27: source missing"),
    (entry("{source: us}"), "5:27: matmul.bf16.tflops record_only"),
    (entry("{max: 700 TFLOPS, source: us}"), "5:27: matmul.bf16.tflops min"),
    (entry("{min: 1 us, source: us}", metric=LATENCY), "5:32: nccl.all_reduce.latency max"),
    (entry("{min: 800 TFLOPS, max: 700 TFLOPS, source: us}"), "5:33: min 800 TFLOPS above max 700 TFLOPS"),
    (entry("{min: 990 TFLOPS, source: us}"), "5:33: min 990 TFLOPS above 989 TFLOPS H100 despite_peak"),
    (entry("{min: 800 GB/s, source: us}", metric=BUSBW), "5:36: min 800 GB/s above 1.1 450 GB/s H100 despite_peak"),
    (entry("{min: 2 MB/s, source: us}", metric="hbm.copy.bandwidth"), "5:33: min 2 MB/s under 5 % 3.35 TB/s H100"),
    (entry("{min: 1e999 TFLOPS, source: us}"), "5:33: min '1e999 TFLOPS'"),
    (entry("{max: -1 us, source: us}", metric=LATENCY), "5:38: max -1 us"),
    (entry("{max: -0 us, source: us}", metric=LATENCY), "5:38: max -0 us"),
    (entry("{min_ratio_to_median: 0.75, source: us}"), "5:49: min_ratio_to_median '0.75' '0.75 ratio'"),
    (entry("{min_ratio_to_median: 75, source: us}"), "5:49: min_ratio_to_median '75' '75 %'"),
    (entry("{min_ratio_to_median: 75 TFLOPS, source: us}"), "5:49: min_ratio_to_median TFLOPS %"),
    (entry("{min_ratio_to_median: 100.1 %, source: us}"), "5:49: min_ratio_to_median 100.1 % 5 % 100 %"),
    (entry("{min_ratio_to_median: 0.75 %, source: us}"), "5:49: min_ratio_to_median 0.75 % 5 % 100 %"),
    (entry("{min_ratio_to_median: -75 %, source: us}"), "5:49: min_ratio_to_median -75 % 5 % 100 %"),
    (entry("{min_ratio_to_median: , source: us}"), "5:49: min_ratio_to_median empty"),
    (entry("{min_ratio_to_median: 75 %}"), "5:27: source missing"),
    (entry("{min_ratio_to_median: 75 %, source: us}", metric="inventory.ranks"), "5:25: min_ratio_to_median"),
    (entry("{expect_transport: NET/IB, source: us}", metric=BUSBW), "5:30: nccl.all_reduce.busbw record_only"),
    (entry("{min: 400 GB/s, source: us, expect_transport: }", metric=BUSBW), "5:76: expect_transport empty"),
    (entry("{min: 400 GB/s, source: us, expect_transport: []}", metric=BUSBW), "5:76: list empty"),
    (entry("{min: 400 GB/s, source: us, expect_transport: [P2P, P2P]}", metric=BUSBW), "5:82: 'P2P' twice"),
    (entry("{min: 400 GB/s, source: us, expect_transport: {NET: IB}}", metric=BUSBW), "5:76: expect_transport mapping"),
    (
        entry("{record_only: why, min_ratio_to_median: 75 %, expect_transport: NET/IB}"),
        "5:46: min_ratio_to_median record_only exclude",
        "5:73: expect_transport record_only exclude",
    ),
    (entry("{min: 460 TFLOPS, expected: 60, source: us}"), "5:55: expected '60' '60 TFLOPS'"),
    (entry("{min: 460 TFLOPS, expected: 60 GB/s, source: us}"), "5:55: expected GB/s TFLOPS"),
    (entry("{min: 460 TFLOPS, expected: 0 TFLOPS, source: us}"), "5:55: expected 0 TFLOPS above"),
    (entry("{min: 700 TFLOPS, expected: 690 TFLOPS, source: us}"), "5:55: expected 690 TFLOPS below min 700 TFLOPS"),
    (entry("{max: 20 us, expected: 25 us, source: us}", metric=LATENCY), "5:55: expected 25 us above max 20 us"),
    (entry("{min: 460 TFLOPS, expected: 990 TFLOPS, source: us}"), "5:55: expected 990 TFLOPS above 989 TFLOPS H100"),
    (entry("{min_ratio_to_median: 75 %, expected: 1 TFLOPS, source: us}"), "5:65: expected 1 TFLOPS under 5 % 989"),
    (entry("{expected: 700 TFLOPS, source: us}"), "5:27: matmul.bf16.tflops record_only expected"),
    (entry("{record_only: why, expected: 700 TFLOPS}"), "5:46: expected record_only exclude"),
    (
        entry(
            "[{when: {wrld_size: 8}, min: 400 Gbs, source: us}, {when: {nnodes: 0}, max: 5, sorce: us}]",
            metric="nccl.all_reduce.busbw",
        ),
        "5:39: 'wrld_size' 'world_size'",
        "5:59: min 'Gbs' 'GB/s'",
        "5:97: nnodes '0' 1",
        "5:106: max '5' '5 GB/s'",
        "5:109: 'sorce' 'source'",
    ),
    (entry("{min: 400 Gbs}", metric="nccl.all_reduce.bsbw"), "5:7: 'nccl.all_reduce.bsbw' 'nccl.all_reduce.busbw'"),
    (
        f"schema_version: 1\ndefaults: {{{BUSBW}: {{{RATIO}, ratio_source: us}}}}\n"
        f"skus: {{H200: {{limits: {{{BUSBW}: {{min_ratio_to_median: none, source: us}}}}}}}}\n",
        f"3:47: no limit {BUSBW}",
    ),
    (
        entry("{min: 990 TFLOPS, max: 5 s, source: us}"),
        "5:33: min 990 TFLOPS above 989 TFLOPS H100 despite_peak",
        "5:50: max s TFLOPS",
    ),
    (entry("{record_only: why, min: 700 TFLOPS}"), "5:46: min record_only exclude"),
    (entry("{record_only: ''}"), "5:41: record_only empty"),
    (entry("{min: [700 TFLOPS], source: us}"), "5:33: min list"),
    (entry("[]"), "5:27: list empty"),
    (entry("{when: {wrld_size: 8}, " + OK + "}"), "5:35: 'wrld_size' 'world_size'"),
    (entry("{when: {labels: {size: 1 GB}}, " + OK + "}"), "5:44: size when under"),
    (entry("{when: {size: large}, " + OK + "}"), "5:41: size 'large' 1 GB"),
    (entry("{when: {size: 1 GB/s}, " + OK + "}"), "5:41: size '1 GB/s' 1 GB"),
    (entry("{when: {world_size: 1.5 or more}, " + OK + "}"), "5:47: world_size '1.5 or more' 1"),
    (entry("{when: {size: 1 to 2 GB}, " + OK + "}"), "5:41: size '1 to 2 GB' 1 GB"),
    (entry("{when: {world_size: 8 to 2}, " + OK + "}"), "5:47: world_size '8 to 2'"),
    ("schema_version: 1\nevery_sku:\n  limits:\n    size: >= 1 GB\n", "4:12: expected '=' 'X or more'"),
    (entry("[{when: {world_size: 8}, " + OK + "}, {when: {nnodes: 1}, " + OK + "}]"), "5:82: nnodes 1 5 world_size 8"),
    ("schema_version: 1\nskus:\n  mine:\n    nvml_name: 'NVIDIA (X'\n", "4:16: 'NVIDIA (X' missing 7 nvml_name"),
    ("schema_version: 1\nskus:\n  mine:\n    nvml_name: .*\n", "4:16: '.*'"),
    ("schema_version: 1\nskus:\n  cpu-rehearsal:\n    nvml_name: NVIDIA H200\n", "4:16: nvml_name limits"),
]


@of_each("case", BROKEN)
def test_a_broken_file_is_refused_with_place_finding_and_remedy(case, tmp_path, monkeypatch):
    text, *wanted = case
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ThresholdsError) as caught:
        loader.load(Path("my.yaml"))
    require_complaints(str(caught.value).splitlines(), wanted)


def test_all_errors_of_all_files_come_at_once_in_the_order_of_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(entry("{min: 1 GB, sorce: us}"))
    Path("b.yaml").write_text("schema_version: 1\nskus: {H200: {limit: {}}, H300: {limits: {x: {}}}}\n")
    with pytest.raises(ThresholdsError) as caught:
        loader.load(Path("a.yaml"), Path("b.yaml"), Path("c.yaml"))
    places = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    wanted = "a.yaml:5:33 a.yaml:5:39 b.yaml:2:15 b.yaml:2:27 b.yaml:2:43 c.yaml:1:1"
    assert " ".join(places) == wanted


# Reading ---------------------------------------------------------------------------------------------------------


def test_a_limit_is_in_the_canonical_unit_and_cites_its_line_and_source(tmp_path):
    limits = read(tmp_path, entry("{min: 0.7 PFLOPS, source: us}"))
    limit = limits.limit("matmul.bf16.tflops", sku="H100 SXM", world_size=1, nnodes=1, labels={})
    assert (limit.min, limit.max, limit.unit) == (700.0, None, "TFLOPS")
    assert limit.to_json() == {
        "min": 700.0,
        "max": None,
        "min_ratio_to_median": None,
        "expect_transport": None,
        "source": "us",
        "origin": f"{tmp_path}/limits0.yaml:5:27",
    }


def test_ratios_and_transports_are_read(tmp_path):
    for text, ratio in {"75 %": 0.75, "0.75 ratio": 0.75, "100 %": 1.0, "5 %": 0.05, "92.9%": 0.929}.items():
        [limit] = read(tmp_path, entry("{min_ratio_to_median: " + text + ", source: us}")).limits
        assert (limit.min, limit.max, limit.min_ratio_to_median) == (None, None, pytest.approx(ratio))
    for text, names in {"NET/IB": ["NET/IB"], "[P2P, SHM]": ["P2P", "SHM"], "[NET/IB]": ["NET/IB"]}.items():
        written = "{min: 1 TB/s, expect_transport: " + text + ", source: us}"
        [limit] = read(tmp_path, entry(written, metric="hbm.copy.bandwidth")).limits
        assert limit.to_json()["expect_transport"] == names


def test_a_reason_in_writing_admits_an_unusual_floor(tmp_path):
    assert read(tmp_path, entry("{min: 990 TFLOPS, source: us, despite_peak: overclocked}")).limits[0].min == 990.0
    above = entry("{min: 700 TFLOPS, expected: 990 TFLOPS, source: us, despite_peak: overclocked}")
    assert read(tmp_path, above).limits[0].expected == 990.0
    anchor = entry("&floor {" + OK + "}") + "      matmul.fp16.tflops: *floor\n"
    assert [limit.min for limit in read(tmp_path, anchor).limits] == [700.0, 700.0], "an anchor may be used again"


def test_a_floor_of_a_slow_fabric_is_no_mistake_but_inside_a_node_it_is(tmp_path):
    across = entry("{when: {nnodes: 2}, min: 5 GB/s, source: us}", metric=BUSBW)
    assert read(tmp_path, across).limits[0].min == 5.0
    with pytest.raises(ThresholdsError, match="under 5 % of 450 GB/s"):
        read(tmp_path, across.replace("nnodes: 2", "nnodes: 1"))
    for both in ("nnodes: 1 to 2", "world_size: 2 or more"):
        with pytest.raises(ThresholdsError, match="under 5 % of 450 GB/s"):
            read(tmp_path, across.replace("nnodes: 2", both))


@of_each(
    "case",
    [
        ("world_size", "8", ["8"], ["7", "16", "8 GB", None]),
        ("world_size", "3 or more", ["3", "4096"], ["2", None]),
        ("world_size", "2 to 7", ["2", "7"], ["1", "8"]),
        ("size", "1 GB", ["1 GB", "1000 MB", "1e9 B"], ["1 GiB", "1", "large", None]),
        ("size", "1.1 GB or more", ["1.1 GB", "1100 MB", "2 GB"], ["1099 MB"]),
        ("size", "below 1.1 GB", ["1 GB", "1 B"], ["1.1 GB", "1100 MB", "1.1GB", None]),
        ("size", "8192", ["8192"], ["8192 B", "8191"]),
        ("dtype", "bf16", ["bf16"], ["fp32", "BF16", None]),
        ("transport", "NVLS", ["NVLS"], ["Ring"]),
    ],
)
def test_a_condition_holds_by_amount_or_by_text(case, tmp_path):
    key, text, holds, fails = case
    made = read(tmp_path, entry("{when: {" + f"{key}: {text}" + "}, " + OK + "}")).limits[0].when[0]
    assert [made.holds(fact) for fact in holds] == [True] * len(holds)
    assert [made.holds(fact) for fact in fails] == [False] * len(fails)


def test_other_labels_stand_under_labels(tmp_path):
    limits = read(tmp_path, entry("{when: {labels: {bucket: 25 or more}}, " + OK + "}"))
    where = {"sku": "H100 SXM", "world_size": 1, "nnodes": 1}
    assert limits.limit("matmul.bf16.tflops", labels={"bucket": "25"}, **where)
    assert not limits.limit("matmul.bf16.tflops", labels={"bucket": "24"}, **where)
    assert not limits.limit("matmul.bf16.tflops", labels={}, **where)


# Choosing --------------------------------------------------------------------------------------------------------


def busbw(limits, world_size, nnodes, size, sku="H100 SXM"):
    labels = {} if size is None else {"size": size}
    return limits.limit(BUSBW, sku=sku, world_size=world_size, nnodes=nnodes, labels=labels)


def test_a_later_file_decides_where_it_applies_and_leaves_the_rest(tmp_path):
    mine = entry("{when: {nnodes: 2 or more}, min: 380 GB/s, source: contract}", metric=BUSBW)
    limits = read(tmp_path, mine, shipped=True)
    across, inside = busbw(limits, 16, 2, "1 GB"), busbw(limits, 8, 1, "1 GB")
    assert (across.min, across.origin) == (380.0, f"{tmp_path}/limits0.yaml:5:30")
    assert inside.min == 400.0
    assert inside.origin.startswith("thresholds.yaml:")


def test_an_entry_with_the_same_conditions_takes_the_place_of_the_earlier_one(tmp_path):
    first, second = entry("{" + OK + "}"), entry("{min: 650 TFLOPS, source: later}")
    assert [limit.min for limit in read(tmp_path, first, second).limits] == [650.0]


def test_two_files_of_the_same_name_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("thresholds.yaml").write_text(entry("{" + OK + "}"))
    limits = loader.load(loader.shipped_path(), Path("thresholds.yaml"))
    limit = limits.limit("matmul.bf16.tflops", sku="H100 SXM", world_size=1, nnodes=1, labels={})
    assert limit.origin == f"{tmp_path.resolve()}/thresholds.yaml:5:27"


# SKUs ------------------------------------------------------------------------------------------------------------


def test_a_new_sku_is_recognised_by_its_whole_name(tmp_path):
    text = "schema_version: 1\nskus:\n  H300:\n    nvml_name: [NVIDIA H300, 'NVIDIA H300 \\d+GB']\n"
    limits = read(tmp_path, text)
    assert limits.sku_for("NVIDIA H300") == limits.sku_for("NVIDIA H300 96GB") == "H300"
    assert limits.sku_for("NVIDIA H300 NVL") is None
    assert limits.sku_for("NVIDIA H200") == "H200"


EVERY = EVERY_SKU % "ddp.loss_error: %s"
"""A file of its own, or the top of one that goes on with skus."""


def loss(limits, sku, **labels):
    found = limits.limit("ddp.loss_error", sku=sku, world_size=8, nnodes=1, labels=labels)
    return found and found.source


def test_what_holds_on_every_sku_holds_on_a_new_one_too_but_on_no_unknown_gpu(tmp_path):
    found = read(tmp_path, EVERY % "{max: 1 ratio, source: all}" + "skus: {H300: {nvml_name: NVIDIA H300}}\n")
    assert [loss(found, sku) for sku in ("H100 SXM", "cpu-rehearsal", "H300", "H400")] == ["all", "all", "all", None]


def test_a_sku_s_own_entry_decides_where_it_applies_and_the_later_file_before_it(tmp_path):
    own = "skus: {H200: {limits: {ddp.loss_error: {when: {dtype: bf16}, max: 2 ratio, source: own}}}}\n"
    first = EVERY % "[{max: 1 ratio, source: all}, {when: {dtype: bf16, world_size: 8}, max: 1 ratio, source: two}]"
    found = read(tmp_path, first + own)
    assert (loss(found, "H200", dtype="bf16"), loss(found, "H200")) == ("own", "all")
    assert loss(found, "H100 SXM", dtype="bf16") == "two"
    later = read(tmp_path, first + own, EVERY % "{max: 3 ratio, source: later}")
    assert (loss(later, "H200", dtype="bf16"), loss(later, "H200"), loss(later, "L40S")) == ("later",) * 3


DEFAULTS = """schema_version: 1
defaults:
  nccl.all_gather.busbw, nccl.broadcast.busbw:
    {when: {size: 1 GB or more}, min_ratio_to_median: 75 %, ratio_source: "0.75, them"}
skus:
  cpu-rehearsal:
    limits: {nccl.all_gather.busbw: {min: 1 MB/s, source: floor}}
  H100 SXM:
    limits:
      nccl.all_gather.busbw, nccl.broadcast.busbw:
        - {when: {nnodes: 1}, min: 300 GB/s, source: us}
        - [{when: {nnodes: 2, size: 8 GiB or more}, min: 200 GB/s, min_ratio_to_median: none, source: us}]
        - {when: {nnodes: 3}, min: 90 GB/s, min_ratio_to_median: 50 %, source: us}
        - {when: {nnodes: 4}, record_only: too few}
"""


def test_an_entry_has_the_defaults_of_its_metric_that_it_does_not_give_itself(tmp_path):
    found = {
        (limit.sku, limit.metric, limit.conditions()): (limit.min_ratio_to_median, limit.source)
        for limit in read(tmp_path, DEFAULTS).limits
    }
    own = {
        "nnodes 1, size 1 GB or more": (0.75, "us; ratio: 0.75, them"),
        "nnodes 2, size 8 GiB or more": (None, "us"),
        "nnodes 3, size 1 GB or more": (0.5, "us"),
        "nnodes 4": (None, ""),
    }
    assert found == {("cpu-rehearsal", "nccl.all_gather.busbw", "always"): (None, "floor")} | {
        ("H100 SXM", f"nccl.{name}.busbw", where): each
        for name in ("all_gather", "broadcast")
        for where, each in own.items()
    }


def test_a_metric_that_is_declared_as_recorded_needs_no_entry_and_can_have_one(tmp_path):
    where = {"sku": "H100 SXM", "world_size": 8, "nnodes": 1, "labels": {}}
    other = read(tmp_path, entry("{" + OK + "}"))
    limit = other.limit(LATENCY, **where)
    assert limit.record_only == known(LATENCY).recorded
    assert LATENCY in other.metrics
    assert other.limit(LATENCY, **(where | {"sku": "an unknown one"})) is None
    assert other.limit(BUSBW, **where) is None, "a metric that is judged needs one"
    mine = read(tmp_path, entry("{max: 30 us, source: us}", metric=LATENCY)).limit(LATENCY, **where)
    assert mine.max == 30.0
