"""A program on a node ends with the connection, in order if it can, and no process of it remains."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recordings import wait_until

from pytest_gpucluster.runners import ssh
from pytest_gpucluster.runners.node_agent import exit_of

_DEADLINE = 60.0
_SUPERVISE = """\
import os, sys
from pathlib import Path
from pytest_gpucluster.runners import node_agent, ssh
ssh.HEARTBEAT_TIMEOUT_SECONDS, node_agent.GRACE_SECONDS = float(sys.argv[1]), float(sys.argv[2])
sys.exit(node_agent.Supervisor().run([sys.executable, "-S", "-c", sys.argv[3]], os.environ, Path("run")))
"""
_POLITE = """\
import pathlib, signal, sys, time
def bye(number, frame):
    pathlib.Path("signal").write_text(signal.Signals(number).name)
    print("reports are written", flush=True)
    sys.exit(2)
signal.signal(signal.SIGTERM, bye)
signal.signal(signal.SIGINT, bye)
print("begun", flush=True)
time.sleep(600)
"""
_DEAF = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
orphan = subprocess.Popen(rank, start_new_session=True, stdout=subprocess.DEVNULL)
open("pids", "w").write(f"{os.getpid()} {orphan.pid}")
print("begun", flush=True)
time.sleep(600)
"""


class Supervised:
    """A supervisor and its program, and the other side of the connection."""

    def __init__(self, tmp_path, script, *, heartbeat=60.0, grace=60.0):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SUPERVISE, str(heartbeat), str(grace), script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
        )

    def send(self, word):
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()

    def begun(self):
        assert self.process.stdout.readline() == b"begun\n"

    def rest(self):
        return self.process.stdout.read()

    def end(self):
        return self.process.wait(timeout=_DEADLINE)


@pytest.fixture
def supervised(tmp_path, request):
    started = []

    def start(script, **settings):
        started.append(Supervised(tmp_path, script, **settings))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        each.process.stdin.close()
        each.process.stdout.close()
        each.process.stderr.close()


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_output_and_exit_code_are_forwarded(supervised, tmp_path):
    script = "import sys; print('out ü', flush=True); print('err', file=sys.stderr)\n"
    script += "sys.stdout.buffer.write(b'\\xff'); sys.exit(10)"
    run = supervised(script)
    assert run.rest() == "out ü\nerr\n".encode() + b"\xff"
    assert run.end() == 10
    assert (tmp_path / "run" / "output.log").read_bytes() == "out ü\nerr\n".encode() + b"\xff"
    assert exit_of(tmp_path / "run") == 10


def test_much_output_is_forwarded_whole(supervised):
    run = supervised("print('x' * 99 + '\\n', end='') or [print('y' * 999) for _ in range(4000)]")
    time.sleep(0.5)  # not read at first: the output has to wait, and is not lost
    assert run.rest().decode() == "x" * 99 + "\n" + ("y" * 999 + "\n") * 4000


@pytest.mark.parametrize(("word", "name"), [(ssh.INTERRUPT, "SIGINT"), (ssh.TERMINATE, "SIGTERM")])
def test_it_ends_in_order_on_request(word, name, supervised, tmp_path):
    run = supervised(_POLITE)
    run.begun()
    run.send(ssh.HEARTBEAT)
    run.send(word)
    assert run.rest() == b"reports are written\n"
    assert run.end() == 2
    assert (tmp_path / "signal").read_text() == name


@pytest.mark.parametrize("lost", ["the other side", "the login session", "its supervisor"])
def test_it_ends_in_order_when_the_connection_is_lost(lost, supervised, tmp_path):
    run = supervised(_POLITE)
    run.begun()
    if lost == "the other side":
        run.process.stdin.close()
    else:
        run.process.send_signal(signal.SIGHUP if lost == "the login session" else signal.SIGKILL)
    wait_until((tmp_path / "signal").exists)
    assert run.end() == (-9 if lost == "its supervisor" else 2)
    assert (tmp_path / "signal").read_text() == "SIGTERM"
    if lost != "its supervisor":
        assert (tmp_path / "run" / "output.log").read_text() == "begun\nreports are written\n"
        assert exit_of(tmp_path / "run") == 2


def test_it_ends_without_heartbeats(supervised, tmp_path):
    run = supervised(_POLITE, heartbeat=3.0)
    run.begun()
    for _ in range(33):
        run.send(ssh.HEARTBEAT)
        time.sleep(0.1)
    assert not (tmp_path / "signal").exists()  # longer than that, and never long without a heartbeat
    assert run.end() == 2
    assert (tmp_path / "signal").read_text() == "SIGTERM"


