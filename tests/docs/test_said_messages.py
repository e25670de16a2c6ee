"""A quoted message is found in the source, and one that nobody says is not."""

from __future__ import annotations

import pytest
from said_messages import is_said, templates


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("the enforced power limit is … W", id="a value in the middle"),
        pytest.param("… never reported", id="a value in front"),
        pytest.param("… is not known: … tells nothing; …", id="several values"),
    ],
)
def test_what_is_said_is_found(message: str) -> None:
    assert is_said(message)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("the enforced power limits are … W", id="a word is another one"),
        pytest.param("W … the enforced power limit is", id="another order"),
        pytest.param("the enforced power limit is … of the median of the others", id="two texts in one"),
        pytest.param("Say whether a process is in another's namespace", id="a sentence of nobody"),
    ],
)
def test_what_nobody_says_is_not_found(message: str) -> None:
    assert not is_said(message)


def test_too_few_words_are_no_quotation() -> None:
    with pytest.raises(ValueError, match="quote more words"):
        is_said("… is …")


def test_docstrings_say_nothing_to_an_operator() -> None:
    assert not any(text.startswith("Limits: YAML files into frozen values") for text in templates())
