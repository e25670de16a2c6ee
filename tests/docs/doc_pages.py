"""The pages of the documentation, as their reader has them: headings, links, names in backticks, and blocks."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
GENERATED = ("docs/reference.md", "docs/results.md")
"""Pages that are made from the code or from journals: what names they may use is their generator's affair."""
LANGUAGES = ("console", "bash", "text", "yaml", "json", "python", "ini", "toml", "dockerfile", "groovy", "promql")
"""What a block may be: each is checked, but for ``text`` and the last three, which are shown parts of files that have
checks of their own."""

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>\S*)")
_HEADING = re.compile(r"^(#{1,6}) +(.*?) *#*$")


class BadPage(Exception):
    """A page that cannot be read as what it is meant to be."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
        page: the page that it stands on.
        line: of its first line, counted from 1.
        language: what follows the fence.
        text: what is in it, without the indentation of its fence.
        before: the last line of text before it, which may name it.
    """

    page: str
    line: int
    language: str
    text: str
    before: str

    @property
    def where(self) -> str:
        """Place for a message."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file that it is said to be: the name in backticks on a line that ends in a colon; "" if none is."""
        named = re.findall(r"`([\w./-]+\.\w+|[\w./-]*/?Makefile|hosts)`[^`]*:$", self.before)
        return named[-1] if named else ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One Markdown file; ``name`` is its path in the repository."""

    name: str
    text: str

    @property
    def folder(self) -> Path:
        """What relative links are relative to."""
        return (ROOT / self.name).parent

    @functools.cached_property
    def blocks(self) -> list[Block]:
        """Every fenced block.

        Raises:
            BadPage: a fence that is never closed.
        """
        return list(_blocks(self))

    def blocks_of(self, *languages: str) -> list[Block]:
        """The blocks in these languages."""
        return [block for block in self.blocks if block.language in languages]

    @functools.cached_property
    def prose(self) -> str:
        """The page with as many lines, but nothing in its fenced blocks."""
        lines = self.text.splitlines()
        for block in self.blocks:
            count = block.text.count("\n")
            lines[block.line - 1 : block.line - 1 + count] = [""] * count
        # Indented by four after an empty line: code too, as the picture in how-it-works.
        return "\n".join(lines)

    @functools.cached_property
    def headings(self) -> list[str]:
        """The texts of all headings, in their order."""
        return [match[2] for line in self.prose.splitlines() if (match := _HEADING.match(line))]

    @functools.cached_property
    def anchors(self) -> set[str]:
        """What a link to a part of this page may name, as GitHub makes it of the headings."""
        found: dict[str, int] = {}
        anchors = set(re.findall(r"""<a (?:name|id)=["']([^"']+)["']""", self.prose))
        for heading in self.headings:
            slug = _slug(heading)
            count = found.get(slug, 0)
            found[slug] = count + 1
            anchors.add(f"{slug}-{count}" if count else slug)
        return anchors

    @functools.cached_property
    def links(self) -> list[tuple[int, str]]:
        """Line and target of every link and picture; what stands in backticks is none."""
        found = []
        for number, line in enumerate(self.prose.splitlines(), start=1):
            bare = re.sub(r"(?<!\\)`[^`]*`", "``", line)
            found += [(number, target) for target in re.findall(r"\]\(\s*<?([^)\s>]*)>?(?:\s+\"[^\"]*\")?\s*\)", bare)]
        for number, target in re.findall(r"^()\[[^\]]+\]:\s+(\S+)", self.prose, re.MULTILINE):
            found.append((number or 0, target))
        return found

    @functools.cached_property
    def code(self) -> list[tuple[int, str]]:
        """Line and text of everything in single backticks."""
        found = []
        for match in re.finditer(r"(?<![`\\])(`+)(?!`)(.+?)(?<!`)\1(?!`)", self.prose, re.DOTALL):
            if "\n\n" in match[2]:
                continue
            line = self.prose.count("\n", 0, match.start()) + 1
            found.append((line, " ".join(match[2].split()).replace("\\|", "|")))
        return found


def page_named(name: str) -> Page:
    """Read one page, by its path in the repository."""
    return Page(name=name, text=(ROOT / name).read_text(encoding="utf-8"))


@functools.cache
def every_page() -> tuple[Page, ...]:
    """All that a reader may be sent to."""
    paths = {
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
        *(path for path in (ROOT / "deploy").rglob("*.md") if "node_modules" not in path.parts),
    }
    return tuple(page_named(path.relative_to(ROOT).as_posix()) for path in sorted(paths))


def names() -> list[str]:
    """The names of all pages, for parametrization."""
    return [page.name for page in every_page()]


def _blocks(page: Page) -> Iterator[Block]:
    opened: tuple[int, str, str, str] | None = None  # line, indentation, fence, language
    before, inside = "", []
    for number, line in enumerate(page.text.splitlines(), start=1):
        match = _FENCE.match(line)
        if opened is None:
            if match is not None:
                opened, inside = (number + 1, match["indent"], match["fence"], match["language"]), []
            elif line.strip():
                before = line.strip()
            continue
        start, indent, fence, language = opened
        if match is not None and match["fence"].startswith(fence) and not match["language"]:
            text = "".join(f"{kept}\n" for kept in inside)
            yield Block(page=page.name, line=start, language=language, text=text, before=before)
            opened, before = None, ""
        else:
            inside.append(line.removeprefix(indent))
    if opened is not None:
        raise BadPage(f"{page.name}:{opened[0] - 1}: this block is never closed")


def _slug(heading: str) -> str:
    """GitHub's anchor of a heading: lower case, no punctuation, dashes for spaces."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
