"""The Markdown of a run: it fits where it goes, what is wrong comes first, and foreign text stays text."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import example_runs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pytest_gpucluster.journal import Journal, JournalBuilder, encode
from pytest_gpucluster.reports import markdown
from pytest_gpucluster.wording import one_line

GFM = MarkdownIt("commonmark").enable(["table", "strikethrough"])
RUN = {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "2026-01-02T03:04:05Z"}


def read(*lines: dict[str, Any]) -> Journal:
    builder = JournalBuilder(keep_samples=False)
    for line in lines:
        builder.add(json.loads(encode(line)))
    return builder.journal()


def example(name: str) -> str:
    return markdown.render(read(*example_runs.lines(name)))


class Seen(HTMLParser):
    """What a reader of the page sees: its elements, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.text = ""
        self.feed(GFM.render(page))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        assert attrs == []

    def handle_data(self, data: str) -> None:
        self.text += data


OURS = {"h2", "h3", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "code"}


@pytest.mark.parametrize("name", example_runs.NAMES)
def test_an_example_is_a_page_of_headings_and_tables_and_nothing_else(name: str) -> None:
    page = example(name)
    assert set(Seen(page).elements) <= OURS
    assert len(page.encode()) < markdown.MOST_BYTES
    for table in page.split("\n\n"):
        if table.startswith("| "):
            assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1


def test_the_verdict_comes_first_then_what_is_wrong_then_what_did_not_run() -> None:
    page = example("cluster")
    assert page.startswith("## \N{CROSS MARK} REJECTED\n\n**Exit code 1:** ")
    order = [page.index(text) for text in ("### What is wrong", "### What did not run", "<summary>All tests (15)")]
    assert order == sorted(order)
    wrong = page[order[0] : order[1]]
    assert "| test\\_matmul\\[bf16\\] | \N{CROSS MARK} failed | 585.6 TFLOPS |" in wrong
    assert "rank 11 (gpu-02, GPU 3 GPU-" in wrong


def test_only_an_accepted_run_has_the_mark_of_one() -> None:
    marks = {name: example(name).split()[1] for name in example_runs.NAMES}
    good = "\N{WHITE HEAVY CHECK MARK}"
    assert [name for name, mark in marks.items() if mark == good] == ["accepted"]
    assert marks["rehearsal"] == "\N{WHITE CIRCLE}"
    assert "REHEARSAL" in example("rehearsal").splitlines()[0]


def test_a_run_that_was_cut_off_says_in_which_test() -> None:
    page = markdown.render(read(RUN, {"type": "start", "nodeid": "t.py::test_a"}))
    assert page.startswith("## \N{CROSS MARK} BROKEN\n\n**Exit code 11:** the run ended during t.py::test\\_a\n")
    assert "| test\\_a | \N{COLLISION SYMBOL} ended here |" in page


@pytest.mark.parametrize("rows", [100, 2000])
def test_it_always_fits_and_says_how_much_was_left_out(rows: int) -> None:
    tests = [
        {
            "type": "test",
            "nodeid": f"t.py::test_{number}[{'@|<' * 200}]",
            "outcome": outcome,
            "message": "\N{SNOWMAN}|" * 500,
        }
        for number in range(rows)
        for outcome in [("failed", "passed", "skipped")[number % 3]]
    ]
    problems = [{"type": "problem", "name": "p" * 500, "message": "`" * 500} for _ in range(rows)]
    page = markdown.render(read({**RUN, "run_id": "r" * 10_000}, *tests, *problems))
    assert len(page.encode()) <= markdown.MOST_BYTES
    assert "rows are left out here" in page
    assert page.endswith("of the run's folder.\n")
    assert set(Seen(page).elements) <= OURS


def test_nothing_is_left_out_where_there_is_room() -> None:
    assert "left out" not in example("cluster")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a|b", "a\\|b"),
        ("`rm -rf`", "\\`rm -rf\\`"),
        ("<script>&amp;", "&lt;script&gt;&amp;amp;"),
        ("@everyone", "@&#8203;everyone"),
        ("see #12 and GH-3", "see #&#8203;12 and GH&#8203;-3"),
        ("https://x.y www.x.y", "https:&#8203;//x.y www&#8203;.x.y"),
        ("[a](b) ![c](d)", "\\[a\\](b) !\\[c\\](d)"),
        ("$x$ ~~y~~ *z* _w_", "\\$x\\$ \\~\\~y\\~\\~ \\*z\\* \\_w\\_"),
        ("a\nb\tc", "a b c"),
        ("\x1b[31m\u202e", "#x1B\\[31m#x202E"),
        ("\\|", "\\\\\\|"),
    ],
)
def test_foreign_text_is_shown_and_does_nothing(text: str, expected: str) -> None:
    assert markdown.text(text, 100) == expected


@given(
    st.text(alphabet=st.one_of(st.sampled_from("\\`*_[]()|~$<>&@:#/!-+=.w1GH \n\r\t\x1b\u202e'\""), st.characters()))
)
def test_whatever_is_in_a_cell_is_one_cell_of_text(text: str) -> None:
    page = f"| a | b |\n| --- | --- |\n| {markdown.text(text, 10_000)} | end |\n"
    seen = Seen(page)
    assert seen.elements == ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]
    shown = seen.text.replace("\u200b", "").split("\n")
    line = "".join(c if c.isprintable() else f"#x{ord(c):02X}" for c in one_line(text, 10_000)).replace("\u200b", "")
    assert [part.strip() for part in shown if part.strip()] == [*"ab", *([line.strip()] if line.strip() else []), "end"]
