"""Names, messages, help texts and docs use the field's words; what this project once said instead is listed here."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RATHER = {
    "told|tells?|telling|said": "reported, shown, printed, stated; the report, the answer, the message",
    "nobody|whoever|whom": "no rank, no process, unknown; the launcher, the operator; which",
    "beside|meanwhile": "next to, compared with; during the test",
    "accompaniment|errand|kinship|vitals": "monitor, remote job, compatibility, liveness",
    "golden": "reference",
    "on record": "recorded",
    "without a word": "without a message",
    "(hold|holds|held) against": "compared with",
    "so (many|long|much)": "N, the number of; the duration of",
    "as may be": "up to",
    "what (became|becomes|came|comes) of": "the result of",
    "to blame": "the culprit, the suspected component",
}
"""A word or a phrase, also as a part of a name between underscores: what to write."""
_PATTERNS = {
    re.compile(rf"(?<![a-z])(?:{words})(?![a-z])".replace(" ", r"[\s#>*]+"), re.IGNORECASE): instead
    for words, instead in RATHER.items()
}


def texts():
    for name in ("README.md", "CONTRIBUTING.md", "Makefile", "conftest.py", "pyproject.toml", "thresholds.yaml"):
        yield ROOT / name
    for folder in ("pytest_gpucluster", "acceptance", "deploy", "docs", "perf"):
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and path.suffix != ".pyc")


def complaints(text):
    for pattern, instead in _PATTERNS.items():
        for found in pattern.finditer(text):
            yield f"{text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}: {instead}"


def test_no_text_uses_a_word_of_its_own():
    found = []
    for path in texts():
        name = path.relative_to(ROOT).as_posix()
        found += [f"{name}:{complaint}" for complaint in complaints(path.read_text(errors="replace"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["what it told", "rank_told = 1", "put on\n    # record", "Nobody knows", "hold\nagainst"]
)
def test_words_are_found_in_names_and_across_lines(text):
    assert [complaint.split(":")[0] for complaint in complaints(text)] == ["1"]


@pytest.mark.parametrize("text", ["besides", "untold", "on records", "intelligible"])
def test_other_words_are_not(text):
    assert not list(complaints(text))
