"""docs/glossary.md: the words that the product says are explained, each once."""

from __future__ import annotations

import re

import doc_pages
import pytest

from pytest_gpucluster import options, verdict

PAGE = doc_pages.page_named("docs/glossary.md")
ROWS = [row.split("|")[1:-1] for row in PAGE.text.splitlines() if re.match(r"\| (?!word |---)", row)]
WORDS = [word.strip().strip("`") for row in ROWS for word in re.split(r", (?![^(]*\))", row[0])]


def test_every_row_explains_its_word():
    assert len(ROWS) > 50
    assert all(len(row) == 2 and len(row[1].split()) >= 3 for row in ROWS)


def test_no_word_is_explained_twice():
    assert sorted(word for word in set(WORDS) if WORDS.count(word) > 1) == []


@pytest.mark.parametrize(
    "word", sorted({w for text in verdict.EXIT_CODES.values() for w in re.findall(r"[A-Z]{6,}", text)})
)
def test_every_verdict_is_explained(word):
    assert any(re.search(rf"\b{word}\b", cell) for row in ROWS for cell in row), word


@pytest.mark.parametrize("profile", [*options.PROFILES, "cpu"])
def test_every_profile_is_named(profile):
    [row] = [row for row in ROWS if row[0].strip() == "profile"]
    assert f"`{profile}`" in row[1]
