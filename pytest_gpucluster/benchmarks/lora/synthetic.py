"""Conversations made from a seed, in the format of glaive-function-calling-v2, for training without a download.

The draws of a seed are the same on every machine, in every process and with every version of Python.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pytest_gpucluster.benchmarks.lora.dataset import BETWEEN, END, LABELS, WITH_FUNCTIONS, Row
from pytest_gpucluster.benchmarks.lora.function_calls import FunctionCall, write

Item = TypeVar("Item")


class Draws:
    """Draws from a seed. Keys in addition to the seed make draws that do not depend on each other.

    Only ``random.Random(int)`` and its ``random()`` are used: only their results are guaranteed not to change. Source:
    Python's documentation of ``random``, "Notes on Reproducibility". The rest is implemented here.
    """

    def __init__(self, seed: int, *keys: object) -> None:
        text = "/".join(map(str, (seed, *keys)))
        self._random = random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))

    def below(self, end: int) -> int:
        """Return a whole number from 0 to ``end - 1``."""
        return min(int(self._random.random() * end), end - 1)

    def one(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return items[self.below(len(items))]

    def chance(self, ratio: float) -> bool:
        """Return True with this probability."""
        return self._random.random() < ratio

    def shuffle(self, items: MutableSequence[Item]) -> None:
        """Put the items into another order, in place: Fisher and Yates, from the end."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]


WITHOUT_FUNCTIONS = "SYSTEM: You are a helpful assistant, with no access to external functions."

_TALK_RATIO = 0.1
"""The part of the conversations without a function call."""

_SECOND_RATIO = 0.5
"""The part in which the assistant has to choose between two functions."""

_TRIES = 1000

Arguments = dict[str, str | int]


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function that the assistant may call.

    Attributes:
        description: for the system text.
        parameters: by name, the values of each: all texts or all numbers.
        questions: how a user requests it.
        respond: what it returns for these arguments; the number is drawn, from 0 to 9.
        answer: the assistant's answer. Arguments and response are filled in, as into the questions.
    """

    name: str
    description: str
    parameters: Mapping[str, Sequence[str] | Sequence[int]]
    questions: Sequence[str]
    respond: Callable[[Arguments, int], dict[str, Any]]
    answer: str

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the function, as it stands in the system text."""
        properties = {
            name: {"type": "integer" if isinstance(values[0], int) else "string"}
            for name, values in self.parameters.items()
        }
        return {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": properties, "required": list(self.parameters)},
        }


_CITIES = ("Paris", "Rome", "Oslo", "Cairo", "Lima", "Tokyo", "Delhi", "Quito")
_CURRENCIES = ("USD", "EUR", "GBP", "JPY", "INR", "BRL")
_FIRST_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "O'Hara", "José")