def test_a_program_that_ignores_signals_is_killed_with_its_descendants(supervised, tmp_path):
    for script, code, said in (
        (_DEAF, ssh.FAILED, "killed 0.5 s after the request to stop"),
        (_DEAF.removesuffix("time.sleep(600)\n") + "sys.exit(0)", 0, ""),
    ):
        run = supervised(script, grace=0.5)
        run.begun()
        run.send(ssh.TERMINATE)
        assert ("outlived" in run.rest().decode()) == (code == 0)
        assert run.end() == code
        assert run.process.stderr.read().decode().strip() == said
        for pid in (tmp_path / "pids").read_text().split():
            wait_until(lambda pid=int(pid): is_gone(pid))


def test_a_program_that_was_killed_ends_as_in_a_shell(supervised, tmp_path):
    run = supervised("import os; os.kill(os.getpid(), 9)")
    assert run.end() == 137
    (tmp_path / "run" / "ended.json").write_text("half a fi")
    assert exit_of(tmp_path / "run") is None
    assert exit_of(tmp_path / "gone") is None


def node(request, **settings):
    """Ask our side of a node, as ssh would: exit code, what follows the mark, and the last line of the error output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gpucluster.runners.node_agent"],
        input=request,
        capture_output=True,
        timeout=_DEADLINE,
        **settings,
    )
    assert done.stdout.startswith(ssh.MARK)
    return done.returncode, done.stdout.removeprefix(ssh.MARK), done.stderr.decode().strip().rpartition("\n")[2]


def test_a_request_that_cannot_be_met_is_answered_with_why():
    for request_line, message in (
        (b"", "no request"),
        (b"GET / HTTP/1.1\n", "no request"),
        (b"[]\n", "no request"),
        (b'{"protocol": 7, "do": "run"}\n', "protocol 7"),
        (b'{"do": "run"}\n', "protocol None"),
        (ssh.request("format"), "'format'"),
        (ssh.request("run"), "KeyError('directory')"),  # never Python's own exit code, which is a rejection's
        (ssh.request("collect", directory="/", folder="/gone/for/good"), "nothing was started"),
        (ssh.request("run", words=["--version"], env={}, directory="/gone", folder="run"), "/gone: No such file"),
    ):
        code, output, why = node(request_line)
        assert (code, output) == (ssh.FAILED, b"")
        assert message in why


def probed(tmp_path, **changed):
    asked = {"directory": str(tmp_path), "report_dir": "out", "arguments": ["suite"], "port": None}
    asked["master"] = "127.0.0.1"
    code, output, _ = node(ssh.request("probe", **{**asked, **changed}))
    assert code == 0
    return json.loads(output)


def test_a_node_that_is_fit_has_nothing_against_a_run(tmp_path):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_it.py").write_text("")
    first = probed(tmp_path)
    assert first["problems"] == []
    assert len(first["suite"]) == 12
    (tmp_path / "suite" / "__pycache__").mkdir()
    (tmp_path / "suite" / "__pycache__" / "x.pyc").write_text("")
    assert probed(tmp_path)["suite"] == first["suite"]
    (tmp_path / "suite" / "test_it.py").write_text("#")
    assert probed(tmp_path)["suite"] != first["suite"]
    assert probed(tmp_path, arguments=["elsewhere", "-k", "it"])["suite"] not in ("", first["suite"])  # the shipped one


def test_a_node_reports_what_would_stop_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    for message, changes in (
        ("(--directory)", {"directory": "/gone"}),
        ("file/out", {"report_dir": "file/out"}),
        ("no-such-host.invalid", {"master": "no-such-host.invalid"}),
    ):
        assert message in probed(tmp_path, **changes)["problems"][0]
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [problem] = probed(tmp_path, port=port)["problems"]
        assert f" port {port}: " in problem
        assert "(--port)" in problem


def test_a_process_that_cannot_be_killed_does_not_keep_the_exit_code_back(tmp_path):
    patched = """\
from pytest_gpucluster.runners import node_agent
node_agent.kill_descendants = lambda: None  # as for a process that hangs in the kernel
node_agent._ORPHAN_SECONDS = node_agent._LEFT_SECONDS = 0.2
"""
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid, flush=True); sys.exit(1)"
    command = [sys.executable, "-c", patched + _SUPERVISE, "0.5", "60", script]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    pid = int(agent.stdout.readline())
    try:
        assert agent.wait(_DEADLINE) == 1
        assert exit_of(tmp_path / "run") == 1
    finally:
        os.kill(pid, signal.SIGKILL)
        agent.stdin.close()
        agent.stdout.close()
