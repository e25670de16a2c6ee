"""The messages that pages quote with an ellipsis are those of the code, so that an operator finds them by searching."""

import ast
import functools
import re

from each import of_each
from pages import ROOT, Page, every_page

OF_OTHERS = re.compile(r"EADDRINUSE|The client socket has timed out|Cuda is not available|DistNetworkError")
"""Messages of torch and torchrun."""
SHORTEST = 9
"""A shorter piece of a message, such as "on rank", is found anywhere."""


@functools.cache
def source_texts():
    """All texts of the package, the suite and the scripts, a placeholder being a NUL."""
    found = []
    for folder in ("pytest_gpucluster", "acceptance"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    scripts = (path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".sh", ".sbatch"))
    found += [re.sub(r'"? *\\\n\s*"?', " ", path.read_text(encoding="utf-8")) for path in scripts]
    return "\n".join(" ".join(text.split()) for text in found)


def unknown_pieces(page):
    for line, code in page.code:
        for piece in code.split("…") if "…" in code else ():
            words = piece.strip(" .:;,()[]")
            if len(words) >= SHORTEST and words not in source_texts() and not OF_OTHERS.search(words):
                yield f"{page.name}:{line}: `{code}`: no text of this project has {words!r}"


@of_each("page", [page for page in every_page() if page.name != "CHANGELOG.md"], name=lambda page: page.name)
def test_quoted_messages_are_those_of_the_code(page):
    found = list(unknown_pieces(page))
    assert not found, "\n".join(found)


def test_a_message_that_the_code_does_not_have_is_found():
    page = Page("docs/page.md", "`… was never written in this project: …`\n\n`… never reported`\n")
    [found] = unknown_pieces(page)
    assert found.startswith("docs/page.md:1: ")
