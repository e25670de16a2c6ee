"""Several sessions in one process, one after the other, as editors and other tests run them."""

import json
import subprocess
import sys

from sessions import environment

DEADLINE = 120.0

SESSIONS = """
import gc, json, sys, weakref
import pytest

class Seen:
    def pytest_configure(self, config):
        configs.append(weakref.ref(config))

configs, frozen = [], []
for _ in range(4):
    assert pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Seen()]) == 0
    frozen.append(gc.get_freeze_count())
print()
print(json.dumps({"frozen": frozen, "alive": [config() is not None for config in configs]}))
"""


def test_what_a_session_has_left_is_freed_when_the_next_one_begins(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\ngpucluster = true\naddopts = -p no:hypothesispytest\n")
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    options = ["--gpucluster-device=cpu", f"--gpucluster-report-dir={tmp_path / 'report'}"]
    command = [sys.executable, "-c", SESSIONS, *options]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert min(told["frozen"]) > 10_000, "what is loaded is left alone in every session"
    # Of the first one pytest's own modules keep something, with and without this plugin.
    assert told["alive"][1:3] == [False, False]
