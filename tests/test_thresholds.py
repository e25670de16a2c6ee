from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_gpucluster import hardware, metrics, thresholds, units
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.limits import Condition, Limit, Thresholds, peak_of

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
    "empty file": ("", ["1:1: the file is empty; it needs schema_version and skus"]),
    "only a comment": ("# nothing\n", ["1:1: the file is empty; it needs schema_version and skus"]),
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
    "octal version": (
        entry("{" + OK + "}").replace(": 1", ": 01", 1),
        ["1:17: schema_version is '01'; this version reads 1"],
    ),
    "empty skus": ("schema_version: 1\nskus:\n", ["2:6: skus is empty; it must be keys with values"]),
    "unknown top key": (
        "schema_version: 1\nsku: {}\n",
        ["2:1: unknown key 'sku'; allowed are schema_version, skus; did you mean 'skus'?"],
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
        ["5:28: unknown key 'mim'; allowed are min, max, source, when, record_only, despite_peak; did you mean 'min'?"],
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
        ["5:28: unknown key '<<'; allowed are min, max, source, when, record_only, despite_peak"],
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
        ["5:27: no limit for matmul.bf16.tflops; give min or max with a source, or record_only with a reason"],
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
        "source": "us",
        "origin": f"{tmp_path}/limits0.yaml:5:27",
    }


def test_a_reason_in_writing_admits_an_unusual_floor(tmp_path: Path) -> None:
    assert read(tmp_path, entry("{min: 990 TFLOPS, source: us, despite_peak: overclocked}")).limits[0].min == 990.0


def test_a_floor_of_a_slow_fabric_is_no_mistake_but_inside_a_node_it_is(tmp_path: Path) -> None:
    across = entry("{when: {nnodes: 2}, min: 5 GB/s, source: us}", metric=BUSBW)
    assert read(tmp_path, across).limits[0].min == 5.0
    with pytest.raises(ThresholdsError, match="under 5 % of 450 GB/s"):
        read(tmp_path, across.replace("nnodes: 2", "nnodes: 1"))


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


# The shipped file ------------------------------------------------------------------------------------------------

SHIPPED = thresholds.load()


@pytest.mark.parametrize(
    ("metric", "where", "minimum"),
    [
        ("matmul.bf16.tflops", (1, 1, {}), 700.0),
        ("matmul.fp32.tflops", (16, 2, {}), 60.0),
        ("hbm.copy.bandwidth", (16, 2, {}), 2.5),
        (BUSBW, (8, 1, {"size": "1 GB"}), 400.0),
        (BUSBW, (8, 1, {"size": "8 GiB"}), 400.0),
        (BUSBW, (16, 2, {"size": "1 GB"}), 350.0),
    ],
)
def test_the_h100_limits_are_the_accepted_figures_to_the_digit(
    metric: str, where: tuple[int, int, dict[str, str]], minimum: float
) -> None:
    world_size, nnodes, labels = where
    limit = SHIPPED.limit(metric, sku="H100 SXM", world_size=world_size, nnodes=nnodes, labels=labels)
    assert limit is not None
    assert (limit.min, limit.max) == (minimum, None)
    assert "accept" in limit.source


def test_small_messages_are_recorded_and_an_unforeseen_topology_has_no_limit() -> None:
    small = busbw(SHIPPED, 16, 2, "100 MB")
    assert small is not None
    assert small.record_only
    assert busbw(SHIPPED, 12, 2, "1 GB") is None
    assert busbw(SHIPPED, 16, 2, None) is None


# Taken before any test runs: other tests add metrics of their own.
JUDGED = [name for name, metric in metrics.METRICS.items() if metric.better != "none"]


@pytest.mark.parametrize("sku", hardware.SKUS)
def test_every_sku_says_something_about_every_metric(sku: str) -> None:
    assert [name for name in JUDGED if not SHIPPED.entries(name, sku=sku)] == []


@pytest.mark.parametrize("limit", SHIPPED.limits, ids=lambda limit: f"{limit.sku}-{limit.metric}-{limit.origin}")
def test_every_shipped_figure_agrees_with_the_source_it_cites(limit: Limit) -> None:
    if limit.record_only is not None:
        assert (limit.min, limit.max, limit.source) == (None, None, "")
        return
    peak = peak_of(metrics.known(limit.metric), SHIPPED.skus[limit.sku])
    share = re.match(r"0\.90 of (\S+ [A-Za-z/]+S?)", limit.source)
    if limit.source == "derived: 0.70 of peak":
        assert peak is not None
        assert limit.min == pytest.approx(0.7 * peak, rel=1e-9)
    elif share:
        measured = units.parse(share[1].rstrip(","), like=limit.unit).to(limit.unit)
        # Rounded down to a readable figure.
        assert limit.min is not None
        assert 0.895 * measured <= limit.min <= 0.9 * measured
    else:
        assert re.match(r"acceptance of|floor shipped by|Azure/|no H200 figure|rehearsal floor", limit.source)


@pytest.mark.parametrize("limit", [limit for limit in SHIPPED.limits if limit.sku == hardware.CPU_REHEARSAL])
def test_every_rehearsal_limit_can_be_missed_and_says_that_it_proves_nothing(limit: Limit) -> None:
    if limit.record_only is None:
        assert (limit.min or limit.max or 0) > 0
        assert limit.source == "rehearsal floor: proves the path, says nothing about hardware"


def test_the_example_for_operators_in_the_shipped_file_loads(tmp_path: Path) -> None:
    lines = thresholds.shipped_path().read_text(encoding="utf-8").splitlines()
    start = lines.index("#     schema_version: 1")
    end = next(number for number in range(start, len(lines)) if lines[number] == "#")
    example = "\n".join(line.removeprefix("#     ") for line in lines[start:end])
    limits = read(tmp_path, example, shipped=True)
    limit = busbw(limits, 16, 2, "1 GB")
    assert limit is not None
    assert (limit.min, limit.source) == (380.0, "contract with the vendor, annex 2")
