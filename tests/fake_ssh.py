"""An ssh that is a small program: a file has what each node does, and everything else is the real node agent.

It runs the real ``runners.node_agent`` in place of a node, except for the result of a run. The program lets a fork of
one process do so: to load the node agent costs more than all that it does.
"""

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from pytest_gpucluster.journal import journal

_SSH = """\
#!{python} -SI
import json, os, socket, sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({server!r})
    asked = [{root!r}, sys.argv[1:], dict(os.environ), os.getcwd()]
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    os._exit(int(server.recv(16) or 255))
"""


class FakePrograms:
    """Programs that come first on the PATH: a file says what they do, and they note what they were asked."""

    def __init__(self, root, programs):
        self.root, self.bin = root, root / "bin"
        self.bin.mkdir(parents=True)
        for name, text in programs.items():
            (self.bin / name).write_text(text.format(python=sys.executable, root=str(root)))
            (self.bin / name).chmod(0o755)
        (root / "log.jsonl").touch()

    @property
    def path(self):
        """PATH with the programs in front."""
        return f"{self.bin}:{os.environ['PATH']}"

    @property
    def notes(self):
        """What they have noted, in its order."""
        return [json.loads(line) for line in (self.root / "log.jsonl").read_text().splitlines()]

    def say(self, acts):
        (self.root / "acts.json").write_text(json.dumps(acts))


class FakeSsh(FakePrograms):
    """The program, what the nodes do, and what they were asked to run."""

    def __init__(self, root):
        super().__init__(root, {"ssh": _SSH.replace("{server!r}", repr(_start_server()))})

    def acts(self, acts):
        """Say what happens on which node; "*" for what is the same on all."""
        self.say({"*": {"exit": 0}, **acts})

    @property
    def started(self):
        """Node -> the last request to run something."""
        return {note["name"]: note for note in self.notes}


def journal_lines(*, outcome="passed", message="", verdict="ACCEPTED", exit=0, nnodes=1, ranks=8, rehearsal=False):
    """Return the lines of the journal of a run; without a verdict it was cut off after its first test."""
    test = {"type": "test", "nodeid": "t.py::test_it", "criterion": "matmul", "outcome": outcome, "message": message}
    lines = [
        {"type": "run", "schema_version": journal.SCHEMA_VERSION, "run_id": "r", "started_at": "2026-01-02T03:04:05Z"}
        | {"nnodes": nnodes, "world_size": nnodes * ranks, "rehearsal": rehearsal},
        {"type": "collected", "tests": [{"nodeid": "t.py::test_it"}, {"nodeid": "t.py::test_next"}]},
        test,
    ]
    if verdict is None:
        return [*lines, {"type": "start", "nodeid": "t.py::test_next"}]
    return [*lines, {"type": "end", "verdict": verdict, "exit": exit, "reason": message or "1 passed"}]


def found(kept):
    """Return what sweep.json has of the nodes alone: name -> verdict, exit code and failure."""
    return {each["node"]: (each["verdict"], each["exit"], each["failure"]) for each in kept["alone"]}


# ---- the process whose forks are the nodes ---------------------------------------------------------------------------

_MOST_BYTES = 1 << 20
_server = []


def _start_server():
    """Start it, unless it is there; return its address."""
    if not _server:
        folder = Path(tempfile.mkdtemp(prefix="fake-ssh-"))
        process = subprocess.Popen(
            [sys.executable, __file__, folder / "socket"],
            stdin=subprocess.PIPE,  # which it ends with
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout.read(1) == b".", "it does not listen"
        _server.append((folder, process))
    return str(_server[0][0] / "socket")


def turn_off():
    """End it."""
    while _server:
        folder, process = _server.pop()
        process.communicate()
        shutil.rmtree(folder)


def _serve(address):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(1024)
        os.write(1, b".")
        running = set[int]()
        while 0 not in (ready := select.select([listener, 0], [], [], 1.0)[0]):
            running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
            if ready:
                client, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    _become(client)
                client.close()
                running.add(pid)


def _become(client):
    code = 255
    try:
        asked, descriptors, _, _ = socket.recv_fds(client, _MOST_BYTES, 3)
        root, words, environ, directory = json.loads(asked)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(directory)
        threading.Thread(target=_end_with, args=[client], daemon=True).start()
        code = as_python(lambda: _be_node(Path(root), words))
        client.send(b"%d" % code)
    finally:
        os._exit(code)


def _end_with(client):
    client.recv(1)
    os._exit(255)


def _be_node(root, words):
    name = words[words.index("--") + 1]
    acts = json.loads((root / "acts.json").read_text())
    act = {**acts["*"], **acts.get(name, {})}
    os.environ["GPUCLUSTER_HOSTNAME"] = act.get("calls itself", name)
    os.environ["SSH_CONNECTION"] = act.get("reached", "")
    if "refuses" in act:
        sys.exit(f"ssh: connect to host {name} port 22: {act['refuses']}")
    print(f"Welcome to {name}! ", end="", flush=True)
    real_collect = node_agent.REQUESTS["collect"]

    def probe(request):
        print(act.get("answers") or json.dumps({**node_agent.collect_facts(request), **act.get("facts", {})}))
        return int(act.get("probe exit", 0))

    def run(request):
        with (root / "log.jsonl").open("a") as log:
            log.write(json.dumps({"name": name, "ssh": words, **request}) + "\n")
        folder = Path(request["directory"]) / (request["folder"] or ".")
        if "prints" in act:
            print("a warning\x1b[31m")
            print(act["prints"], end="")
        joint = "--nnodes=2" in request["words"]
        act["exit"] = act.get("together exit", act["exit"]) if joint else act["exit"]
        journals = act.get("together") if joint else None
        for number, lines in enumerate(journals or act.get("journals", ())):
            place = folder / f"20260102-00000{number}"
            place.mkdir(parents=True)
            (place / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        folder.mkdir(parents=True, exist_ok=True)
        for wanted in act.get("writes", ()):
            (folder / wanted).parent.mkdir(parents=True)
            (folder / wanted).touch()
        if "own disk" not in act:
            (folder / "output.log").touch()
        # Until it is asked to stop, or the connection is closed.
        if "hangs" in act or (joint and "together hangs" in act):
            while (command := os.read(0, 99)) and b"terminate" not in command:
                pass
        (folder / "ended.json").write_text(json.dumps({"exit": act["exit"]}))
        if "lost" in act:
            print(act["lost"], file=sys.stderr)
            sys.exit(255)
        if act["exit"] is None:
            raise node_agent.EnvironmentBroken(act["error"])
        return int(act["exit"])

    def collect(request):
        if "keeps for long" in act:
            (root / "collecting").touch()
            time.sleep(100)
        if "keeps" in act:
            raise node_agent.EnvironmentBroken(act["keeps"])
        return int(real_collect(request))

    node_agent.REQUESTS.update(probe=probe, run=run, collect=collect)
    sys.exit(node_agent.main())


if __name__ == "__main__":
    from pytest_gpucluster.runners import node_agent
    from pytest_gpucluster.session.fork_server import as_python

    _serve(sys.argv[1])
