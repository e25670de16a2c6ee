"""A chat is taken apart into its turns, wherever labels and end tokens stand in it."""

from __future__ import annotations

import re

import pytest
from each import of_each
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks.lora.dataset import BETWEEN, END, LABELS, turns_of

CHAT = (
    "USER: How hot is it in Rome?\n\n\n"
    'ASSISTANT: <functioncall> {"name": "heat", "arguments": \'{"city": "Rome"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"degrees": 30}\n\n\n'
    "ASSISTANT: It is 30 degrees. <|endoftext|>\n\n\n"
    "USER: Thanks!\n"
)


def test_roles_and_texts_are_found_in_their_order_and_where_they_stand():
    found = turns_of(CHAT)
    assert [(turn.role, turn.text) for turn in found] == [
        ("user", "How hot is it in Rome?"),
        ("assistant", '<functioncall> {"name": "heat", "arguments": \'{"city": "Rome"}\'}'),
        ("function", '{"degrees": 30}'),
        ("assistant", "It is 30 degrees."),
        ("user", "Thanks!"),
    ]
    assert all(CHAT[turn.start : turn.end] == turn.text for turn in found)


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


def test_labels_in_a_line_and_paragraphs_are_text_and_ends_may_be_left_out_or_repeated():
    for chat, texts in [
        (
            "USER: What is ASSISTANT: and USER: so?\nASSISTANT: A label.",
            ["What is ASSISTANT: and USER: so?", "A label."],
        ),
        (f"USER: a\n\n\nASSISTANT: b\n\n\nUSER: c\n\n\nASSISTANT: d {END} {END}\n", list("abcd")),
        ("USER: one\n\n\ntwo\n\nASSISTANT: three\nfour", ["one\n\n\ntwo", "three\nfour"]),
    ]:
        assert [turn.text for turn in turns_of(chat)] == texts


@of_each(
    "refused",
    [
        (" \n", "empty"),
        ("Hello! USER: hi", "(USER:, ASSISTANT:, FUNCTION RESPONSE:), but with 'Hello!"),
        ("once\nUSER: hi\nASSISTANT: hello", "but with 'once"),
        ("USER: hi", "there is nothing to train on"),
        ("USER: hi\n\n\nASSISTANT: <|endoftext|>", "there is nothing to train on"),
    ],
)
def test_what_is_no_conversation_is_refused_with_the_reason(refused):
    chat, why = refused
    with pytest.raises(ValueError, match=re.escape(why)):
        turns_of(chat)
