"""``report.html`` as text: what stands in it, what is escaped, how large it gets."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import example_runs
import pytest

from pytest_gpucluster import journal
from pytest_gpucluster.journal import (
    Cluster,
    CollectedTest,
    End,
    Journal,
    JudgedLimit,
    JudgedMetric,
    Problem,
    RankPlace,
    Run,
    Started,
    TestResult,
)
from pytest_gpucluster.reports.html import page

# What is written as one element, without an end.
VOID = {"meta", "input", "br", "wbr", "path", "circle", "rect", "line", "use", "polyline", "polygon", "ellipse"}


class Outline(HTMLParser):
    """Headings, texts, ids, links and scripts of a page; it complains where an element is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[int] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def parsed(document: str) -> Outline:
    outline = Outline()
    outline.feed(document)
    outline.close()
    assert outline.open == []
    return outline


@pytest.fixture(scope="module", params=example_runs.NAMES)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, example_runs.write(folder, request.param)


def rendered(folder: Path) -> str:
    return page.render(journal.read(folder / journal.FILE_NAME, keep_samples=False), folder=folder)


def run(**changes: object) -> Journal:
    told = Journal(run=Run(run_id="r", started_at="2026-11-21T09:00:00Z", device="cuda"))
    return replace(told, **changes)  # type: ignore[arg-type]


def end(word: str, code: int, reason: str = "because") -> End:
    return End(verdict=word, exit=code, reason=reason, at="2026-11-21T09:10:00Z")


