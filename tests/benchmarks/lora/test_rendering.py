"""A conversation is laid out as glaive's files are, and what the assistant says stands apart."""

from __future__ import annotations

from pytest_gpucluster.benchmarks.lora.rendering import segments, text_of
from pytest_gpucluster.benchmarks.lora.rows import Row

ROW = Row(
    system="SYSTEM: Be brief.\n",
    chat="USER: One?\nASSISTANT: Two. <|endoftext|>\n\nFUNCTION RESPONSE: 3\n\n\n\nASSISTANT: Four <|endoftext|>",
)


def test_what_is_given_and_what_is_said_take_turns():
    assert [(piece.text, piece.judged) for piece in segments(ROW)] == [
        ("SYSTEM: Be brief.\n\n\nUSER: One?\n\n\nASSISTANT:", False),
        (" Two.", True),
        ("\n\n\nFUNCTION RESPONSE: 3\n\n\nASSISTANT:", False),
        (" Four", True),
    ]


def test_without_a_system_text_the_first_turn_is_the_begin():
    assert next(segments(Row(system=" ", chat=ROW.chat))).text == "USER: One?\n\n\nASSISTANT:"


def test_what_follows_the_last_answer_is_given():
    [*_, last] = segments(Row(system="", chat=ROW.chat + "\nUSER: Five?"))
    assert (last.text, last.judged) == ("\n\n\nUSER: Five?", False)


def test_an_answer_without_words_is_judged_for_its_end_alone():
    pieces = list(segments(Row(system="", chat="USER: a\nASSISTANT:\nUSER: b\nASSISTANT: c")))
    assert [(piece.text, piece.judged) for piece in pieces][1] == ("", True)


def test_the_text_is_all_pieces_together():
    assert text_of(ROW) == (
        "SYSTEM: Be brief.\n\n\nUSER: One?\n\n\nASSISTANT: Two.\n\n\nFUNCTION RESPONSE: 3\n\n\nASSISTANT: Four"
    )
