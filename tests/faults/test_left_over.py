"""torchrun.py: a process that outlives its launcher is seen, in whatever session it is, and ended."""

import os
import subprocess
import sys
import time

from recordings import wait_until
from torchrun import _TOKEN, Run, processes

LEAVES_ONE = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""


def test_a_process_that_stays_is_named_and_ended(tmp_path):
    token = f"left-over-{os.getpid()}"
    launcher = subprocess.Popen([sys.executable, "-c", LEAVES_ONE], env={**os.environ, _TOKEN: token})
    run = Run(directory=tmp_path, agents=[launcher], token=token, started=time.monotonic(), deadline=60.0).wait()
    assert run.exits == [0]
    [left] = run.left_over
    assert "time.sleep(600)" in left
    wait_until(lambda: processes(token) == [])