FUNCTIONS = (
    Function(
        name="get_weather",
        description="Get the weather of a city",
        parameters={"city": _CITIES, "days": (2, 3, 5, 7)},
        questions=(
            "What will the weather be like in {city} for {days} days?",
            "Can you give me the weather of {city}? I need {days} days.",
        ),
        respond=lambda arguments, drawn: {
            "forecast": ("sunny", "cloudy", "rainy")[drawn % 3],
            "degrees": 10 + drawn % 5,
        },
        answer="The weather in {city} will be {forecast}, with {degrees} degrees.",
    ),
    Function(
        name="convert_currency",
        description="Convert an amount of money",
        parameters={"amount": (10, 20, 50, 100, 500), "source": _CURRENCIES, "target": _CURRENCIES},
        questions=(
            "How much is {amount} {source} in {target}?",
            "Please convert {amount} {source} to {target} for me.",
        ),
        respond=lambda arguments, drawn: {"converted": int(arguments["amount"]) * (2 + drawn % 2)},
        answer="{amount} {source} are {converted} {target} today.",
    ),
    Function(
        name="create_note",
        description="Write a note for somebody",
        parameters={"person": _FIRST_NAMES, "text": ("call back", "bring the keys", "buy milk", "don't be late")},
        questions=(
            'Leave a note for {person} that says "{text}".',
            'I would like {person} to read this: "{text}". Can you note it down?',
        ),
        respond=lambda arguments, drawn: {"status": "success", "note_id": 40 + drawn % 5},
        answer="I have written the note for {person}. Its number is {note_id}.",
    ),
    Function(
        name="find_recipe",
        description="Find a recipe by its main ingredient",
        parameters={"ingredient": ("rice", "beans", "eggs", "tofu", "fish", "corn"), "servings": (2, 4, 6, 8)},
        questions=(
            "What can I cook with {ingredient} for {servings} people?",
            "Find me a recipe with {ingredient}, please, for {servings}.",
        ),
        respond=lambda arguments, drawn: {
            "recipe": f"{('baked', 'fried', 'spicy')[drawn % 3]} {arguments['ingredient']}",
            "minutes": 15 + 5 * (drawn % 4),
        },
        answer="You could cook {recipe} for {servings} people. It takes {minutes} minutes.",
    ),
    Function(
        name="calculate_area",
        description="Calculate the area of a rectangle",
        parameters={"width": (2, 3, 4, 5, 6), "height": (2, 3, 4, 5, 6)},
        questions=(
            "What is the area of a rectangle of {width} by {height}?",
            "My room is {width} wide and {height} long. How large is it?",
        ),
        respond=lambda arguments, drawn: {"area": int(arguments["width"]) * int(arguments["height"])},
        answer="The area is {area}, for a width of {width} and a height of {height}.",
    ),
)

_TALK = (
    ("Hello, how are you?", "I am fine, thank you. How can I help you?"),
    ("Can you order a pizza for me?", "I'm sorry, but I can't order anything. I have no function for it."),
    ("Who wrote Faust?", "Goethe wrote Faust, in two parts."),
    ("Thank you!", "You're welcome! Ask me again whenever you like."),
)


def synthetic_rows(count: int, seed: int) -> list[Row]:
    """Make conversations, all different: the same for the same seed, on every machine.

    In most, the user asks for something that one of the functions does: the assistant calls it, gets the response, and
    answers. The others have no call.

    Raises: ValueError if ``count`` is more than there are different conversations.
    """
    rows: list[Row] = []
    seen: set[str] = set()
    while len(rows) < count:
        for attempt in range(_TRIES):
            row = _row(Draws(seed, "row", len(rows), attempt))
            if row.key() not in seen:
                break
        else:
            raise ValueError(f"there are not {count} different conversations; ask for fewer")
        seen.add(row.key())
        rows.append(row)
    return rows


def _row(draws: Draws) -> Row:
    function = draws.one(FUNCTIONS)
    offered = [function]
    if draws.chance(_SECOND_RATIO):
        offered.append(draws.one([other for other in FUNCTIONS if other is not function]))
    draws.shuffle(offered)
    system = WITH_FUNCTIONS + "\n\n".join(json.dumps(each.schema(), indent=4) for each in offered)
    if draws.chance(_TALK_RATIO):
        question, answer = draws.one(_TALK)
        turns = [f"{LABELS['user']} {question}", f"{LABELS['assistant']} {answer} {END}"]
        return Row(system=system if draws.chance(0.5) else WITHOUT_FUNCTIONS, chat=BETWEEN.join(turns))
    arguments = _arguments(function, draws)
    response = function.respond(arguments, draws.below(10))
    turns = [
        f"{LABELS['user']} {draws.one(function.questions).format(**arguments)}",
        f"{LABELS['assistant']} {write(FunctionCall(name=function.name, arguments=arguments))} {END}",
        f"{LABELS['function']} {json.dumps(response)}",
        f"{LABELS['assistant']} {function.answer.format(**arguments, **response)} {END}",
    ]
    return Row(system=system, chat=BETWEEN.join(turns))


def _arguments(function: Function, draws: Draws) -> Arguments:
    arguments: Arguments = {}
    for name, values in function.parameters.items():
        allowed = [value for value in values if value not in arguments.values() or isinstance(value, int)]
        arguments[name] = draws.one(allowed)
    return arguments
