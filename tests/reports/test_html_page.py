"""``report.html`` as text: what stands in it, what is escaped, how large it gets."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import example_runs
from each import of_each

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import Cluster, End, Problem, RankPlace, Run, TestResult
from pytest_gpucluster.judge.judged import JudgedLimit, JudgedMetric
from pytest_gpucluster.reports.html import page

# What is written as one element, without an end.
VOID = {"meta", "input", "br", "wbr", "path", "circle", "rect", "line", "use", "polyline", "polygon", "ellipse"}


class Outline(HTMLParser):
    """Headings, texts, ids, links and scripts of a page; it complains where an element is not closed."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.headings = []
        self.elements = []
        self.words = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def parsed(document):
    outline = Outline()
    outline.feed(document)
    outline.close()
    assert outline.open == []
    return outline


def run(**changes):
    journal = Journal(run=Run(run_id="r", started_at="2026-11-21T09:00:00Z", device="cuda"))
    return replace(journal, **changes)


def end(word, code, reason="because"):
    return End(verdict=word, exit=code, reason=reason, at="2026-11-21T09:10:00Z")


@of_each("name", example_runs.NAMES)
def test_each_example_is_one_sound_document(example_pages, name):
    document = example_pages[name]
    assert document.startswith("<!DOCTYPE html>")
    parser = parsed(document)
    ids = [attributes["id"] for _, attributes in parser.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert parser.headings[0] == 1
    assert parser.headings.count(1) == 1
    deeper = zip(parser.headings, parser.headings[1:], strict=False)
    assert [pair for pair in deeper if pair[1] > pair[0] + 1] == [], "a heading skips a level"
    for link in parser.of("a"):
        href = str(link["href"])
        assert href[1:] in ids if href.startswith("#") else href.startswith("./"), href
    assert len(parser.of("caption")) == len(parser.of("table")) > 0
    assert [cell for cell in parser.of("th") if cell.get("scope") not in ("col", "row")] == []


@of_each("name", example_runs.NAMES)
def test_nothing_is_loaded_and_the_policy_allows_this_script_and_style_alone(example_pages, name):
    document = example_pages[name]
    parser = parsed(document)
    assert {"link", "img", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in parser.elements} == set()
    assert [
        attributes for _, attributes in parser.elements if {"src", "srcset", "style", "ping"} & set(attributes)
    ] == []
    handlers = [name for _, attributes in parser.elements for name in attributes if name.startswith("on")]
    assert handlers == []
    style = document.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(str(meta["content"]) for meta in parser.of("meta") if meta.get("http-equiv"))
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", document, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_hostile_texts_are_text(example_pages):
    document = example_pages["hostile"]
    parser = parsed(document)
    assert len(parser.of("script")) == 1
    assert "<b>bold" not in document
    assert "&lt;script&gt;" in document
    assert "{{ 7*7 }}" in document
    assert [character for character in set(document) if not character.isprintable() and character not in "\n\t"] == []
    assert len(document.encode()) < 500_000


def test_every_control_character_and_change_of_direction_is_shown_wherever_it_comes_from():
    text = "".join(map(chr, range(0x20))) + "\x7f\x85\u202e\u2066\ud800"
    place = RankPlace(rank=0, host=text, gpu={"uuid": text, "index": text, text: text}, versions={text: text})
    limit = JudgedLimit(min=2.0, source=text, origin=text)
    seen = {0: {text: text, "throttle": [text]}}
    measured = {"metric": "x", "unit": text, "labels": {text: text}, "values": {0: 1.0, 1: 2.0}, "telemetry": seen}
    metric = JudgedMetric(**measured, status="failed", value=1.0, worst_rank=0, limit=limit, reason=text)
    result = TestResult(
        nodeid=f"a::{text}",
        name=text,
        criterion=text,
        message=text,
        text=text,
        outcome="failed",
        measurements=(metric,),
        properties=((text, text),),
        sections=((text, text),),
        isolation={"culprits": [{"units": [0], "evidence": [text]}], "names": {"0": text}},
        telemetry=seen,
    )
    journal = run(
        cluster=Cluster(ranks=(place,), problems=(text,)),
        results=(result,),
        problems=(Problem(name=text, message=text, text=text),),
        properties=((text, text),),
        end=end(text, 1, text),
    )
    document = page.render(journal)
    parsed(document)
    assert [character for character in set(document) if not character.isprintable() and character not in "\n\t"] == []
    document.encode("utf-8")
    assert "#x202E" in document
    assert "#xD800" in document


TONES = {
    ("ACCEPTED", 0, False): "good",
    ("ACCEPTED", 1, False): "broken",
    ("REHEARSED", 0, True): "neutral",
    ("SELECTION PASSED", 0, False): "neutral",
    ("REJECTED", 1, False): "bad",
    ("INCOMPLETE", 10, False): "incomplete",
    ("BROKEN", 11, False): "broken",
    ("SOMETHING NEW", 0, False): "neutral",
    ("SOMETHING NEW", 77, False): "broken",
}


@of_each("verdict", list(TONES))
def test_only_an_acceptance_looks_like_one(verdict):
    word, code, rehearsal = verdict
    heading = f"REHEARSAL, {word}" if rehearsal else word
    selection = word == "SELECTION PASSED"
    begun = Run(run_id="r", started_at="", rehearsal=rehearsal, selection=selection)
    document = page.render(run(run=begun, end=end(word, code)))
    assert f'<header class="verdict v-{TONES[verdict]}">' in document
    assert f"<h1>{heading}</h1>" in document
    assert ("REHEARSAL" in parsed(document).text) is rehearsal
    assert ("Only a selection" in parsed(document).text) is selection


def test_many_long_failures_do_not_fill_a_page_and_what_is_left_out_is_stated():
    for many, text, left_out in ((400, "x" * 100_000, r"\d characters left"), (1600, "", "and 100 more")):
        failed = TestResult(nodeid="", outcome="failed", message="m", text=text)
        results = tuple(replace(failed, nodeid=f"a::b[{number}]", name=f"b[{number}]") for number in range(many))
        document = page.render(run(results=results, end=end("REJECTED", 1)))
        assert len(document.encode()) < 2_000_000
        assert re.search(left_out, document)
        assert document.count('<tbody id="c') == min(many, 1500)


def test_a_node_has_the_values_of_its_gpus_their_telemetry_and_failures(example_pages):
    section = example_pages["cluster"].partition('<h2 id="nodes">')[2].partition("</section>")[0]
    summaries = re.findall(r"<summary>(.*?)</summary>", section)
    assert [text for text in summaries if "failures" in text] == ["gpu-01, with failures", "gpu-02, with failures"]
    assert re.search(r"GPU 3: .*matmul", section)
    assert "GPU 0" not in "".join(re.findall("<li>.*?</li>", section))
    (row,) = re.findall(r"<tr class=\"t-failed\"><th scope=\"row\">matmul\[bf16\]</th>.*?</tr>", section)
    assert re.findall(r"<td class=\"n\">\u00d7 (.*?)</td>", row) == ["585.6"]
    assert section.count("<svg") == 6
