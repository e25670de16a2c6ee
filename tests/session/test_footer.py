"""Lines below what is written: what reaches the terminal, byte by byte. test_live_hooks.py has a real one."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator

import pytest

from pytest_gpucluster.session.status_line import ERASE_BELOW, IND, RESTORE, SAVE, StatusLine

SHOWN = f"{IND}\x1b[1A{SAVE}\x1b[?7l{IND}\r\x1b[2Kone{{}}\x1b[?7h{RESTORE}"


class Screen:
    """A terminal that keeps every byte, in the order in which they come."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.reads, self.writes = os.pipe()
        self.columns, self.rows = columns, rows
        self.status_line = StatusLine(self.writes, size=self.size, styled=False)
        self.file = self.status_line.above(io.TextIOWrapper(io.FileIO(os.dup(self.writes), "w")))

    def size(self, descriptor: int) -> os.terminal_size:
        if not self.columns and self.rows:
            raise OSError("the terminal is gone")
        return os.terminal_size((self.columns, self.rows))

    def received(self) -> str:
        os.set_blocking(self.reads, False)
        try:
            return os.read(self.reads, 65536).decode()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        self.file.close()
        self.status_line.close()
        os.close(self.reads)


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    made.close()


def test_the_line_is_shown_below_and_erased_before_anything_is_written(screen: Screen) -> None:
    screen.file.write("tests ..")
    assert screen.received() == "tests .."
    screen.status_line.show(["one"])
    assert screen.received() == SHOWN.format("")
    screen.status_line.show(["one"])
    assert screen.received() == ERASE_BELOW + SHOWN.format(""), "the lines are drawn anew, not one below the other"
    assert screen.file.write(".") == 1
    assert screen.received() == f"{ERASE_BELOW}."
    screen.file.write(".")
    assert screen.received() == ".", "there is nothing to erase any more"
    screen.status_line.show(["one"])
    screen.received()
    screen.status_line.show([])
    assert screen.received() == ERASE_BELOW


def test_nothing_is_shown_while_somebody_else_writes(screen: Screen) -> None:
    screen.status_line.show(["one"])
    screen.received()
    screen.status_line.hold()
    assert screen.received() == ERASE_BELOW
    screen.status_line.hold()
    screen.status_line.release()
    screen.status_line.show(["one"])
    assert screen.received() == "", "one of the two still writes"
    screen.status_line.release()
    screen.status_line.show(["one"])
    assert screen.received() == SHOWN.format("")


@pytest.mark.parametrize(
    ("columns", "rows", "shown"),
    [(19, 24, []), (80, 4, []), (80, 5, ["one"]), (80, 6, ["one", "two"]), (0, 0, ["one", "two"]), (0, 1, [])],
    ids=["narrow", "low", "one line", "two lines", "of unknown size", "gone"],
)
def test_only_as_much_as_there_is_room_for(columns: int, rows: int, shown: list[str]) -> None:
    screen = Screen(columns, rows)
    screen.status_line.show(["one", "two"])
    received = screen.received()
    assert [line for line in ("one", "two") if line in received] == shown
    screen.close()


def test_a_terminal_that_is_gone_is_no_error(screen: Screen) -> None:
    reads = os.dup(screen.reads)
    os.dup2(os.open(os.devnull, os.O_RDONLY), screen.reads)
    os.close(reads)
    screen.status_line.show(["one"])  # EPIPE
    screen.status_line.show(["one"])


def test_a_terminal_that_takes_nothing_is_waited_for_by_nobody_but_who_writes(screen: Screen) -> None:
    """As one that Ctrl-S has stopped."""
    screen.status_line.show(["one"])
    screen.received()
    os.set_blocking(screen.writes, False)
    fill = b"\r" * 4096
    with contextlib.suppress(BlockingIOError):
        while os.write(screen.writes, fill):
            pass
    os.set_blocking(screen.writes, True)
    screen.status_line.show(["two"])
    screen.status_line.erase()
    screen.status_line.give_up()
    screen.status_line.release()
    assert screen.status_line.is_shown, "the line is there still"
    assert set(os.read(screen.reads, 2**20).decode()) == {"\r"}
    screen.file.write("pytest's own")
    assert screen.received() == f"{ERASE_BELOW}pytest's own", "as soon as it can be, it is erased"
    screen.status_line.show(["one"])
    assert screen.received() == SHOWN.format("")


def test_last_words_wait_for_no_terminal_that_takes_nothing(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_gpucluster.session.status_line._LAST_WORDS_SECONDS", 0.01)
    screen.status_line.show(["one"])
    screen.received()
    held, done = threading.Event(), threading.Event()

    def stuck() -> None:
        with screen.status_line.lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=stuck)
    thread.start()
    held.wait(60)
    screen.status_line.give_up()
    screen.status_line.close()
    assert screen.received() == ""
    done.set()
    thread.join()
    screen.status_line.give_up()
    assert screen.received() == ERASE_BELOW
