import subprocess
import sys

import pytest

from pytest_gpucluster.agreement import hang_diagnosis

HOLDS_THE_GIL = """
import ctypes, faulthandler, sys, threading, time

def beat():
    while True:
        faulthandler.dump_traceback_later(0.2, file=sys.stderr)
        time.sleep(0.1)

def hold():
    ctypes.PyDLL("libc.so.6").usleep(600_000)

threading.Thread(target=beat, daemon=True).start()
time.sleep(0.3)
hold()
"""
CRASHES = "import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)"


@pytest.fixture(scope="module")
def dumps():
    """What the faulthandler of this Python writes."""

    def run(script):
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stderr

    return {"held": run(HOLDS_THE_GIL), "crashed": run(CRASHES)}


def test_the_place_is_the_main_threads_innermost_frame(dumps):
    assert hang_diagnosis.stack_location(dumps["held"]) == "<string>:10 in hold"
    assert hang_diagnosis.fatal_error(dumps["held"]) == ""


def test_a_crash_is_named_by_its_signal(dumps):
    assert hang_diagnosis.fatal_error(dumps["crashed"]).endswith(": Segmentation fault")
    assert hang_diagnosis.stack_location(dumps["crashed"])


def test_anything_else_says_nothing():
    for text in ("", "most recent call first):", "garbage \x00 File", "Thread 0x1 (most recent"):
        assert hang_diagnosis.stack_location(text) == hang_diagnosis.fatal_error(text) == ""
