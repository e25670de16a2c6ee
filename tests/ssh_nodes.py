"""Nodes that are reached over a real ssh: an sshd for each, with its own keys, address and port, on this host."""

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.launch.detached_process import end_with_parent
from pytest_gpucluster.runners.node_agent import descendants

_UP_SECONDS = 20.0


@dataclass
class SshNode:
    """One node: an sshd that listens on an address of the loopback interface."""

    name: str
    address: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def line(self):
        """Its line in a hosts file."""
        return f"{self.name} address={self.address} port={self.port}"

    def cut(self):
        """Kill every connection of this node, as if a switch had died; return how many there were."""
        sessions = [pid for pid in descendants(self.process.pid) if _is_sshd(pid)]
        for pid in sessions:
            _kill(pid)
        return len(sessions)

    def down(self):
        """End it and everything that came of it."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            _kill(pid)
        self.process.wait()


class SshNodes:
    """Some nodes, and the client's settings that reach them."""

    def __init__(self, folder, sshd, names, forced):
        """Start them. ``forced`` is node -> a command that it runs whatever it is asked."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for key in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True, timeout=60
            )
        (folder / "authorized").write_bytes((folder / "user_key.pub").read_bytes())
        self.nodes = {}
        try:
            for number, name in enumerate(names):
                self.nodes[name] = self._start(sshd, name, f"127.0.0.{number + 2}", forced.get(name, ""))
            self._await_all()
        except BaseException:
            self.down()
            raise
        host_key = (folder / "host_key.pub").read_text().strip()
        known = [f"[{node.address}]:{node.port} {host_key}" for node in self.nodes.values()]
        (folder / "known_hosts").write_text("\n".join(known) + "\n")
        self.config = folder / "ssh_config"
        self.config.write_text(
            f'IdentityFile "{folder}/user_key"\nIdentitiesOnly yes\nUserKnownHostsFile "{folder}/known_hosts"\n'
            "StrictHostKeyChecking yes\nGlobalKnownHostsFile none\n"
        )

    @property
    def option(self):
        """What the command is told so that its ssh reaches these nodes and asks nobody else's settings."""
        return f"--ssh=-F{self.config}"

    def hosts(self, path, *more):
        """Write a hosts file of all of them, and of more lines."""
        path.write_text("\n".join([*(node.line for node in self.nodes.values()), *more]) + "\n")
        return path

    def down(self):
        """End all of them."""
        for node in self.nodes.values():
            node.down()

    def _start(self, sshd, name, address, forced):
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        config = self.folder / f"{name}.conf"
        config.write_text(
            f"ListenAddress {address}\nPort {port}\nHostKey {self.folder}/host_key\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nUsePAM no\nPermitRootLogin yes\nPrintMotd no\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nAllowUsers {getpass.getuser()}\n"
            f"SetEnv OMP_NUM_THREADS=1 GPUCLUSTER_HOSTNAME={name}\n" + (f"ForceCommand {forced}\n" if forced else "")
        )
        if os.getuid() == 0:  # where sshd keeps its unprivileged half, as Debian's service makes it
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sshd, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,  # also where the tests are killed
            )
        return SshNode(name, address, port, process)

    def _await_all(self):
        until = time.monotonic() + _UP_SECONDS
        for node in self.nodes.values():
            while True:
                with contextlib.suppress(OSError), socket.create_connection((node.address, node.port), timeout=5):
                    break
                log = (self.folder / f"{node.name}.log").read_text(errors="backslashreplace")
                assert node.process.poll() is None, f"sshd of {node.name} has ended:\n{log}"
                assert time.monotonic() < until, f"sshd of {node.name} does not listen:\n{log}"
                time.sleep(0.05)


@contextlib.contextmanager
def ssh_nodes(folder, sshd, names, forced):
    """Start nodes; they end with the block, and so does all that was started on them."""
    nodes = SshNodes(folder, sshd, names, forced)
    try:
        yield nodes
    finally:
        nodes.down()


def _is_sshd(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip().startswith("sshd")
    return False


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
