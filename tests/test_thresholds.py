from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster import metrics, thresholds, units
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.limits import Condition, Limit, Thresholds

BUSBW = "nccl.all_reduce.busbw"


def entry(text: str, *, sku: str = "H100 SXM", metric: str = "matmul.bf16.tflops") -> str:
    """Wrap one entry, given in flow style, into a whole file; it starts at line 5, column 27 for bf16."""
    return f"schema_version: 1\nskus:\n  {sku}:\n    limits:\n      {metric}: {text}\n"


def read(tmp_path: Path, *files: str, shipped: bool = False) -> Thresholds:
    paths = [thresholds.shipped_path()] if shipped else []
    for number, text in enumerate(files):
        paths.append(tmp_path / f"limits{number}.yaml")
        paths[-1].write_text(text, encoding="utf-8")
    return thresholds.load(*paths)


def errors_of(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ThresholdsError) as caught:
        thresholds.load(Path("my.yaml"))
    return str(caught.value).splitlines()


OK = "min: 700 TFLOPS, source: us"
BROKEN = {
    "empty file": ("", ["1:1: the file is empty; it needs schema_version, and every_sku or skus"]),
    "only a comment": ("# nothing\n", ["1:1: the file is empty; it needs schema_version, and every_sku or skus"]),
    "no mapping": ("- 1\n", ["1:1: the file is no mapping; it must be keys with values"]),
    "nothing in it": (
        "schema_version: 1\n",
        ["1:1: skus is missing; it maps the name of a GPU to its limits"],
    ),
    "no version": (
        "skus: {H200: {nvml_name: mine}}\n",
        ["1:1: schema_version is missing; this version reads schema_version: 1"],
    ),
    "newer version": (
        entry("{" + OK + "}").replace(": 1", ": 2", 1),
        ["1:17: schema_version is '2'; this version reads 1"],
    ),
    "a section of every SKU with another key": (
        "schema_version: 1\nevery_sku: {limit: {ddp.loss_error: {" + "max: 1 ratio, source: us}}}\n",
        ["2:13: unknown key 'limit'; allowed are limits; did you mean 'limits'?"],
    ),
    "an empty section of every SKU": (
        "schema_version: 1\nevery_sku:\n",
        ["2:11: every_sku is empty; it must be keys with values"],
    ),
    "one figure for the peaks of all": (
        "schema_version: 1\nevery_sku: {limits: {matmul.bf16.tflops: {" + OK + "}}}\n",
        [
            "2:22: matmul.bf16.tflops stands beside the data sheet peak of each SKU, so its limits stand under skus, "
            "by SKU"
        ],
    ),
    "octal version": (
        entry("{" + OK + "}").replace(": 1", ": 01", 1),
        ["1:17: schema_version is '01'; this version reads 1"],
    ),
    "empty skus": ("schema_version: 1\nskus:\n", ["2:6: skus is empty; it must be keys with values"]),
    "unknown top key": (
        "schema_version: 1\nsku: {}\n",
        ["2:1: unknown key 'sku'; allowed are schema_version, every_sku, skus; did you mean 'skus'?"],
    ),
    "unknown sku": (
        entry("{" + OK + "}", sku="H100 SMX"),
        [
            "3:3: unknown SKU 'H100 SMX'; a SKU that is none of H100 SXM, H100 PCIe, H100 NVL, H200,"
            " A100 80GB, B200, GB200, L40S, cpu-rehearsal needs its nvml_name; did you mean 'H100 SXM'?"
        ],
    ),
    "empty sku": (
        "schema_version: 1\nskus:\n  H200:\n",
        ["3:8: the SKU 'H200' is empty; it must be keys with values"],
    ),
    "unknown metric": (
        entry("{" + OK + "}", metric="matmul.bf61.tflops"),
        ["5:7: unknown metric 'matmul.bf61.tflops'; did you mean 'matmul.bf16.tflops'?"],
    ),
    "unknown key": (
        entry("{mim: 700 TFLOPS, source: us}"),
        [
            "5:28: unknown key 'mim'; allowed are min, max, min_ratio_to_median, expected, expect_transport, source,"
            " when, record_only, despite_peak; did you mean 'min'?"
        ],
    ),
    "duplicate key": (
        entry("{" + OK + ", min: 800 TFLOPS}"),
        ["5:57: duplicate key 'min'; the first one is at line 5"],
    ),
    "duplicate metric": (
        entry("{" + OK + "}") + "      matmul.bf16.tflops: {min: 1 TFLOPS, source: us}\n",
        ["6:7: duplicate key 'matmul.bf16.tflops'; the first one is at line 5"],
    ),
    "merge key": (
        entry("{<<: {" + OK + "}}"),
        [
            "5:28: unknown key '<<'; allowed are min, max, min_ratio_to_median, expected, expect_transport, source,"
            " when, record_only, despite_peak"
        ],
    ),
    "wrong case": (
        entry("{min: 400 gb/s, source: us}", metric=BUSBW),
        ["5:36: min: unknown unit 'gb/s'; did you mean 'GB/s' or 'Gb/s'? Case matters: B is bytes, b is bits"],
    ),
    "wrong dimension": (
        entry("{min: 400 GiB, source: us}", metric=BUSBW),
        ["5:36: min: GiB is a unit of amount of data; GB/s or another unit of data rate is needed"],
    ),
    "no unit": (entry("{min: 700, source: us}"), ["5:33: min: '700' has no unit: write '700 TFLOPS'"]),
    "not a number": (
        entry("{min: .nan TFLOPS, source: us}"),
        ["5:33: min: '.nan TFLOPS' is no quantity: write a decimal number and a unit, such as '400 TFLOPS'"],
    ),
    "negative": (
        entry("{min: -1 TFLOPS, source: us}"),
        ["5:33: min is -1 TFLOPS; it must be above zero, or nothing can miss it"],
    ),
    "zero floor": (
        entry("{min: 0 TFLOPS, source: us}"),
        ["5:33: min is 0 TFLOPS; it must be above zero, or nothing can miss it"],
    ),
    "empty min": (entry("{min: , source: us}"), ["5:32: min is empty"]),
    "null source": (entry("{min: 700 TFLOPS, source: ~}"), ["5:53: source is empty"]),
    "no source": (entry("{min: 700 TFLOPS}"), ["5:27: source is missing; say where the figure comes from"]),
    "no bound": (
        entry("{source: us}"),
        [
            "5:27: no limit for matmul.bf16.tflops; give min, max or min_ratio_to_median with a source, or"
            " record_only with a reason"
        ],
    ),
    "bound of the wrong side": (
        entry("{max: 700 TFLOPS, source: us}"),
        ["5:27: matmul.bf16.tflops needs min: higher is better, and without it any value passes"],
    ),
    "latency with a floor": (
        entry("{min: 1 us, source: us}", metric="nccl.all_reduce.latency"),
        ["5:32: nccl.all_reduce.latency needs max: lower is better, and without it any value passes"],
    ),
    "min above max": (
        entry("{min: 800 TFLOPS, max: 700 TFLOPS, source: us}"),
        ["5:33: min 800 TFLOPS is above max 700 TFLOPS"],
    ),
    "above the peak": (
        entry("{min: 990 TFLOPS, source: us}"),
        [
            "5:33: min 990 TFLOPS is above 989 TFLOPS, the data sheet peak of H100 SXM; lower it, or"
            " give the reason in despite_peak"
        ],
    ),
    "busbw above any link": (
        entry("{min: 800 GB/s, source: us}", metric=BUSBW),
        [
            "5:36: min 800 GB/s is above 1.1 times 450 GB/s, the data sheet peak of H100 SXM; lower it,"
            " or give the reason in despite_peak"
        ],
    ),
    "a factor of 1000 low": (
        entry("{min: 2333 MB/s, source: us}", metric="hbm.copy.bandwidth"),
        [
            "5:33: min 2333 MB/s is under 5 % of 3.35 TB/s, the data sheet peak of H100 SXM; check the"
            " unit, or give the reason in despite_peak"
        ],
    ),
    "infinite": (
        entry("{min: 1e999 TFLOPS, source: us}"),
        ["5:33: min: '1e999 TFLOPS' is too large"],
    ),
    "negative ceiling": (
        entry("{max: -1 us, source: us}", metric="nccl.all_reduce.latency"),
        ["5:38: max is -1 us; it must be zero or more"],
    ),
    "ceiling below zero by its sign alone": (
        entry("{max: -0 us, source: us}", metric="nccl.all_reduce.latency"),
        ["5:38: max is -0 us; it must be zero or more"],
    ),
    "ratio without a unit": (
        entry("{min_ratio_to_median: 0.75, source: us}"),
        ["5:49: min_ratio_to_median: '0.75' has no unit: write '0.75 ratio'"],
    ),
    "percent without a unit": (
        entry("{min_ratio_to_median: 75, source: us}"),
        ["5:49: min_ratio_to_median: '75' has no unit: write '75 %'"],
    ),
    "ratio in another unit": (
        entry("{min_ratio_to_median: 75 TFLOPS, source: us}"),
        ["5:49: min_ratio_to_median: TFLOPS is a unit of compute rate; % or another unit of ratio is needed"],
    ),
    "ratio above all": (
        entry("{min_ratio_to_median: 100.1 %, source: us}"),
        ["5:49: min_ratio_to_median is 100.1 %; it must be from 5 % to 100 %"],
    ),
    "ratio of a hundredth": (
        entry("{min_ratio_to_median: 0.75 %, source: us}"),
        ["5:49: min_ratio_to_median is 0.75 %; it must be from 5 % to 100 %"],
    ),
    "negative ratio": (
        entry("{min_ratio_to_median: -75 %, source: us}"),
        ["5:49: min_ratio_to_median is -75 %; it must be from 5 % to 100 %"],
    ),
    "empty ratio": (entry("{min_ratio_to_median: , source: us}"), ["5:48: min_ratio_to_median is empty"]),
    "ratio without source": (
        entry("{min_ratio_to_median: 75 %}"),
        ["5:27: source is missing; say where the figure comes from"],
    ),
    "ratio of what has no better side": (
        entry("{min_ratio_to_median: 75 %, source: us}", metric="inventory.ranks"),
        ["5:25: min_ratio_to_median says nothing of inventory.ranks: neither more nor less is better"],
    ),
    "transport alone": (
        entry("{expect_transport: NET/IB, source: us}", metric=BUSBW),
        [
            f"5:30: no limit for {BUSBW}; give min, max or min_ratio_to_median with a source, or record_only with a"
            " reason"
        ],
    ),
    "empty transport": (
        entry("{min: 400 GB/s, source: us, expect_transport: }", metric=BUSBW),
        ["5:75: expect_transport is empty"],
    ),
    "no transport": (
        entry("{min: 400 GB/s, source: us, expect_transport: []}", metric=BUSBW),
        ["5:76: the list is empty"],
    ),
    "the same transport twice": (
        entry("{min: 400 GB/s, source: us, expect_transport: [P2P, P2P]}", metric=BUSBW),
        ["5:82: expect_transport has 'P2P' twice"],
    ),
    "a mapping as transport": (
        entry("{min: 400 GB/s, source: us, expect_transport: {NET: IB}}", metric=BUSBW),
        ["5:76: expect_transport must be a single value, not a mapping"],
    ),
    "record_only with the new keys": (
        entry("{record_only: why, min_ratio_to_median: 75 %, expect_transport: NET/IB}"),
        [
            "5:46: min_ratio_to_median and record_only exclude each other",
            "5:73: expect_transport and record_only exclude each other",
        ],
    ),
    "expected without a unit": (
        entry("{min: 460 TFLOPS, expected: 60, source: us}"),
        ["5:55: expected: '60' has no unit: write '60 TFLOPS'"],
    ),
    "expected in another dimension": (
        entry("{min: 460 TFLOPS, expected: 60 GB/s, source: us}"),
        ["5:55: expected: GB/s is a unit of data rate; TFLOPS or another unit of compute rate is needed"],
    ),
    "nothing expected": (
        entry("{min: 460 TFLOPS, expected: 0 TFLOPS, source: us}"),
        ["5:55: expected is 0 TFLOPS; it must be above zero"],
    ),
    "less expected than demanded": (
        entry("{min: 700 TFLOPS, expected: 690 TFLOPS, source: us}"),
        ["5:55: expected 690 TFLOPS is below min 700 TFLOPS; what is expected must keep the limit"],
    ),
    "more expected than allowed": (
        entry("{max: 20 us, expected: 25 us, source: us}", metric="nccl.all_reduce.latency"),
        ["5:55: expected 25 us is above max 20 us; what is expected must keep the limit"],
    ),
    "expected above the peak": (
        entry("{min: 46 TFLOPS, expected: 68 TFLOPS, source: us}", metric="matmul.fp32.tflops"),
        [
            "5:54: expected 68 TFLOPS is above 67 TFLOPS, the data sheet peak of H100 SXM; lower it, or give the reason"
            " in despite_peak"
        ],
    ),
    "expected far below the peak": (
        entry("{min_ratio_to_median: 75 %, expected: 0.7 TFLOPS, source: us}"),
        [
            "5:65: expected 0.7 TFLOPS is under 5 % of 989 TFLOPS, the data sheet peak of H100 SXM; check the unit, or"
            " give the reason in despite_peak"
        ],
    ),
    "expected alone": (
        entry("{expected: 700 TFLOPS, source: us}"),
        [
            "5:27: no limit for matmul.bf16.tflops; give min, max or min_ratio_to_median with a source, or record_only"
            " with a reason; expected is shown and never judged"
        ],
    ),
    "expected of what is only recorded": (
        entry("{record_only: why, expected: 700 TFLOPS}"),
        ["5:46: expected and record_only exclude each other"],
    ),
    "all that is wrong under a misspelt metric": (
        entry(
            "[{when: {wrld_size: 8}, min: 400 Gbs, source: us}, {when: {nnodes: 0}, max: 5, sorce: us}]",
            metric="nccl.all_reduce.bsbw",
        ),
        [
            "5:7: unknown metric 'nccl.all_reduce.bsbw'; did you mean 'nccl.all_reduce.busbw'?",
            "5:38: unknown key 'wrld_size'; allowed are world_size, nnodes, local_world_size, size, dtype,"
            " transport, labels; did you mean 'world_size'?",
            "5:58: min: unknown unit 'Gbs'; did you mean 'GB/s'?",
            "5:96: nnodes is '0'; it counts in whole numbers from 1",
            "5:105: max: '5' has no unit: write '5 GB/s'",
            "5:108: unknown key 'sorce'; allowed are min, max, min_ratio_to_median, expected, expect_transport, source,"
            " when, record_only, despite_peak; did you mean 'source'?",
        ],
    ),
    "what can be checked where the metric cannot be guessed": (
        entry("{min: hot, max: 5 GBs, source: us}", metric="gpu.temp"),
        [
            "5:7: unknown metric 'gpu.temp'; did you mean 'gpu.temperature'?",
            "5:23: min: 'hot' is no quantity: write a decimal number and a unit, such as '380 GB/s'",
            "5:33: max: unknown unit 'GBs'; did you mean 'GB/s'?",
        ],
    ),
    "a bad bound beside a floor above the peak": (
        entry("{min: 990 TFLOPS, max: 5 s, source: us}"),
        [
            "5:33: min 990 TFLOPS is above 989 TFLOPS, the data sheet peak of H100 SXM; lower it, or"
            " give the reason in despite_peak",
            "5:50: max: s is a unit of time; TFLOPS or another unit of compute rate is needed",
        ],
    ),
    "two entries that both apply, one of them broken": (
        entry("[{when: {world_size: 8}, " + OK + "}, {when: {nnodes: 1}, min: 7 TFLOP, source: us}]"),
        [
            "5:82: this entry (nnodes 1) and that at line 5 (world_size 8) can both apply; add a"
            " condition to one of them",
            "5:107: min: unknown unit 'TFLOP'; did you mean 'TFLOPS'?",
        ],
    ),
    "record_only with min": (
        entry("{record_only: why, min: 700 TFLOPS}"),
        ["5:46: min and record_only exclude each other"],
    ),
    "record_only without reason": (entry("{record_only: ''}"), ["5:41: record_only is empty"]),
    "list as value": (
        entry("{min: [700 TFLOPS], source: us}"),
        ["5:33: min must be a single value, not a list"],
    ),
    "empty list": (entry("[]"), ["5:27: the list is empty"]),
    "unknown condition": (
        entry("{when: {wrld_size: 8}, " + OK + "}"),
        [
            "5:35: unknown key 'wrld_size'; allowed are world_size, nnodes, local_world_size, size,"
            " dtype, transport, labels; did you mean 'world_size'?"
        ],
    ),
    "size under labels": (
        entry("{when: {labels: {size: 1 GB}}, " + OK + "}"),
        ["5:44: size stands directly under when, not under labels"],
    ),
    "size in words": (
        entry("{when: {size: large}, " + OK + "}"),
        ["5:41: size is 'large'; allowed is a value, 'X or more', 'below X' or 'X to Y', with sizes such as 1 GB"],
    ),
    "size as rate": (
        entry("{when: {size: 1 GB/s}, " + OK + "}"),
        ["5:41: size is '1 GB/s'; allowed is a value, 'X or more', 'below X' or 'X to Y', with sizes such as 1 GB"],
    ),
    "half a rank": (
        entry("{when: {world_size: 1.5 or more}, " + OK + "}"),
        ["5:47: world_size is '1.5 or more'; it counts in whole numbers from 1"],
    ),
    "mixed range": (
        entry("{when: {size: 1 to 2 GB}, " + OK + "}"),
        ["5:41: size is '1 to 2 GB'; allowed is a value, 'X or more', 'below X' or 'X to Y', with sizes such as 1 GB"],
    ),
    "backward range": (
        entry("{when: {world_size: 8 to 2}, " + OK + "}"),
        ["5:47: world_size is '8 to 2'; nothing lies in that range"],
    ),
    "comparison": (
        "schema_version: 1\nskus:\n  H200:\n    limits:\n      matmul.bf16.tflops:\n"
        "        when:\n          size: >= 1 GB\n",
        [
            "7:18: no valid YAML: while scanning a block scalar, expected chomping or indentation"
            " indicators, but found '='; a condition is a value, 'X or more', 'below X' or 'X to Y'"
        ],
    ),
    "two entries that both apply": (
        entry("[{when: {world_size: 8}, " + OK + "}, {when: {nnodes: 1}, " + OK + "}]"),
        [
            "5:82: this entry (nnodes 1) and that at line 5 (world_size 8) can both apply; add a"
            " condition to one of them"
        ],
    ),
    "bad pattern": (
        "schema_version: 1\nskus:\n  mine:\n    nvml_name: 'NVIDIA (X'\n",
        [
            "4:16: bad pattern 'NVIDIA (X': missing ), unterminated subpattern at position 7; nvml_name"
            " is a regular expression"
        ],
    ),
    "any pattern": (
        "schema_version: 1\nskus:\n  mine:\n    nvml_name: .*\n",
        ["4:16: the pattern '.*' takes any GPU; write the name that nvidia-smi -L shows"],
    ),
    "a gpu as rehearsal": (
        "schema_version: 1\nskus:\n  cpu-rehearsal:\n    nvml_name: NVIDIA H200\n",
        ["4:16: cpu-rehearsal takes no nvml_name: its limits say nothing about a GPU"],
    ),
}


