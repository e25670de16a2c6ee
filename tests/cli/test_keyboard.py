"""Keys on a terminal, and where there is none."""

from __future__ import annotations

import os
import pty
import termios
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from each import of_each

from pytest_gpucluster.cli import watch_screen as module
from pytest_gpucluster.cli.watch_screen import Keyboard, keyboard


@pytest.fixture
def pair() -> Iterator[tuple[int, int]]:
    leader, follower = pty.openpty()
    yield leader, follower
    for descriptor in (leader, follower):
        os.close(descriptor)


@of_each("key", ["q", "Q", "\x03", "\x04", "quit"])
def test_these_keys_end_the_display(key: str) -> None:
    reads, writes = os.pipe()
    os.write(writes, key.encode())
    assert Keyboard(reads).wait(60)
    os.close(reads)
    os.close(writes)


def test_the_terminal_is_left_as_it_was(pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    follower = pair[1]
    monkeypatch.setattr(module.sys, "stdin", SimpleNamespace(fileno=lambda: follower))
    before = termios.tcgetattr(follower)
    seen = []

    def show() -> None:
        with keyboard() as keys:
            lines = termios.tcgetattr(follower)
            seen.append((keys.is_available, bool(lines[3] & termios.ECHO), lines[6][termios.VSUSP]))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        show()
    assert seen == [(True, False, b"\0")], "no echo, and no Ctrl-Z that leaves the shell with this screen"
    assert termios.tcgetattr(follower) == before