def test_each_example_is_one_sound_document(example: tuple[str, Path]) -> None:
    document = rendered(example[1])
    assert document.startswith("<!DOCTYPE html>")
    told = parsed(document)
    ids = [attributes["id"] for _, attributes in told.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert told.headings[0] == 1
    assert told.headings.count(1) == 1
    deeper = zip(told.headings, told.headings[1:], strict=False)
    assert [pair for pair in deeper if pair[1] > pair[0] + 1] == [], "a heading skips a level"
    for link in told.of("a"):
        href = str(link["href"])
        assert href[1:] in ids if href.startswith("#") else href.startswith("./"), href


def test_each_table_has_a_caption_and_scopes(example: tuple[str, Path]) -> None:
    told = parsed(rendered(example[1]))
    assert len(told.of("caption")) == len(told.of("table")) > 0
    assert [cell for cell in told.of("th") if cell.get("scope") not in ("col", "row")] == []


def test_nothing_is_loaded_from_anywhere(example: tuple[str, Path]) -> None:
    document = rendered(example[1])
    told = parsed(document)
    assert {"link", "img", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in told.elements} == set()
    assert [attributes for _, attributes in told.elements if {"src", "srcset", "style", "ping"} & set(attributes)] == []
    handlers = [name for _, attributes in told.elements for name in attributes if name.startswith("on")]
    assert handlers == []
    style = document.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_allows_this_script_and_style_alone(example: tuple[str, Path]) -> None:
    document = rendered(example[1])
    policy = next(meta["content"] for meta in parsed(document).of("meta") if meta.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", document, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_a_page_of_a_journal_is_always_the_same(example: tuple[str, Path]) -> None:
    assert rendered(example[1]) == rendered(example[1])


def test_hostile_texts_are_text(tmp_path: Path) -> None:
    document = rendered(example_runs.write(tmp_path, "hostile"))
    told = parsed(document)
    assert len(told.of("script")) == 1
    assert "<b>bold" not in document
    assert "&lt;script&gt;" in document
    assert "{{ 7*7 }}" in document
    assert [character for character in set(document) if not character.isprintable() and character not in "\n\t"] == []
    assert len(document.encode()) < 500_000


def test_every_control_character_and_change_of_direction_is_shown_wherever_it_comes_from() -> None:
    text = "".join(map(chr, range(0x20))) + "\x7f\x85\u202e\u2066\ud800"
    place = RankPlace(rank=0, host=text, gpu={"uuid": text, "index": text, text: text}, versions={text: text})
    metric = JudgedMetric(
        metric="x",
        unit=text,
        labels={text: text},
        status="failed",
        value=1.0,
        worst_rank=0,
        values={0: 1.0, 1: 2.0},
        limit=JudgedLimit(min=2.0, source=text, origin=text),
        reason=text,
        telemetry={0: {text: text, "throttle": [text]}},
    )
    result = TestResult(
        nodeid=f"a::{text}",
        outcome="failed",
        name=text,
        criterion=text,
        message=text,
        text=text,
        measurements=(metric,),
        properties=((text, text),),
        sections=((text, text),),
        isolation={"culprits": [{"units": [0], "evidence": [text]}], "names": {"0": text}},
        telemetry={0: {"throttle": [text]}},
    )
    told = run(
        cluster=Cluster(ranks=(place,), problems=(text,)),
        results=(result,),
        problems=(Problem(name=text, message=text, text=text),),
        properties=((text, text),),
        end=end(text, 1, text),
    )
    document = page.render(told)
    parsed(document)
    assert [character for character in set(document) if not character.isprintable() and character not in "\n\t"] == []
    document.encode("utf-8")
    assert "#x202E" in document
    assert "#xD800" in document


@pytest.mark.parametrize(
    ("word", "code", "rehearsal", "tone"),
    [
        ("ACCEPTED", 0, False, "good"),
        ("ACCEPTED", 0, True, "neutral"),
        ("ACCEPTED", 1, False, "broken"),
        ("REHEARSED", 0, True, "neutral"),
        ("SELECTION PASSED", 0, False, "neutral"),
        ("REJECTED", 1, False, "bad"),
        ("INCOMPLETE", 10, False, "incomplete"),
        ("BROKEN", 11, False, "broken"),
        ("SOMETHING NEW", 0, False, "neutral"),
        ("SOMETHING NEW", 77, False, "broken"),
    ],
)
def test_only_an_acceptance_looks_like_one(word: str, code: int, rehearsal: bool, tone: str) -> None:
    told = run(run=Run(run_id="r", started_at="", rehearsal=rehearsal), end=end(word, code))
    document = page.render(told)
    assert f'<header class="verdict v-{tone}">' in document
    assert f"<h1>{word}</h1>" in document
    assert ("REHEARSAL" in parsed(document).text) is rehearsal


def test_a_selection_is_said_to_be_one() -> None:
    told = run(run=Run(run_id="r", started_at="", selection=True), end=end("SELECTION PASSED", 0))
    assert "Only a selection ran : it accepts no cluster." in parsed(page.render(told)).text


def test_a_run_without_an_end_is_broken_and_says_how_far_it_came() -> None:
    told = run(
        collected=(CollectedTest(nodeid="a::b", name="b"), CollectedTest(nodeid="a::c", name="c")),
        running=Started(nodeid="a::b"),
        cut=True,
    )
    text = parsed(page.render(told)).text
    assert "BROKEN" in text
    assert "the journal has no closing line: the run ended during a::b" in text
    assert "the last line of the journal was cut off" in text
    assert "the run ended before it" in text


def test_a_journal_of_one_line_is_a_page() -> None:
    text = parsed(page.render(run())).text
    assert "BROKEN" in text
    assert "No test ran, and none was collected." in text
    assert "No rank told where it runs" in text


def test_failing_rows_come_first_and_say_value_limit_margin_and_who(tmp_path: Path) -> None:
    folder = example_runs.write(tmp_path, "cluster")
    document = rendered(folder)
    outcomes = re.findall(r'<tbody id="c\d+"[^>]*data-outcome="([^"]*)"', document)
    # Of the two that were skipped one had to run.
    assert outcomes == ["failed"] * 5 + ["error", "not run", "skipped"] + ["passed"] * 6 + ["skipped"]
    text = parsed(document).text
    for expected in ("585.6 TFLOPS", "&gt;= 700 TFLOPS", "-16.5 %", "rank 11 on gpu-02, GPU 3"):
        assert expected.replace("&gt;", ">") in text


def test_sections_of_a_rejected_run_are_all_there(tmp_path: Path) -> None:
    document = rendered(example_runs.write(tmp_path, "cluster"))
    told = parsed(document)
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", document)
    assert titles == [
        "The run",
        "Problems outside of any test",
        "Criteria",
        "Did not run",
        "Tightest margins",
        "Inventory",
        "Limits in force",
        "Workload and options",
        "Environment and versions",
        "Files",
    ]
    for expected in (
        "Who is to blame",
        "What each rank reported",
        "What the GPUs did",
        "this suite's rule",
        "SHA-256",
        "NCCL_DEBUG",
        "Serial",
        "96.00.89.00.01",
    ):
        assert expected in told.text, expected
    assert "./journal.jsonl" in [link["href"] for link in told.of("a")]


def results_of(many: int, text: str) -> tuple[TestResult, ...]:
    return tuple(
        TestResult(nodeid=f"a::b[{number}]", name=f"b[{number}]", outcome="failed", message="m", text=text)
        for number in range(many)
    )


def test_many_long_failures_do_not_fill_a_page_and_what_is_left_out_is_said() -> None:
    document = page.render(run(results=results_of(400, "x" * 100_000), end=end("REJECTED", 1)))
    assert len(document.encode()) < 2_000_000
    assert "characters left out; the journal has them" in document
    assert "this page would become too large; the journal has them all" in document
    assert document.count('<tbody id="c') == 400


def test_more_rows_than_a_page_takes_are_counted() -> None:
    document = page.render(run(results=results_of(1600, ""), end=end("REJECTED", 1)))
    assert "and 100 more, which the journal has" in document
    assert len(document.encode()) < 2_000_000


def test_values_that_are_no_numbers_are_shown_as_what_they_are() -> None:
    metric = JudgedMetric(
        metric="matmul.bf16.tflops",
        unit="TFLOPS",
        status="error",
        value=math.nan,
        worst_rank=1,
        values={0: math.inf, 1: math.nan},
        limit=JudgedLimit(min=700.0),
        margin=math.nan,
        interval=(math.nan, math.inf),
    )
    result = TestResult(nodeid="a::b", name="b", outcome="error", measurements=(metric,), duration_seconds=math.nan)
    text = parsed(page.render(run(results=(result,), end=end("BROKEN", 11)))).text
    assert "NaN TFLOPS" in text
    assert "Infinity TFLOPS" in text
    assert "not a number" in text


def ranks(many: int) -> dict[int, float]:
    return {rank: 700.0 + rank / 1000 for rank in range(many)}


@pytest.mark.parametrize(("many", "is_each_shown"), [(64, True), (65, False)])
def test_above_64_ranks_only_the_median_and_the_worst_are_in_the_page(many: int, is_each_shown: bool) -> None:
    metric = JudgedMetric(
        metric="matmul.bf16.tflops",
        unit="TFLOPS",
        status="failed",
        value=700.0,
        worst_rank=0,
        values=ranks(many),
        limit=JudgedLimit(min=701.0),
    )
    result = TestResult(nodeid="a::b", name="b", outcome="failed", measurements=(metric,))
    document = page.render(run(results=(result,), end=end("REJECTED", 1)))
    assert (f"Median of {many} ranks, and the 8 worst" in document) is not is_each_shown
    assert (f"the values of all {many} ranks are in the journal" in document) is not is_each_shown
    assert document.count('<th scope="row">') > 64 if is_each_shown else document.count('<th scope="row">') < 20


def test_what_all_ranks_have_in_common_stands_once() -> None:
    places = tuple(
        RankPlace(
            rank=rank,
            host=f"gpu-{rank // 8:02}",
            local_rank=rank % 8,
            gpu={"index": str(rank % 8), "uuid": f"GPU-{rank}", "vbios": "96.1", "serial": f"S{rank}"},
            versions={"driver": "580.1" if rank else "580.2", "torch": "2.13"},
        )
        for rank in range(16)
    )
    text = parsed(page.render(run(cluster=Cluster(ranks=places)))).text
    assert text.count("96.1") == 1
    assert text.count("S15") == 1
    inventory = text.partition("The same on every rank")[2]
    assert "VBIOS 96.1" in inventory
    assert "580.2" in inventory, "a driver that differs stands in its rank's row"


def test_advice_stands_before_the_evidence() -> None:
    told = TestResult(
        nodeid="a::b", name="b", outcome="error", message="no route", text="no route\nwhat to do: look at the cable"
    )
    document = page.render(run(results=(told,), end=end("BROKEN", 11)))
    assert document.index("What to do") < document.index("<h4>Text</h4>")
    assert '<p class="remedy">look at the cable</p>' in document


def test_the_page_of_1024_ranks_and_40_criteria_is_under_2_megabytes(tmp_path: Path) -> None:
    # Four criteria of each kind take long enough to make; the page of 40 has each of them ten times.
    four = journal.read(example_runs.write_large(tmp_path, criteria=4) / journal.FILE_NAME, keep_samples=False)
    results = tuple(
        replace(result, nodeid=f"{result.nodeid}-{again}", name=f"{result.name}-{again}")
        for again in range(10)
        for result in four.results
    )
    document = page.render(replace(four, results=results, collected=None), folder=tmp_path)
    assert {result.outcome for result in results} == {"passed", "failed"}
    assert document.count('<tbody id="c') == len(results) == 40
    assert len(document.encode()) < 2_000_000
    assert "gpu-127" in document, "the inventory names every host"
    assert "this page would become too large" not in document