@pytest.mark.parametrize(("text", "messages"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_with_place_finding_and_remedy(
    text: str, messages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert errors_of(tmp_path, text, monkeypatch) == [f"my.yaml:{message}" for message in messages]


def test_all_errors_of_all_files_come_at_once_in_the_order_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(entry("{min: 1 GB, sorce: us}"))
    Path("b.yaml").write_text("schema_version: 1\nskus: {H200: {limit: {}}, H300: {limits: {x: {}}}}\n")
    with pytest.raises(ThresholdsError) as caught:
        thresholds.load(Path("a.yaml"), Path("b.yaml"), Path("c.yaml"))
    places = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert places == [
        "a.yaml:5:33",
        "a.yaml:5:39",
        "b.yaml:2:15",
        "b.yaml:2:27",
        "b.yaml:2:43",
        "b.yaml:2:46",
        "c.yaml:1:1",
    ]


# Reading ---------------------------------------------------------------------------------------------------------


def test_a_limit_is_in_the_canonical_unit_and_cites_its_line_and_source(tmp_path: Path) -> None:
    limits = read(tmp_path, entry("{min: 0.7 PFLOPS, source: us}"))
    limit = limits.limit("matmul.bf16.tflops", sku="H100 SXM", world_size=1, nnodes=1, labels={})
    assert limit is not None
    assert (limit.min, limit.max, limit.unit) == (700.0, None, "TFLOPS")
    assert limit.to_json() == {
        "min": 700.0,
        "max": None,
        "min_ratio_to_median": None,
        "expect_transport": None,
        "source": "us",
        "origin": f"{tmp_path}/limits0.yaml:5:27",
    }


@pytest.mark.parametrize(
    ("text", "ratio"), [("75 %", 0.75), ("0.75 ratio", 0.75), ("100 %", 1.0), ("5 %", 0.05), ("92.9%", 0.929)]
)
def test_a_ratio_to_the_median_is_read_with_its_unit(text: str, ratio: float, tmp_path: Path) -> None:
    [limit] = read(tmp_path, entry("{min_ratio_to_median: " + text + ", source: us}")).limits
    assert (limit.min, limit.max, limit.min_ratio_to_median) == (None, None, pytest.approx(ratio))


@pytest.mark.parametrize(
    ("text", "names"), [("NET/IB", ["NET/IB"]), ("[P2P, SHM]", ["P2P", "SHM"]), ("[NET/IB]", ["NET/IB"])]
)
def test_a_transport_is_a_name_or_a_list_of_names(text: str, names: list[str], tmp_path: Path) -> None:
    [limit] = read(
        tmp_path, entry("{min: 1 TB/s, expect_transport: " + text + ", source: us}", metric="hbm.copy.bandwidth")
    ).limits
    assert limit.to_json()["expect_transport"] == names


def test_a_metric_that_is_misspelt_gives_no_limit(tmp_path: Path) -> None:
    with pytest.raises(ThresholdsError, match=r"did you mean 'matmul\.bf16\.tflops'"):
        read(tmp_path, entry("{" + OK + "}", metric="matmul.bf61.tflops"))


def test_a_reason_in_writing_admits_an_unusual_floor(tmp_path: Path) -> None:
    assert read(tmp_path, entry("{min: 990 TFLOPS, source: us, despite_peak: overclocked}")).limits[0].min == 990.0
    above = entry("{min: 700 TFLOPS, expected: 990 TFLOPS, source: us, despite_peak: overclocked}")
    assert read(tmp_path, above).limits[0].expected == 990.0


def test_a_floor_of_a_slow_fabric_is_no_mistake_but_inside_a_node_it_is(tmp_path: Path) -> None:
    across = entry("{when: {nnodes: 2}, min: 5 GB/s, source: us}", metric=BUSBW)
    assert read(tmp_path, across).limits[0].min == 5.0
    with pytest.raises(ThresholdsError, match="under 5 % of 450 GB/s"):
        read(tmp_path, across.replace("nnodes: 2", "nnodes: 1"))
    for both in ("nnodes: 1 to 2", "world_size: 2 or more"):
        with pytest.raises(ThresholdsError, match="under 5 % of 450 GB/s"):
            read(tmp_path, across.replace("nnodes: 2", both))


def test_an_anchor_may_be_used_again(tmp_path: Path) -> None:
    text = entry("&floor {" + OK + "}") + "      matmul.fp16.tflops: *floor\n"
    assert [limit.min for limit in read(tmp_path, text).limits] == [700.0, 700.0]


def condition(key: str, text: str, tmp_path: Path) -> Condition:
    limits = read(tmp_path, entry("{when: {" + f"{key}: {text}" + "}, " + OK + "}"))
    return limits.limits[0].when[0]


@pytest.mark.parametrize(
    ("key", "text", "holds", "fails"),
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
def test_a_condition_holds_by_amount_or_by_text(
    key: str, text: str, holds: list[str], fails: list[str | None], tmp_path: Path
) -> None:
    made = condition(key, text, tmp_path)
    assert [made.holds(fact) for fact in holds] == [True] * len(holds)
    assert [made.holds(fact) for fact in fails] == [False] * len(fails)


def test_other_labels_stand_under_labels(tmp_path: Path) -> None:
    limits = read(tmp_path, entry("{when: {labels: {bucket: 25 or more}}, " + OK + "}"))
    where = {"sku": "H100 SXM", "world_size": 1, "nnodes": 1}
    assert limits.limit("matmul.bf16.tflops", labels={"bucket": "25"}, **where)  # type: ignore[arg-type]
    assert not limits.limit("matmul.bf16.tflops", labels={"bucket": "24"}, **where)  # type: ignore[arg-type]
    assert not limits.limit("matmul.bf16.tflops", labels={}, **where)  # type: ignore[arg-type]


# Round trips -----------------------------------------------------------------------------------------------------

FIGURES = st.floats(1e-3, 1e6).map(lambda value: f"{value:.6g}")
SIZES = st.builds("{} {}".format, st.integers(1, 4096), st.sampled_from(["B", "kB", "MB", "GB", "KiB", "GiB"]))
RANKS = st.integers(1, 4096).map(str)


def forms(ends: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """A condition in each form, with one end; a range of two ends could be empty."""
    return st.builds(str.format, st.sampled_from(["{}", "{} or more", "below {}"]), ends)


@given(
    st.sampled_from(["matmul.bf16.tflops", BUSBW, "nccl.all_reduce.latency", "gpu.memory.free"]),
    FIGURES,
    FIGURES,
    st.none() | st.floats(5, 100).map(lambda value: f"{value:.4g} %"),
    st.dictionaries(st.sampled_from(["world_size", "nnodes", "local_world_size"]), forms(RANKS)),
    st.none() | forms(SIZES),
    st.none() | st.lists(st.sampled_from(["NET/IB", "P2P", "SHM"]), min_size=1, unique=True),
    st.data(),
)
def test_every_limit_that_can_be_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    metric: str,
    low: str,
    high: str,
    ratio: str | None,
    when: dict[str, str],
    size: str | None,
    transports: list[str] | None,
    data: st.DataObject,
) -> None:
    unit = metrics.known(metric).unit
    same = [symbol for symbol, other in units.UNITS.items() if other.dimension == units.UNITS[unit].dimension]
    low, high = f"{low} {data.draw(st.sampled_from(same))}", f"{high} {data.draw(st.sampled_from(same))}"
    if units.parse(low).to(unit) > units.parse(high).to(unit):
        low, high = high, low
    written: dict[str, object] = {"min": low, "max": high, "source": "us", "despite_peak": "made at random"}
    written |= {"when": when | ({"size": size} if size else {})} if when or size else {}
    written |= {"min_ratio_to_median": ratio} if ratio else {}
    written |= {"expect_transport": transports} if transports else {}
    path = tmp_path_factory.getbasetemp() / "made.yaml"
    path.write_text(json.dumps({"schema_version": 1, "skus": {"H200": {"limits": {metric: written}}}}))
    [limit] = thresholds.load(path).limits
    assert (limit.min, limit.max) == (units.parse(low).to(unit), units.parse(high).to(unit))
    assert limit.min_ratio_to_median == (units.parse(ratio).to("ratio") if ratio else None)
    assert limit.expect_transport == (tuple(transports) if transports else None)
    assert {part.key: part.text for part in limit.when} == written.get("when", {})
    for part in limit.when:
        end = re.sub(r"^below | or more$", "", part.text)
        assert part.holds(end) == (not part.text.startswith("below"))
        assert part.exact == (end == part.text)


# Choosing --------------------------------------------------------------------------------------------------------


def busbw(limits: Thresholds, world_size: int, nnodes: int, size: str | None, sku: str = "H100 SXM") -> Limit | None:
    labels = {} if size is None else {"size": size}
    return limits.limit(BUSBW, sku=sku, world_size=world_size, nnodes=nnodes, labels=labels)


def test_a_later_file_decides_where_it_applies_and_leaves_the_rest(tmp_path: Path) -> None:
    mine = entry("{when: {nnodes: 2 or more}, min: 380 GB/s, source: contract}", metric=BUSBW)
    limits = read(tmp_path, mine, shipped=True)
    across, inside = busbw(limits, 16, 2, "1 GB"), busbw(limits, 8, 1, "1 GB")
    assert across is not None
    assert (across.min, across.origin) == (380.0, f"{tmp_path}/limits0.yaml:5:30")
    assert inside is not None
    assert inside.min == 400.0
    assert inside.origin.startswith("thresholds.yaml:")


def test_an_entry_with_the_same_conditions_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    first, second = entry("{" + OK + "}"), entry("{min: 650 TFLOPS, source: later}")
    assert [limit.min for limit in read(tmp_path, first, second).limits] == [650.0]


def test_two_files_of_the_same_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("thresholds.yaml").write_text(entry("{" + OK + "}"))
    limits = thresholds.load(thresholds.shipped_path(), Path("thresholds.yaml"))
    limit = limits.limit("matmul.bf16.tflops", sku="H100 SXM", world_size=1, nnodes=1, labels={})
    assert limit is not None
    assert limit.origin == f"{tmp_path.resolve()}/thresholds.yaml:5:27"


# SKUs ------------------------------------------------------------------------------------------------------------


def test_a_new_sku_is_recognised_by_its_whole_name(tmp_path: Path) -> None:
    text = "schema_version: 1\nskus:\n  H300:\n    nvml_name: [NVIDIA H300, 'NVIDIA H300 \\d+GB']\n"
    limits = read(tmp_path, text)
    assert limits.sku_for("NVIDIA H300") == limits.sku_for("NVIDIA H300 96GB") == "H300"
    assert limits.sku_for("NVIDIA H300 NVL") is None
    assert limits.sku_for("NVIDIA H200") == "H200"


EVERY = "schema_version: 1\nevery_sku: {limits: {ddp.loss_error: %s}}\n"
"""A file of its own, or the top of one that goes on with skus."""


def loss(limits: Thresholds, sku: str, **labels: str) -> str | None:
    found = limits.limit("ddp.loss_error", sku=sku, world_size=8, nnodes=1, labels=labels)
    return found and found.source


def test_what_holds_on_every_sku_holds_on_a_new_one_too_but_on_no_unknown_gpu(tmp_path: Path) -> None:
    found = read(tmp_path, EVERY % "{max: 1 ratio, source: all}" + "skus: {H300: {nvml_name: NVIDIA H300}}\n")
    assert [loss(found, sku) for sku in ("H100 SXM", "cpu-rehearsal", "H300", "H400")] == ["all", "all", "all", None]


def test_a_sku_s_own_entry_decides_where_it_applies_and_the_later_file_before_it(tmp_path: Path) -> None:
    own = "skus: {H200: {limits: {ddp.loss_error: {when: {dtype: bf16}, max: 2 ratio, source: own}}}}\n"
    first = EVERY % "[{max: 1 ratio, source: all}, {when: {dtype: bf16, world_size: 8}, max: 1 ratio, source: two}]"
    found = read(tmp_path, first + own)
    assert (loss(found, "H200", dtype="bf16"), loss(found, "H200")) == ("own", "all")
    assert loss(found, "H100 SXM", dtype="bf16") == "two"
    later = read(tmp_path, first + own, EVERY % "{max: 3 ratio, source: later}")
    assert (loss(later, "H200", dtype="bf16"), loss(later, "H200"), loss(later, "L40S")) == ("later",) * 3
