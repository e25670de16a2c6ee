"""The proposed file is one that a run can load, in which each floor has its conditions and its source."""

import re

import pytest
from accepted_runs import BF16, BUSBW, LIMIT, measured, source
from each import of_each

from pytest_gpucluster.analysis.calibration import Source, conditions_of, overlay, propose, series
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.judge import loader

OTHER = {**LIMIT, "min": 100.0}
HOSTILE = "'a': {b}\n# <script>\x1b[31m\u202e \ud800"


def text_of(sources, peak=None, recorded=()):
    made, without = [], []
    for one in series(sources):
        if one not in recorded:
            try:
                made.append(propose(one, peak=peak))
            except ThresholdsError as error:
                without.append((one, str(error)))
    return overlay(
        "H100 SXM",
        made,
        without,
        sources,
        at="2026-01-02T03:04:05Z",
        version="0.1.0",
        recorded=recorded,
        shipped="",
    )


def load(folder, text):
    path = folder / "proposed.yaml"
    path.write_text(text, encoding="utf-8")
    return [one for one in loader.load(loader.shipped_path(), path).limits if one.layer == 1]


def test_a_floor_is_loaded_with_its_condition_and_says_what_it_is_made_of(tmp_path):
    text = text_of([source(measured([710.0] * 8 + [600.0], limit=OTHER), number=7)])
    [limit] = load(tmp_path, text)
    assert (limit.metric, limit.sku, limit.min, limit.conditions()) == (BF16, "H100 SXM", 688.0, "n 16384")
    assert limit.min_ratio_to_median == pytest.approx(0.929)
    for part in ("median 710 TFLOPS", "3 spreads of 7.1 TFLOPS", "9 values of 1 run: run-7", "limits.yaml:7:9"):
        assert part in limit.source
    assert re.search(r"# BELOW IT, .*: 600 TFLOPS on rank 8 \(gpu-02\)", text)
    assert f"#     sha256 {7:064x}" in text


def test_what_was_demanded_besides_min_stays_demanded(tmp_path):
    limit = {**OTHER, "max": 800.0, "expect_transport": ["NET/IB", "P2P"]}
    labels = {"size": "1 GB", "dtype": "bf16", "world_size": "16", "nnodes": "2", "scope": "it's", "transport": "P2P"}
    [found] = load(tmp_path, text_of([source(measured([400.0] * 8, BUSBW, unit="GB/s", limit=limit, labels=labels))]))
    assert (found.min, found.max, found.expect_transport) == (388.0, 800.0, ("NET/IB", "P2P"))
    assert sorted(part.key for part in found.when) == ["dtype", "nnodes", "scope", "size", "world_size"]
    assert found.applies(labels)
    assert not found.applies({**labels, "size": "8 GB"})


def test_a_floor_that_is_far_below_the_peak_says_that_it_is_meant(tmp_path):
    labels = {"size": "1 MB", "world_size": "8", "nnodes": "1"}
    text = text_of([source(measured([10.0] * 8, BUSBW, unit="GB/s", limit=None, labels=labels))], peak=450.0)
    [found] = load(tmp_path, text)
    assert found.min == 9.7
    assert "despite_peak: " in text


def test_what_has_no_floor_is_named_with_the_reason():
    text = text_of([source(measured([710.0] * 8, limit=OTHER), measured([1.0], labels={"n": "8"}))])
    assert "\n#   matmul.bf16.tflops (n=8): 1 value, " in text


def test_nothing_that_a_journal_says_breaks_out_of_its_place(tmp_path):
    limit = {**OTHER, "source": HOSTILE, "origin": HOSTILE}
    run = source(measured([710.0] * 8, limit=limit))
    run = Source(path=HOSTILE, sha256=run.sha256, journal=run.journal)
    text = text_of([run])
    assert all(line.isprintable() for line in text.splitlines())
    [found] = load(tmp_path, text)
    assert found.min == 688.0
    assert "'a': {b}" in found.source


@of_each("text", ["0 to 1", "below 3", "5 or more", " padded", "a\nb"])
def test_a_label_that_no_condition_can_say_has_no_floor(text):
    [one] = series([source(measured([710.0] * 8, labels={"pair": text}))])
    with pytest.raises(ThresholdsError):
        conditions_of(one)


def decided(text, folder, **labels):
    path = folder / "proposed.yaml"
    path.write_text(text, encoding="utf-8")
    found = loader.load(loader.shipped_path(), path)
    limit = found.limit(BF16, sku="H100 SXM", world_size=16, nnodes=2, labels=labels)
    assert limit is not None
    return limit


@of_each("judged", [True, False])
def test_a_floor_never_decides_about_what_has_more_labels_and_keeps_its_limit(tmp_path, judged):
    """The burn-in measures the same product as the criterion of it, and is slower."""
    labels = {"n": "16384", "load": "burn-in"}
    hot = measured([702.0] * 8, labels=labels, limit=LIMIT if judged else None)
    sources = [source(measured([730.0] * 8, limit=LIMIT), hot)]
    text = text_of(sources, recorded=() if judged else series(sources)[1:])
    assert decided(text, tmp_path, n="16384").min == 708.0
    limit = decided(text, tmp_path, **labels)
    assert limit.min == (700.0 if judged else None)
    assert (limit.record_only is None) == judged
    assert limit.min_ratio_to_median == (pytest.approx(0.929) if judged else None)


def test_what_was_expected_stays_where_the_floor_is_below_it(tmp_path):
    for expected, kept in ((720.0, 720.0), (600.0, None)):
        [found] = load(tmp_path, text_of([source(measured([710.0] * 9, limit={**OTHER, "expected": expected}))]))
        assert (found.min, found.expected) == (688.0, kept)
