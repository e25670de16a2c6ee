"""Links lead somewhere, parts that they name are there, and a reader finds every page from the index."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import doc_pages
import pytest
from doc_pages import ROOT, Page

INDEX = "docs/README.md"


def broken(page: Page, others: Mapping[str, Page]) -> Iterator[str]:
    """What is wrong with the links of a page."""
    for line, target in page.links:
        place, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        found = page.folder.joinpath(place) if place else ROOT / page.name
        if not found.exists():
            yield f"{page.name}:{line}: {target}: there is no such file"
            continue
        if not found.resolve().is_relative_to(ROOT):
            yield f"{page.name}:{line}: {target}: leads out of the repository"
            continue
        name = found.resolve().relative_to(ROOT).as_posix()
        if anchor and name in others and anchor not in others[name].anchors:
            yield f"{page.name}:{line}: {target}: {name} has no such heading"


def reached(pages: Iterable[Page], index: str) -> set[str]:
    """The pages to which links lead from the index, in any number of steps."""
    by_name = {page.name: page for page in pages}
    found, todo = set(), [index]
    while todo:
        name = todo.pop()
        if name in found or name not in by_name:
            continue
        found.add(name)
        page = by_name[name]
        for _, target in page.links:
            if "://" not in target:
                path = Path(page.folder.joinpath(target.partition("#")[0])).resolve()
                if path.is_relative_to(ROOT):
                    todo.append(path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.parametrize("page", doc_pages.every_page(), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert list(broken(page, {other.name: other for other in doc_pages.every_page()})) == []


def test_the_index_names_every_page_of_the_documentation():
    index = doc_pages.page_named(INDEX)
    named = {(index.folder / target.partition("#")[0]).resolve() for _, target in index.links if "://" not in target}
    missing = [
        page.name
        for page in doc_pages.every_page()
        if page.name.startswith("docs/") and page.name != INDEX and (ROOT / page.name).resolve() not in named
    ]
    assert missing == [], f"add a line to {INDEX}"


def test_every_page_is_reached_from_the_index():
    assert sorted(set(doc_pages.names()) - reached(doc_pages.every_page(), INDEX)) == []


def test_the_readme_leads_to_the_index():
    assert INDEX in {target.partition("#")[0] for _, target in doc_pages.page_named("README.md").links}


@pytest.mark.parametrize("page", doc_pages.every_page(), ids=lambda page: page.name)
def test_a_page_has_one_title_and_no_level_is_left_out(page):
    levels = [len(match) for match in re.findall(r"^(#+) ", page.prose, re.MULTILINE)]
    assert levels[:1] == [1], f"{page.name} does not begin with a title"
    assert levels.count(1) == 1
    assert [second for first, second in itertools.pairwise(levels) if second > first + 1] == []


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("nowhere.md", "nowhere.md: there is no such file"),
        ("run.md#exit-code", "docs/run.md has no such heading"),
        ("#not-here", "docs/junit.md has no such heading"),
        ("../../outside.md", "there is no such file"),
        ("../..", "leads out of the repository"),
    ],
)
def test_a_planted_fault_is_named(target, expected):
    page = Page(name="docs/junit.md", text=f"# A page\n\nSee\n[that]({target}).\n")
    [complaint] = broken(page, {page.name: page, "docs/run.md": doc_pages.page_named("docs/run.md")})
    assert complaint.startswith("docs/junit.md:4: ")
    assert expected in complaint


def test_good_links_are_good():
    page = Page(name="docs/page.md", text="# A\n\n[a](run.md#exit-codes) `[b](none)` [c](https://x.example/y)\n")
    assert list(broken(page, {"docs/run.md": doc_pages.page_named("docs/run.md")})) == []


def test_a_page_that_nobody_links_to_is_not_reached():
    pages = [
        Page(name="docs/README.md", text="# I\n[a](a.md)\n"),
        Page(name="docs/a.md", text="# A\n[b](b.md#x)\n"),
        Page(name="docs/b.md", text="# B\n"),
        Page(name="docs/c.md", text="# C\n[a](a.md)\n"),
    ]
    assert reached(pages, INDEX) == {"docs/README.md", "docs/a.md", "docs/b.md"}
