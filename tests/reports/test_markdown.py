"""The Markdown of a run: it fits where it goes, what is wrong comes first, and foreign text stays text."""

import re
from html.parser import HTMLParser

import example_runs
from each import of_each
from example_runs import read
from markdown_it import MarkdownIt

from pytest_gpucluster.reports import markdown

GFM = MarkdownIt("commonmark").enable(["table", "strikethrough"])
RUN = {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "2026-01-02T03:04:05Z"}


def example(name):
    return markdown.render(example_runs.journal_of(name))


class Seen(HTMLParser):
    """What a reader of the page sees: its elements, and its text."""

    def __init__(self, page):
        super().__init__()
        self.elements = []
        self.text = ""
        self.feed(GFM.render(page))

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        assert attrs == []

    def handle_data(self, data):
        self.text += data


OURS = {"h2", "h3", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "code"}


@of_each("name", example_runs.NAMES)
def test_an_example_is_a_page_of_headings_and_tables_and_nothing_else(name):
    page = example(name)
    assert set(Seen(page).elements) <= OURS
    assert len(page.encode()) < markdown.MOST_BYTES
    for table in page.split("\n\n"):
        if table.startswith("| "):
            assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1


def test_only_an_accepted_run_has_the_mark_of_one():
    marks = {name: example(name).split()[1] for name in example_runs.NAMES}
    good = "\N{WHITE HEAVY CHECK MARK}"
    assert [name for name, mark in marks.items() if mark == good] == ["accepted"]
    assert marks["rehearsal"] == "\N{WHITE CIRCLE}"
    assert "REHEARSAL" in example("rehearsal").splitlines()[0]


@of_each("rows", [100, 2000])
def test_it_always_fits_and_says_how_much_was_left_out(rows):
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
    assert re.search(r"\d rows are left", page)
    assert set(Seen(page).elements) <= OURS


@of_each(
    "case",
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
def test_foreign_text_is_shown_and_does_nothing(case):
    assert markdown.text(case[0], 100) == case[1]
