"""A chat is taken apart into its turns, wherever labels and end tokens stand in it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks.lora.conversation import BETWEEN, END, LABELS, turns_of

CHAT = (
    "USER: How hot is it in Rome?\n\n\n"
    'ASSISTANT: <functioncall> {"name": "heat", "arguments": \'{"city": "Rome"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"degrees": 30}\n\n\n'
    "ASSISTANT: It is 30 degrees. <|endoftext|>\n\n\n"
    "USER: Thanks!\n"
)


def test_roles_and_texts_are_found_in_their_order():
    assert [(turn.role, turn.text) for turn in turns_of(CHAT)] == [
        ("user", "How hot is it in Rome?"),
        ("assistant", '<functioncall> {"name": "heat", "arguments": \'{"city": "Rome"}\'}'),
        ("function", '{"degrees": 30}'),
        ("assistant", "It is 30 degrees."),
        ("user", "Thanks!"),
    ]


def test_spans_are_where_the_texts_stand():
    assert all(CHAT[turn.start : turn.end] == turn.text for turn in turns_of(CHAT))


TEXTS = st.text(min_size=1, max_size=20).map(str.strip).filter(bool).filter(lambda text: END not in text)


@given(st.lists(st.tuples(st.sampled_from(sorted(LABELS)), TEXTS), min_size=1), st.booleans())
def test_what_was_put_together_is_taken_apart_again(turns, with_end):
    turns = [*turns, ("assistant", "so it is")]
    if any(label in text for _, text in turns for label in LABELS.values()):
        return
    pieces = [f"{LABELS[role]} {text}{f' {END}' if with_end and role == 'assistant' else ''}" for role, text in turns]
    chat = BETWEEN.join(pieces)
    found = turns_of(chat)
    assert [(turn.role, turn.text) for turn in found] == turns
    assert all(chat[turn.start : turn.end] == turn.text for turn in found)


def test_a_label_in_the_middle_of_a_line_is_text():
    [asked, said] = turns_of("USER: What does ASSISTANT: mean, USER: and so on?\nASSISTANT: It is a label.")
    assert asked.text == "What does ASSISTANT: mean, USER: and so on?"
    assert said.text == "It is a label."


def test_the_assistant_may_leave_out_the_end_or_repeat_it():
    told = turns_of(f"USER: a\n\n\nASSISTANT: b\n\n\nUSER: c\n\n\nASSISTANT: d {END} {END}\n")
    assert [turn.text for turn in told] == list("abcd")


def test_a_turn_may_hold_several_paragraphs():
    assert turns_of("USER: one\n\n\ntwo\n\nASSISTANT: three\nfour")[0].text == "one\n\n\ntwo"


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        (" \n", "the chat is empty"),
        ("Hello! USER: hi", "does not begin with a turn (USER:, ASSISTANT:, FUNCTION RESPONSE:), but with 'Hello!"),
        ("once\nUSER: hi\nASSISTANT: hello", "but with 'once"),
        ("USER: hi", "the assistant says nothing"),
        ("USER: hi\n\n\nASSISTANT: <|endoftext|>", "the assistant says nothing"),
    ],
    ids=["empty", "no turn", "text before it", "nobody answers", "an empty answer"],
)
def test_what_is_no_conversation_is_refused_with_the_reason(chat, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        turns_of(chat)
