"""Faults of rank 1 alone: it fails, it forks a process that comes back from the test, a timer ends it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from stamps import RANK, meet, stamp


def test_fails(cluster):
    assert RANK != 1, "a bad GPU"


def test_forks(cluster):
    if RANK == 1:
        os.fork()


def test_is_ended_by_a_timer(cluster):
    """As pytest-timeout ends a process by its method "thread". What it has started is in a session of its own."""
    meet(cluster, "fork")
    if RANK == 0:
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGSTOP)  # the recorder
    if RANK == 1:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        stamp("fault")
        threading.Timer(0.3, lambda: (sys.stderr.write("Timeout"), os._exit(1))).start()
        time.sleep(60)


def test_next(cluster):
    meet(cluster, "fault")
