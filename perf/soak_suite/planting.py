"""Makes the fault of a round at its moment, on its rank. Runs next to stamps.py and one_fault.py of tests/faults."""

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path

import one_fault
from stamps import RANK, all_reduce, stamp

PLAN = json.loads(os.environ["SOAK_PLAN"])
GARBAGE = bytes(range(256)) * 64 + b"\xff\xfe\xed\xa0\x80\xc0\x80 ]]></failure><!-- \x1b]0;title\x07\x1b[2J \x00" * 64
LONG_LINE = b"x" * 3_000_000 + b"\xf0\x9f"
HOSTILE_TEXT = "\x00\x08\x1b[31m\ud800\ufffe ]]> <&>\"' \r\n\u2028 " + "y" * 100_000


def strike(test, moment, cluster=None, call=None):
    """Make the fault, if this is where it is planted. Every rank must call this."""
    planned = PLAN["fault"] not in ("none", "drop_test", "leave_out_test") and (test, moment) == (
        PLAN["test"],
        PLAN["moment"],
    )
    if not planned or (call is not None and call != PLAN["call"]):
        return
    stamp("fault")
    fault, is_victim = PLAN["fault"], PLAN["victim"] == RANK
    if fault == "absent" and not is_victim:
        all_reduce(cluster)
    elif fault == "other_collective":
        other_collective(cluster, is_victim)
    elif is_victim and fault != "absent":
        (globals().get(fault) or getattr(one_fault, fault))()


class Struck:
    """Calls something, and strikes at one of the calls."""

    def __init__(self, test, call):
        self.test, self.call, self.calls = test, call, 0

    def __call__(self, *arguments):
        self.calls += 1
        strike(self.test, "inside", call=self.calls)
        return self.call(*arguments)


def pause():
    one_fault.stop()  # until SIGCONT


def raise_error():
    raise RuntimeError("planted")


def raise_assertion():
    raise AssertionError("planted")


def raise_exit():
    sys.exit(3)


change_exit = raise_assertion  # and the conftest takes back the exit code


def exit_with_0():
    atexit.register(os._exit, 0)
    raise AssertionError("planted")


def end_at_start():
    time.sleep(1.0)  # until the other rank has begun
    one_fault.kill()


def end_with_0_at_start():
    time.sleep(1.0)
    one_fault.leave_with_0()


raise_at_start = raise_error


def lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()


def loop():
    while True:
        pass


def other_collective(cluster, is_victim):
    import torch

    if is_victim:
        torch.distributed.barrier(group=cluster.group)
    else:
        all_reduce(cluster)


def print_garbage():
    for descriptor in (1, 2):
        for content in (GARBAGE, LONG_LINE, b"\n"):
            while content:
                content = content[os.write(descriptor, content) :]
    if PLAN["captured"]:  # else Python itself refuses to print half of a character
        print(HOSTILE_TEXT)


def raise_garbage():
    print_garbage()
    raise RuntimeError(HOSTILE_TEXT)


def fill_disk():
    with open(Path(os.environ["SOAK_DISK"], "filler"), "ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                stamp("full")


fill_disk_for_a_while = fill_disk


def make_room():
    """Remove the filler, if the disk was to be full for a while."""
    if PLAN["fault"] == "fill_disk_for_a_while" and PLAN["victim"] == RANK:
        filler = Path(os.environ["SOAK_DISK"], "filler")
        if filler.exists():
            time.sleep(1.0)  # the recorder has met the full disk by now
            filler.unlink()
            stamp("room")
