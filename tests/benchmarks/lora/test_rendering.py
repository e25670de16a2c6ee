"""A conversation is laid out as glaive's files are, and what the assistant says stands apart."""

from __future__ import annotations

from pytest_gpucluster.benchmarks.lora.dataset import Row
from pytest_gpucluster.benchmarks.lora.packing import segments, text_of

ROW = Row(
    system="SYSTEM: Be brief.\n",
    chat="USER: One?\nASSISTANT: Two. <|endoftext|>\n\nFUNCTION RESPONSE: 3\n\n\n\nASSISTANT: Four <|endoftext|>",
)


def test_what_is_given_and_what_is_reported_take_turns():
    assert [(piece.text, piece.is_assistant) for piece in segments(ROW)] == [
        ("SYSTEM: Be brief.\n\n\nUSER: One?\n\n\nASSISTANT:", False),
        (" Two.", True),
        ("\n\n\nFUNCTION RESPONSE: 3\n\n\nASSISTANT:", False),
        (" Four", True),
    ]
    assert text_of(ROW) == "".join(piece.text for piece in segments(ROW))


def test_without_a_system_text_with_an_answer_without_words_and_with_a_last_question():
    pieces = segments(Row(system=" ", chat="USER: a\nASSISTANT:\nUSER: b\nASSISTANT: c\nUSER: d?"))
    assert [(piece.text, piece.is_assistant) for piece in pieces] == [
        ("USER: a\n\n\nASSISTANT:", False),
        ("", True),
        ("\n\n\nUSER: b\n\n\nASSISTANT:", False),
        (" c", True),
        ("\n\n\nUSER: d?", False),
    ]
