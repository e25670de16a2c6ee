"""Troubleshooting quotes what the suite says, has what an operator looks for, and judges Xids as the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_tables import rows
from said_messages import ELLIPSIS, is_said

from pytest_gpucluster import options
from pytest_gpucluster.health.xid import TAKE_OUT

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADER = ("you see", "cause", "command", "fix")
OF_OTHERS = ("torch", "NCCL", "the kernel", "the shell")
SUBJECTS = (
    "port", "Slow start", "NCCL timeouts", "hung ranks", "interface", "Shared memory", "File descriptors",
    "Locked memory", "container", "Out of memory", "ECC", "Xids", "other nodes do not see", "differs between ranks",
)  # fmt: skip


def quoted(cell: str) -> list[str]:
    """What a cell says that this suite says: in backticks, more than one word, and not marked as others' words."""
    others = "|".join(OF_OTHERS)
    own = re.sub(rf"`[^`]*` \*\(of (?:{others})\)\*", "", cell)
    return [text for text in re.findall(r"`([^`]*)`", own) if ELLIPSIS in text or " " in text]


def xids() -> dict[int, str]:
    """Xid -> how the page says that it is judged."""
    table = PAGE.partition("<!-- xids: ")[2].partition("\n\n")[0].partition("-->\n")[2]
    found = {}
    for row in rows(table, ["Xid", "what it says", "judged", "first step"]):
        for number in row[0].split(", "):
            found[int(number)] = row[2]
    return found


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_an_operator_looks_for_is_there(subject: str) -> None:
    assert subject in PAGE


def test_every_row_says_what_is_seen_why_and_what_to_do() -> None:
    told = list(rows(PAGE, HEADER))
    assert len(told) > 60
    for row in told:
        assert len(row) == 4, row
        seen, cause, _, fix = row
        assert seen, row
        assert cause, row
        assert fix, row


@pytest.mark.parametrize("message", sorted({text for row in rows(PAGE, HEADER) for text in quoted(row[0])}))
def test_what_is_quoted_the_suite_says(message: str) -> None:
    assert is_said(message), "quote the message as the source has it, with an ellipsis for names and numbers"


def test_a_message_that_nobody_says_would_be_seen() -> None:
    [message] = quoted("`the port of … is on fire`")
    assert not is_said(message)


def test_words_of_others_are_left_to_them() -> None:
    assert quoted("`… has too few`, `Too many open files` *(of the kernel)*") == ["… has too few"]


def test_every_xid_that_rejects_is_listed_as_such_and_no_other() -> None:
    assert {number for number, judged in xids().items() if judged == "hardware"} == TAKE_OUT
    assert set(xids().values()) == {"hardware", "note"}


def test_no_first_step_is_a_reset_alone_for_what_rejects_until_the_next_boot() -> None:
    """The kernel log outlives a reset of the GPU, and gpu.health judges all of it."""
    table = PAGE.partition("<!-- xids: ")[2].partition("\n\n")[0].partition("-->\n")[2]
    told = [row for row in rows(table, ["Xid", "what it says", "judged", "first step"]) if row[2] == "hardware"]
    assert len(told) > 5
    assert [row for row in told if "reset" in row[3] and "reboot" not in row[3]] == []
    assert "Reboot before you run again" in PAGE


def test_sections_in_the_list_at_the_top_are_sections() -> None:
    listed = re.findall(r"\]\(#([\w-]+)\)", PAGE.partition("\n## ")[0])
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert len(listed) >= len(headings)
    assert {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings} == set(listed)


def test_timeouts_that_are_named_exist() -> None:
    named = re.findall(r"--gpucluster-timeouts (\w+)=", PAGE)
    assert named
    assert set(named) <= set(options.Timeouts.__dataclass_fields__)
