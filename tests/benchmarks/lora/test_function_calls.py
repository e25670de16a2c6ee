"""A call in glaive's notation is read as what it means, and for a text without a call the reason is returned."""

from __future__ import annotations

import json

import pytest
from each import of_each
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks.lora import function_calls
from pytest_gpucluster.benchmarks.lora.function_calls import CALL, FunctionCall, parse, same_json, write

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=4)
NAMES = st.text(min_size=1).filter(str.strip)


@given(name=NAMES, arguments=ARGUMENTS)
@settings(max_examples=100)
def test_every_call_that_is_written_is_read_again(name, arguments):
    call = FunctionCall(name=name, arguments=arguments)
    assert parse(write(call)) == call
    for ascii_only, end in [(True, " <|endoftext|>"), (False, "<|endoftext|>\n"), (False, "")]:
        inner = json.dumps(arguments, ensure_ascii=ascii_only)
        assert parse(f'{CALL} {{"name": {json.dumps(name)}, "arguments": \'{inner}\'}}{end}') == call
    escaped = json.dumps(arguments).replace("'", "\\'")
    assert parse(f'{CALL} {{"name": {json.dumps(name)}, "arguments": \'{escaped}\'}}') == call
    for value in (arguments, json.dumps(arguments)):
        assert parse(f"{CALL} {json.dumps({'name': name, 'arguments': value})}") == call
        assert parse(f"{CALL}\n{json.dumps({'arguments': value, 'name': name}, indent=2)}") == call


@given(name=NAMES, arguments=ARGUMENTS)
def test_a_call_as_chat_templates_write_it_is_read(name, arguments):
    written = json.dumps({"name": name, "arguments": arguments})
    for text in (
        f"<tool_call>\n{written}\n</tool_call>",
        f"Let me see.\n<tool_call>{written}</tool_call><|endoftext|>",
    ):
        assert parse(text) == FunctionCall(name=name, arguments=arguments)
        assert function_calls.has_call(text)


@given(arguments=st.dictionaries(st.sampled_from(["it's", "b"]), st.sampled_from(["don't", 'say "x"', "line\nline"])))
def test_escapes_of_escapes_are_taken_off_where_nothing_else_gives_json(arguments):
    inner = json.dumps(arguments).replace("\\", "\\\\").replace("'", "\\'")
    found = parse(f'{CALL} {{"name": "f", "arguments": \'{inner}\'}}')
    # A line break, escaped twice, is JSON as it stands: a backslash and an n.
    as_it_stands = {name: value.replace("\n", "\\n") for name, value in arguments.items()}
    assert found in [FunctionCall(name="f", arguments=each) for each in (arguments, as_it_stands)]


@given(st.text(max_size=200))
def test_no_text_whatever_makes_the_reader_fail(text):
    assert function_calls.has_call(f"{CALL} {text}")
    assert isinstance(parse(text), str)
    assert isinstance(parse(f"{CALL} {text}"), (FunctionCall, str))
    assert isinstance(parse(f'{CALL} {{"name": "f", "arguments": \'{text}\'}}'), (FunctionCall, str))


@given(st.data())
def test_a_call_that_is_cut_off_is_no_call(data):
    text = write(FunctionCall(name="find", arguments={"to": "O'Hara", "n": [1, {"a": "}'"}]}))
    end = data.draw(st.integers(0, len(text) - 1))
    assert isinstance(parse(text[:end]), str)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("""{"name": "f", "arguments": '{"text": "don't"}'}""", {"text": "don't"}),
        ("""{"name": "f", "arguments": '{"text": "don\\'t"}'}""", {"text": "don't"}),
        ("""{"name": "f", "arguments": '{"text": "'}', '"}'}""", {"text": "'}', '"}),
        ("""{"name": "f", "arguments": '{\\"text\\": \\"x\\"}'}""", {"text": "x"}),
        ("""{"name": "f", "arguments": '{"path": "C:\\\\new"}'}""", {"path": "C:\\new"}),
        ("""{"name":"f","arguments":'{}'}""", {}),
        ("""{"name": "f", "arguments": ' {"a": 1} ' }""", {"a": 1}),
        ("""{"arguments": '{"a": "Köln, 北京"}', "name": "f"}""", {"a": "Köln, 北京"}),
        ("""{"name": "f", "arguments": {"a": {"b": [1, 2.5, null]}}}""", {"a": {"b": [1, 2.5, None]}}),
    ],
)
def test_the_ways_to_write_arguments(text, arguments):
    assert parse(f"Sure, one moment. {CALL} {text} <|endoftext|>") == FunctionCall(name="f", arguments=arguments)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I cannot do that.", "no <functioncall>"),
        (f"{CALL} f(a=1)", "no JSON: Expecting value"),
        (f'{CALL} {{"name": "f"}}', "no arguments"),
        (f"{CALL} {{\"arguments\": '{{}}'}}", "no name"),
        (f'{CALL} {{"name": " ", "arguments": \'{{}}\'}}', "the name is no text, or empty"),
        (f'{CALL} {{"name": 7, "arguments": \'{{}}\'}}', "the name is no text"),
        (f'{CALL} {{"name": "f", "arguments": \'[1]\'}}', "the arguments are no JSON object"),
        (f'{CALL} {{"name": "f", "arguments": null}}', "the arguments are no JSON object"),
        (f'{CALL} {{"name": "f", "arguments": \'{{a: 1}}\'}}', "the arguments in quotes are no JSON"),
        (f'{CALL} {{"name": "f", "arguments": "{{a: 1}}"}}', "the arguments in quotes are no JSON"),
        (f'{CALL} {{"name": "f", "arguments": {{"a": NaN}}}}', "NaN is no JSON"),
        (f'{CALL} {{"name": "f", "arguments": {{"a": 1, "a": 2}}}}', "key 'a' is there twice"),
        (f'{CALL} {{"name": "f", "name": "g", "arguments": {{}}}}', "key 'name' is there twice"),
        (f'{CALL} {{"name": "f", "arguments": {{}}, "id": 3}}', "key 'id' is neither name nor arguments"),
        (f'{CALL} {{"name": "f", "arguments": {{}}}} and more', "no JSON: Extra data"),
        (f'{CALL} {{"name": "f", "arguments": {{}}}} {CALL} {{}}', "no JSON: Extra data"),
        (f'{CALL} {{"name": "f" "arguments": {{}}}}', "no JSON: Expecting ',' delimiter"),
        (f'{CALL} {{"name": "f", "arguments": {{}}', "no JSON: Expecting ',' delimiter"),
        (f"{CALL} {{'name': 'f'}}", "no JSON"),
        (f'{CALL} {{"name": "f", "arguments": {"[" * 100_000}', "nested too deeply"),
    ],
)
def test_what_is_no_call_is_reported_why(text, reason):
    found = parse(text)
    assert isinstance(found, str)
    assert reason in found


@given(JSON)
def test_a_value_is_the_same_as_its_copy(value):
    assert same_json(value, json.loads(json.dumps(value)))


@of_each("pair", [(True, 1), (0, False), (None, False), ("1", 1), ([1], [1, 2]), ([1, 2], [2, 1])])
def test_values_that_differ_are_not_the_same(pair):
    for one, other in (pair, pair[::-1]):
        assert not same_json(one, other)
        assert not same_json({"a": [one]}, {"a": [other]})
        assert not same_json({"a": 1}, {"a": 1, "b": one})
    assert not same_json({}, [])
