"""The pages of the documentation as their reader has them: headings, links, names in backticks, blocks and tables."""

import functools
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
_FENCE = re.compile(r"^( *)```(?P<language>\w*)\n(?P<text>.*?)^\1``` *$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"`([\w./-]+\.\w+|[\w./-]*/?Makefile|hosts)`[^`]*:$")


class Block(NamedTuple):
    """A fenced block; ``file`` is what the line before it names and ends in a colon."""

    line: int
    language: str
    text: str
    file: str


class Page:
    """One Markdown file; ``name`` is its path in the repository."""

    def __init__(self, name, text):
        self.name, self.text = name, text
        self.prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
        self.blocks = []
        for match in _FENCE.finditer(text):
            named = _FILE.findall(text[: match.start()].rstrip().rpartition("\n")[2])
            line = text.count("\n", 0, match.start()) + 2
            self.blocks.append(Block(line, match["language"], textwrap.dedent(match["text"]), "".join(named[-1:])))

    def blocks_of(self, *languages):
        """The blocks in these languages."""
        return [block for block in self.blocks if block.language in languages]

    @functools.cached_property
    def anchors(self):
        """What a link to a part of this page may name, as GitHub makes it of the headings."""
        slugs = []
        for heading in re.findall(r"^#{1,6} +(.*?) *#*$", self.prose, re.MULTILINE):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            slugs.append(re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-"))
        numbered = {f"{slug}-{slugs[:at].count(slug)}" for at, slug in enumerate(slugs) if slug in slugs[:at]}
        return {*slugs, *numbered, *re.findall(r"""<a (?:name|id)=["']([^"']+)["']""", self.prose)}

    @functools.cached_property
    def links(self):
        """File and anchor of every link within the repository; what stands in backticks is none."""
        bare = re.sub(r"(?<!\\)`[^`\n]*`", "``", self.prose)
        targets = re.findall(r"\]\(\s*<?([^)\s>]*)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s+(\S+)", bare, re.MULTILINE)
        own = [first or second for first, second in targets if not re.match(r"\w+:", first or second)]
        return [(target.partition("#")[0], target.partition("#")[2]) for target in own]

    @functools.cached_property
    def code(self):
        """Line and text of everything in backticks."""
        found = re.finditer(r"(?<![`\\])(`+)(?!`)((?:(?!\n\n).)+?)(?<!`)\1(?!`)", self.prose, re.DOTALL)
        return [
            (self.prose.count("\n", 0, one.start()) + 1, " ".join(one[2].split()).replace("\\|", "|")) for one in found
        ]

    def place(self, target=""):
        """Where a link of this page leads; where the page itself is."""
        return (ROOT / self.name).parent.joinpath(target).resolve() if target else (ROOT / self.name).resolve()


def page_named(name):
    """Read one page, by its path in the repository."""
    return Page(name, (ROOT / name).read_text(encoding="utf-8"))


@functools.cache
def every_page():
    """All that a reader may be sent to."""
    below = [path for folder in ("docs", "deploy") for path in (ROOT / folder).rglob("*.md")]
    paths = [*ROOT.glob("*.md"), *(path for path in below if "node_modules" not in path.parts)]
    return tuple(page_named(path.relative_to(ROOT).as_posix()) for path in sorted(paths))


def rows(text, header):
    """The cells of the rows of every table with this header."""
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if inside and line.startswith("|") and not re.fullmatch(r"\|[\s:|-]+\|", line):
            yield cells
        inside = cells == list(header) or (inside and line.startswith("|"))
