"""What goes over a connection: lines that are ours, and lines that are not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.remote import frames
from pytest_gpucluster.remote.frames import Frame, decode, encode


@given(st.text())
def test_a_text_comes_as_it_was_sent_and_in_one_line(text):
    line = encode(frames.OUT, text)
    assert line.count(b"\n") == 1
    assert decode(line) == Frame(frames.OUT, text)


@given(st.binary())
def test_bytes_come_as_they_were_sent(piece):
    assert decode(encode(frames.PART, piece)) == Frame(frames.PART, piece)


def test_a_greeting_without_an_end_of_line_hides_nothing():
    assert decode(b"Last login: today" + encode(frames.END, {"exit": 0})) == Frame(frames.END, {"exit": 0})


@pytest.mark.parametrize(
    "line",
    [
        b"Welcome!\n",
        frames.MARK + b"\n",
        frames.MARK + b"[]\n",
        frames.MARK + b"7\n",
        frames.MARK + b'{"end": 0}\n',
        frames.MARK + b'{"out": null}\n',
        frames.MARK + b'{"else": "x"}\n',
        frames.MARK + b'{"part": "no base64!"}\n',
        frames.MARK + b'{"part": 7}\n',
        frames.MARK + b'{"end": {"exit": 0}, "out": ""}\n',
        encode(frames.END, {"exit": 0})[:-6],
        frames.MARK + b"[" * 100_000,
    ],
)
def test_a_line_of_somebody_else_says_nothing(line):
    assert decode(line) is None


def test_a_request_is_read_as_it_was_made():
    told = frames.read_request(frames.request("run", words=["a b", "ü"], env={}))
    assert (told["do"], told["words"]) == ("run", ["a b", "ü"])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"", "no request came"),
        (b"GET / HTTP/1.1\n", "no request came"),
        (b"[]\n", "no request came"),
        (json.dumps({"do": "run", "protocol": 99}).encode(), "protocol 99"),
        (json.dumps({"do": "run"}).encode(), "protocol None"),
    ],
)
def test_what_is_no_request_is_refused(line, told):
    with pytest.raises(EnvironmentBroken, match=told):
        frames.read_request(line)
