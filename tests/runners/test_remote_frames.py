"""What goes over a connection: lines that are ours, and lines that are not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.runners import ssh
from pytest_gpucluster.runners.ssh import Frame, decode, encode


@given(st.text())
def test_a_text_comes_as_it_was_sent_and_in_one_line(text):
    line = encode(ssh.OUT, text)
    assert line.count(b"\n") == 1
    assert decode(line) == Frame(ssh.OUT, text)


@given(st.binary())
def test_bytes_come_as_they_were_sent(piece):
    assert decode(encode(ssh.PART, piece)) == Frame(ssh.PART, piece)


def test_a_greeting_without_an_end_of_line_hides_nothing():
    assert decode(b"Last login: today" + encode(ssh.END, {"exit": 0})) == Frame(ssh.END, {"exit": 0})


def test_a_line_of_somebody_else_says_nothing():
    rubbish = (b"", b"[]", b"7", b'{"end": 0}', b'{"out": null}', b'{"else": "x"}', b'{"part": "no base64!"}')
    more = (b'{"part": 7}', b'{"end": {"exit": 0}, "out": ""}')
    ours = [ssh.MARK + line + b"\n" for line in (*rubbish, *more)]
    for line in (b"Welcome!\n", *ours, encode(ssh.END, {"exit": 0})[:-6], ssh.MARK + b"[" * 100_000):
        assert decode(line) is None, line[:40]


def test_a_request_is_read_as_it_was_made_or_refused():
    request = ssh.read_request(ssh.request("run", words=["a b", "ü"], env={}))
    assert (request["do"], request["words"]) == ("run", ["a b", "ü"])
    for line, why in (
        (b"", "no request"),
        (b"GET / HTTP/1.1\n", "no request"),
        (b"[]\n", "no request"),
        (json.dumps({"do": "run", "protocol": 99}).encode(), "protocol 99"),
        (json.dumps({"do": "run"}).encode(), "protocol None"),
    ):
        with pytest.raises(EnvironmentBroken, match=why):
            ssh.read_request(line)
